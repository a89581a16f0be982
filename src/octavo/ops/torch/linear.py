"""The matrix product: a library call, chosen so that a row's result doesn't depend on its batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo import ops
from octavo.ops.op import Target, implements


@implements(ops.linear, backend="torch", array_type=torch.Tensor)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _without_onednn(target: Target) -> str | None:
    if target != Target("cpu", "float32"):
        return "only for float32 on CPUs"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this version of torch doesn't expose oneDNN's linear"
    return None


@implements(
    ops.linear,
    backend="torch",
    array_type=torch.Tensor,
    name="onednn",
    unsupported=_without_onednn,
    rank=1,
)
def onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Where torch itself takes MKL, which has other kernels for 1, for 2 to 3 and for more rows,
    in other orders of summation. oneDNN sums in one order from 2 rows on, so one row becomes two.
    All matrices of SmolLM2-135M, 2 threads: 35 ms against 48 for 1 row, 54 against 80 for 16, 121
    against 180 for 64.
    """
    rows = x.shape[0]
    if rows == 1:
        x = functional.pad(x, (0, 0, 0, 1))
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y[:rows]


def steady_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product for parts of a batch: of those above, the best that can."""
    target = Target(x.device.type, str(x.dtype).removeprefix("torch."))
    product = linear if _without_onednn(target) else onednn_linear
    return product(x, weight, bias)


@implements(ops.head_linear, backend="torch", array_type=torch.Tensor)
def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = x.shape[1]
    matrices = weight.view(heads, -1, weight.shape[1])
    return torch.stack(
        [steady_linear(x[:, h].contiguous(), matrices[h], None) for h in range(heads)], dim=1
    )

"""A model's weights as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.ops.backend import WeightRequest
from octavo.ops.torch.dtypes import to_tensor, torch_dtype


@dataclass(frozen=True)
class TorchWeightPlan:
    """`WeightPlan`: one tensor for all roles of a weight, `dtype` unless it insists on its own."""

    requests: Sequence[WeightRequest]
    dtype: str
    device: torch.device

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(request.dtype or self.dtype for request in self.requests)

    @property
    def num_bytes(self) -> tuple[int, ...]:
        shapes = (request.shape for request in self.requests)
        return tuple(
            math.prod(shape) * BYTES_PER_VALUE[name]
            for shape, name in zip(shapes, self.formats, strict=True)
        )

    def load(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for request, name in zip(self.requests, self.formats, strict=True):
            tensor = to_tensor(_values(request)).to(self.device).to(torch_dtype(name))
            yield (tensor,) * len(request.roles)


def _values(request: WeightRequest) -> np.ndarray:
    # A copy even of a single part: what `read` gives may be a window on the file.
    array = np.concatenate([part.read(slice(None)) for part in request.parts])
    return array.astype(np.float32) + np.float32(request.offset) if request.offset else array

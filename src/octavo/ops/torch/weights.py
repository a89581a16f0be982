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
    """`WeightPlan`: one tensor for all roles of a weight, `dtype` unless it insists on its own.
    Quantized ones become floats as they are loaded.
    """

    requests: Sequence[WeightRequest]
    dtype: str
    device: torch.device

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(map(self._format, self.requests))

    @property
    def num_bytes(self) -> tuple[int, ...]:
        return tuple(
            math.prod(request.shape) * BYTES_PER_VALUE[self._dtype(request)]
            for request in self.requests
        )

    def load(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for request in self.requests:
            dtype = torch_dtype(self._dtype(request))
            tensor = to_tensor(_values(request)).to(self.device).to(dtype)
            yield (tensor,) * len(request.roles)

    def _dtype(self, request: WeightRequest) -> str:
        return request.dtype or self.dtype

    def _format(self, request: WeightRequest) -> str:
        quantized = dict.fromkeys(p.dtype for p in request.parts if p.dtype not in BYTES_PER_VALUE)
        made_of = f" (from {' and '.join(quantized)})" if quantized else ""
        return f"{self._dtype(request)}{made_of}"


def _values(request: WeightRequest) -> np.ndarray:
    # A copy even of a single part: what `read` gives may be a window on the file.
    array = np.concatenate([part.read(slice(None)) for part in request.parts])
    return array.astype(np.float32) + np.float32(request.offset) if request.offset else array

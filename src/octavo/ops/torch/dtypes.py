"""numpy's dtype names (with ml_dtypes) and torch's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

# Types that torch can't take from numpy cross as integers of the same size.
_BY_BITS: dict[np.dtype, tuple[type, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}
_BITS_OF = {ours: (bits, np.dtype(theirs)) for theirs, (bits, ours) in _BY_BITS.items()}


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A CPU tensor on the same memory; a copy where that is read-only or not contiguous."""
    array = np.require(array, requirements=["C", "W"])
    if array.dtype in _BY_BITS:
        bits, dtype = _BY_BITS[array.dtype]
        return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype in _BITS_OF:
        bits, dtype = _BITS_OF[tensor.dtype]
        view = tensor.contiguous().view(torch_dtype(np.dtype(bits).name))
        return view.numpy().view(dtype)
    array: np.ndarray = tensor.numpy()
    return array

"""A checkpoint's tensors into transformers' module, through Octavo's readers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
import transformers

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import ConfigError
from octavo.models.loader import listed
from octavo.models.stored_piece import Checkpoint
from octavo.models.through_transformers.attention import PAGED
from octavo.ops.torch.dtypes import to_tensor, torch_dtype

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor that is read when transformers takes all of it, as from its own safetensors files.

    on_read: told the values that were read. Quantized ones come as float32.
    """

    checkpoint: Checkpoint
    name: str
    on_read: Callable[[int], None]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        tensor = to_tensor(self.checkpoint.read(self.name))
        self.on_read(tensor.numel())
        return tensor

    def get_shape(self) -> list[int]:
        return list(self.checkpoint.tensors[self.name].shape)


class _Counter:
    """Tells `progress` how far reading is; tensors are read by several threads."""

    def __init__(self, total: int, item_bytes: int, progress: Progress) -> None:
        self._total = total
        self._item_bytes = item_bytes
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, values: int) -> None:
        with self._lock:
            self._done += values
            done = min(self._done * self._item_bytes, self._total)
        self._progress(done, self._total)


def weight_format(checkpoint: Checkpoint, dtype: str) -> str:
    """What the weights are held in, and what of them was quantized."""
    stored = dict.fromkeys(str(spec.dtype) for spec in checkpoint.tensors.values())
    quantized = [name for name in stored if name not in BYTES_PER_VALUE]
    return f"{dtype} (from {' and '.join(quantized)})" if quantized else dtype


def loaded_module(
    architecture: Any,
    config: Any,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    num_bytes: int,
    progress: Progress | None,
) -> Any:
    """The causal language model with its weights. config: left as it is. num_bytes: of them all,
    for progress.

    transformers builds it without memory, renames and joins tensors as its own checkpoints need it,
    and makes what is no parameter. Raises ConfigError that names missing, unexpected and wrongly
    shaped tensors.
    """
    library: Any = transformers
    library.logging.disable_progress_bar()
    counter = _Counter(num_bytes, BYTES_PER_VALUE[dtype], progress or (lambda done, total: None))
    stored = {name: _StoredTensor(checkpoint, name, counter.add) for name in checkpoint.tensors}
    config = copy.deepcopy(config)
    config._attn_implementation = PAGED
    if device == "cpu":
        # Expert after expert: products of groups give a row other bits in another batch.
        config._experts_implementation = "eager"
    module, found = architecture.from_pretrained(
        None,
        config=config,
        state_dict=stored,
        dtype=torch_dtype(dtype),
        ignore_mismatched_sizes=True,  # they are told below, together with the others
        output_loading_info=True,
    )
    _check(checkpoint, architecture.__name__, found, module)
    return module.to(device)


def _check(checkpoint: Checkpoint, architecture: str, found: Any, module: Any) -> None:
    misshapen = [
        f"{name} is {list(theirs)} instead of {list(ours)}"
        for name, theirs, ours in found["mismatched_keys"]
    ]
    kinds: dict[str, Iterable[str]] = {
        "missing": found["missing_keys"],
        "unexpected": found["unexpected_keys"],
        "wrong shape": misshapen,
        "not converted": found.get("conversion_errors") or (),
        "other": found.get("error_msgs") or (),
    }
    named = {kind: sorted(names) for kind, names in kinds.items()}
    faults = "; ".join(f"{kind}: {listed(names)}" for kind, names in named.items() if names)
    if not faults:
        empty = [
            n for n, one in (*module.named_parameters(), *module.named_buffers()) if one.is_meta
        ]
        faults = f"without values: {listed(empty)}" if empty else ""
    if faults:
        raise ConfigError(
            f"the tensors of {checkpoint.name} are not those that transformers "
            f"{transformers.__version__} has for {architecture}: {faults}. Fetch the model again, "
            "or correct its config.json"
        )

"""Whether a module says with Octavo's attention what it says with its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.ops.batch import HostBatch

if TYPE_CHECKING:
    from octavo.models.engine_model import EngineModel
    from octavo.ops.backend import Backend

_BLOCK_SIZE = 4
_LENGTHS = (9, 6)
_STEPS = ((6, 5), (9, 6))
"""Tokens of both sequences that are computed after the first step, and after the second."""

_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Of the logits' difference, by their own size. Rounding that changes which experts are chosen is
within; what attention sees wrongly is not.
"""


def own_logits(module: Any, vocab_size: int) -> list[torch.Tensor]:
    """Of each sequence by itself, (T, V), with transformers' eager attention and no cache."""
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    device = next(module.parameters()).device
    with torch.inference_mode():
        logits = [
            module(input_ids=torch.from_numpy(tokens).to(device)[None], use_cache=False).logits[0]
            for tokens in _sequences(vocab_size)
        ]
    module.set_attn_implementation(implementation)
    return logits


def relative_error(
    model: EngineModel, expected: Sequence[torch.Tensor], backend: Backend, dtype: str
) -> float:
    """How far the logits are from `expected` (from `own_logits`), by the size of these: the worst
    of two ragged steps, in which both sequences share a batch and read from the cache.
    """
    num_blocks = sum(-(-length // _BLOCK_SIZE) for length in _LENGTHS)
    layers = backend.allocate_kv(num_blocks, _BLOCK_SIZE, model.kv_shapes, KVFormat(dtype))

    def logits(host: HostBatch) -> Any:
        ctx = backend.batch_context(host, layers)
        rows = backend.from_host(np.arange(len(host.token_ids)))
        return model.logits(model.forward(ctx), rows)

    computed = backend.compile(logits)
    starts, errors = (0,) * len(_LENGTHS), []
    for ends in _STEPS:
        found = computed(_batch(model.vocab_size, starts, ends)).float()
        own = torch.cat([one[a:b] for one, a, b in zip(expected, starts, ends, strict=True)])
        error = torch.linalg.vector_norm(found - own.float())
        errors.append(float(error / torch.linalg.vector_norm(own.float())))
        starts = ends
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def refuse_other_logits(module: str, error: float, dtype: str) -> None:
    """Raises ConfigError if an error (from `relative_error`) is more than rounding."""
    if error <= _TOLERANCE[dtype]:
        return
    hint = "" if dtype == "float32" else ". If that is rounding, --dtype float32 has less of it"
    raise ConfigError(
        f"{module} gives other logits with Octavo's attention and cache than with its own: they "
        f"differ by {error:.2g} of their size in {dtype}, so it is not served{hint}. `octavo "
        "models` lists the families that Octavo has itself"
    )


def _sequences(vocab_size: int) -> list[np.ndarray]:
    """Tokens from all over the vocabulary."""
    return [
        (np.arange(length, dtype=np.int64) * 7919 + 104729 * (i + 1)) % vocab_size
        for i, length in enumerate(_LENGTHS)
    ]


def _batch(vocab_size: int, starts: tuple[int, ...], ends: tuple[int, ...]) -> HostBatch:
    counts = [-(-length // _BLOCK_SIZE) for length in _LENGTHS]
    firsts = np.cumsum([0, *counts[:-1]])
    places = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    tables = np.zeros((len(_LENGTHS), max(counts)), np.int32)
    for row, first, count in zip(tables, firsts, counts, strict=True):
        row[:count] = np.arange(first, first + count)
    tokens = zip(_sequences(vocab_size), places, strict=True)
    return HostBatch(
        token_ids=np.concatenate([sequence[at] for sequence, at in tokens]),
        positions=np.concatenate(places),
        kv_slots=np.concatenate(
            [first * _BLOCK_SIZE + at for first, at in zip(firsts, places, strict=True)]
        ),
        query_starts=np.cumsum([0, *map(len, places)]).astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=tables,
    )

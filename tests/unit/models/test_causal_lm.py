"""What a model gives besides its hidden states."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, BatchContext
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import make_checkpoint
from support.forward import Forward, host_batch, load_model
from support.oracle import load_oracle

TOKENS = [5, 9, 31, 7, 300, 12, 8]


class CountedBlock:
    """Puts out a new array; counts how many of these there still are then."""

    def __init__(self, outputs: list[weakref.ref[np.ndarray]], counts: list[int]) -> None:
        self._outputs = outputs
        self._counts = counts

    def __call__(self, x: np.ndarray, ctx: object) -> np.ndarray:
        y = x + 1
        self._outputs.append(weakref.ref(y))
        self._counts.append(sum(output() is not None for output in self._outputs))
        return y


@pytest.mark.parametrize(("taps", "counts"), [((), [1, 2, 2, 2, 2]), ((1,), [1, 2, 2, 3, 3])])
def test_only_what_is_tapped_outlives_the_next_block(
    taps: tuple[int, ...], counts: list[int]
) -> None:
    found: list[int] = []
    outputs: list[weakref.ref[np.ndarray]] = []
    model = SimpleNamespace(
        embed=lambda ctx: np.zeros(3) + ctx.token_ids,
        blocks=[CountedBlock(outputs, found) for _ in range(5)],
        norm=np.copy,
    )
    CausalLM.forward_with_taps(cast(CausalLM, model), cast(Any, SimpleNamespace(token_ids=1)), taps)
    assert found == counts


def hidden_and_taps(model: CausalLM, taps: tuple[int, ...], ctx: BatchContext) -> tuple[Array, ...]:
    return model.forward_with_taps(ctx, taps)


@pytest.mark.parametrize("name", BACKENDS)
def test_taps_are_the_outputs_of_their_blocks(tmp_path: Path, name: str) -> None:
    import torch

    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=4)
    with torch.inference_mode():
        states = load_oracle(folder)(
            torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True
        ).hidden_states
    backend = cpu_backend(name)
    forward = Forward(load_model(folder, backend), backend)
    sequence = forward.sequence(TOKENS)
    batch = host_batch([(TOKENS, sequence.table, 0, len(TOKENS))], forward.block_size)
    compute = backend.compile(partial(hidden_and_taps, forward.model, (2, 0, 1)))
    hidden, *taps = compute(backend.batch_context(batch, forward.kv_layers))
    # transformers' hidden_states begin with the embeddings; the last ones are normalised.
    for actual, expected in zip((hidden, *taps), (4, 3, 1, 2), strict=True):
        np.testing.assert_allclose(
            backend.to_host(actual), states[expected][0].numpy(), atol=2e-4, rtol=2e-4
        )
    alone = backend.compile(forward.model.forward)(backend.batch_context(batch, forward.kv_layers))
    assert np.array_equal(backend.to_host(alone), backend.to_host(hidden))

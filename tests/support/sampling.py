"""Drives a Sampler without a model: logits come from a table, by the sequence's last token."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SlotBinding, TokenLogprobs
from octavo.ops.backend import Backend
from octavo.sampling.sampler import SampledRows, Sampler


def bind(
    slot: int = 0,
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> SlotBinding:
    """A binding with `params` as its SamplingParams."""
    tokens = prompt + output
    return SlotBinding(slot, tokens, len(prompt), SamplingParams(**params), seed, eos, bad_words)


def sample_once(backend: Backend, logits: np.ndarray, bindings: list[SlotBinding]) -> SampledRows:
    """One token for each binding from its row of `logits` (R, V)."""
    slots = np.array([binding.slot for binding in bindings])
    sampler = Sampler(backend, max_num_seqs=int(slots.max()) + 1, vocab_size=logits.shape[1])
    for binding in bindings:
        sampler.bind(binding)
    positions = np.array([len(binding.token_ids) for binding in bindings])
    return sampler.sample(backend.from_host(logits.astype(np.float32)), slots, positions)


class TableModel:
    """The logits after a token are that token's row of a fixed random table (V, V)."""

    def __init__(self, backend: Backend, vocab_size: int, *, spread: float = 2.0) -> None:
        self._backend = backend
        self.table = np.random.default_rng(0).normal(0, spread, (vocab_size, vocab_size))

    def generate(
        self, bindings: list[SlotBinding], num_tokens: int
    ) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """`num_tokens` tokens, and log-probabilities where asked for, of each binding's sequence,
        all in one batch.
        """
        slots = np.array([binding.slot for binding in bindings])
        sampler = Sampler(
            self._backend, max_num_seqs=int(slots.max()) + 1, vocab_size=len(self.table)
        )
        for binding in bindings:
            sampler.bind(binding)
        tokens = [list(binding.token_ids) for binding in bindings]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in bindings]
        for _ in range(num_tokens):
            logits = self.table[[sequence[-1] for sequence in tokens]].astype(np.float32)
            positions = np.array([len(sequence) for sequence in tokens])
            sampled = sampler.sample(self._backend.from_host(logits), slots, positions)
            if sampled.errors:
                raise AssertionError(sampled.errors)
            for row, token in enumerate(sampled.token_ids.tolist()):
                tokens[row].append(token)
                sampler.observe(bindings[row].slot, (token,))
                if row in sampled.logprobs:
                    logprobs[row].append(sampled.logprobs[row])
        return [sequence[-num_tokens:] for sequence in tokens], logprobs

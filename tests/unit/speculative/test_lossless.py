"""The tokens of speculative decoding are distributed as without it: chi-square tests against exact
probabilities, of 204,800 tokens for each way of guessing and setting, where draft and target are
far apart; and what is wrong on purpose fails them with a tenth of the tokens. Seeds are fixed:
every run has the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.ops.backend import Backend
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft, Verified
from octavo.sampling import sampler as sampler_module
from octavo.sampling.rejection import draw
from octavo.sampling.sampler import SampledRows, Sampler
from octavo.speculative.verify import verify
from support.backends import cpu_backend
from support.speculation import check_tokens, generate

V = 8
TARGET, DRAFT = np.random.default_rng(1).normal(0, 1.5, (2, V, V))
FEW = {"num_sequences": 1024, "num_tokens": 20}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return cpu_backend("native")


class ModelDrafts:
    """Chains by a draft model whose logits are a table's row (V, W) of the last token: drawn or
    chosen, as the sampler has it. min_probability: a chain that is less likely is not made longer.
    """

    def __init__(
        self,
        backend: Backend,
        table: np.ndarray = DRAFT,
        *,
        length: int = 3,
        min_probability: float = 0.0,
    ) -> None:
        self._backend = backend
        self._table = table.astype(np.float32)
        self._length = length
        self._min_probability = min_probability

    def __call__(self, slots: Slots, sampler: Sampler, active: np.ndarray) -> list[Draft | None]:
        known = slots.lengths[active]
        last_tokens = slots.token_ids[active, known - 1]
        token_ids = np.zeros((len(active), self._length), np.int64)
        q = np.zeros((len(active), self._length, V), np.float32)
        lengths = np.zeros(len(active), np.int64)
        probability = np.ones(len(active))
        growing, is_drawn = np.arange(len(active)), False
        for depth in range(self._length):
            logits = self._backend.from_host(self._table[last_tokens])
            slot_ids, positions = active[growing], known[growing] + depth
            drafted = sampler.draft(logits, slot_ids, positions, depth=depth)
            token_ids[growing, depth] = drafted.token_ids
            if is_drawn := bool(drafted.probabilities):
                q[growing, depth] = list(drafted.probabilities.values())
            lengths[growing] += 1
            probability[growing] *= drafted.confidences
            goes_on = probability[growing] >= self._min_probability
            last_tokens, growing = drafted.token_ids[goes_on], growing[goes_on]
            if not len(growing):
                break
        return [
            Draft(tokens[:length], None, distributions[:length] if is_drawn else None)
            for tokens, distributions, length in zip(token_ids, q, lengths.tolist(), strict=True)
        ]


class ChosenTrees:
    """The same tree of guesses after the same token: each node's token is the rank-th likeliest of
    the draft's after its parent's. By default a chain of three.
    """

    def __init__(
        self, parents: tuple[int, ...] = (-1, 0, 1), ranks: tuple[int, ...] = (0, 0, 0)
    ) -> None:
        order = np.argsort(-DRAFT, axis=1).tolist()
        self._by_last_token = []
        for last_token in range(V):
            tokens: list[int] = []
            for parent, rank in zip(parents, ranks, strict=True):
                tokens.append(order[last_token if parent < 0 else tokens[parent]][rank])
            is_chain = parents == tuple(range(-1, len(parents) - 1))
            draft = Draft(np.array(tokens), None if is_chain else np.array(parents))
            self._by_last_token.append(draft)

    def __call__(self, slots: Slots, sampler: Sampler, active: np.ndarray) -> list[Draft | None]:
        last_tokens = slots.token_ids[active, slots.lengths[active] - 1].tolist()
        return [self._by_last_token[token] for token in last_tokens]


TREE = ChosenTrees(parents=(-1, -1, -1, 0, 0, 1, 3), ranks=(0, 1, 2, 0, 1, 0, 0))


def nothing(slots: Slots, sampler: Sampler, active: np.ndarray) -> list[Draft | None]:
    return [None] * len(active)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.01, "logit_bias": {2: 1.5}},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_drawn_chains(backend: Backend, setting: dict[str, Any]) -> None:
    params = SamplingParams(**setting)
    check_tokens(generate(backend, TARGET, ModelDrafts(backend), params=params), TARGET, params)


@pytest.mark.parametrize("setting", SETTINGS[::2], ids=str)
def test_chosen_chains(backend: Backend, setting: dict[str, Any]) -> None:
    params = SamplingParams(**setting)
    check_tokens(generate(backend, TARGET, ChosenTrees(), params=params), TARGET, params)


@pytest.mark.parametrize("setting", SETTINGS[1::2], ids=str)
def test_chosen_trees(backend: Backend, setting: dict[str, Any]) -> None:
    params = SamplingParams(**setting)
    check_tokens(generate(backend, TARGET, TREE, params=params), TARGET, params)


def test_chains_that_stop_where_the_draft_is_not_sure(backend: Backend) -> None:
    draft = ModelDrafts(backend, length=5, min_probability=0.3)
    check_tokens(generate(backend, TARGET, draft, **FEW), TARGET)


@pytest.mark.parametrize("width", [V - 2, V + 3])
def test_drafts_of_other_vocabularies(backend: Backend, width: int) -> None:
    """SPD-11: of a draft whose logits are fewer or more than the tokenizer's ids."""
    table = np.random.default_rng(2).normal(0, 1.5, (V, width))
    table[:, V:] = 20.0  # padding that the draft likes best
    check_tokens(generate(backend, TARGET, ModelDrafts(backend, table), **FEW), TARGET)


def test_a_draft_that_equals_the_target_is_always_accepted(backend: Backend) -> None:
    rejected = 0

    def counting(draft: Draft, sampled: SampledRows, first_row: int) -> Verified:
        nonlocal rejected
        verified = verify(draft, sampled, first_row)
        rejected += len(draft.token_ids) - len(verified.accepted)
        return verified

    draft = ModelDrafts(backend, TARGET)
    check_tokens(generate(backend, TARGET, draft, verifier=counting, **FEW), TARGET)
    assert rejected == 0


# --- the very same tokens ------------------------------------------------------------------------

EOS = int(TARGET[0].argmax())
EXACT: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 5, "temperature": 0.7, "top_k": 5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.0, "min_tokens": 10, "logit_bias": {EOS: 3.0}},  # SPD-14
    {"temperature": 0.0, "frequency_penalty": 0.2, "logit_bias": {1: -100.0}},  # SPD-14
]


@pytest.mark.parametrize("setting", EXACT, ids=str)
def test_greedy_and_seeded_tokens_are_those_without_speculation(
    backend: Backend, setting: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "params": SamplingParams(**setting),
        "eos_token_ids": frozenset({EOS}),
        "bad_words_ids": ((3, 4), (5, 6, 1)),
        "num_sequences": 40,
        "num_tokens": 60,
    }
    plain = generate(backend, TARGET, nothing, **asked)
    noisy = TARGET + np.random.default_rng(3).normal(0, 0.5, TARGET.shape)
    for propose in (ModelDrafts(backend, noisy, length=4), ChosenTrees(), TREE):
        assert np.array_equal(generate(backend, TARGET, propose, **asked), plain)


# --- what must not pass --------------------------------------------------------------------------


def resample_from_p(
    p: np.ndarray, q: np.ndarray, drafts: np.ndarray, acceptance: np.ndarray, again: np.ndarray
) -> np.ndarray:
    rows = np.arange(len(drafts))
    is_accepted = acceptance * q[rows, drafts] < p[rows, drafts]
    return np.where(is_accepted, drafts, draw(p, again))


def accept_by_q_over_p(
    p: np.ndarray, q: np.ndarray, drafts: np.ndarray, acceptance: np.ndarray, again: np.ndarray
) -> np.ndarray:
    rows = np.arange(len(drafts))
    is_accepted = acceptance * p[rows, drafts] < q[rows, drafts]
    residual = np.maximum(p - q, 0)
    return np.where(is_accepted, drafts, draw(residual, again))


def accept_where_likely(
    p: np.ndarray, q: np.ndarray, drafts: np.ndarray, acceptance: np.ndarray, again: np.ndarray
) -> np.ndarray:
    """As "typical acceptance" does."""
    is_accepted = p[np.arange(len(drafts)), drafts] > 0.1
    return np.where(is_accepted, drafts, draw(np.maximum(p - q, 0), again))


@pytest.mark.parametrize("wrong", [resample_from_p, accept_by_q_over_p, accept_where_likely])
def test_wrong_rejection_is_found_out(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(sampler_module, "accept_or_resample", wrong)
    tokens = generate(backend, TARGET, ModelDrafts(backend), **FEW)
    with pytest.raises(AssertionError, match="chi-square"):
        check_tokens(tokens, TARGET)


def test_believing_the_first_guess_is_found_out(backend: Backend) -> None:
    def wrong(draft: Draft, sampled: SampledRows, first_row: int) -> Verified:
        verified = verify(draft, sampled, first_row)
        if sampled.token_ids[first_row] == (draft.token_ids[0] + 1) % V:
            return verified._replace(token_ids=(int(draft.token_ids[0]),))
        return verified

    tokens = generate(backend, TARGET, ChosenTrees(), verifier=wrong, **FEW)
    with pytest.raises(AssertionError, match="chi-square"):
        check_tokens(tokens, TARGET)


def test_leaving_out_a_drawn_token_for_what_it_is_is_found_out(backend: Backend) -> None:
    drafts = ModelDrafts(backend, length=2)

    def wrong(slots: Slots, sampler: Sampler, active: np.ndarray) -> list[Draft | None]:
        """A chain ends before its first unlikely token, not after it."""
        kept: list[Draft | None] = []
        for draft in drafts(slots, sampler, active):
            assert draft is not None
            assert draft.probabilities is not None
            own = draft.probabilities[np.arange(2), draft.token_ids]
            length = int(np.argmin(np.append(own > 0.25, False)))
            kept.append(
                Draft(draft.token_ids[:length], None, draft.probabilities[:length])
                if length
                else None
            )
        return kept

    tokens = generate(backend, TARGET, wrong, **FEW)
    with pytest.raises(AssertionError, match="chi-square"):
        check_tokens(tokens, TARGET)

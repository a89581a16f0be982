"""A draft model that is the target itself guesses what the target says, whatever happened before.

Its cache is a second one, in further layers: a token that it missed or computed wrongly shows in
its drafts, and one that was never written is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.core.step import DraftRequest
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.speculative import drafting_loop
from octavo.speculative.draft_model import DraftModel
from octavo.speculative.proposer import Proposer
from octavo.speculative.registry import Target, build_proposers
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.drafting import DraftDrive, MisleadingSampler
from support.forward import Forward, load_model

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size).tolist() for size in (23, 6, 13)]
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def model(backend: Backend, checkpoint: Checkpoint) -> CausalLM:
    return load_model(checkpoint, backend)


@pytest.fixture(scope="module")
def greedy(model: CausalLM, backend: Backend) -> Greedy:
    return Greedy(model, backend)


@pytest.fixture
def drive(model: CausalLM, backend: Backend) -> DraftDrive:
    return make_drive(model, model, backend)


def make_drive(target: CausalLM, draft: CausalLM, backend: Backend) -> DraftDrive:
    return DraftDrive(
        target,
        backend,
        lambda sampler: DraftModel(draft, backend, sampler, vocab_size=VOCAB_SIZE),
        vocab_size=VOCAB_SIZE,
    )


class Greedy:
    """A model's continuations, without drafts."""

    def __init__(self, model: CausalLM, backend: Backend) -> None:
        self._forward = Forward(model, backend)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, tokens: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
        """The next `count` tokens."""
        known = self._known.setdefault(tuple(tokens), [])
        if len(known) < count:
            sequence = self._forward.sequence(tokens, room=count)
            known.clear()
            while len(known) < count:
                missing = len(sequence.tokens) - sequence.num_computed
                (logits,) = self._forward.step([(sequence, missing)])
                known.append(int(logits[-1, :VOCAB_SIZE].argmax()))
                sequence.tokens.append(known[-1])
            self._forward.free_blocks += sequence.table
        return known[:count]


def start(drive: DraftDrive, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Sequences 0, 1, ... with their first token."""
    for slot, prompt in enumerate(prompts):
        drive.bind(slot, prompt)
    drive.step({}, work={slot: len(prompt) for slot, prompt in enumerate(prompts)})


def check(drive: DraftDrive, greedy: Greedy, drafts: dict[int, int | DraftRequest]) -> None:
    """One step, whose drafts must be as asked and all right."""
    expected = {}
    for slot, asked in drafts.items():
        length = asked if isinstance(asked, int) else asked.length
        expected[slot] = greedy(drive.tokens(slot), length)
    found = drive.step(drafts)
    assert {slot: draft.token_ids.tolist() for slot, draft in found.items()} == expected


@pytest.mark.parametrize("length", [1, 2, 5])
def test_drafts_are_the_targets_own_continuation(
    drive: DraftDrive, greedy: Greedy, length: int
) -> None:
    start(drive)
    for _ in range(4):
        check(drive, greedy, dict.fromkeys(range(3), length))
    for slot, prompt in enumerate(PROMPTS):
        assert len(drive.tokens(slot)) == len(prompt) + 1 + 4 * (length + 1)
        assert drive.tokens(slot) == prompt + greedy(prompt)[: 1 + 4 * (length + 1)]


def test_each_sequence_has_the_length_that_it_asks_for(drive: DraftDrive, greedy: Greedy) -> None:
    start(drive)
    for lengths in ({2: 1, 0: 6, 1: 3}, {0: 2}, {1: 1, 2: 7}, {1: 4, 0: 4, 2: 4}):
        check(drive, greedy, dict(lengths))


def test_rejected_drafts_leave_nothing_behind(drive: DraftDrive, greedy: Greedy) -> None:
    start(drive)
    random = np.random.default_rng(0)
    for _ in range(6):
        length = int(random.integers(1, 7))
        ends = [len(drive.tokens(slot)) for slot in range(3)]
        drive.misleading.wrong = set(random.integers(min(ends), max(ends) + 6, 4).tolist())
        drive.step(dict.fromkeys(range(3), length))
        drive.misleading.wrong = set()
        check(drive, greedy, {0: 3, 2: 2})


@pytest.mark.parametrize("pause", [1, 3, 4, 9])
def test_what_was_missed_is_caught_up_on(drive: DraftDrive, greedy: Greedy, pause: int) -> None:
    start(drive)
    check(drive, greedy, {0: 3})
    for _ in range(pause):
        drive.step({1: 2}, work={0: 1, 2: 1})
    check(drive, greedy, {0: 3, 1: 3, 2: 3})


def test_a_preempted_sequence_is_computed_anew(drive: DraftDrive, greedy: Greedy) -> None:
    start(drive)
    check(drive, greedy, {0: 4, 1: 4})
    tokens = drive.tokens(0)
    drive.bind(4, tokens)
    drive.step({}, work={4: len(tokens)})
    check(drive, greedy, {4: 4, 1: 2})


def test_a_slot_may_have_another_sequence(drive: DraftDrive, greedy: Greedy) -> None:
    start(drive)
    check(drive, greedy, {0: 4})
    drive.bind(0, PROMPTS[2])
    drive.step({1: 2}, work={0: len(PROMPTS[2])})
    check(drive, greedy, {0: 4})


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_prefix_hits_whether_drafted_for_or_not(
    drive: DraftDrive, greedy: Greedy, drafts: int
) -> None:
    prompt = PROMPTS[0]
    start(drive, [prompt])
    for _ in range(drafts):
        check(drive, greedy, {0: 3})
    table = drive.tables[0][:5]
    for slot in (1, 2):
        drive.bind(slot, [*prompt[:20], 9, slot + 30], table=table, num_computed=20)
    drive.step({}, work={1: 2, 2: 2})
    check(drive, greedy, {1: 3, 2: 3})
    check(drive, greedy, {1: 2, 0: 4, 2: 1})


def test_a_prefix_hit_on_what_was_covered_in_part(drive: DraftDrive, greedy: Greedy) -> None:
    start(drive, [PROMPTS[1]])
    check(drive, greedy, {0: 1})
    for _ in range(8):
        drive.step({}, work={0: 1})
    tokens = drive.tokens(0)
    drive.bind(1, [*tokens[:12], 17], table=drive.tables[0][:3], num_computed=12)
    check(drive, greedy, {1: 4})
    check(drive, greedy, {0: 4, 1: 4})


@pytest.mark.parametrize("num_shared", [20, 21, 22])
@pytest.mark.parametrize("is_covered", [True, False])
def test_copies_on_write(
    drive: DraftDrive, greedy: Greedy, num_shared: int, is_covered: bool
) -> None:
    """The source goes on with other tokens in the block that is copied."""
    prompt = PROMPTS[0]
    start(drive, [prompt])
    if is_covered:
        check(drive, greedy, {0: 3})
    index = num_shared // 4
    table = drive.tables[0][: -(-num_shared // 4)]
    drive.bind(3, [*prompt[:num_shared], 44, 45], table=table, num_computed=num_shared)
    drive.step({0: 1}, work={3: 2})
    assert drive.tables[3][index] != drive.tables[0][index]
    check(drive, greedy, {0: 4, 3: 4})
    check(drive, greedy, {0: 2, 3: 3})


def test_a_long_prompt_is_caught_up_on_in_parts(
    drive: DraftDrive, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_loop, "_MAX_CATCH_UP", 5)
    start(drive)
    found = []
    for _ in range(9):
        expected = {slot: greedy(drive.tokens(slot), 2) for slot in range(3)}
        drafts = drive.step({0: 2, 1: 2, 2: 2})
        assert all(draft.token_ids.tolist() == expected[slot] for slot, draft in drafts.items())
        found.append(sorted(drafts))
    # 24, 7 and 14 tokens are missing, and one more in each step without a draft. The shortest come
    # first, and 8 are read with a draft's first forward.
    assert found == [[1], *[[1, 2]] * 5, *[[0, 1, 2]] * 3]


def test_who_has_caught_up_never_waits(
    drive: DraftDrive, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(drive)
    check(drive, greedy, dict.fromkeys(range(3), 3))
    monkeypatch.setattr(drafting_loop, "_MAX_CATCH_UP", 0)
    for pause in (0, 3, 1):
        for _ in range(pause):
            drive.step({}, work={0: 1, 1: 1, 2: 1})
        check(drive, greedy, dict.fromkeys(range(3), 3))


def test_the_last_known_token_is_computed_again_if_nothing_came_after_it(
    drive: DraftDrive, greedy: Greedy
) -> None:
    """As when a draft was accepted and the target then failed at the row behind it."""
    start(drive)
    drive.misleading.wrong = {len(PROMPTS[0]) + 3}
    drive.step({0: 3})
    drive.misleading.wrong = set()
    drive.slots.lengths[0] -= 1
    drive.num_computed[0] -= 1
    check(drive, greedy, {0: 3})


def test_siblings_that_share_a_prompt_compute_it_once(
    drive: DraftDrive, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPTS[0]
    start(drive, [prompt])
    for slot in (1, 2, 3):
        drive.bind(slot, [*prompt[:22], slot + 30], table=drive.tables[0][:6], num_computed=22)
    # All but the last one of the first; the others lack two in their copy of a block.
    monkeypatch.setattr(drafting_loop, "_MAX_CATCH_UP", 23 + 3 * 2)
    check(drive, greedy, dict.fromkeys(range(4), 3))


def test_drafting_ends_where_confidence_does(
    drive: DraftDrive, model: CausalLM, greedy: Greedy, backend: Backend
) -> None:
    start(drive)
    forward = Forward(model, backend)
    requests, expected = {}, {}
    for slot, floor in enumerate((0.9, 0.5, 0.0)):
        tokens = drive.tokens(slot)
        drafted = greedy(tokens, 6)
        logits = forward.prompt(tokens + drafted)[len(tokens) - 1 : -1].astype(np.float64)
        chances = np.exp(logits - logits.max(1, keepdims=True))
        path = np.cumprod(chances.max(1) / chances.sum(1))
        expected[slot] = drafted[: int((path >= floor).sum())]
        requests[slot] = DraftRequest(0, 6, floor)
    assert sorted(map(len, expected.values()))[0] < 6
    found = drive.step(requests)
    assert {slot: draft.token_ids.tolist() for slot, draft in found.items()} == {
        slot: tokens for slot, tokens in expected.items() if tokens
    }
    check(drive, greedy, {0: 2, 1: 2, 2: 2})


def test_tokens_are_drawn_from_the_probabilities_that_are_told(
    drive: DraftDrive, model: CausalLM, greedy: Greedy, backend: Backend
) -> None:
    for slot, prompt in enumerate(PROMPTS):
        drive.bind(slot, prompt, temperature=0.0 if slot == 1 else 2.0)
    drive.step({}, work={slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    forward = Forward(model, backend)
    known = [drive.tokens(slot) for slot in range(3)]
    drafts = drive.step({0: 4, 1: 3, 2: 2})
    assert drafts[1].token_ids.tolist() == greedy(known[1], 3)
    assert drafts[1].probabilities is None
    for slot, length in ((0, 4), (2, 2)):
        drafted, found = drafts[slot].token_ids.tolist(), drafts[slot].probabilities
        assert found is not None
        assert found.shape == (length, VOCAB_SIZE)
        logits = forward.prompt(known[slot] + drafted)[len(known[slot]) - 1 : -1] / 2.0
        chances = np.exp(logits - logits.max(1, keepdims=True))
        np.testing.assert_allclose(found, chances / chances.sum(1, keepdims=True), atol=1e-5)
    assert drafts[0].token_ids.tolist() != greedy(known[0], 4)


def test_no_draft_goes_beyond_what_the_draft_model_sees(
    tmp_path_factory: pytest.TempPathFactory, model: CausalLM, backend: Backend
) -> None:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("short"), max_position_embeddings=26)
    drive = make_drive(model, load_model(folder, backend), backend)
    start(drive)
    drafts = drive.step({0: 5, 1: 5})
    # 24 tokens are known: those at positions 23 to 25 are read, which gives 3.
    assert {slot: len(draft.token_ids) for slot, draft in drafts.items()} == {0: 3, 1: 5}
    while len(drive.tokens(0)) <= 26:
        drive.step({}, work={0: 1})
    assert sorted(drive.step({0: 5, 1: 5})) == [1]
    assert drive.step({0: 5}) == {}


def test_spd_11_output_layers_padded_to_different_sizes(
    tmp_path_factory: pytest.TempPathFactory, backend: Backend
) -> None:
    """Rows that stand for no token are as likely as others, and never drafted."""
    target, draft = (
        load_model(
            make_checkpoint("llama", tmp_path_factory.mktemp("padded"), vocab_size=rows, seed=rows),
            backend,
        )
        for rows in (520, 512)
    )
    drive = make_drive(target, draft, backend)
    start(drive)
    for _ in range(8):
        drafts = drive.step({0: 4, 1: 4, 2: 4})
        assert all((draft.token_ids < VOCAB_SIZE).all() for draft in drafts.values())
    greedy = Greedy(target, backend)
    for slot, prompt in enumerate(PROMPTS):
        generated = drive.tokens(slot)[len(prompt) :]
        assert generated == greedy(prompt, len(generated))
    drive = make_drive(draft, draft, backend)
    start(drive)
    check(drive, Greedy(draft, backend), {0: 4, 1: 4, 2: 4})


def test_a_model_with_too_few_rows_is_refused(model: CausalLM, drive: DraftDrive) -> None:
    with pytest.raises(ConfigError, match=r"embeddings of 320 tokens.* has 321"):
        DraftModel(model, drive.backend, drive.sampler, vocab_size=VOCAB_SIZE + 1)


def test_it_is_built_from_settings(
    model: CausalLM, checkpoint: Checkpoint, backend: Backend, greedy: Greedy
) -> None:
    def open_model(name: str) -> Checkpoint:
        return {"org/small": checkpoint}[name]

    def build(sampler: MisleadingSampler) -> Proposer:
        target = Target(
            model=model,
            checkpoint=checkpoint,
            backend=backend,
            sampler=sampler,
            dtype="float32",
            quantization=None,
            vocab_size=VOCAB_SIZE,
            open_model=open_model,
        )
        settings = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 3}
        (proposer,) = build_proposers([settings], target)
        return proposer

    drive = DraftDrive(model, backend, build, vocab_size=VOCAB_SIZE)
    assert drive.proposer.name == "draft_model"
    start(drive)
    check(drive, greedy, {0: 3, 1: 2})

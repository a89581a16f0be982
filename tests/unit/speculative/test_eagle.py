"""EAGLE's heads against their formulas, and drafts that don't depend on what happened before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.core.step import DraftRequest
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, log_probabilities
from octavo.ops.backend import Backend
from octavo.sampling.sampler import Sampler
from octavo.speculative import demand, eagle
from octavo.speculative.eagle import Eagle
from octavo.speculative.proposer import Proposer
from octavo.speculative.registry import Target, build_proposers
from octavo.weights import open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.draft_heads import (
    CONFIG,
    EagleFormula,
    Tensors,
    eagle3_tensors,
    eagle_tensors,
    save_head,
)
from support.drafting import MAX_MODEL_LEN, MAX_NUM_SEQS, DraftDrive
from support.forward import load_model
from support.oracle import load_oracle
from support.sampling import bind

RANDOM = np.random.default_rng(4)
PROMPTS = [RANDOM.integers(3, VOCAB_SIZE, size).tolist() for size in (23, 6, 13)]
LAYER_IDS = [1, 2, 4]
HEADS: dict[str, tuple[str, Tensors, dict[str, Any]]] = {
    "EAGLE": ("eagle", eagle_tensors(), {}),
    "EAGLE, 300 tokens": ("eagle", eagle_tensors(num_draft_tokens=300), {"draft_vocab_size": 300}),
    "EAGLE-3": (
        "eagle3",
        eagle3_tensors(),
        {"draft_vocab_size": 300, "eagle_aux_hidden_state_layer_ids": LAYER_IDS},
    ),
}


class Oracle:
    """What a fresh sequence's drafts are, by transformers' features and the head's formula."""

    def __init__(self, folder: Path, tensors: Tensors, method: str) -> None:
        checkpoint = open_checkpoint(str(folder))
        embedding, head = (
            checkpoint.read(name) for name in ("model.embed_tokens.weight", "lm_head.weight")
        )
        self.formula = EagleFormula(tensors, embedding, head)
        self._model = load_oracle(folder)
        self._ids = LAYER_IDS if method == "eagle3" else [-1]

    def features(self, tokens: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            states = self._model(
                torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True
            ).hidden_states
        return np.concatenate([states[i][0].numpy() for i in self._ids], axis=1)

    def __call__(
        self, tokens: Sequence[int], count: int, *, floor: float = 0.0
    ) -> list[tuple[int, ...]]:
        return self.formula.draft(self.features(tokens[:-1]), tokens, count, floor=floor)


class Case(NamedTuple):
    folder: Path
    method: str
    model: CausalLM
    oracle: Oracle
    backend: Backend
    target_folder: Path

    def build(self, sampler: Any) -> Eagle:
        (proposer,) = build_proposers(
            [{"method": self.method, "model": str(self.folder)}],
            target_of(self.model, self.target_folder, self.backend, sampler),
        )
        assert isinstance(proposer, Eagle)
        return proposer


def target_of(model: CausalLM, folder: Path, backend: Backend, sampler: Any) -> Target:
    return Target(
        model=model,
        checkpoint=open_checkpoint(str(folder)),
        backend=backend,
        sampler=sampler,
        dtype="float32",
        quantization=None,
        vocab_size=VOCAB_SIZE,
        open_model=open_checkpoint,
    )


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=5)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.fixture(scope="module")
def model(backend: Backend, target_folder: Path) -> CausalLM:
    return load_model(target_folder, backend)


@pytest.fixture(scope="module", params=HEADS)
def case(
    request: pytest.FixtureRequest,
    backend: Backend,
    model: CausalLM,
    target_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    method, tensors, config = HEADS[request.param]
    folder = save_head(tmp_path_factory.mktemp("head"), tensors, CONFIG | config)
    oracle = Oracle(target_folder, tensors, method)
    return Case(folder, method, model, oracle, backend, target_folder)


@pytest.fixture
def drive(case: Case) -> DraftDrive:
    return DraftDrive(case.model, case.backend, case.build, vocab_size=VOCAB_SIZE)


def start(drive: DraftDrive, prompts: Sequence[Sequence[int]] = PROMPTS, chunk: int = 100) -> None:
    """Sequences 0, 1, ... with their first token."""
    for slot, prompt in enumerate(prompts):
        drive.bind(slot, prompt)
    left = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
    while left:
        work = {slot: min(chunk, count) for slot, count in left.items()}
        drive.step({}, work=work)
        left = {slot: n for slot, count in left.items() if (n := count - work[slot])}


def check(drive: DraftDrive, oracle: Oracle, lengths: dict[int, int]) -> None:
    """One step, whose drafts are those of fresh sequences."""
    expected = {slot: sorted(oracle(drive.tokens(slot), n)) for slot, n in lengths.items()}
    found = drive.step(dict(lengths))
    assert {slot: sorted(draft.paths()[1:]) for slot, draft in found.items()} == expected


@pytest.mark.parametrize("chunk", [100, 5])
def test_drafts_are_those_of_the_formula(drive: DraftDrive, case: Case, chunk: int) -> None:
    start(drive, chunk=chunk)
    check(drive, case.oracle, {0: 4, 1: 1, 2: 6})
    check(drive, case.oracle, {2: 2})
    check(drive, case.oracle, {1: 3, 0: 5})


def test_after_accepted_and_rejected_drafts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random head says is never accepted; so some of it is put right, as if it knew."""
    drives = [
        DraftDrive(case.model, case.backend, case.build, vocab_size=VOCAB_SIZE) for _ in range(2)
    ]
    for drive in drives:
        start(drive, PROMPTS[:1])
    for _ in range(4):
        drives[0].step({}, work={0: 1})
    known, drive = drives[0].tokens(0)[len(PROMPTS[0]) + 1 :], drives[1]
    places = {int(token): place for place, token in enumerate(case.oracle.formula.token_ids)}
    fed = [places[token] for token in known[:3] if token in places]

    def feed(logits: Array, tokens: np.ndarray, num_top: int) -> tuple[np.ndarray, ...]:
        *others, ids, values = log_probabilities(logits, tokens, num_top)
        if fed:
            ids[:, 0], values[:, 0], values[:, 1:] = fed.pop(0), 0.0, -40.0
        return *others, ids, values

    monkeypatch.setattr(eagle, "log_probabilities", feed)
    before = len(drive.tokens(0))
    drive.step({0: 6})
    assert 2 < len(drive.tokens(0)) - before < 7  # some were accepted, not all
    assert not fed
    check(drive, case.oracle, {0: 5})


@pytest.mark.parametrize("is_drafted_for", [True, False])
def test_a_shared_prefix_is_known(drive: DraftDrive, case: Case, is_drafted_for: bool) -> None:
    start(drive, PROMPTS[:1])
    if is_drafted_for:
        drive.step({0: 3})
    drive.bind(1, [*PROMPTS[0][:20], 9, 8, 7], table=drive.tables[0][:5], num_computed=20)
    drive.step({}, work={1: 3})
    check(drive, case.oracle, {1: 4, 0: 2})
    check(drive, case.oracle, {0: 2, 1: 1})


def test_the_next_turn_finds_what_the_last_one_left(drive: DraftDrive, case: Case) -> None:
    """The slot is taken by another sequence, whose prefix the first has not been drafted for."""
    start(drive, PROMPTS[:1])
    check(drive, case.oracle, {0: 3})
    for _ in range(3):
        drive.step({}, work={0: 1})
    text, table = drive.tokens(0), drive.tables[0]
    drive.bind(0, [*text[:24], 9, 8, 7], table=table[:6], num_computed=24)
    drive.step({}, work={0: 3})
    check(drive, case.oracle, {0: 4})


def test_a_fork_inside_a_block_goes_its_own_way(drive: DraftDrive, case: Case) -> None:
    start(drive, PROMPTS[:1])
    drive.step({}, work={0: 1})
    drive.bind(1, PROMPTS[0], table=drive.tables[0][:6], num_computed=22)
    drive.step({}, work={1: 1, 0: 1})
    check(drive, case.oracle, {1: 4, 0: 4})
    check(drive, case.oracle, {0: 2, 1: 2})


def test_preempted_and_resumed(drive: DraftDrive, case: Case) -> None:
    start(drive, PROMPTS[:2])
    check(drive, case.oracle, {0: 3, 1: 3})
    text = drive.tokens(0)
    drive.bind(3, text)
    drive.step({1: 2}, work={3: len(text)})
    check(drive, case.oracle, {3: 4, 1: 1})


def test_a_block_that_is_used_again_is_forgotten(drive: DraftDrive, case: Case) -> None:
    start(drive, PROMPTS[:1])
    drive.step({0: 2})
    drive.bind(1, PROMPTS[2])
    drive.tables[1] = list(drive.tables[0])  # all its blocks anew, none of its tokens
    drive.step({}, work={1: len(PROMPTS[2])})
    check(drive, case.oracle, {1: 4})


class Calls:
    """Puts itself in the place of an attribute, and remembers what it was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.args: list[tuple[Any, ...]] = []
        self._function = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args.append(args)
        return self._function(*args, **kwargs)


def test_no_first_token_waits_for_the_head(
    drive: DraftDrive, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Calls(monkeypatch, drive.proposer, "_read")
    first = Calls(monkeypatch, drive.proposer, "_first")
    start(drive, chunk=9)
    assert (read.args, first.args) == ([], [])
    check(drive, case.oracle, {0: 4, 1: 4, 2: 4})
    assert (len(read.args), len(first.args)) == (1, 1)  # for all sequences together
    check(drive, case.oracle, {0: 2, 1: 2, 2: 2})
    assert (len(read.args), len(first.args)) == (1, 2)


def test_what_memory_has_no_room_for_is_read_ahead(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "_MOST_WAITING_BYTES", 0)
    monkeypatch.setattr(eagle, "_LEAST_WAITING", 1)
    drive = DraftDrive(case.model, case.backend, case.build, vocab_size=VOCAB_SIZE)
    assert isinstance(drive.proposer, Eagle)
    features, row_bytes = drive.proposer._features, 4 * drive.proposer._head.num_features
    start(drive, PROMPTS[:1], chunk=9)
    drive.bind(1, PROMPTS[1])
    drive.bind(2, PROMPTS[2])
    drive.step({}, work={0: 1, 1: 6, 2: 13})
    for _ in range(9):
        drive.step({}, work=dict.fromkeys(range(3), 1))
        assert features.num_bytes <= (MAX_NUM_SEQS + 3) * row_bytes
    check(drive, case.oracle, {0: 4, 1: 4, 2: 4})


def test_of_sequences_that_ended_no_more_waits_than_there_is_memory_for(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "_MOST_WAITING_BYTES", 0)
    monkeypatch.setattr(eagle, "_LEAST_WAITING", 2)
    drive = DraftDrive(case.model, case.backend, case.build, vocab_size=VOCAB_SIZE)
    assert isinstance(drive.proposer, Eagle)
    features, row_bytes = drive.proposer._features, 4 * drive.proposer._head.num_features
    for _ in range(3):
        start(drive, PROMPTS[1:])
        drive.step({}, work={0: 1, 1: 1})
        assert features.num_bytes <= (2 * MAX_NUM_SEQS + 2) * row_bytes
    check(drive, case.oracle, {0: 3, 1: 3})


def test_a_step_reads_so_many_tokens_for_drafts(
    drive: DraftDrive, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "_MOST_READ", 13)
    start(drive)
    # 23, 6 and 13 tokens are to be read: 12 of the third sequence, and then 1 of the first.
    expected = {slot: sorted(case.oracle(drive.tokens(slot), 2)) for slot in (1, 2)}
    found = drive.step({0: 2, 1: 2, 2: 2})
    assert {slot: sorted(draft.paths()[1:]) for slot, draft in found.items()} == expected
    assert sorted(drive.step({0: 2, 1: 2, 2: 2})) == [1, 2]
    check(drive, case.oracle, {0: 2, 1: 2, 2: 2})


def test_after_a_pause_it_drafts_for_those_that_start(
    drive: DraftDrive, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "_MOST_UNASKED", 3)
    assert isinstance(drive.proposer, Eagle)
    start(drive, PROMPTS[:2])
    check(drive, case.oracle, {0: 2})
    copied = Calls(monkeypatch, drive.proposer._host_rows, "copy")
    for _ in range(6):  # too busy for drafts
        drive.step({}, work={0: 1, 1: 1})
    drive.bind(2, PROMPTS[2])
    drive.step({}, work={0: 1, 1: 1, 2: 9})
    assert len(copied.args) == 3
    assert drive.step({0: 2, 1: 2}, work={2: 4}) == {}
    drive.bind(3, PROMPTS[2])
    drive.step({}, work={0: 1, 1: 1, 2: 1, 3: 13})
    found = drive.step(dict.fromkeys(range(4), 1))
    assert sorted(found) == [3]
    check(drive, case.oracle, {3: 4})


def test_only_what_the_head_can_read_is_copied_from_the_device(
    drive: DraftDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(drive.proposer, Eagle)
    copied = Calls(monkeypatch, drive.proposer._host_rows, "copy")
    drive.bind(0, PROMPTS[0], table=[0, 1, 2, 3, 4], num_computed=20)  # nobody saw these
    drive.step({}, work={0: 3})
    drive.bind(1, PROMPTS[2])
    drive.step({}, work={0: 1, 1: 13})
    drive.step({1: 3}, work={0: 1})
    num_accepted = drive.num_computed[1] - 14
    drive.step({}, work={0: 1})
    rows = [wanted.tolist() for _, wanted in copied.args]
    assert rows == [[0, 1, 2], [*range(1, 14)], [*range(1, 2 + num_accepted)]]
    assert num_accepted < 3


def test_without_features_there_is_no_draft(drive: DraftDrive) -> None:
    """Blocks that were filled before the proposer came, say."""
    drive.bind(0, PROMPTS[0], table=[0, 1, 2, 3, 4], num_computed=20)
    drive.step({}, work={0: 3})
    assert drive.step({0: 3}) == {}


def test_next_to_the_longest_text_others_may_have_longer_drafts(
    drive: DraftDrive, case: Case
) -> None:
    long = RANDOM.integers(3, VOCAB_SIZE, MAX_MODEL_LEN - 3).tolist()
    start(drive, [PROMPTS[0], long], chunk=MAX_MODEL_LEN)
    check(drive, case.oracle, {0: 8, 1: 1})


@pytest.mark.parametrize("count", range(4))
def test_it_stops_where_it_is_unsure(drive: DraftDrive, case: Case, count: int) -> None:
    start(drive, PROMPTS[:1])
    formula, text = case.oracle.formula, drive.tokens(0)
    features = case.oracle.features(text[:-1])
    path, reached = case.oracle(text, 4)[count], 1.0
    for depth, token in enumerate(path):
        place = formula.token_ids.tolist().index(token)
        reached *= formula.probabilities_after(features, text, path[:depth])[place]
    floor = 1.01 * reached  # so that this path is below it
    expected = case.oracle(text, 4, floor=floor)
    assert path not in expected
    found = drive.step({0: DraftRequest(0, 4, floor)})
    assert [sorted(d.paths()[1:]) for d in found.values()] == [sorted(expected)] * bool(expected)


def test_guesses_are_chosen_whatever_the_temperature(case: Case) -> None:
    sampler = Sampler(case.backend, max_num_seqs=MAX_NUM_SEQS, vocab_size=VOCAB_SIZE)
    drive = DraftDrive(
        case.model, case.backend, lambda _: case.build(sampler), vocab_size=VOCAB_SIZE
    )
    start(drive, PROMPTS[:1])
    sampler.bind(bind(0, prompt=tuple(PROMPTS[0]), temperature=0.7))
    expected = sorted(case.oracle(drive.tokens(0), 3))
    draft = drive.step({0: 3})[0]
    assert draft.probabilities is None
    assert sorted(draft.paths()[1:]) == expected


@pytest.mark.parametrize("name", HEADS)
def test_half_precision(name: str, tmp_path: Path, target_folder: Path) -> None:
    method, tensors, config = HEADS[name]
    folder, backend = save_head(tmp_path, tensors, CONFIG | config), cpu_backend("torch")
    model = load_model(target_folder, backend, dtype="bfloat16")
    target = target_of(model, target_folder, backend, None)

    def make(sampler: Any) -> Proposer:
        (proposer,) = build_proposers(
            [{"method": method, "model": str(folder)}],
            replace(target, dtype="bfloat16", sampler=sampler),
        )
        return proposer

    drive = DraftDrive(model, backend, make, vocab_size=VOCAB_SIZE, kv_dtype="bfloat16")
    start(drive)
    for _ in range(2):
        drafts = drive.step(dict.fromkeys(range(3), 4))
        assert [len(draft.token_ids) for draft in drafts.values()] == [4, 4, 4]


EAGLE, EAGLE3 = HEADS["EAGLE"][1], HEADS["EAGLE-3"][1]
NARROW = EAGLE["layers.0.self_attn.k_proj.weight"]


@pytest.mark.parametrize(
    ("method", "tensors", "config", "message"),
    [
        ("eagle3", EAGLE, {}, "is no EAGLE-3 head; use method eagle"),
        ("eagle", EAGLE3, {}, "is an EAGLE-3 head; use method eagle3"),
        ("eagle", EAGLE | {"fc.weight": None}, {}, "missing: fc.weight"),
        ("eagle", EAGLE | {"layers.0.mlp.up_proj.weight": None}, {}, "missing: layers.0.mlp.up_pr"),
        ("eagle3", EAGLE3 | {"midlayer.hidden_norm.weight": None}, {}, "is no EAGLE-3 head"),
        ("eagle3", EAGLE3 | {"norm.weight": None}, {}, "missing: norm.weight"),
        (
            "eagle",
            EAGLE | {"model.layers.0.mlp.up_proj.weight": EAGLE["layers.0.mlp.up_proj.weight"]},
            {},
            "layers.0.mlp.up_proj.weight and .*layers.0.mlp.up_proj.weight are both layers.0.mlp",
        ),
        ("eagle", EAGLE | {"extra.weight": EAGLE["fc.bias"]}, {}, "unexpected: extra.weight"),
        (
            "eagle3",
            EAGLE3
            | {"midlayer.self_attn.k_proj.weight": EAGLE["layers.0.self_attn.k_proj.weight"]},
            {},
            r"self_attn.k_proj.weight is \[32, 64\] instead of \[32, 128\]",
        ),
        ("eagle", EAGLE, {"hidden_size": 48}, "the target's hidden size, 64"),
        ("eagle", EAGLE, {"draft_vocab_size": 99}, "draft_vocab_size 99"),
        ("eagle3", EAGLE3 | {"d2t": np.zeros((2, 300), np.int64)}, {}, "not different ids below"),
        ("eagle3", EAGLE3 | {"d2t": np.zeros(0, np.int64)}, {}, "draft_vocab_size must be"),
        ("eagle3", EAGLE3, {"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ("eagle3", EAGLE3, {"eagle_aux_hidden_state_layer_ids": [2, 6]}, "must name layers from 1"),
    ],
)
def test_heads_of_another_kind_or_model_are_refused(
    tmp_path: Path,
    model: CausalLM,
    target_folder: Path,
    backend: Backend,
    method: str,
    tensors: dict[str, np.ndarray | None],
    config: dict[str, Any],
    message: str,
) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder = save_head(tmp_path, kept, CONFIG | config)
    target = target_of(model, target_folder, backend, None)
    with pytest.raises(ConfigError, match=message):
        build_proposers([{"method": method, "model": str(folder)}], target)


def test_eagle3_sees_early_middle_and_late_layers(
    tmp_path: Path, model: CausalLM, target_folder: Path, backend: Backend
) -> None:
    """Where the config doesn't say: the inputs of 2, n / 2 and n - 3 of the target's 5 layers."""
    folder = save_head(tmp_path, EAGLE3, CONFIG | {"draft_vocab_size": 300})
    target = target_of(model, target_folder, backend, None)
    (proposer,) = build_proposers([{"method": "eagle3", "model": str(folder)}], target)
    assert proposer.taps == (1, 1, 1)
    assert [*proposer.kv_heads] == [(2, 16)]

"""Medusa's heads against their formula, and the trees that are made of what they say."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.core.step import DraftRequest
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.speculative import demand
from octavo.speculative.medusa import Medusa, Place, best_tree
from octavo.speculative.proposer import DraftTask
from octavo.speculative.registry import Target, build_proposers
from octavo.weights import open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.draft_heads import HIDDEN, Tensors, medusa_logits, medusa_tensors, save_head
from support.drafting import DraftDrive
from support.forward import load_model
from support.oracle import load_oracle

PROMPTS = [np.random.default_rng(8).integers(3, VOCAB_SIZE, n).tolist() for n in (11, 5)]
CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1}
OWN, SHARED, DEEP = (
    medusa_tensors(),
    medusa_tensors(has_lm_heads=False),
    medusa_tensors(num_layers=2),
)
SOME = np.array([3, 5, 8, *range(20, 200)])


def vllm_names(tensors: Tensors) -> Tensors:
    """Of one layer each."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        new = f"blocks.{head}.layers.{layer}.{rest[-1]}" if len(rest) == 2 else f"lm_heads.{head}"
        renamed[new if len(rest) == 2 else f"{new}.weight"] = tensor
    return renamed


class Head(NamedTuple):
    """stored: the checkpoint's tensors. tensors: the same by Medusa's names. token_ids: that it
    guesses among.
    """

    stored: Tensors
    tensors: Tensors
    config: dict[str, Any]
    token_ids: np.ndarray = np.arange(VOCAB_SIZE)


HEADS = {
    "as published": Head(OWN, OWN, CONFIG),
    "two layers": Head(DEEP, DEEP, CONFIG | {"medusa_num_layers": 2}),
    "in a model's file": Head({f"medusa_head.{n}": t for n, t in OWN.items()}, OWN, CONFIG),
    "the target's head": Head(SHARED, SHARED, CONFIG),
    "some rows of the target's head": Head(
        SHARED | {"d2t": SOME - np.arange(len(SOME))},
        SHARED,
        CONFIG | {"draft_vocab_size": len(SOME)},
        SOME,
    ),
    "as vLLM has it": Head(
        vllm_names(OWN),
        OWN,
        {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE},
    ),
    "vLLM, fewer tokens": Head(
        {
            **vllm_names({name: t for name, t in OWN.items() if ".linear." in name}),
            **{f"lm_heads.{h}.weight": OWN[f"{h}.1.weight"][SOME] for h in range(3)},
            "token_map": SOME,
        },
        OWN,
        {
            "num_heads": 3,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB_SIZE,
            "truncated_vocab_size": len(SOME),
        },
        SOME,
    ),
    "vLLM, one head for all": Head(
        vllm_names(SHARED) | {"lm_heads.0.weight": OWN["0.1.weight"]},
        SHARED | {f"{h}.1.weight": OWN["0.1.weight"] for h in range(3)},
        {"num_heads": 3, "num_hidden_layers": 1, "original_lm_head": True},
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.fixture(scope="module")
def model(backend: Backend, target_folder: Path) -> CausalLM:
    return load_model(target_folder, backend)


class Oracle:
    """The heads' probabilities behind a text, by transformers' states."""

    def __init__(self, folder: Path, head: Head) -> None:
        self._model = load_oracle(folder)
        self._lm_head = open_checkpoint(str(folder)).read("lm_head.weight")
        self._head = head

    def __call__(self, tokens: list[int]) -> np.ndarray:
        """(H, V); tokens that it doesn't guess have 0. tokens: the last has no state yet."""
        import torch

        with torch.inference_mode():
            states = self._model(
                torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True
            ).hidden_states
        logits = medusa_logits(self._head.tensors, states[-1][0, -1].numpy(), self._lm_head)
        masked = np.full_like(logits, -np.inf)
        masked[:, self._head.token_ids] = logits[:, self._head.token_ids]
        weights = np.exp(masked - masked.max(1, keepdims=True))
        result: np.ndarray = weights / weights.sum(1, keepdims=True)
        return result


def best_paths(probabilities: np.ndarray, length: int) -> list[tuple[int, ...]]:
    """All paths of tokens, the likeliest first, by trying them all."""
    likeliest = [np.argsort(-row)[:10].tolist() for row in probabilities]
    paths = [
        path for depth in range(1, len(probabilities) + 1) for path in product(*likeliest[:depth])
    ]

    def reached(path: tuple[int, ...]) -> float:
        return float(np.prod([probabilities[head, token] for head, token in enumerate(path)]))

    return sorted(paths, key=reached, reverse=True)[:length]


def _task(slot: int, request: DraftRequest) -> DraftTask:
    return DraftTask(slot, request)


def build(
    folder: Path, model: CausalLM, target_folder: Path, backend: Backend, dtype: str = "float32"
) -> Medusa:
    target = Target(
        model=model,
        checkpoint=open_checkpoint(str(target_folder)),
        backend=backend,
        sampler=None,  # type: ignore[arg-type]  # it makes its own choice
        dtype=dtype,
        quantization=None,
        vocab_size=VOCAB_SIZE,
        open_model=open_checkpoint,
    )
    (proposer,) = build_proposers([{"method": "medusa", "model": str(folder)}], target)
    assert isinstance(proposer, Medusa)
    return proposer


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_the_likeliest_trees(
    name: str, tmp_path: Path, model: CausalLM, target_folder: Path, backend: Backend
) -> None:
    head = HEADS[name]
    folder = save_head(tmp_path, head.stored, head.config)
    oracle = Oracle(target_folder, head)
    medusa = build(folder, model, target_folder, backend)
    drive = DraftDrive(model, backend, lambda _: medusa, vocab_size=VOCAB_SIZE)
    for slot, prompt in enumerate(PROMPTS):
        drive.bind(slot, prompt)
    drive.step({}, work={slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    for _ in range(2):  # the second time behind a chain that was rejected
        lengths = {0: 7, 1: 4}
        expected = {s: best_paths(oracle(drive.tokens(s)), n) for s, n in lengths.items()}
        tasks = [(slot, DraftRequest(0, length)) for slot, length in lengths.items()]
        for slot, request in tasks:
            (draft,) = medusa.propose([DraftTask(slot, request)])
            assert draft is not None
            assert sorted(draft.paths()[1:]) == sorted(expected[slot])
        both = medusa.propose([DraftTask(slot, request) for slot, request in tasks])
        found = {slot: draft for (slot, _), draft in zip(tasks, both, strict=True)}
        assert {s: sorted(d.paths()[1:]) for s, d in found.items() if d} == {
            slot: sorted(paths) for slot, paths in expected.items()
        }
        drive.step({}, work={0: 1, 1: 1})


def test_nothing_is_guessed_for_a_sequence_that_was_not_seen(
    tmp_path: Path, model: CausalLM, target_folder: Path, backend: Backend
) -> None:
    folder = save_head(tmp_path, OWN, CONFIG)
    medusa = build(folder, model, target_folder, backend)
    drive = DraftDrive(model, backend, lambda _: medusa, vocab_size=VOCAB_SIZE)
    drive.bind(0, PROMPTS[0])
    drive.step({}, work={0: len(PROMPTS[0])})
    request = DraftRequest(0, 2)
    assert medusa.propose([DraftTask(1, request)]) == [None]
    assert medusa.propose([DraftTask(0, request)]) != [None]
    drive.bind(0, drive.tokens(0))  # as long as the one before, and not computed yet
    drive.step({}, work={0: 3})
    assert medusa.propose([DraftTask(0, request)]) == [None]


def test_after_a_pause_it_drafts_again(
    tmp_path: Path,
    model: CausalLM,
    target_folder: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demand, "_MOST_UNASKED", 3)
    medusa = build(save_head(tmp_path, OWN, CONFIG), model, target_folder, backend)
    drive = DraftDrive(model, backend, lambda _: medusa, vocab_size=VOCAB_SIZE)
    for slot, prompt in enumerate(PROMPTS):
        drive.bind(slot, prompt)
    drive.step({}, work={0: 11, 1: 5})
    for _ in range(4):  # too busy for drafts
        drive.step({}, work={0: 1, 1: 1})
    assert drive.step({0: 2}, work={1: 1}) == {}
    assert sorted(drive.step({0: 2, 1: 2})) == [0, 1]


def test_half_precision(tmp_path: Path, target_folder: Path) -> None:
    backend = cpu_backend("torch")
    model = load_model(target_folder, backend, dtype="bfloat16")
    medusa = build(save_head(tmp_path, OWN, CONFIG), model, target_folder, backend, "bfloat16")
    drive = DraftDrive(model, backend, lambda _: medusa, vocab_size=VOCAB_SIZE, kv_dtype="bfloat16")
    drive.bind(0, PROMPTS[0])
    drive.step({}, work={0: len(PROMPTS[0])})
    assert len(drive.step({0: 4})[0].token_ids) == 4


LOG = np.log([[0.5, 0.3, 0.1], [0.9, 0.05, 0.01], [0.4, 0.3, 0.2]]).tolist()


def test_a_tree_grows_by_the_likeliest_path() -> None:
    assert best_tree(LOG, 1, 0.0) == [Place(0, 0, -1)]
    assert best_tree(LOG, 2, 0.0) == [Place(0, 0, -1), Place(1, 0, 0)]
    # 0.5, 0.5 * 0.9, 0.3, 0.3 * 0.9, 0.45 * 0.4
    assert best_tree(LOG, 5, 0.0)[2:] == [Place(0, 1, -1), Place(1, 0, 2), Place(2, 0, 1)]


def test_a_tree_ends_where_nothing_is_likely_enough() -> None:
    assert len(best_tree(LOG, 50, 0.2)) == 4
    assert best_tree(LOG, 50, 0.51) == []
    assert len(best_tree(LOG, 50, 0.0)) == 3 + 9 + 27


def test_broken_logits_guess_nothing() -> None:
    broken = [LOG[0], [np.nan] * 3, LOG[2]]
    assert [place.depth for place in best_tree(broken, 50, 0.0)] == [0, 0, 0]
    assert best_tree(broken[1:], 50, 0.0) == []


def test_a_chain_is_told_as_a_chain() -> None:
    from octavo.speculative.medusa import _draft

    top_ids = np.arange(9).reshape(3, 3)
    chain = _draft(top_ids, best_tree(LOG, 2, 0.0))
    assert chain.token_ids.tolist() == [0, 3]
    assert chain.parents is None
    tree = _draft(top_ids, best_tree(LOG, 5, 0.0))
    assert tree.token_ids.tolist() == [0, 3, 1, 3, 6]
    assert tree.parents is not None
    assert tree.parents.tolist() == [-1, 0, -1, 2, 1]


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"1.0.linear.weight": None}, {}, "missing: blocks.1.layers.0.weight"),
        ({"3.0.linear.weight": OWN["0.0.linear.weight"]}, {}, "unexpected: blocks.3"),
        (
            {"medusa_head.0.0.linear.weight": OWN["0.0.linear.weight"]},
            {},
            r"0\.0\.linear.weight and .*0\.0\.linear.weight are both blocks.0.layers.0.weight",
        ),
        ({"2.1.weight": OWN["2.1.weight"][1:]}, {}, r"lm_heads.2.weight is \[319, 64\]"),
        ({}, {"hidden_size": 48}, "the target's hidden size, 64"),
        ({"d2t": np.full(9, 400)}, {}, "not different ids below 320"),
        ({}, {"draft_vocab_size": 99}, "draft_vocab_size 99"),
        ({}, {"medusa_num_heads": None}, "medusa_num_heads must be an integer from 1 to 64"),
    ],
)
def test_heads_of_another_model_are_refused(
    tmp_path: Path,
    model: CausalLM,
    target_folder: Path,
    backend: Backend,
    change: dict[str, Any],
    config: dict[str, Any],
    message: str,
) -> None:
    tensors = {name: t for name, t in (OWN | change).items() if t is not None}
    folder = save_head(tmp_path, tensors, CONFIG | config)
    with pytest.raises(ConfigError, match=message):
        build(folder, model, target_folder, backend)

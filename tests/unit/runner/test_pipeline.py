"""Pipelines of real runners, by the real scheduler and loop: what comes out is what the whole model
in one runner gives, to the bit.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import InvariantError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runner.linked_pipeline import LinkedPipeline
from octavo.runner.pipeline import StageInput
from octavo.weights import Checkpoint, open_checkpoint
from support.checkpoints import VOCAB_SIZE, make_checkpoint, make_repeating_checkpoint
from support.draft_heads import (
    CONFIG,
    eagle3_tensors,
    eagle_tensors,
    medusa_tensors,
    save_head,
)
from support.pipeline import (
    Engine,
    FedTrees,
    MakeProposer,
    PipelineExecutor,
    Texts,
    configured,
    own_backend,
)

RNG = np.random.default_rng(6)
SHARED = RNG.integers(3, VOCAB_SIZE, 19).tolist()
PROMPTS = [RNG.integers(3, VOCAB_SIZE, n).tolist() for n in (41, 5, 12, 1, 67, 9, 23)]
PROMPTS += [SHARED + RNG.integers(3, VOCAB_SIZE, n).tolist() for n in (3, 8, 30)]
STAGES = [2, 3]

Scenario = Callable[[], list[Request]]


def request(number: int, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    """A seed of the user's, so that what is guessed is never drawn: texts don't depend on it."""
    eos = sampling.pop("eos", ())
    return Request(
        request_id=str(number),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=number, **sampling),
        max_tokens=max_tokens,
        seed=number,
        eos_token_ids=frozenset(eos),
    )


def greedy() -> list[Request]:
    return [request(i, prompt, 9 + i, temperature=0.0) for i, prompt in enumerate(PROMPTS)]


def seeded() -> list[Request]:
    return [request(i, prompt, 12, temperature=1.5, top_p=0.9) for i, prompt in enumerate(PROMPTS)]


def penalized() -> list[Request]:
    """Penalties count tokens that other stages never hear of by themselves."""
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    return [
        request(i, prompt, 14, temperature=0.0 if i % 2 else 0.8, **penalties)
        for i, prompt in enumerate(PROMPTS)
    ]


def with_logprobs() -> list[Request]:
    return [
        request(
            i,
            prompt,
            8,
            temperature=0.0,
            logprobs=i % 3,
            prompt_logprobs=None if i % 2 else i % 4,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def forks() -> list[Request]:
    """Which share blocks of the prompt, the last one of which is copied when they write."""
    return [request(i, prompt, 10, temperature=1.2, n=3) for i, prompt in enumerate(PROMPTS[:3])]


def stopped() -> list[Request]:
    """They end when a token comes, at different times; their slots are taken at once."""
    return [
        request(i, prompt, 30, temperature=1.8, eos=range(0, VOCAB_SIZE, 9))
        for i, prompt in enumerate(PROMPTS * 2)
    ]


def long() -> list[Request]:
    """More than a small cache holds."""
    return [
        request(i, prompt[:13], 50, temperature=0.7 if i % 2 else 0.0)
        for i, prompt in enumerate(PROMPTS)
    ]


SCENARIOS: dict[str, Scenario] = {
    "greedy": greedy,
    "seeded": seeded,
    "penalties": penalized,
    "log-probabilities": with_logprobs,
    "forks": forks,
    "stops": stopped,
    "long": long,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("llama")
    return open_checkpoint(str(make_checkpoint("llama", folder, num_hidden_layers=5)))


@pytest.fixture(scope="module")
def texts_alone(checkpoint: Checkpoint) -> dict[str, Texts]:
    """By scenario, of the whole model."""
    found = {}
    for name, scenario in SCENARIOS.items():
        with Engine(checkpoint) as engine:
            found[name] = engine.run(*scenario())
    return found


def check_same(found: Texts, expected: Texts) -> None:
    assert not expected.errors
    assert found == expected


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_stages_give_what_one_runner_gives(
    checkpoint: Checkpoint, texts_alone: dict[str, Texts], scenario: str, num_stages: int
) -> None:
    with Engine(checkpoint, num_stages) as engine:
        check_same(engine.run(*SCENARIOS[scenario]()), texts_alone[scenario])
        assert isinstance(engine.executor, PipelineExecutor)
        assert engine.executor.most_in_flight == num_stages
        steps = engine.executor.steps
        assert any(len(step.sequences) > 1 for step in steps)
        assert any(not s.samples for step in steps for s in step.sequences)  # chunks
        if scenario == "forks":
            assert any(step.block_copies for step in steps)
        stages = engine.loop.stats().stages
        assert len(stages) == num_stages
        assert all(stage.busy_seconds > 0 == stage.exchange_seconds for stage in stages)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("scenario", ["long"])
def test_with_so_few_blocks_that_sequences_are_preempted(
    checkpoint: Checkpoint, texts_alone: dict[str, Texts], scenario: str, num_stages: int
) -> None:
    with Engine(checkpoint, num_stages, num_blocks=29) as engine:
        check_same(engine.run(*SCENARIOS[scenario]()), texts_alone[scenario])
        assert engine.loop.stats().total_preemptions > 3


@pytest.mark.parametrize("num_stages", STAGES)
def test_prefixes_are_found_again(
    checkpoint: Checkpoint, texts_alone: dict[str, Texts], num_stages: int
) -> None:
    with Engine(checkpoint, num_stages) as engine:
        engine.run(*[r for r in greedy() if r.request_id in "01234"])
        hits = engine.loop.stats().total_prefix_hits
        engine.texts = Texts()
        check_same(engine.run(*greedy()), texts_alone["greedy"])
        assert engine.loop.stats().total_prefix_hits > hits + 100


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "deepseek_v3", "opt"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Tied (MDL-07), with windows, with latent vectors, with learned positions."""
    checkpoint = open_checkpoint(str(make_checkpoint(family, tmp_path)))
    with Engine(checkpoint) as alone, Engine(checkpoint, 2) as staged:
        check_same(staged.run(*greedy()), alone.run(*greedy()))


# --- guesses --------------------------------------------------------------------------------------


def itself(folder: Path, checkpoint: Checkpoint) -> MakeProposer:
    return configured(method="draft_model", model=str(checkpoint.path))


def other_model(folder: Path, checkpoint: Checkpoint) -> MakeProposer:
    make_checkpoint("qwen3", folder, num_hidden_layers=1, seed=3)
    return configured(method="draft_model", model=str(folder))


def medusa(folder: Path, checkpoint: Checkpoint) -> MakeProposer:
    config = CONFIG | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    save_head(folder, medusa_tensors(has_lm_heads=False), config)
    return configured(method="medusa", model=str(folder))


def eagle(folder: Path, checkpoint: Checkpoint) -> MakeProposer:
    save_head(folder, eagle_tensors(), CONFIG)
    return configured(method="eagle", model=str(folder))


def eagle3(folder: Path, checkpoint: Checkpoint) -> MakeProposer:
    """It looks at layers of every stage."""
    config = CONFIG | {"draft_vocab_size": 300, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    save_head(folder, eagle3_tensors(), config)
    return configured(method="eagle3", model=str(folder))


METHODS = {
    "itself": itself,
    "another model": other_model,
    "medusa": medusa,
    "eagle": eagle,
    "eagle3": eagle3,
}


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("method", METHODS)
def test_guesses_change_no_text(
    checkpoint: Checkpoint,
    texts_alone: dict[str, Texts],
    tmp_path: Path,
    method: str,
    num_stages: int,
) -> None:
    proposer = METHODS[method](tmp_path, checkpoint)
    with Engine(checkpoint, num_stages, proposer=proposer) as engine:
        check_same(engine.run(*greedy()), texts_alone["greedy"])
        drafts = engine.loop.stats().all_drafts
        assert drafts.num_draft_tokens > 0
        engine.texts = Texts()
        check_same(engine.run(*penalized()), texts_alone["penalties"])
    if method == "itself":
        assert drafts.num_accepted_tokens == drafts.num_draft_tokens


def test_what_repeats_is_looked_up(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_repeating_checkpoint(tmp_path)))
    requests = [request(i, prompt, 60, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    with (
        Engine(checkpoint) as alone,
        Engine(checkpoint, 2, proposer=configured(method="ngram")) as engine,
    ):
        check_same(engine.run(*requests), alone.run(*requests))
        assert engine.loop.stats().all_drafts.num_accepted_tokens > 50


@pytest.mark.parametrize("num_blocks", [200, 31])
@pytest.mark.parametrize("num_stages", [1, *STAGES])
def test_what_is_accepted_of_trees_moves_on_every_stage(
    checkpoint: Checkpoint, texts_alone: dict[str, Texts], num_stages: int, num_blocks: int
) -> None:
    """A wrong guess lies before each right one."""
    requests, expected = long(), texts_alone["long"]
    whole = [[*r.prompt_token_ids, *expected.tokens[r.request_id, 0]] for r in requests]
    fed = FedTrees(whole)
    with Engine(
        checkpoint,
        num_stages,
        num_blocks=num_blocks,
        proposer=lambda target: fed,
        draft_length=6,
    ) as engine:
        check_same(engine.run(*requests), expected)
        assert engine.loop.stats().total_preemptions > 0 or num_blocks == 200
    assert fed.num_accepted > 100


def test_sockets_that_hold_next_to_nothing_let_no_stages_wait_for_each_other(
    checkpoint: Checkpoint, texts_alone: dict[str, Texts], tmp_path: Path
) -> None:
    """Chunks of 110 tokens with three tapped layers are far more than these buffers take."""
    proposer = eagle3(tmp_path, checkpoint)
    with Engine(checkpoint, 3, budget=110, proposer=proposer) as engine:
        for link in engine.links:
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                link._socket.setsockopt(socket.SOL_SOCKET, buffer, 1)
        check_same(engine.run(*greedy()), texts_alone["greedy"])


# --- failures -------------------------------------------------------------------------------------


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """The call number `at` of a method raises MemoryError."""
    calls = iter(range(1, 10**6))
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise MemoryError("4 TiB at /a/path")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


PLACES = {
    "the first stage's forward": lambda runners: (runners[0], "_forward"),
    "the middle stage's forward": lambda runners: (runners[1], "_forward"),
    "before the middle stage's drafts": lambda runners: (runners[1]._state, "apply"),
    "the last stage's guesses": lambda runners: (runners[2]._speculation, "propose"),
    "the last stage's sampling": lambda runners: (runners[2]._sampler, "sample"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_on_one_stage_fails_on_all_and_the_next_is_right(
    checkpoint: Checkpoint,
    texts_alone: dict[str, Texts],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    with Engine(checkpoint, 3, proposer=configured(method="ngram")) as engine:
        fail_once(monkeypatch, *PLACES[place](engine.runners), at=6)
        failed = engine.run(*long())
        texts = set(failed.errors.values())
        assert len(texts) == 1
        (text,) = texts
        assert "MemoryError" in text
        assert ("/a/path" in text) is (
            "last" in place
        )  # what the last stage raises is its worker's
        engine.texts = Texts()
        check_same(engine.run(*long()), texts_alone["long"])


def test_a_sequence_may_fail_alone(checkpoint: Checkpoint, texts_alone: dict[str, Texts]) -> None:
    """One may not end yet, and every token ends it."""
    broken = request(99, PROMPTS[0], 5, min_tokens=3, eos=range(VOCAB_SIZE))
    with Engine(checkpoint, 2) as engine:
        found = engine.run(broken, *long())
        assert list(found.errors) == [("99", 0)]
        del found.errors["99", 0], found.tokens["99", 0], found.logprobs["99", 0]
        check_same(found, texts_alone["long"])


def test_the_stage_of_a_pipeline_must_be_one(checkpoint: Checkpoint) -> None:
    with Engine(checkpoint) as engine, pytest.raises(InvariantError, match="whole, and no stage"):
        StageInput(LinkedPipeline(None, None), own_backend(), engine.runners[0]._model, ())

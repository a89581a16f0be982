"""The runner with a tiny model: however its work is cut and wherever it lies, the tokens are the
same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.model_spec import KVFormat
from octavo.core.step import (
    DraftRequest,
    ScheduledSequence,
    ScheduledStep,
    SequenceOutput,
    StepOutput,
)
from octavo.models.causal_lm import CausalLM
from octavo.ops.backend import Backend
from octavo.runner import model_runner
from octavo.runner.model_runner import ModelRunner
from octavo.runner.speculation import Speculation
from octavo.sampling.sampler import Sampler
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposers import Proposers
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import load_model
from support.runner import Drive

BLOCK_SIZE = 4
PROMPT = tuple(int(token) for token in np.random.default_rng(1).integers(3, VOCAB_SIZE, 23))
SAMPLED: dict[str, Any] = {"prompt": PROMPT, "seed": 11, "temperature": 2.0, "top_p": 0.95}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "temperature": 0.0},
    SAMPLED,
    {"prompt": PROMPT, "seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def model(backend: Backend, checkpoint: Checkpoint) -> CausalLM:
    return load_model(checkpoint, backend, num_positions=120)


def make_drive(
    model: CausalLM,
    backend: Backend,
    vocab_size: int = VOCAB_SIZE,
    speculation: Speculation | None = None,
) -> Drive:
    runner = ModelRunner(
        model,
        backend,
        Sampler(backend, max_num_seqs=6, vocab_size=vocab_size),
        num_blocks=200,
        block_size=BLOCK_SIZE,
        kv_format=KVFormat("float32"),
        max_num_seqs=6,
        max_model_len=120,
        vocab_size=vocab_size,
        speculation=speculation,
    )
    return Drive(runner, BLOCK_SIZE)


@pytest.fixture
def drive(model: CausalLM, backend: Backend) -> Drive:
    return make_drive(model, backend)


@pytest.fixture(scope="module")
def alone(model: CausalLM, backend: Backend) -> list[list[int]]:
    """What each of REQUESTS generates by itself, its prompt in one piece."""
    results = []
    for request in REQUESTS:
        drive = make_drive(model, backend)
        drive.bind(0, **request)
        results += drive.run([0], 12)
    return results


def test_the_requests_differ_from_their_first_token(alone: list[list[int]]) -> None:
    assert len({tokens[0] for tokens in alone}) == len(REQUESTS)
    assert all(len(tokens) == 12 for tokens in alone)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 22])
def test_chunked_equals_whole(drive: Drive, alone: list[list[int]], chunk: int) -> None:
    sequences = [drive.bind(slot, **request) for slot, request in enumerate(REQUESTS)]
    assert drive.run([0, 1, 2], 12, chunk=chunk) == alone
    silent = -(-len(PROMPT) // chunk) - 1
    for sequence in sequences:
        assert [output.token_ids for output in sequence.outputs[:silent]] == [()] * silent
        assert all(len(output.token_ids) == 1 for output in sequence.outputs[silent:])


def test_any_slot_and_company(drive: Drive, alone: list[list[int]]) -> None:
    drive.bind(2, prompt=(9, 8, 7), seed=1)
    drive.run([2], 3)
    for slot, request in zip((4, 0, 5), REQUESTS, strict=True):
        drive.bind(slot, **request)
    drive.step({2: 1, 5: 5, 4: 23})
    assert drive.run([4, 0, 2, 5], 12, chunk=6)[0] == alone[0]
    assert [drive.sequences[slot].generated for slot in (4, 0, 5)] == alone


@pytest.mark.parametrize("index", range(len(REQUESTS)))
def test_preempted_and_resumed_equals_uninterrupted(
    drive: Drive, alone: list[list[int]], index: int
) -> None:
    drive.bind(0, **REQUESTS[index])
    (first,) = drive.run([0], 5)
    drive.bind(3, output=tuple(first), **REQUESTS[index])
    assert drive.run([3], 12, chunk=10) == [alone[index]]


def test_a_slot_can_be_taken_again_in_the_step_after(drive: Drive, alone: list[list[int]]) -> None:
    drive.bind(0, prompt=PROMPT * 3, seed=3, logit_bias={7: 100.0}, logprobs=2, prompt_logprobs=1)
    drive.run([0], 2)
    sequence = drive.bind(0, **REQUESTS[1])
    assert drive.run([0], 12) == [alone[1]]
    assert {(o.logprobs, o.prompt_logprobs) for o in sequence.outputs} == {(None, None)}


def test_a_fork_shares_full_blocks_and_copies_the_partly_filled_one(
    drive: Drive, alone: list[list[int]]
) -> None:
    parent = drive.bind(0, **REQUESTS[0])
    drive.run([0], 1)
    drive.bind(1, table=parent.table, num_computed=22, **REQUESTS[1])
    drive.copy_block(1, 5)  # tokens 20 to 22 of the prompt; the two go on differently from there
    drive.run([0, 1], 12)
    assert [drive.sequences[slot].generated for slot in (0, 1)] == alone[:2]
    child = drive.sequences[1]
    assert child.table[:5] == parent.table[:5]
    assert not set(child.table[5:]) & set(parent.table[5:])


def test_a_step_may_read_blocks_that_it_fills_itself(drive: Drive, alone: list[list[int]]) -> None:
    first = drive.bind(0, **REQUESTS[0])
    first.table += [50, 51, 52, 53, 54]
    drive.bind(1, table=first.table, num_computed=20, **REQUESTS[1])
    drive.step({1: 3, 0: 23})
    assert [generated[:1] for generated in drive.run([0, 1], 1)] == [t[:1] for t in alone[:2]]


def prompt_logprobs(outputs: list[SequenceOutput]) -> list[list[tuple[int, float]]]:
    """(token, log-probability) by output; none where it reports none."""
    return [
        [(record.token_id, record.logprob) for record in output.prompt_logprobs or ()]
        for output in outputs
    ]


@pytest.mark.parametrize("chunk", [1, 4, 9, 22, 23])
def test_prompt_logprobs_come_with_the_chunk_that_predicts_them(
    drive: Drive, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "_PROMPT_LOGPROB_ROWS", 4)
    sequence = drive.bind(0, prompt=PROMPT, temperature=0.0, prompt_logprobs=2)
    drive.run([0], 3, chunk=chunk)
    by_output = prompt_logprobs(sequence.outputs)
    lengths = [min(chunk, 22 - start) for start in range(0, 22, chunk)]
    assert [len(records) for records in by_output if records] == lengths
    assert not any(by_output[len(lengths) :])
    records = [record for output in sequence.outputs for record in output.prompt_logprobs or ()]
    assert [record.token_id for record in records] == list(PROMPT[1:])
    assert all(len(record.top) == 2 for record in records)


def test_prompt_logprobs_are_those_of_the_model(drive: Drive) -> None:
    sequence = drive.bind(0, prompt=PROMPT, temperature=0.0, prompt_logprobs=0)
    drive.run([0], 1)
    (records, *_) = prompt_logprobs(sequence.outputs)
    for position in (1, 8, 22):
        # The same by another way: the whole distribution of a sequence that ends just before.
        drive.bind(1, prompt=PROMPT[:position], temperature=0.0, logprobs=-1)
        (output,) = drive.step({1: position})
        assert output.logprobs is not None
        token, logprob = records[position - 1]
        assert token == PROMPT[position]
        assert dict(output.logprobs[0].top)[token] == pytest.approx(logprob, abs=1e-4)


@pytest.fixture
def poison(
    model: CausalLM, backend: Backend, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> int:
    """A token with a broken embedding."""
    token = VOCAB_SIZE - 1
    assert token not in PROMPT
    table = checkpoint.read("model.embed_tokens.weight").copy()
    table[token] = np.nan
    monkeypatch.setattr(model.embedding.table, "array", backend.from_host(table))
    return token


def test_mdl_13_broken_activations_end_their_own_sequence_alone(
    drive: Drive, alone: list[list[int]], poison: int
) -> None:
    broken = drive.bind(0, prompt=(poison, *PROMPT), temperature=0.0)
    drive.bind(1, **REQUESTS[0])
    drive.bind(2, prompt=(5, poison, 6), prompt_logprobs=0)
    outputs = drive.step({0: 24, 1: 23, 2: 3})
    assert outputs[0] == SequenceOutput(
        0, (), error="the model produced non-finite logits at position 24"
    )
    assert outputs[2].error == "the model produced non-finite logits at position 3"
    assert drive.run([1], 12) == [alone[0]]
    # What the broken sequence left in its blocks must not reach the next that gets them.
    drive.bind(0, table=broken.table, **REQUESTS[1])
    assert drive.run([0], 12) == [alone[1]]


def test_broken_prompt_logprobs_are_an_error_of_their_chunk(drive: Drive, poison: int) -> None:
    drive.bind(0, prompt=(*PROMPT[:5], poison, *PROMPT[6:]), prompt_logprobs=0)
    (output,) = drive.step({0: 5})
    assert output.error is None
    (output,) = drive.step({0: 15})
    assert output.error == "the model produced non-finite logits at position 6"
    assert output.prompt_logprobs is None


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"logit_bias": {0: 1.0}, "seed": 3}, {"seed": 4}]
)
def test_padding_of_the_logits_is_neither_chosen_nor_reported(
    model: CausalLM,
    backend: Backend,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
) -> None:
    """A model with more rows than the tokenizer has tokens: these rows may hold anything."""
    known = VOCAB_SIZE - 5
    head = checkpoint.read("lm_head.weight").copy()
    head[known:] *= 100.0
    head[-1] = np.nan
    monkeypatch.setattr(model.head.weight, "array", backend.from_host(head))
    drive = make_drive(model, backend, known)
    prompt = tuple(token % known for token in PROMPT)
    sequence = drive.bind(0, prompt=prompt, logprobs=-1, prompt_logprobs=-1, **params)
    drive.run([0], 3)
    assert max(sequence.generated) < known
    records = [r for output in sequence.outputs for r in output.logprobs or ()]
    records += [r for output in sequence.outputs for r in output.prompt_logprobs or ()]
    assert len(records) == 3 + len(PROMPT) - 1
    for record in records:
        assert sorted(token for token, _ in record.top) == list(range(known))
        assert sum(np.exp(logprob) for _, logprob in record.top) == pytest.approx(1.0, abs=1e-4)


def test_logprobs_only_where_asked(drive: Drive) -> None:
    drive.bind(0, prompt=PROMPT, logprobs=1)
    drive.bind(1, prompt=PROMPT)
    asked, plain = drive.step({0: 23, 1: 23})
    assert asked.logprobs is not None
    assert asked.logprobs[0].token_id == asked.token_ids[0]
    assert plain.logprobs is None


def test_a_step_without_sequences_still_copies(drive: Drive, alone: list[list[int]]) -> None:
    drive.bind(0, **REQUESTS[0])
    drive.run([0], 4)
    drive.copy_block(0, 2)
    drive.step({})
    assert drive.run([0], 12) == [alone[0]]


def test_what_guesses_is_told_of_a_step_without_sequences(
    model: CausalLM, backend: Backend
) -> None:
    """It may bind slots, whose sequences are guessed for later."""
    speculation = Proposers([NgramProposer()])
    drive = make_drive(model, backend, speculation=speculation)
    drive.bind(0, prompt=(5, 6, 7, 5, 6))
    drive.step({})
    asked = ScheduledSequence(0, 4, 1, (), True, DraftRequest(0, 2))
    drafts = speculation.propose([asked])
    assert drafts[0].token_ids.tolist() == [7, 5]


def test_no_drafts_no_sequences(drive: Drive) -> None:
    assert drive.runner.execute(ScheduledStep(4, [], [], [], 0)) == StepOutput(4, [])


def test_times_by_rows_are_of_sequences_that_can_be(drive: Drive) -> None:
    """The model has positions for no more."""
    times = drive.runner.seconds_by_rows([1, 8, 400], repeats=1)
    assert [rows for rows, _ in times] == [1, 8, 120]
    assert all(seconds > 0 for _, seconds in times)

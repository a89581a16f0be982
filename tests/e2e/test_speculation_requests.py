"""Whatever a request asks for, guessing tokens changes nothing of what it gets: tokens, text,
log-probabilities, and how it ends; and what became of the guesses is told rightly.

Tiny random models in float32, drafts of fixed lengths.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.step import DraftTotals
from support.checkpoints import VOCAB_SIZE, make_checkpoint, make_repeating_checkpoint

LENGTH = 5
EOS = 2
MODEL = {"backend": "native", "dtype": "float32", "max_model_len": 256}

rng = random.Random(11)
WORDS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(6)] for _ in range(5)]
PROMPTS = [
    *([rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in range(4, 24, 2)),
    *([token for i in order for token in WORDS[i]] for order in ([0, 1, 0, 1, 0], [2, 3, 2, 4, 2])),
    *(word * repeats for word in WORDS[:4] for repeats in (3, 5)),
]
FEW = [PROMPTS[3], PROMPTS[10], PROMPTS[13]]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, seed=7, max_tokens=40, ignore_eos=True)
ASKS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": replace(SEEDED, top_p=0.9, top_k=50, min_p=0.01),
    "until the end": replace(GREEDY, ignore_eos=False, logit_bias={EOS: 2.0}),
    "log-probabilities": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "log-probabilities, seeded": replace(SEEDED, logprobs=0),
    "three of each": replace(SEEDED, n=3),
    "frequency penalty (SPD-14)": replace(GREEDY, frequency_penalty=1.5),
    "presence penalty": replace(SEEDED, presence_penalty=1.0),
    "repetition penalty": replace(GREEDY, repetition_penalty=1.02),
    "allowed tokens": replace(GREEDY, allowed_token_ids=[9, 10, 11, 12, 13, 14]),
    "bad words": replace(GREEDY, bad_words=["the", "th", " p", "a", "e"]),
    "a stop string": replace(GREEDY, stop=["e", "a", "o"]),
    "a stop token": replace(GREEDY, stop_token_ids=range(60, 120), min_tokens=6),
}


def method(name: str, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": name, "num_speculative_tokens": LENGTH}
    if name == "ngram":
        settings["prompt_lookup_min"] = 1
    if name == "draft_model":
        settings["model"] = str(folder)
    if name == "layer_skip":
        settings["num_layers"] = 1
    return settings | {"adaptive": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repeating_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), **MODEL)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module", params=["ngram", "suffix", "layer_skip", "draft_model"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), speculative_config=method(request.param, folder), **MODEL)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def drafted_by_model(folder: Path) -> Iterator[LLM]:
    """The model is its own draft model."""
    llm = LLM(str(folder), speculative_config=method("draft_model", folder), **MODEL)
    yield llm
    llm.shutdown()


def shown(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a user asked for, without how it was computed."""
    return [
        (
            output.prompt_logprobs,
            [
                replace(of, spec_decode_metrics=None, num_preemptions=0)
                for of in output.outputs
            ],
        )
        for output in outputs
    ]  # fmt: skip


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("ask", ASKS)
def test_what_is_asked_for_is_the_same(ask: str, llm: LLM, plain: LLM) -> None:
    before = llm.get_metrics().all_drafts.num_draft_tokens
    assert shown(llm.generate(FEW, ASKS[ask])) == shown(plain.generate(FEW, ASKS[ask]))
    assert llm.get_metrics().all_drafts.num_draft_tokens > before


def test_all_of_them_in_one_batch(llm: LLM, plain: LLM) -> None:
    prompts = [prompt for prompt in FEW for _ in ASKS]
    params = [*ASKS.values()] * len(FEW)
    assert shown(llm.generate(prompts, params)) == shown(plain.generate(prompts, params))


def test_spd_02_stop_strings_anywhere(llm: LLM, plain: LLM) -> None:
    text = plain.generate([PROMPTS[10]], GREEDY)[0].outputs[0].text
    stops = [text[begin : begin + 3] for begin in range(0, 30, 2)]
    params = [replace(GREEDY, stop=[stop]) for stop in stops]
    outputs = llm.generate([PROMPTS[10]] * len(stops), params)
    for stop, output in zip(stops, outputs, strict=True):
        assert output.outputs[0].text == text[: text.index(stop)]
        assert output.outputs[0].stop_reason == stop


def test_spd_04_exactly_max_tokens(llm: LLM) -> None:
    lengths = list(range(1, 13))
    params = [replace(GREEDY, max_tokens=n, logprobs=1) for n in lengths]
    before = llm.get_metrics()
    outputs = llm.generate([PROMPTS[13]] * len(lengths), params)
    for n, output in zip(lengths, outputs, strict=True):
        found = output.outputs[0]
        assert len(found.token_ids) == len(found.logprobs or ()) == n
        assert found.finish_reason == "length"
    generated = llm.get_metrics().total_generated_tokens - before.total_generated_tokens
    assert generated == sum(lengths)


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_spd_08_greedy_tokens_are_the_same(
    name: str, length: int, folder: Path, plain: LLM
) -> None:
    assert len(PROMPTS) == 20
    params = replace(GREEDY, max_tokens=64)
    expected = tokens(plain.generate(PROMPTS, params))
    settings = method(name, folder) | {"num_speculative_tokens": length}
    llm = LLM(str(folder), speculative_config=settings, max_num_seqs=4, **MODEL)
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert [tokens(llm.generate([prompt], params))[0] for prompt in PROMPTS] == expected
    assert llm.get_metrics().all_drafts.num_accepted_tokens > 100
    llm.shutdown()


def test_spd_11_output_layers_padded_to_different_sizes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of the tokenizer's 320 ids; the rows beyond would win as often as the others."""
    target, draft = (
        make_checkpoint("llama", tmp_path_factory.mktemp("padded"), vocab_size=rows, seed=rows)
        for rows in (520, 512)
    )
    llm = LLM(str(target), speculative_config=method("draft_model", draft), **MODEL)
    plain = LLM(str(target), **MODEL)
    assert llm.vocab_size == VOCAB_SIZE
    for params in (GREEDY, SEEDED):
        assert tokens(llm.generate(PROMPTS, params)) == tokens(plain.generate(PROMPTS, params))
    drawn = tokens(llm.generate(PROMPTS, replace(SEEDED, seed=None, temperature=1.0)))
    assert all(token < VOCAB_SIZE for of_one in drawn for token in of_one)
    drafts = llm.get_metrics().all_drafts
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    llm.shutdown()
    plain.shutdown()


def check_counts(drafts: DraftTotals, length: int) -> None:
    assert 0 <= drafts.num_accepted_tokens <= drafts.num_draft_tokens
    if drafts.num_drafts:
        assert 1 <= 1 + drafts.num_accepted_tokens / drafts.num_drafts <= length + 1
    positions = drafts.num_accepted_per_position
    assert len(positions) <= length
    assert sum(positions) == drafts.num_accepted_tokens
    assert sorted(positions, reverse=True) == list(positions)


def test_spd_12_counts_are_of_drafts_alone(drafted_by_model: LLM) -> None:
    """A model that guesses for itself is always right: accepted equals drafted, and not more."""
    llm = drafted_by_model
    start = last = llm.get_metrics().all_drafts
    for params in (replace(GREEDY, max_tokens=50), replace(GREEDY, max_tokens=9)):
        for _ in llm.stream(PROMPTS[0], params):
            drafts = llm.get_metrics().all_drafts
            check_counts(drafts, LENGTH)
            assert all(now >= before for now, before in zip(drafts, last, strict=True))
            last = drafts
    assert last.num_draft_tokens - start.num_draft_tokens > 40
    assert (
        last.num_accepted_tokens - start.num_accepted_tokens
        == last.num_draft_tokens - start.num_draft_tokens
    )


def test_spd_12_a_request_that_ends_inside_an_accepted_run(drafted_by_model: LLM) -> None:
    """Its third token is the second of its first draft."""
    llm = drafted_by_model
    whole = tokens(llm.generate([PROMPTS[1]], GREEDY))[0]
    assert whole[2] not in whole[:2]
    output = llm.generate([PROMPTS[1]], replace(GREEDY, stop_token_ids=[whole[2]]))[0]
    assert output.outputs[0].token_ids == whole[:3]
    counts = output.outputs[0].spec_decode_metrics
    assert counts is not None
    assert (counts.num_drafts, counts.num_draft_tokens) == (1, LENGTH)
    assert 0 <= counts.acceptance_rate <= 1
    assert 1 <= counts.mean_acceptance_length <= LENGTH + 1
    check_counts(llm.get_metrics().all_drafts, LENGTH)


def test_spd_14_no_end_before_min_tokens(llm: LLM) -> None:
    """With the bias the end is the likeliest token everywhere, the second included."""
    wants_to_end = replace(GREEDY, ignore_eos=False, logit_bias={EOS: 100.0})
    assert tokens(llm.generate(FEW, wants_to_end)) == [[EOS]] * len(FEW)
    for found in tokens(llm.generate(FEW, replace(wants_to_end, min_tokens=10))):
        assert found.index(EOS) == 10
        assert len(found) == 11


def test_smp_16_and_spd_14_logit_bias_moves_the_choice(llm: LLM, plain: LLM) -> None:
    """In a batch with requests that have none."""
    greedy = tokens(plain.generate(FEW, GREEDY))
    banned = [replace(GREEDY, logit_bias={first: -100.0}) for first, *_ in greedy]
    forced = [replace(GREEDY, logit_bias={77: 100.0})] * len(FEW)
    params = [*banned, *forced, *[GREEDY] * len(FEW)]
    outputs = llm.generate(FEW * 3, params)
    assert shown(outputs) == shown(plain.generate(FEW * 3, params))
    without, always, others = (tokens(outputs[i : i + len(FEW)]) for i in (0, 3, 6))
    assert all(
        first not in found for (first, *_), found in zip(greedy, without, strict=True)
    )  # fmt: skip
    assert always == [[77] * 40] * len(FEW)
    assert others == greedy


def test_static_batches(folder: Path, plain: LLM) -> None:
    llm = LLM(
        str(folder),
        speculative_config=method("draft_model", folder),
        batching="static",
        max_num_seqs=3,
        **MODEL,
    )
    assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(plain.generate(PROMPTS, GREEDY))
    llm.shutdown()


def test_a_request_that_goes_first_preempts_one_that_is_drafted_for(
    folder: Path, plain: LLM
) -> None:
    llm = LLM(
        str(folder),
        speculative_config=method("draft_model", folder),
        scheduling_policy="priority",
        max_num_seqs=1,
        **MODEL,
    )
    expected = [plain.generate([prompt], GREEDY)[0].outputs[0] for prompt in FEW[:2]]
    stream = llm.stream(FEW[0], GREEDY)
    begun = [next(stream) for _ in range(3)]
    assert tokens(llm.generate([FEW[1]], GREEDY, priority=-1)) == [expected[1].token_ids]
    assert llm.get_metrics().total_preemptions == 1
    assert "".join(piece.text for piece in (*begun, *stream)) == expected[0].text
    llm.shutdown()


def test_metrics_of_each_output(llm: LLM, plain: LLM) -> None:
    [output] = llm.generate([PROMPTS[13]], replace(GREEDY, n=2))
    for of in output.outputs:
        assert of.spec_decode_metrics is not None
        assert of.spec_decode_metrics.num_draft_tokens > 0
    assert output.metrics is not None
    assert output.metrics.speculative_decoding == output.outputs[0].spec_decode_metrics
    assert output.metrics.tokens_per_second is not None
    [output] = plain.generate([PROMPTS[13]], replace(GREEDY, stop=["e"]))
    assert output.metrics is not None
    assert output.outputs[0].spec_decode_metrics is None

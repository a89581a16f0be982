from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SlotBinding
from octavo.sampling.edits import SequenceEdits, merge_edits

VOCAB_SIZE = 50
EOS = 2


def bind(
    prompt: tuple[int, ...] = (5, 6, 5),
    output: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    eos: frozenset[int] = frozenset({EOS}),
    **params: Any,
) -> SlotBinding:
    return SlotBinding(0, prompt + output, len(prompt), SamplingParams(**params), 1, eos, bad_words)


def edits_of(*args: Any, **kwargs: Any) -> SequenceEdits:
    return SequenceEdits(bind(*args, **kwargs), VOCAB_SIZE)


def penalties(edits: SequenceEdits) -> dict[int, int]:
    found = edits.penalties()
    assert found is not None
    tokens, counts = found
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True))


def forbidden(edits: SequenceEdits) -> set[int]:
    return {token for token, bias in edits.biases() if bias == -math.inf}


def test_a_plain_sequence_asks_for_nothing() -> None:
    for binding in (
        bind(),
        bind(top_k=3, temperature=0.5, min_p=0.1),
        bind(eos=frozenset(), min_tokens=3),
    ):
        assert not SequenceEdits.are_asked_by(binding)
    asking: list[dict[str, Any]] = [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ((1,),)},
        {"min_tokens": 1},
    ]
    for params in asking:
        assert SequenceEdits.are_asked_by(bind(**params)), params


def test_repetition_covers_the_prompt_and_counts_are_of_the_output_alone() -> None:
    edits = edits_of(repetition_penalty=1.5, presence_penalty=0.5)
    assert penalties(edits) == {5: 0, 6: 0}
    for token in (6, 9, 9):
        edits.observe(token)
    assert penalties(edits) == {5: 0, 6: 1, 9: 2}


def test_presence_and_frequency_ignore_the_prompt() -> None:
    edits = edits_of(presence_penalty=0.5)
    assert penalties(edits) == {}
    edits.observe(5)
    assert penalties(edits) == {5: 1}


def test_a_resumed_sequence_stands_where_it_was() -> None:
    params: dict[str, Any] = {"repetition_penalty": 2.0, "min_tokens": 4, "bad_words": ((7, 8, 9),)}
    whole = edits_of(**params)
    for token in (6, 7, 8):
        whole.observe(token)
    resumed = edits_of(output=(6, 7, 8), **params)
    assert penalties(whole) == penalties(resumed)
    assert whole.biases() == resumed.biases()
    assert forbidden(resumed) == {9, EOS}


def test_bad_words_of_one_and_more_tokens() -> None:
    edits = edits_of(prompt=(3, 4), bad_words=((11,), (4, 12), (20, 21, 22), (21, 23)))
    assert forbidden(edits) == {11}  # the prompt's 4 is not part of the output's text
    edits.observe(4)
    assert forbidden(edits) == {11, 12}
    edits.observe(20)
    assert forbidden(edits) == {11}
    edits.observe(21)
    assert forbidden(edits) == {11, 22, 23}
    edits.observe(21)
    assert forbidden(edits) == {11, 23}


def test_min_tokens_forbids_eos_until_reached_but_not_stop_tokens() -> None:
    edits = edits_of(min_tokens=2, stop_token_ids=[30])
    assert forbidden(edits) == {EOS}
    edits.observe(1)
    assert forbidden(edits) == {EOS}
    edits.observe(1)
    assert forbidden(edits) == set()


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    edits = edits_of(
        prompt=(1, VOCAB_SIZE),
        bad_words=((VOCAB_SIZE + 1,),),
        eos=frozenset({EOS, VOCAB_SIZE}),
        min_tokens=1,
        repetition_penalty=2.0,
        logit_bias={VOCAB_SIZE: 3.0},
        allowed_token_ids=[3, VOCAB_SIZE],
    )
    assert penalties(edits) == {1: 0}
    assert edits.biases() == [(EOS, -math.inf)]
    assert edits.allowed is not None
    assert edits.allowed.tolist() == [3]


def test_merged_edits_keep_rows_apart() -> None:
    penalised = edits_of(repetition_penalty=2.0, frequency_penalty=0.25)
    biased = edits_of(logit_bias={4: 1.5}, bad_words=((9,),))
    allowed = edits_of(allowed_token_ids=[8, 3, 8])
    merged = merge_edits([(1, penalised), (2, biased), (4, allowed)], num_rows=6)
    assert merged is not None
    assert merged.penalty_rows.tolist() == [1, 1]
    assert merged.penalty_tokens.tolist() == [5, 6]
    assert merged.penalty_counts.tolist() == [0, 0]
    assert merged.repetition.tolist() == [1, 2, 1, 1, 1, 1]
    assert merged.frequency.tolist() == [0, 0.25, 0, 0, 0, 0]
    assert merged.presence.tolist() == [0] * 6
    assert merged.bias_rows.tolist() == [2, 2]
    assert merged.bias_tokens.tolist() == [4, 9]
    assert merged.bias_values.tolist() == [1.5, -math.inf]
    assert merged.allowed_rows.tolist() == [4]
    assert merged.allowed_pair_rows.tolist() == [4, 4]
    assert merged.allowed_pair_tokens.tolist() == [3, 8]
    for name in merged._fields:
        floats = {"repetition", "presence", "frequency", "bias_values"}
        assert getattr(merged, name).dtype == (np.float32 if name in floats else np.int64), name


def test_nothing_to_edit_merges_to_nothing() -> None:
    edits = edits_of(min_tokens=1)
    assert merge_edits([], 3) is None
    assert merge_edits([(0, edits)], 1) is not None
    edits.observe(1)
    assert merge_edits([(0, edits)], 1) is None


def test_edits_after_guesses_are_those_of_the_same_output_and_leave_no_trace() -> None:
    params: dict[str, Any] = {
        "output": (6, 9),
        "repetition_penalty": 1.5,
        "min_tokens": 4,
        "bad_words": ((9, 8, 11), (8, 12), (6, 9, 13)),
    }
    edits = edits_of(**params)
    before = penalties(edits), edits.biases()
    for path in ((), (8,), (9, 8), (7, 7, 5), (9, 9, 6, 9)):
        observed = edits_of(**params)
        for token in path:
            observed.observe(token)
        found = edits.penalties(path)
        assert found is not None
        assert dict(zip(*(part.tolist() for part in found), strict=True)) == penalties(observed)
        assert edits.biases(path) == observed.biases()
    assert (penalties(edits), edits.biases()) == before


def test_merged_edits_of_one_sequence_after_different_guesses() -> None:
    edits = edits_of(presence_penalty=0.5, bad_words=((7, 9),))
    merged = merge_edits([(0, edits), (1, edits), (2, edits)], 3, paths=[(), (7,), (7, 8)])
    assert merged is not None
    assert merged.penalty_rows.tolist() == [1, 2, 2]
    assert merged.penalty_tokens.tolist() == [7, 7, 8]
    assert merged.penalty_counts.tolist() == [1, 1, 1]
    assert (merged.bias_rows.tolist(), merged.bias_tokens.tolist()) == ([1], [9])


def test_extreme_repetition_penalties_stay_finite() -> None:
    for penalty in (1000.0, 0.001):
        merged = merge_edits([(0, edits_of(repetition_penalty=penalty))], 1)
        assert merged is not None
        assert np.isfinite(merged.repetition).all()
        assert (merged.repetition > 0).all()

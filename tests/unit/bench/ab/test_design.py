from __future__ import annotations

import math

import pytest

from octavo.bench.ab.design import Block, compare, order, token_match
from octavo.bench.ab.results import Regime, Verdict
from support import ab_blocks

OFFLINE = Regime(name="offline")
ONLINE = Regime(name="online", rate=2.0)
SAME = {"a": 0.01, "b": 0.01}


def test_every_second_round_is_reversed() -> None:
    played = [arm for number in range(4) for arm in order(["a", "b"], number)]
    assert played == list("abbaabba")
    assert order(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_a_speedup_is_found_whatever_the_metrics_direction() -> None:
    arms = {"slow": 0.01, "fast": 0.005}
    offline = compare("slow", "fast", OFFLINE, ab_blocks.blocks(arms))
    rate = offline.headline
    assert [effect.metric for effect in offline.effects] == ["output_rate", "e2e"]
    assert rate.verdict is Verdict.FASTER
    assert rate.speedup.value == pytest.approx(2.0, rel=0.05)
    assert rate.speedup.low is not None
    assert rate.speedup.high is not None
    assert rate.speedup.low < 2.0 < rate.speedup.high
    online = compare("slow", "fast", ONLINE, ab_blocks.blocks(arms, rate=2.0, regime="online"))
    found = {effect.metric: effect for effect in online.effects}
    assert list(found) == ["e2e", "ttft", "tpot", "max_stall"]
    assert found["tpot"].speedup.value == pytest.approx(2.0, rel=0.05)
    assert found["e2e"].speedup.value > 2.0  # queues are shorter, too
    assert all(effect.verdict is Verdict.FASTER for effect in online.effects)


def test_the_other_way_round_it_is_slower_by_the_same_factor() -> None:
    blocks = ab_blocks.blocks({"slow": 0.01, "fast": 0.005})
    forth = compare("slow", "fast", OFFLINE, blocks).headline
    back = compare("fast", "slow", OFFLINE, blocks).headline
    assert back.verdict is Verdict.SLOWER
    assert back.speedup.value == pytest.approx(1 / forth.speedup.value)
    assert back.speedup.low == pytest.approx(1 / (forth.speedup.high or math.nan))


def test_equal_arms_are_told_apart_in_no_more_than_one_of_ten_experiments() -> None:
    """The noise of a start, common to a block's requests, is what naive intervals miss."""
    false = 0
    for seed in range(120):
        blocks = ab_blocks.blocks(SAME, seed=seed, count=25, rounds=4)
        false += compare("a", "b", OFFLINE, blocks).headline.verdict is not Verdict.NO_DIFFERENCE
    assert 0 < false <= 12  # never would mean that it sees nothing


def test_all_effects_of_equal_arms_together_mislead_in_no_more_than_one_of_ten() -> None:
    false = false_in_a_class = 0
    for seed in range(60):
        blocks = ab_blocks.blocks(SAME, seed=seed, rate=2.0, regime="online", rounds=4, count=25)
        comparison = compare("a", "b", ONLINE, blocks)
        rows = comparison.class_effects
        assert {(row.class_name, row.metric) for row in rows} == {
            (name, metric) for name in ("chat", "code") for metric in ("ttft", "tpot", "e2e")
        }
        false += any(e.verdict is not Verdict.NO_DIFFERENCE for e in comparison.effects)
        false_in_a_class += any(row.verdict is not Verdict.NO_DIFFERENCE for row in rows)
    assert false <= 6
    assert false_in_a_class <= 6


def test_the_same_requests_show_what_different_ones_would_hide() -> None:
    """5 % with common requests; the requests' own spread is far larger."""
    blocks = ab_blocks.blocks({"a": 0.01, "b": 0.0095}, start_noise=0.002)
    effect = compare("a", "b", OFFLINE, blocks).headline
    assert effect.verdict is Verdict.FASTER
    assert effect.more_rounds == 0


def test_too_little_is_said_with_how_much_more_it_takes() -> None:
    blocks = ab_blocks.blocks(SAME, rounds=3, start_noise=0.08)
    effect = compare("a", "b", OFFLINE, blocks).headline
    assert effect.verdict is Verdict.NO_DIFFERENCE
    assert effect.more_rounds is not None
    assert effect.more_rounds > 5
    longer = ab_blocks.blocks(SAME, rounds=3 + effect.more_rounds, start_noise=0.08)
    speedup = compare("a", "b", OFFLINE, longer).headline.speedup
    assert speedup.high is not None
    assert math.log(speedup.high / speedup.value) < 1.5 * math.log(1.05)


def test_one_round_gives_a_factor_and_no_verdict() -> None:
    effect = compare(
        "a", "b", OFFLINE, ab_blocks.blocks({"a": 0.01, "b": 0.005}, rounds=1)
    ).headline
    assert effect.verdict is Verdict.UNKNOWN
    assert effect.speedup.low is None
    assert effect.p_value is None
    assert effect.more_rounds is None


def test_requests_that_fail_in_one_arm_are_left_out_of_pairs_and_counted() -> None:
    planned = ab_blocks.requests(1, 20)
    found = []
    for number in range(3):
        for arm, failures in (("a", ()), ("b", (3, 7))):
            run = ab_blocks.play(planned, seed=number, failures=failures)
            found.append(Block(arm=arm, regime="offline", round=number, run=run))
    comparison = compare("a", "b", OFFLINE, found)
    assert comparison.num_pairs == 3 * 18
    assert comparison.num_unpaired == 3 * 2


def test_an_arm_without_output_has_no_effect_to_show() -> None:
    planned = ab_blocks.requests(1, 5)
    dead = ab_blocks.play(planned, seed=1, failures=range(5))
    found = [
        Block(arm="a", regime="offline", round=0, run=ab_blocks.play(planned, seed=1)),
        Block(arm="b", regime="offline", round=0, run=dead),
    ]
    assert compare("a", "b", OFFLINE, found).effects == []


def test_texts_are_compared_up_to_their_first_difference() -> None:
    texts = [("a b c d", "a b c d"), ("a b c d", "a b x d"), ("a b", "a b c d")]
    match = token_match(texts, str.split)
    assert match is not None
    assert (match.num_compared, match.num_equal) == (3, 1)
    assert match.matched_share == pytest.approx((4 + 2 + 2) / 12)
    assert match.median_divergence == 2
    assert match.unit == "tokens"
    by_character = token_match([("abcd", "abXd")], None)
    assert by_character is not None
    assert by_character.unit == "characters"
    assert by_character.matched_share == 0.5
    assert token_match([], None) is None


def test_texts_of_paired_requests_are_compared() -> None:
    planned = ab_blocks.requests(1, 3)
    found = [
        Block(arm=arm, regime="offline", round=0, run=ab_blocks.play(planned, seed=1, texts=texts))
        for arm, texts in (("a", {0: "x y", 1: "x"}), ("b", {0: "x z", 1: "x"}))
    ]
    match = compare("a", "b", OFFLINE, found, tokenize=str.split).match
    assert match is not None
    assert (match.num_compared, match.num_equal, match.median_divergence) == (2, 1, 1)

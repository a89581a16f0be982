from __future__ import annotations

from dataclasses import replace

from octavo.bench.ab.results import (
    AbResult,
    ArmResult,
    Comparison,
    Effect,
    Regime,
    TokenMatch,
    Verdict,
)
from octavo.bench.ab.screen import MOST_LINES, WIDTH, ab_lines
from octavo.bench.load.target import Target
from octavo.bench.points import Estimate

OFFLINE = Regime(name="offline")
MECHANISMS = {
    "mean_batch": 3.5,
    "slot_efficiency": 0.5,
    "padding_share": 0.3,
    "kv_fill": 0.9,
    "steps": 1234.0,
}


def arm(name: str, regime: str = "offline", **changes: object) -> ArmResult:
    values = {
        "name": name,
        "text": name,
        "regime": regime,
        "target": Target(base_url="http://there/v1", model="tiny"),
        "num_rounds": 3,
        "num_requests": 30,
        "num_ok": 30,
        "failures": {},
        "num_output_tokens": 900,
        "output_rate": Estimate(100.0, 95.0, 105.0),
        "makespan_s": Estimate(9.0),
        "metrics": {},
        "mechanisms": {},
    }
    return ArmResult(**values | changes)  # type: ignore[arg-type]


def effect(metric: str, verdict: Verdict, more_rounds: int | None = 0) -> Effect:
    return Effect(
        metric=metric,
        class_name=None,
        speedup=Estimate(2.0, 1.9, 2.1),
        num_rounds=3,
        num_pairs=30,
        p_value=0.01,
        verdict=verdict,
        more_rounds=more_rounds,
    )


def comparison(candidate: str, baseline: str, *effects: Effect, **changes: object) -> Comparison:
    values = {
        "candidate": candidate,
        "baseline": baseline,
        "regime": "offline",
        "effects": effects,
        "class_effects": (),
        "num_pairs": 30,
        "num_unpaired": 0,
        "match": None,
    }
    return Comparison(**values | changes)  # type: ignore[arg-type]


FASTER = effect("output_rate", Verdict.FASTER)
RESULT = AbResult(
    regimes=[OFFLINE],
    arms=[arm("new"), arm("old")],
    comparisons=[comparison("new", "old", FASTER)],
)


def shown(result: AbResult) -> str:
    return "\n".join(ab_lines("a title", result, folder="here"))


def test_the_verdict_stands_in_the_row_of_its_candidate() -> None:
    _, _, head, new, old, *_ = ab_lines("a title", RESULT)
    assert head.endswith("speed-up")
    assert new.startswith("new")
    assert new.endswith("×2 [1.9, 2.1] faster")
    assert old.startswith("old")
    assert "×" not in old


def test_a_candidate_with_several_baselines_has_a_line_for_each() -> None:
    result = replace(
        RESULT,
        arms=[*RESULT.arms, arm("older")],
        comparisons=[comparison("new", name, FASTER) for name in ("old", "older")],
    )
    text = shown(result)
    assert "speed-up" not in text
    assert "new against old, offline: output tokens/s ×2 [1.9, 2.1], faster" in text
    assert "new against older, offline: output tokens/s ×2 [1.9, 2.1], faster" in text


def test_what_could_not_be_seen_is_told() -> None:
    none = Verdict.NO_DIFFERENCE
    by_more = {0: "5 % would have shown", 7: "about 7 more rounds would show 5 %"}
    for more_rounds, words in by_more.items():
        compared = comparison("new", "old", effect("output_rate", none, more_rounds))
        assert words in " ".join(shown(replace(RESULT, comparisons=[compared])).split())


def test_a_verdict_that_seems_to_contradict_its_interval_is_explained() -> None:
    compared = comparison("new", "old", effect("output_rate", Verdict.NO_DIFFERENCE))
    assert "(Holm)" in shown(replace(RESULT, comparisons=[compared]))
    assert "(Holm)" not in shown(RESULT)


def test_failures_unpaired_requests_and_invalid_runs_are_told() -> None:
    result = replace(
        RESULT,
        arms=[arm("new", num_ok=28), arm("old")],
        comparisons=[comparison("new", "old", FASTER, num_unpaired=2)],
        invalid=["new: client_lag failed"],
        notes=["the budget was short"],
    )
    text = shown(result)
    assert "failed" in text.splitlines()[2]
    assert "2 requests without a partner" in text
    assert "INVALID: new: client_lag failed" in text
    assert "note: the budget was short" in text


def test_an_arm_that_did_nothing_is_told() -> None:
    text = shown(replace(RESULT, comparisons=[comparison("new", "old", num_pairs=0)]))
    assert "nothing to compare" in text


def test_outputs_that_differ_are_told_with_how_far_they_agree() -> None:
    match = TokenMatch(
        unit="tokens", num_compared=30, num_equal=20, matched_share=0.75, median_divergence=12
    )
    text = shown(replace(RESULT, comparisons=[comparison("new", "old", FASTER, match=match)]))
    assert "outputs: 20 of 30 equal, 75.0% of tokens before the first difference" in " ".join(
        text.split()
    )


def test_mechanisms_in_which_arms_differ_come_first_and_only_as_many_as_fit() -> None:
    arms = [
        arm("a name that is much too long", mechanisms=MECHANISMS),
        arm("old", mechanisms={**MECHANISMS, "kv_fill": 0.4}),
    ]
    lines = ab_lines("a title", replace(RESULT, arms=arms))
    head = lines[2]
    assert "KV fill" in head
    assert "batch" in head
    assert "a name that is much too…" in lines[3]
    assert max(map(len, lines)) <= WIDTH
    many = [arm(f"arm {i}", mechanisms=MECHANISMS) for i in range(9)]
    result = replace(
        RESULT,
        regimes=[OFFLINE, Regime(name="closed", concurrency=4)],
        arms=[*many, *(replace(each, regime="closed") for each in many[:4])],
        notes=["a long note " * 30] * 4,
    )
    lines = ab_lines("a title", result, folder="here")
    assert len(lines) == MOST_LINES
    assert lines[-1] == "all figures, requests and logs: here"
    assert "… more in ab.json" in lines[-2]

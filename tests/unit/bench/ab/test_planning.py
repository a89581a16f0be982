from __future__ import annotations

import pytest

from octavo.bench.ab import planning
from octavo.bench.ab.experiment import Plan
from octavo.bench.launch import parse_arm
from octavo.bench.workloads.presets import workload_named
from octavo.core.errors import ConfigError

EMPTY = Plan(arms=(), against=(), regimes=(), num_rounds=2, num_requests=8)


def test_the_first_arm_is_the_candidate_against_each_other() -> None:
    plan = planning.with_arms(EMPTY, "octavo", ["hf-naive", "http://there:8000"], None)
    assert [arm.name for arm in plan.arms] == ["octavo", "hf-naive", "http://there:8000"]
    assert plan.against == [("hf-naive", "octavo"), ("http://there:8000", "octavo")]


def test_equal_arms_get_different_names() -> None:
    plan = planning.with_arms(EMPTY, "octavo", ["octavo", "octavo"], None)
    assert [arm.name for arm in plan.arms] == ["octavo", "octavo (2)", "octavo (3)"]
    assert {arm.text for arm in plan.arms} == {"octavo"}


def test_the_first_value_of_a_knob_is_the_baseline() -> None:
    plan = planning.with_arms(EMPTY, "octavo", [], "max_num_seqs=4,8,16")
    assert plan.against == [
        ("max_num_seqs=4", "max_num_seqs=8"),
        ("max_num_seqs=4", "max_num_seqs=16"),
    ]


def test_nothing_to_compare_with_and_too_much_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --b"):
        planning.with_arms(EMPTY, "octavo", [], None)
    with pytest.raises(ConfigError, match="leave out --b"):
        planning.with_arms(EMPTY, "octavo", ["octavo"], "max_num_seqs=4,8")


def test_a_ladder_compares_each_rung_with_the_one_below(tiny: str) -> None:
    plan = planning.with_ladder(EMPTY, tiny, 64)
    assert plan.against[0] == ("naive", "static")
    assert plan.against[-1] == ("native", "formats")
    assert len(plan.rungs) == len(plan.arms) == len(plan.against) + 1


def test_regimes_are_offline_and_online_unless_told() -> None:
    names = [r.name for r in planning.regimes(rate=None, concurrency=None, offline=False)]
    assert names == ["offline", "online"]
    (only,) = planning.regimes(rate=3.5, concurrency=None, offline=False)
    assert (only.name, only.rate) == ("online", 3.5)
    both = planning.regimes(rate=None, concurrency=4, offline=True)
    assert [(r.name, r.concurrency) for r in both] == [("offline", None), ("closed", 4)]


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("10m", 600)]
)
def test_budgets_are_times(text: str, expected: float) -> None:
    assert planning.seconds(text) == expected


@pytest.mark.parametrize("text", ["", "m", "-3m", "0s", "ten", "10 minutes"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        planning.seconds(text)


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (["http://there", "octavo"], "default"),
        (["octavo some/model --dtype float32"], "some/model"),
        (["octavo serve folder"], "folder"),
        (["octavo --dtype float32 --model=x.gguf"], "x.gguf"),
        (["hf-static --batch-size 4 --model folder"], "folder"),
        (["llama-server -m x.gguf --port {port}"], None),
    ],
)
def test_the_model_of_a_command_of_ours_is_known(arms: list[str], expected: str | None) -> None:
    assert planning.model_of([parse_arm(text) for text in arms]) == expected


def test_the_longest_request_of_all_rounds_is_found(tiny: str) -> None:
    longest = planning.longest_request(EMPTY, workload_named("chat").scaled(0.1), tiny)
    assert longest % 16 == 0
    assert 16 <= longest <= 160

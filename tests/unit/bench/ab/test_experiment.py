from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.ab import folder as files
from octavo.bench.ab.design import Block
from octavo.bench.ab.experiment import Plan, Watch, run_experiment
from octavo.bench.ab.results import AbResult, Regime, Verdict
from octavo.bench.ab.screen import MOST_LINES, WIDTH, ab_lines
from octavo.bench.ab.waterfall import Rung
from octavo.bench.launch import parse_arm
from octavo.core.errors import ConfigError
from support.ab_tools import SimulatedTools, stub_arm

SPEEDS = {"fast": 0.005, "slow": 0.01}
OFFLINE, ONLINE = Regime(name="offline"), Regime(name="online")


def plan(**changes: object) -> Plan:
    values = {
        "arms": [stub_arm(name) for name in SPEEDS],
        "against": [("slow", "fast")],
        "regimes": [OFFLINE, ONLINE],
        "num_rounds": 3,
        "num_requests": 12,
        "num_warm_ups": 2,
    }
    return Plan(**values | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulatedTools, AbResult, Path]:
    simulated = SimulatedTools(SPEEDS)
    folder = tmp_path_factory.mktemp("ab")
    blocks: list[Block] = []
    result = run_experiment(
        plan(), simulated.tools(), folder / "logs", Watch(on_block=blocks.append)
    )
    for block in blocks:
        files.append_block(folder, block)
    return simulated, result, folder


def test_arms_take_turns_and_each_play_is_warmed_up(
    played: tuple[SimulatedTools, AbResult, Path],
) -> None:
    simulated, _, folder = played
    assert simulated.prepared_for == ["fast", "slow"]
    labels = [(arm, point.label) for arm, point in simulated.played]
    assert labels[0::2] == [(arm, "warm-up") for arm, _ in labels[1::2]]
    assert labels[1::2] == [
        (arm, f"{regime} {number}")
        for regime in ("offline", "online")
        for number, arms in enumerate((["fast", "slow"], ["slow", "fast"], ["fast", "slow"]), 1)
        for arm in arms
    ]
    # A server of its own for each play, and one to ask what it can do.
    assert len(list((folder / "logs").glob("fast.*.log"))) == 1 + 3 + 3


def test_both_arms_get_the_same_requests_and_each_round_others(
    played: tuple[SimulatedTools, AbResult, Path],
) -> None:
    simulated, _, _ = played
    by_label: dict[str, list[object]] = {}
    for _, point in simulated.played:
        if point.label != "warm-up":
            by_label.setdefault(point.label, []).append((point.requests, point.rate))
    assert len(by_label) == 6
    assert all(len(its) == 2 and its[0] == its[1] for its in by_label.values())
    assert by_label["offline 1"] != by_label["offline 2"]


def test_the_rate_follows_from_the_slowest_arm(
    played: tuple[SimulatedTools, AbResult, Path],
) -> None:
    _, result, _ = played
    online = result.regimes[1]
    slow = result.arm("slow", "offline")
    assert online.rate == pytest.approx(0.7 * 12 / slow.makespan_s.value, rel=0.2)
    assert online.label.endswith("(70% of what slow can do)")


def test_effects_mechanisms_and_outputs_are_told(
    played: tuple[SimulatedTools, AbResult, Path],
) -> None:
    _, result, _ = played
    offline, online = result.comparisons
    assert offline.headline.verdict is Verdict.FASTER
    assert offline.headline.speedup.value == pytest.approx(2, rel=0.2)
    assert {e.metric for e in online.effects} == {"e2e", "ttft", "tpot", "max_stall"}
    assert offline.match is not None
    assert offline.match.matched_share == 1.0
    fast = result.arm("fast", "offline")
    assert (fast.num_rounds, fast.num_requests, fast.num_ok) == (3, 36, 36)
    assert fast.mechanisms == {"steps": 50.0, "mean_batch": 2.0}
    assert len(fast.points) == 3


def test_a_screen_has_20_lines_at_most(played: tuple[SimulatedTools, AbResult, Path]) -> None:
    _, result, _ = played
    lines = ab_lines("12 requests of simulated", result, folder="here")
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH + 10
    text = "\n".join(lines)
    assert "offline: all requests at once" in text
    assert "faster" in text
    assert "outputs: 36 of 36 equal" in text
    assert "here" in lines[-1]


def test_what_was_found_is_kept_in_files(played: tuple[SimulatedTools, AbResult, Path]) -> None:
    _, result, folder = played
    values = files.ab_json(result, title="a title", command="octavo ab", workload={"name": "w"})
    files.write_result(folder, values)
    read = json.loads((folder / "ab.json").read_text())
    assert read["comparisons"][0]["effects"][0]["verdict"] == "faster"
    assert read["octavo_version"]
    assert read["workload"] == {"name": "w"}
    assert "headers" not in read["arms"][0]["target"]
    requests = (folder / "requests.jsonl").read_text().splitlines()
    assert len(requests) == 2 * 2 * 3 * 12
    files.draw(folder, "a title", result)
    assert {path.name for path in folder.glob("*.png")} == {"effects-1.png", "effects-2.png"}


def test_a_budget_ends_a_regime_after_its_first_round_and_that_is_noted(tmp_path: Path) -> None:
    simulated = SimulatedTools(SPEEDS)
    result = run_experiment(plan(budget_s=0.001, regimes=[OFFLINE]), simulated.tools(), tmp_path)
    assert result.arm("fast", "offline").num_rounds == 1
    assert result.comparisons[0].headline.verdict is Verdict.UNKNOWN
    assert any("1 of 3 rounds fit the budget" in note for note in result.notes)


def test_ctrl_c_keeps_the_rounds_that_are_complete(tmp_path: Path) -> None:
    def interrupt_after(count: int) -> Watch:
        blocks: list[Block] = []

        def on_block(block: Block) -> None:
            blocks.append(block)
            if len(blocks) == count:
                raise KeyboardInterrupt

        return Watch(on_block=on_block)

    simulated = SimulatedTools(SPEEDS)
    result = run_experiment(plan(), simulated.tools(), tmp_path, interrupt_after(3))
    assert [regime.name for regime in result.regimes] == ["offline"]
    assert {arm.num_rounds for arm in result.arms} == {1}
    assert any(note.startswith("interrupted") for note in result.notes)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(plan(), simulated.tools(), tmp_path, interrupt_after(1))


def test_an_arm_that_can_not_start_ends_it_before_anything_is_played(tmp_path: Path) -> None:
    simulated = SimulatedTools(SPEEDS)
    broken = parse_arm("broken=no-such-server --port {port}")
    with pytest.raises(ConfigError, match="no-such-server"):
        run_experiment(
            plan(arms=[stub_arm("fast"), broken], against=[("broken", "fast")]),
            simulated.tools(),
            tmp_path,
        )
    assert simulated.played == []


def test_lengths_that_can_not_be_forced_are_noted(tmp_path: Path) -> None:
    simulated = SimulatedTools(SPEEDS, forces_length=False)
    result = run_experiment(plan(num_rounds=1, regimes=[OFFLINE]), simulated.tools(), tmp_path)
    assert any("fast, slow: output lengths can't be forced" in note for note in result.notes)


def test_a_ladder_is_played_and_drawn(tmp_path: Path) -> None:
    simulated = SimulatedTools(SPEEDS)
    rungs = [Rung(stub_arm("slow"), "first"), Rung(stub_arm("fast"), "twice as fast")]
    result = run_experiment(
        plan(arms=[rung.arm for rung in rungs], rungs=rungs, regimes=[OFFLINE]),
        simulated.tools(),
        tmp_path,
    )
    assert result.waterfall is not None
    assert result.waterfall.total.value == pytest.approx(2, rel=0.2)
    files.draw(tmp_path, "a title", result)
    assert (tmp_path / "waterfall.png").exists()
    assert "twice as fast" in "\n".join(ab_lines("a title", result))

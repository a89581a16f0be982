"""What tuning leaves behind: screen, config, tables, JSON, pictures."""

from __future__ import annotations

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from octavo.advisor.tuning import plots, words
from octavo.advisor.tuning.edge import Edge
from octavo.advisor.tuning.engines import engine_named
from octavo.advisor.tuning.final import Gain
from octavo.advisor.tuning.folder import to_json, write_config, write_results
from octavo.advisor.tuning.run import Tuned
from octavo.advisor.tuning.screen import MOST_LINES, tune_lines
from octavo.advisor.tuning.space import Setting
from octavo.bench.points import Estimate
from octavo.cli.config_file import read_config_file
from octavo.config import Config
from support.tuned_runs import tuned


@pytest.fixture(scope="module")
def found() -> Tuned:
    return tuned()


@pytest.fixture(scope="module")
def flat() -> Tuned:
    return tuned(is_flat=True)


def test_the_verdict_says_what_is_gained(found: Tuned) -> None:
    text = words.verdict_of(found)
    assert "max_num_batched_tokens=" in text
    assert "keeps the SLO up to" in text
    assert "at least ×1." in text


def test_the_default_is_an_answer(flat: Tuned) -> None:
    assert words.verdict_of(flat).startswith("the default is as good as anything tried")
    assert "the best other reached ×" in words.verdict_of(flat)


def test_what_ab_should_see_is_promised(found: Tuned) -> None:
    text = words.promise_of(found, found.result.winner)
    assert "against the default: E2E ×" in text
    assert "faster" in text
    (_, compared), (_, kept) = words.check_commands(found, "best.yaml")
    assert compared.startswith('octavo ab --a "tuned=octavo --config best.yaml" --b "octavo org/m')
    assert f"--rate {found.result.common_rate:.3g}" in compared
    assert kept.startswith('octavo bench serve "octavo --config best.yaml" "octavo org/m')
    assert f"--slo {shlex.quote(found.wish.slo.text)}" in kept
    rate = float(kept.split("--rate ")[1].split()[0])
    final = found.result.final
    assert final.mean_edge(found.result.space.default) < rate
    assert rate < final.mean_edge(found.result.winner)


def test_the_screen_is_short(found: Tuned, flat: Tuned) -> None:
    for one in (found, flat):
        lines = tune_lines(one, config="best.yaml", folder="here")
        assert len(lines) <= MOST_LINES
        assert "here" in lines[-1]
    lines = tune_lines(found, config="best.yaml", folder="here")
    assert "to serve: octavo serve --config best.yaml" in lines
    assert any("one knob changed" in line for line in lines)


def test_the_config_is_one_that_octavo_serves_with(found: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write_config(path, found, {"model": "org/m", "quantization": "int8"})
    values = {key.replace("-", "_"): value for key, value in read_config_file(path).items()}
    config = Config.from_flat(values)
    assert config.model.quantization == "int8"
    changes = found.result.space.changes(found.result.winner)
    assert config.to_flat() | changes == config.to_flat()
    head = path.read_text().splitlines()
    assert head[0].startswith("# Found by octavo tune on")
    assert "keeps the SLO up to" in head[1]


def test_the_config_of_a_default_changes_nothing(flat: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    write_config(path, flat, {})
    assert read_config_file(path) == {}


def test_the_config_of_another_engine_has_its_flags(tmp_path: Path) -> None:
    template = engine_named("vllm", model="org/m", asked=())
    other = tuned()
    space = template.space
    winner = space.setting({"max-num-seqs": 64, "enable-prefix-caching": "off"})
    path = tmp_path / "best.yaml"
    gain = Gain(ratio=Estimate(1.2, 1.1, 1.3), bound=1.1, num_seeds=3)
    edges: dict[Setting, tuple[Edge, ...]] = {winner: (), space.default: ()}
    final = replace(other.result.final, winner=winner, gains={winner: gain}, edges=edges)
    result = replace(other.result, space=space, final=final)
    write_config(path, replace(other, wish=replace(other.wish, engine=template), result=result), {})
    assert yaml.safe_load(path.read_text()) == {
        "max-num-seqs": 64,
        "no-enable-prefix-caching": True,
    }
    assert "# Started as: vllm serve org/m" in path.read_text()


def test_another_engine_is_served_by_its_command_and_not_checked_with_octavo(
    found: Tuned, flat: Tuned
) -> None:
    engine = engine_named("llama.cpp", model="m.gguf", asked=("threads=2,4",))
    other = replace(found, wish=replace(found.wish, engine=engine))
    other = replace(other, result=replace(other.result, space=engine.space))
    final = replace(other.result.final, winner=(4,))
    other = replace(other, result=replace(other.result, final=final))
    served = words.serve_command(other, "best.yaml")
    assert served == "llama-server -m m.gguf --port '{port}' --threads 4"
    assert words.check_commands(other, "best.yaml") == []
    assert words.check_commands(flat, "best.yaml") == []  # nothing is promised


def test_the_folder_has_it_all(found: Tuned, tmp_path: Path) -> None:
    write_results(tmp_path, found, command="octavo tune", config="best.yaml")
    values = json.loads((tmp_path / "tune.json").read_text())
    assert values["winner"] == found.result.space.changes(found.result.winner)
    assert values["final"]["gains"][0]["bound"] > 0
    assert len(values["plays"]) == len(found.result.measurements)
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.result.measurements)
    assert rows[0]["stage"] == "default"
    assert rows[0]["max_num_seqs"] == "default"
    report = (tmp_path / "report.md").read_text()
    for heading in ("Finalists", "Sensitivity", "Race", "Not tried", "Where and how"):
        assert f"## {heading}" in report
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 2
    assert (tmp_path / "trade-off.png").stat().st_size > 10_000
    assert (tmp_path / "sensitivity.png").exists()


def test_settings_that_failed_are_told(tmp_path: Path) -> None:
    one = tuned(broken=True, budget_s=7200.0)
    failed = [m for m in one.result.measurements if m.outcome.failure]
    assert failed
    assert any("for lack of memory" in note for note in words.notes_of(one))
    assert any(t.title == "Settings that could not be served" for t in words.tables_of(one))
    plays = to_json(one, command="x")["plays"]
    assert any(play["slo_use"] is None and "out of memory" in play["failure"] for play in plays)


def test_the_front_is_what_nothing_beats_in_both() -> None:
    places = [plots.Place(x=x, y=y) for x, y in [(1, 9), (2, 5), (3, 6), (4, 4), (4, 3), (9, 3)]]
    assert [(p.x, p.y) for p in plots.front_of(places)] == [(1, 9), (2, 5), (4, 3)]

"""Presets and workload files."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

from octavo.bench import workloads
from octavo.bench.workloads.presets import preset_names, read_workload, workload_named
from octavo.core.errors import ConfigError

ROOT = Path(__file__).parents[4]

PUBLISHED = {
    # of the traces: mean input and output tokens
    "azure_conv": (1155, 211),
    "azure_code": (2048, 27.9),
    "mooncake_conv": (12035, 343),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_have_the_means_of_their_traces_within_4_percent(name: str) -> None:
    assert workload_named(name).mean_lengths() == pytest.approx(PUBLISHED[name], rel=0.04)
    assert "github.com" in workload_named(name).description


def test_every_preset_is_a_workload_and_says_what_it_is() -> None:
    assert preset_names()[:6] == [
        "chat",
        "rag",
        "code",
        "long-generation",
        "shared-prefix",
        "mixed",
    ]
    for name in preset_names():
        preset = workload_named(name)
        assert preset.name == name
        assert len(preset.description) > 20


def test_the_mix_has_its_published_shares() -> None:
    weights = {each.name: each.weight for each in workload_named("mixed").classes}
    assert weights == {"chat": 50, "rag": 20, "code": 15, "long-generation": 10, "burst": 5}


def test_own_presets_fit_small_models() -> None:
    for name in preset_names()[:6]:
        for each in workload_named(name).classes:
            longest = each.input.tokens_at(1 - 1e-9) + each.output.tokens_at(1 - 1e-9)
            prefix = each.prefix.tokens if each.prefix else 0
            assert longest + (prefix or 0) <= 4096


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean azure_conv"):
        workload_named("azure_cnv")


def test_a_file_is_read_and_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
schema_version: 1
classes:
  - name: a
    weight: 3
    in: {lognormal: {median: 100, sigma: 0.5}}
    out: 16
  - {name: b, in: {uniform: [10, 20]}, out: {quantiles: [1, 5, 30]}, forced: false}
arrivals: {burstiness: 0.5}
"""
    )
    mine = workload_named(str(path))
    assert mine.name == "mine"
    assert [each.weight for each in mine.classes] == [3, 1]
    assert not mine.classes[1].forced


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: []", "classes is []"),
        ("- a", "must be a mapping"),
        ("classes: [", "line 1 is not YAML"),
        ("classes: [{name: a, in: 5}]", "classes[0].out"),
        ("classes: [{name: a, in: 5, out: 5, wait: 3}]", "has no field 'wait'"),
        ("classes: [{name: a, in: 5, out: 5, weight: 0}]", "classes[0].weight is 0: should be"),
        ("classes: [{name: a, in: {fixed: no}, out: 5}]", "classes[0].in.fixed is False"),
        ("classes: [{name: a, in: 5, out: 5}, {name: a, in: 5, out: 5}]", "name of two classes"),
        ("classes: [{name: a, in: 5, out: 5, prefix: {}}]", "needs either tokens or share"),
        ("{classes: [{name: a, in: 5, out: 5}], arrivals: often}", "arrivals is 'often'"),
        (
            "{classes: [{name: a, in: 5, out: 5}], arrivals: {burstines: 2}}",
            "has no field 'burstines'; did you mean burstiness",
        ),
        ("{schema_version: 2, classes: [{name: a, in: 5, out: 5}]}", "schema_version is 2"),
    ],
)
def test_a_bad_file_is_told_with_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_workload(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        workload_named(str(tmp_path / "none.yaml"))


def test_the_files_that_workloads_need_are_packaged() -> None:
    """Wheels are made from what sdist.include names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["scikit-build"]["sdist"]["include"]
    folder = Path(workloads.__file__).parent
    data = [path for path in folder.iterdir() if path.suffix not in (".py", "") and path.is_file()]
    assert {path.name for path in data} == {"presets.yaml", "words.txt"}
    for path in data:
        name = f"src/octavo/bench/workloads/{path.name}"
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_the_page_on_workloads_is_true(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example, encoding="utf-8")
    assert [each.name for each in read_workload(path).classes] == ["question", "summary"]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| ([\d,]+) \|", page, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == preset_names()
    for name, input_len, output_len in rows:
        shown = [int(number.replace(",", "")) for number in (input_len, output_len)]
        assert shown == [round(mean) for mean in workload_named(name).mean_lengths()]

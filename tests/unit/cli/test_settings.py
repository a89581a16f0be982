"""Flags, environment, file and defaults: which one wins, and what is said about a mistake."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.docs import configuration_page
from octavo.cli.settings import load_config, takes_knobs
from octavo.config import Config, knobs
from octavo.core.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "octavo.yaml"
    path.write_text(text)
    return str(path)


def load(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    return load_config(flags, environ=environ or {})


SOURCES = ("flag", "environment", "file")


@pytest.mark.parametrize(
    "given", [c for n in range(4) for c in itertools.combinations(SOURCES, n)], ids="-".join
)
def test_a_flag_wins_over_environment_over_file_over_default(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {}
    environ = {}
    if "flag" in given:
        flags["port"] = "1"
    if "environment" in given:
        environ["OCTAVO_PORT"] = "2"
    if "file" in given:
        flags["config"] = write(tmp_path, "port: 3")
    expected = {"flag": 1, "environment": 2, "file": 3}
    winner = next((expected[source] for source in SOURCES if source in given), 8000)
    assert load(flags, environ).server.port == winner


def test_each_source_gives_what_the_others_leave_open(tmp_path: Path) -> None:
    file = write(tmp_path, "max-num-seqs: 5\nhost: 0.0.0.0")
    config = load({"config": file, "block_size": "32"}, {"OCTAVO_HOST": "::1"})
    assert (config.scheduler.max_num_seqs, config.server.host) == (5, "::1")
    assert (config.cache.block_size, config.server.port) == (32, 8000)


def test_every_knob_reads_its_variable_and_its_line_in_a_file(tmp_path: Path) -> None:
    for spec in knobs():
        text = {bool: "true", int: "3k", float: "0.5", str: "x", list: "x,y", dict: '{"a": "b"}'}
        value = spec.choices[-1] if spec.choices else text[spec.kind]
        if spec.name == "block_size":
            value = "32"
        expected = spec.check(value.split(",") if spec.kind is list else value)
        assert load({}, {spec.env: value}).to_flat()[spec.name] == expected
        for spelling in (spec.name, spec.name.replace("_", "-"), *spec.aliases):
            file = write(tmp_path, f"{spelling}: '{value}'")
            assert load({"config": file}).to_flat()[spec.name] == expected


def test_yaml_values_keep_their_types(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "served-model-name: [a, 'b,c']\nkernels: {linear: reference}\naccess_log: true\n"
        "max_model_len: null\nshutdown-timeout: 2.5\n",
    )
    config = load({"config": file})
    assert config.model.served_model_name == ["a", "b,c"]
    assert config.backend.kernels == {"linear": "reference"}
    assert config.server.access_log is True
    assert config.model.max_model_len is None
    assert config.server.shutdown_timeout == 2.5


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load({"config": write(tmp_path, "# nothing yet\n")}) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown setting 'prot' .in .*octavo.yaml.; did you mean 'port'"),
        ("--port: 1", "unknown setting '--port'"),
        ("max-num-seq: 1", "did you mean 'max-num-seqs'"),
        ("port: 1\nport-: 2", "unknown setting"),
        ("block-size: 1\nblock_size: 2", "--block-size is given twice"),
        ("gpu-memory-utilization: 0.5\ndevice-memory-utilization: 0.6", "given twice"),
        ("port: many", "--port must be a number, got 'many'.*octavo.yaml"),
        ("revision: 1.0", "--revision must be text, got 1.0"),
        ("- port", "must be a mapping like `port: 8000`, not a list"),
        (
            "enable-expert-parallel: 2",
            r"'enable-expert-parallel' .in .*octavo.yaml.: not built yet;",
        ),
        ("host: a\nport: [", r"is not YAML: expected .*'<stream end>'.* \(line 2, column 8\)$"),
        ("port: 1\nport: 2", r"is not YAML: 'port' is given twice \(line 2, column 1\)$"),
        ("kernels: {a: b, a: c}", r"is not YAML: 'a' is given twice \(line 1, column 17\)$"),
        ("port: \0", "is not YAML: "),
        ("server:\n  port: 1", "unknown setting 'server'"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML: "),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load({"config": write(tmp_path, text)})
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml can't be read: No such file"):
        load({"config": str(tmp_path / "no.yaml")})


def test_a_wrong_variable_is_an_error_that_says_where_it_was() -> None:
    # What Kubernetes sets for a service called octavo.
    with pytest.raises(ConfigError, match=r"--port must be a number.*\(from the environment\)"):
        load({}, {"OCTAVO_PORT": "tcp://10.0.0.7:8000"})


def test_unknown_variables_are_named_once_and_ignored() -> None:
    warnings: list[str] = []
    environ = {
        "OCTAVO_PROT": "1",
        "OCTAVO_SERVICE_HOST": "x",
        "OCTAVO_CACHE_ROOT": "/c",
        "PORT": "",
    }
    assert load_config({}, environ=environ, warn=warnings.append) == Config()
    assert warnings == ["not settings of Octavo, ignored: OCTAVO_PROT, OCTAVO_SERVICE_HOST"]


def test_an_empty_variable_is_unset_but_never_an_empty_key() -> None:
    assert load({}, {"OCTAVO_PORT": ""}) == Config()
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY is empty"):
        load({}, {"OCTAVO_API_KEY": ""})
    with pytest.raises(ConfigError, match="--api-key has an empty item"):
        load({"api_key": [""]})


def test_a_list_is_a_repeated_flag_or_separated_by_commas() -> None:
    assert load({"api_key": ["a", "b"]}).server.api_key == ["a", "b"]
    assert load({"api_key": ["a,b", "c"]}).server.api_key == ["a", "b", "c"]
    assert load({}, {"OCTAVO_API_KEY": "a,b"}).server.api_key == ["a", "b"]


def test_the_model_is_given_once() -> None:
    assert load_config({}, model="m", environ={"OCTAVO_MODEL": "e"}).model.model == "m"
    assert load_config({"model": "m"}, model="m", environ={}).model.model == "m"
    with pytest.raises(ConfigError, match="two models are given, 'm' and --model 'other'"):
        load_config({"model": "other"}, model="m", environ={})


def test_a_verbs_own_parameter_takes_the_place_of_a_knob() -> None:
    @takes_knobs("model")
    def verb(flags: dict[str, Any], seed: int = 0) -> None:
        given.update(flags, seed=seed)

    given: dict[str, Any] = {}
    names = list(inspect.signature(verb).parameters)
    assert names.count("seed") == 1
    verb(**dict.fromkeys(names) | {"model": "m", "seed": 3})
    assert given == {"model": "m", "seed": 3}


def test_the_page_of_settings_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), "run `make docs`"

"""Knobs: what each accepts, what it says when it doesn't, and that they read well."""

from __future__ import annotations

import re

import pytest

from octavo.config import CacheConfig, Config, knobs
from octavo.core.dtypes import plain_kv_dtype
from octavo.core.errors import ConfigError
from octavo.core.foreign_settings import REMARKS
from octavo.knob import Knob, nearest, parse_number

KNOBS = {spec.name: spec for spec in knobs()}


@pytest.mark.parametrize("spec", KNOBS.values(), ids=lambda spec: spec.name)
def test_a_default_is_a_legal_value(spec: Knob) -> None:
    assert spec.check(spec.default) == spec.default


@pytest.mark.parametrize("spec", KNOBS.values(), ids=lambda spec: spec.name)
def test_a_knob_is_documented_in_sentences(spec: Knob) -> None:
    assert spec.doc.endswith(".")
    assert spec.doc[0].isupper() or spec.doc.startswith("`")


def test_no_two_knobs_share_a_spelling() -> None:
    spellings = [name.replace("_", "-") for spec in knobs() for name in (spec.name, *spec.aliases)]
    assert len(spellings) == len(set(spellings))


def test_knobs_stay_few() -> None:
    assert len(KNOBS) <= 60


def test_flat_values_reach_their_sections_and_come_back() -> None:
    config = Config.from_flat({"port": 0, "max_num_seqs": 7, "model": "tiny"})
    assert (config.server.port, config.scheduler.max_num_seqs, config.model.model) == (0, 7, "tiny")
    assert Config.from_flat(config.to_flat()) == config


def test_defaults_are_not_shared() -> None:
    Config().server.api_key.append("left over")
    assert Config().server.api_key == []


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        Config.from_flat({"max_num_seq": 1})


@pytest.mark.parametrize("name", ["enable_expert_parallel", "swap_space", "enforce_eager"])
def test_a_setting_of_other_engines_is_told_what_there_is_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}': not "):
        Config.from_flat({name: 1})


def test_remarks_are_on_what_is_no_knob_and_name_what_is() -> None:
    spellings = {name.replace("_", "-") for k in knobs() for name in (k.name, *k.aliases)}
    assert spellings.isdisjoint(REMARKS)
    for remark in REMARKS.values():
        assert set(re.findall(r"--([\w-]+)", remark)) <= spellings


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "8001", 8001),
        ("max_num_batched_tokens", "2k", 2000),
        ("max_num_batched_tokens", "2K", 2048),
        ("max_model_len", -1, -1),
        ("max_model_len", None, None),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("enable_prefix_caching", "1", True),
        ("access_log", "ON", True),
        ("kernels", '{"linear": "reference"}', {"linear": "reference"}),
        ("served_model_name", "a", ["a"]),
        ("served_model_name", None, []),
        ("served_model_name", ("a", "b"), ["a", "b"]),
        ("dtype", "bfloat16", "bfloat16"),
        ("quantization", None, None),
        ("quantization", "int4", "int4"),
        ("quantization", "int8-channel", "int8-channel"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8_e4m3"),
        ("threads", "2", 2),
    ],
)
def test_values_are_read_in_every_form(name: str, value: object, expected: object) -> None:
    checked = KNOBS[name].check(value)
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", 65536, r"--port must be at most 65535, got 65536\. Port to listen on"),
        ("port", -1, "--port must be at least 0"),
        ("port", "http", "--port must be a number, got 'http'"),
        ("port", 80.5, "--port must be a whole number"),
        ("port", True, "--port must be"),
        ("port", "nan", "--port must be a number"),
        ("port", None, "--port must be"),
        ("gpu_memory_utilization", 1.5, "--gpu-memory-utilization must be at most 1"),
        ("max_body_bytes", 10, r"--max-body-bytes must be at least 1024 \(bytes\)"),
        ("enable_prefix_caching", "maybe", "must be true or false, got 'maybe'"),
        ("scheduling_policy", "lifo", "must be one of fcfs, priority, got 'lifo'"),
        ("quantization", "awq", "--quantization must be one of int8, int8-g64, .*, got 'awq'"),
        ("threads", 0, "--threads must be at least 1"),
        ("kernels", "linear", "must be a JSON object"),
        ("kernels", "[1]", "must be a JSON object"),
        ("model", 7, "must be text, got 7"),
    ],
)
def test_a_bad_value_is_told_with_its_limit(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KNOBS[name].check(value)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        KNOBS["hf_token"].check(12345)
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("3G", 3 * 2**30), ("2t", 2 * 10**12), (7, 7)],
)
def test_sizes_have_suffixes(text: object, number: float) -> None:
    assert parse_number(text) == number


def test_large_whole_numbers_stay_exact() -> None:
    assert parse_number(str(2**60 + 1)) == 2**60 + 1


@pytest.mark.parametrize("text", ["", "k", "1kk", "inf", "nan", "1 000", "0x10"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"convert|finite"):
        parse_number(text)


def test_nothing_is_near_to_something_else() -> None:
    assert nearest("zzz", KNOBS) == ""


@pytest.mark.parametrize(
    ("asked", "plain"),
    [
        ("auto", "auto"),
        ("fp8_e4m3", "fp8"),
        ("int4", "int4"),
        ("int8,int4", "int8,int4"),
        ("bfloat16,fp8_e4m3", "bfloat16,fp8"),
        ("int8,int8", "int8"),
    ],
)
def test_keys_and_values_may_be_cached_in_different_formats(asked: str, plain: str) -> None:
    assert plain_kv_dtype(Config.from_flat({"kv_cache_dtype": asked}).cache.kv_cache_dtype) == plain


@pytest.mark.parametrize("asked", ["int3", "int8,int3", "auto,int8", "int8,int4,int4", "", "int8,"])
def test_an_unknown_format_of_the_cache_is_told_with_those_that_there_are(asked: str) -> None:
    message = "must be (one of auto,|auto, or one of) float32, .*int4, fp8_e4m3, or two of the.*got"
    with pytest.raises(ConfigError, match=message):
        Config.from_flat({"kv_cache_dtype": asked})


def test_prefixes_are_cached_unless_memory_is_reserved() -> None:
    assert CacheConfig().caches_prefixes
    assert not CacheConfig(enable_prefix_caching=False).caches_prefixes
    assert not CacheConfig(kv_policy="reserve-max").caches_prefixes
    assert not CacheConfig(kv_policy="reserve-max", enable_prefix_caching=False).caches_prefixes
    with pytest.raises(ConfigError, match="--enable-prefix-caching does not go with --kv-policy"):
        Config.from_flat({"kv_policy": "reserve-max", "enable_prefix_caching": "on"})

from __future__ import annotations

import pytest

from octavo.bench.ab.knobs import knob_arms
from octavo.bench.launch import parse_arm
from octavo.core.errors import ConfigError

BASE = parse_arm("octavo --dtype float32")


def test_each_value_is_an_arm_and_nothing_else_differs() -> None:
    arms = knob_arms("max_num_seqs=4,16,64", BASE)
    assert [arm.name for arm in arms] == ["max_num_seqs=4", "max_num_seqs=16", "max_num_seqs=64"]
    assert arms[1].text == "octavo --dtype float32 --max-num-seqs 16"


def test_switches_and_defaults_become_the_flags_of_serve() -> None:
    on, off = knob_arms("enable-prefix-caching=on,off", BASE)
    assert on.text.endswith("--enable-prefix-caching")
    assert off.text.endswith("--no-enable-prefix-caching")
    plain, int8 = knob_arms("quantization=default,int8", BASE)
    assert plain.text == BASE.text
    assert int8.text.endswith("--quantization int8")


def test_speculation_is_a_knob_with_a_short_name() -> None:
    off, one, two = knob_arms("speculative=off,ngram:3,ngram+suffix", BASE)
    assert off.text.endswith("--speculative-config off")
    assert (one.name, two.name) == ("speculative=ngram:3", "speculative=ngram+suffix")
    assert one.text.endswith("--speculative-config ngram:3")


def test_sizes_have_suffixes() -> None:
    arms = knob_arms("kv_cache_memory_bytes=16M,1G", BASE)
    assert arms[0].text.endswith("--kv-cache-memory-bytes 16M")


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("max_num_seq=4,8", "did you mean 'max_num_seqs'"),
        ("max_num_seqs", "NAME=VALUE"),
        ("max_num_seqs=4", "two different values"),
        ("max_num_seqs=4,4", "two different values"),
        ("max_num_seqs=4,0", "at least 1"),
        ("quantization=int8,int9", "must be one of"),
        ("dtype=float32,bfloat16", "leave one out"),
        ("port=1,2", "not for --knob"),
        ("kernels={},{}", "two arms"),
        ('speculative_config=off,{"method": "ngram"}', "write it short"),
    ],
)
def test_what_can_not_be_tried_is_refused(experiment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        knob_arms(experiment, BASE)


def test_only_octavo_has_knobs() -> None:
    with pytest.raises(ConfigError, match="not started as `octavo"):
        knob_arms("max_num_seqs=4,8", parse_arm("hf-naive"))

"""Traffic: all forms become one workload, with the moments that planning needs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from octavo.advisor.traffic import read_traffic
from octavo.core.errors import ConfigError


def test_means_are_taken_as_uniform_and_say_so() -> None:
    traffic = read_traffic(input_len="800", output_len="300", users=50)
    lengths = traffic.lengths
    assert lengths.input_mean == pytest.approx(800, rel=2e-3)
    assert lengths.output_mean == pytest.approx(300, rel=2e-3)
    assert lengths.longest == 1200 + 450
    assert traffic.is_assumed
    assert traffic.option == "--lengths 800,300,0.5"


def test_the_resident_context_is_weighted_by_how_long_a_request_lives() -> None:
    """Outputs of 100 or 1900: of what is resident, 95 % are the long ones."""
    traffic = read_traffic(input_len="1000", output_len="p49.99:100,p50:1900,min:100,max:1900")
    plain = 1000 + 1000 / 2
    expected = (100 * (1000 + 50) + 1900 * (1000 + 950)) / 2000
    assert expected > 1.25 * plain
    assert traffic.lengths.context == pytest.approx(expected, rel=0.02)


def test_quantiles_are_interpolated_and_their_ends_filled_in() -> None:
    traffic = read_traffic(input_len="p50:600,p90:1500,max:4000", output_len="p50:100,p99:400")
    lengths = traffic.lengths
    assert lengths.longest == 4000 + 800
    assert 600 < lengths.input_mean < 1000
    assert not traffic.is_assumed
    assert traffic.option is None  # bench needs the workload's file


def test_presets_and_scales_are_those_of_bench() -> None:
    traffic = read_traffic(workload="azure_conv", scale=1 / 16, rate=2)
    assert traffic.option == "--workload azure_conv --scale 0.0625"
    assert traffic.lengths.input_mean == pytest.approx(1161 / 16, rel=0.02)
    assert traffic.burst_cv == pytest.approx(1 / 0.84**0.5)


def test_what_prompts_share_is_known_to_the_cache() -> None:
    assert read_traffic(workload="shared-prefix").hit_rate == pytest.approx(0.9, abs=0.02)
    shared = read_traffic(input_len="1000", output_len="10", prefix_share=0.6)
    assert shared.hit_rate == pytest.approx(0.6)
    assert shared.lengths.input_mean == pytest.approx(1000, rel=2e-3)
    assert read_traffic(workload="chat").hit_rate == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"users": 1, "rate": 1}, "not both"),
        ({"input_len": "800"}, "together"),
        ({"workload": "chat", "input_len": "1", "output_len": "1"}, "its own lengths"),
        ({"input_len": "p50:600,p40:700", "output_len": "1"}, "must rise"),
        ({"input_len": "p50=x", "output_len": "1"}, "neither"),
        ({"input_len": "0", "output_len": "1"}, "from 1 to"),
        ({"workload": "shared-prefix", "prefix_share": 0.5}, "says itself"),
        ({"workload": "nothing"}, "neither a workload"),
    ],
)
def test_mistakes_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_traffic(**options)  # type: ignore[arg-type]


def test_a_workload_file_is_quoted_for_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "my load.yaml"
    path.write_text("classes: [{name: one, in: {fixed: 100}, out: {fixed: 10}}]\n")
    option = read_traffic(workload=str(path)).option
    assert shlex.split(option or "") == ["--workload", str(path)]

from __future__ import annotations

import pytest

from octavo.bench import profile as profiling
from octavo.bench.profile import (
    ATTENTION,
    EXCHANGE,
    PRODUCT,
    PYTHON,
    ROWS,
    SAMPLING,
    UNDIVIDED,
    Profile,
    _Call,
    _Cut,
    _kind,
    _pieces,
)
from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.core.step import ScheduledSequence, ScheduledStep
from octavo.ops.native.recorder import RegionTime

pytestmark = pytest.mark.usefixtures("quick_measurements")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_NUM_DECODE_STEPS", 6)
    monkeypatch.setattr(profiling, "_NUM_PREFILLS", 2)


def profiled(tiny: str, batch: int = 3, **settings: object) -> Profile:
    config = Config.from_flat({"model": tiny, **settings})
    return profiling.profile(config, batch=batch, context=20, prompt=40, temperature=0.0)


def test_the_parts_add_up_to_the_step(tiny: str) -> None:
    profile = profiled(tiny, max_num_batched_tokens=16)
    decode, prefill = profile.steps
    for step in (decode, prefill):
        assert all(part.seconds >= 0 for part in step.parts)
        kinds = [part.kind for part in step.parts]
        assert list(dict.fromkeys(kinds)) == [PRODUCT, ATTENTION, ROWS, SAMPLING, PYTHON]
        others = sum(p.seconds for p in step.parts if p.kind in (ROWS, SAMPLING, PYTHON))
        assert step.other_share == pytest.approx(others / step.seconds)
    assert (decode.num_sequences, decode.num_tokens, decode.num_measured) == (3, 3, 6)
    assert (prefill.num_tokens, prefill.context, prefill.num_measured) == (40, 40, 2)
    # Its three chunks count together, two layers each.
    (gate,) = [part for part in prefill.parts if part.name == "linear 192x64"]
    assert gate.count == 3 * 2
    assert gate.num_bytes == 6 * 192 * 64 * 4
    assert gate.operations == 2 * 2 * 40 * 192 * 64
    floats = max(profile.limits.float_operations_per_second.values())
    read = profile.limits.read_bytes_per_second
    assert gate.least_seconds == max(gate.num_bytes / read, gate.operations / floats)


def test_a_step_is_cut_without_gaps() -> None:
    step = ScheduledStep(1, [], [ScheduledSequence(0, 0, 4, (), samples=True)], [], 4)
    regions = [RegionTime("linear 4x4", 2.5e9, 1.0, 2.0), RegionTime("add", 0.25e9, 0.0, 0.0)]
    calls = [_Call(4.0, 7.0, regions), _Call(7.5, 8.0, [])]
    cut = _Cut(start=1.0, submitted=2.0, returned=9.0, end=9.25, calls=calls, step=step)
    pieces = [(kind, name, piece.nanoseconds * 1e-9) for kind, name, piece in _pieces(cut)]
    assert pieces == [
        (PYTHON, "schedule", 1.0),
        (PYTHON, "lay out the batch", 2.0),
        (PRODUCT, "linear 4x4", 2.5),
        (ROWS, "add", 0.25),
        (PYTHON, "call the tape", 0.25),
        (PYTHON, "lay out the batch", 0.5),
        (UNDIVIDED, "forward, head", 0.5),
        (SAMPLING, "sample", 1.0),
        (PYTHON, "update", 0.25),
    ]
    assert sum(seconds for _, _, seconds in pieces) == cut.end - cut.start


def test_exchanges_are_a_kind_of_their_own() -> None:
    assert [_kind(name) for name in ("all_reduce", "all_gather", "add")] == [
        EXCHANGE,
        EXCHANGE,
        ROWS,
    ]


def test_shares_of_the_whole_step(tiny: str) -> None:
    decode = profiled(tiny).steps[0]
    num_bytes = sum(part.num_bytes for part in decode.parts)
    assert decode.num_bytes == num_bytes > 0
    seconds = num_bytes / decode.read_bytes_per_second
    assert decode.bandwidth_share == pytest.approx(seconds / decode.seconds)
    assert decode.roofline_share >= decode.bandwidth_share * 0.999


def test_integer_weights_are_compared_with_the_integer_peak(tiny: str) -> None:
    profile = profiled(tiny, quantization="int8")
    (gate,) = [p for p in profile.steps[1].parts if p.name == "linear 192x64"]
    peak = max(profile.limits.int8_operations_per_second.values())
    read = profile.limits.read_bytes_per_second
    assert gate.least_seconds == max(gate.num_bytes / read, gate.operations / peak)
    assert gate.num_bytes == 2 * 192 * 64 * 34 / 32


def test_a_backend_that_does_not_record_is_not_divided(tiny: str) -> None:
    decode = profiled(tiny, backend="torch").steps[0]
    assert [p.name for p in decode.parts if p.kind == UNDIVIDED] == ["forward, head"]
    assert decode.other_share is None


@pytest.mark.parametrize(
    ("batch", "settings", "message"),
    [
        (3, {"max_model_len": 24}, "--context: 28 tokens .* 24 of the context"),
        (3, {"max_model_len": 40}, "--prompt: 41 tokens .* 40 of the context"),
        (3, {"max_num_seqs": 2}, "--batch 3 is more than --max-num-seqs 2"),
        (
            8,
            {"max_model_len": 48, "kv_cache_memory_bytes": 4 * 8192, "backend": "native"},
            "--batch 8 sequences of 20 tokens never decode all at once",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny: str, batch: int, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        profiled(tiny, batch, **settings)

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import assembly
from octavo.bench.op_cache_cases import KV_FORMATS
from octavo.bench.op_case import OpCase
from octavo.bench.op_cases import NOT_TIMED, WEIGHT_FORMATS, op_cases
from octavo.bench.op_times import measure_ops
from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.models.causal_lm import CausalLM
from octavo.ops import OPS
from octavo.ops.native.ops import ISAS, NO_KERNEL
from support.checkpoints import make_checkpoint


@pytest.fixture
def model(tiny: str) -> CausalLM:
    return assembly.unloaded_model(assembly.open_model(Config.from_flat({"model": tiny}).model))


@pytest.fixture
def experts(tmp_path: Path) -> CausalLM:
    """A mixture with latent attention."""
    folder = str(make_checkpoint("deepseek_v3", tmp_path))
    config = Config.from_flat({"model": folder})
    return assembly.unloaded_model(assembly.open_model(config.model))


def only(cases: list[OpCase], **wanted: object) -> OpCase:
    (found,) = [c for c in cases if all(getattr(c, k) == v for k, v in wanted.items())]
    return found


def test_cases_have_the_models_shapes(model: CausalLM) -> None:
    cases = list(op_cases(model, [1, 16], context=40))
    shapes = {(case.shape, case.detail) for case in cases if case.op == "linear"}
    # hidden size 64, 4 heads and 2 key/value heads of 16, inner size 96, 320 tokens
    assert shapes == {
        ("128x64", "q+k+v"),
        ("64x64", "o"),
        ("192x64", "gate+up"),
        ("64x96", "down"),
        ("320x64", "lm_head"),
    }
    num_linear = sum(case.op == "linear" for case in cases)
    assert num_linear == 5 * len(WEIGHT_FORMATS) * 2
    attention = [case for case in cases if case.op == "paged_attention"]
    assert {case.shape for case in attention} == {"4/2x16"}
    # Decode for 1 and 16 rows, a prefill and a tree of 16.
    assert len(attention) == len(KV_FORMATS) * 4


def test_every_op_has_a_case_or_is_a_view(model: CausalLM, experts: CausalLM) -> None:
    measured = {case.op for one in (model, experts) for case in op_cases(one, [1], context=1)}
    assert measured == OPS.keys() - NOT_TIMED.keys()
    assert NOT_TIMED.keys() < OPS.keys()


def test_bytes_and_operations_of_a_case(model: CausalLM) -> None:
    cases = list(op_cases(model, [1, 16], context=40))
    product = only(cases, op="linear", shape="192x64", format="int8", rows=16)
    assert product.num_bytes == 192 * 64 * 34 / 32  # a half-precision scale for each 32
    assert product.operations == 2 * 16 * 192 * 64
    assert product.arithmetic == "int8"
    floats = only(cases, op="linear", shape="192x64", format="bfloat16", rows=1)
    assert floats.num_bytes == 192 * 64 * 2
    assert floats.arithmetic == "float"
    decode = only(cases, op="paged_attention", detail="decode at 40", format="bfloat16", rows=16)
    assert decode.num_bytes == 16 * 40 * 2 * 2 * 16 * 2
    assert decode.operations == 16 * 40 * 4 * 4 * 16
    prefill = only(cases, op="paged_attention", detail="prefill", format="float32")
    assert prefill.operations == 4 * 4 * 16 * (16 * 17 // 2)
    tree = only(cases, op="paged_attention", detail="tree at 40", format="bfloat16", rows=16)
    assert tree.num_bytes == 40 * 2 * 2 * 16 * 2
    seen = [24 + 1] + 2 * [24 + 2] + 4 * [24 + 3] + 8 * [24 + 4] + [24 + 5]
    assert tree.operations == 4 * 4 * 16 * sum(seen)
    for detail in ("decode", "prefill"):
        written = only(cases, op="write_kv", detail=detail, format="int8", rows=16)
        assert written.num_bytes == 16 * 2 * 2 * (16 + 4)  # a float32 scale for each head
    copied = only(cases, op="copy_blocks", rows=16)
    assert copied.num_bytes == 2 * 16 * 16 * 2 * 2 * 16 * 2
    moved = only(cases, op="move_kv", format="int8", rows=16)
    assert moved.num_bytes == 2 * 16 * 2 * 2 * (16 + 4)
    penalised = only(cases, op="adjust_logits", detail="256 penalties", rows=16)
    assert penalised.num_bytes == 16 * 256 * (8 + 8 + 8 + 4 + 4)


def test_bytes_and_operations_of_experts_and_latent_attention(experts: CausalLM) -> None:
    cases = list(op_cases(experts, [1, 16], context=40))
    # 4 of 16 experts with 32 inner values, hidden size 64
    mixture = only(cases, op="experts", format="int8", rows=1)
    assert mixture.shape == "16x32x64"
    # 4 panels of 64 inputs, and 4 of 32, whose block of two groups is half empty but for its scales
    assert mixture.num_bytes == 4 * (4 * 16 * 64 * 34 / 32 + 4 * (64 + 16 * 32))
    assert mixture.operations == 2 * 4 * 3 * 32 * 64
    many = only(cases, op="experts", format="int8", rows=16)
    assert 4 * mixture.num_bytes > many.num_bytes > 3.5 * mixture.num_bytes  # nearly all
    assert many.operations == 16 * mixture.operations
    # 4 heads; a vector of 48 + 16 values, of which heads have 24 and 32
    decode = only(cases, op="latent_attention", detail="decode at 40", format="int8", rows=16)
    assert decode.num_bytes == 16 * 40 * (64 + 4)
    assert decode.operations == 16 * 40 * 2 * 4 * (2 * 48 + 16)
    keys = only(cases, op="head_linear", detail="of keys", format="bfloat16", rows=16)
    assert keys.shape == "4x48x24"
    assert keys.num_bytes == 4 * 48 * 24 * 2
    written = only(cases, op="write_latent", detail="decode", format="bfloat16", rows=16)
    assert written.num_bytes == 16 * 64 * 2


@pytest.mark.usefixtures("quick_measurements")
@pytest.mark.parametrize("kind", ["model", "experts"])
def test_every_case_runs_on_every_instruction_set_of_its_op(
    request: pytest.FixtureRequest, kind: str
) -> None:
    model = request.getfixturevalue(kind)
    cases = list(op_cases(model, [1, 16], context=40))
    limits, times = measure_ops(model, threads=1, wanted=(), rows=[1, 16], context=40, rounds=2)
    isas = [name for name, problem in ISAS.items() if not problem]
    without_kernels = {"adjust_logits", "copy_blocks", "head_linear", "move_kv", "take_rows"}
    assert [(one.op, one.implementation) for one in times] == [
        (case.op, isa)
        for case in cases
        for isa in (NO_KERNEL if case.op in without_kernels else isas)
    ]
    from_memory = {"linear", "paged_attention", "write_kv", "copy_blocks"}
    from_memory |= {"experts", "head_linear", "latent_attention", "write_latent"}
    for one in times:
        assert 0 < one.best_us <= one.median_us
        assert (one.share is None) == (one.op not in from_memory)
    for one in (one for one in times if one.op == "linear"):
        peaks = limits.float_operations_per_second
        if one.format.startswith(("int", "mxfp4")):
            peaks = limits.int8_operations_per_second
        memory = one.bytes_per_second / limits.read_bytes_per_second
        compute = one.operations_per_second / peaks[one.implementation]
        assert one.share == pytest.approx(max(memory, compute))
        assert one.bound == ("memory" if memory >= compute else "compute")


@pytest.mark.usefixtures("quick_measurements")
def test_only_the_ops_asked_for(model: CausalLM) -> None:
    _, times = measure_ops(
        model, threads=1, wanted=["add", "sample"], rows=[1], context=1, rounds=1
    )
    assert {one.op for one in times} == {"add", "sample"}
    with pytest.raises(ConfigError, match=r"--op lineer: there is no benchmark of it; use linear,"):
        measure_ops(model, threads=1, wanted=["lineer"], rows=[1], context=1, rounds=1)
    with pytest.raises(ConfigError, match=r"--op split_columns: a view of the same memory"):
        measure_ops(model, threads=1, wanted=["split_columns"], rows=[1], context=1, rounds=1)

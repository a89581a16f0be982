"""What is refused of quantized checkpoints, and what their tensors are seen as."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.weights import open_checkpoint
from octavo.weights.safetensors_writer import write_safetensors
from support.configs import LLAMA
from support.quantized_files import (
    Case,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_int8,
    compressed,
    fp4,
    fp8,
    gptq,
)

MODULE = "model.layers.0.mlp.up_proj"
WEIGHTS = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)


def write(
    folder: Path,
    case: Case,
    *,
    config: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], object] = lambda parts: None,
    **more: np.ndarray,
) -> Path:
    """One matrix. config: keys of quantization_config that differ. change: of its parts."""
    parts = case.store(WEIGHTS).parts
    change(parts)
    tensors = {f"{MODULE}{suffix}": array for suffix, array in parts.items()} | more
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    quantization = {**case.config, **(config or {})}
    text = json.dumps(LLAMA | {"quantization_config": quantization})
    (folder / "config.json").write_text(text)
    return folder


def cut(suffix: str) -> Callable[[dict[str, np.ndarray]], object]:
    """Takes the last row of a part away."""
    return lambda parts: parts.update({suffix: parts[suffix][:-1]})


def store(case: Case, weights: np.ndarray) -> Callable[[dict[str, np.ndarray]], object]:
    """Takes other weights."""
    return lambda parts: parts.update(case.store(weights).parts)


def without(suffix: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda parts: parts.pop(suffix)


def put(suffix: str, array: np.ndarray) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda parts: parts.update({suffix: array})


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        (
            gptq(),
            {"config": {"quant_method": "aqlm"}},
            "'aqlm'.*is not read; auto-round, awq, .*--quantiz",
        ),
        (gptq(), {"config": {"quant_method": None}}, "no named method"),
        (gptq(), {"config": {"checkpoint_format": "marlin"}}, "one GPU kernel .'marlin'"),
        (
            gptq(),
            {"config": {"quant_method": "auto-round", "packing_format": "auto_round"}},
            "packing_format is 'auto_round', but that of GPTQ or AWQ",
        ),
        (gptq(), {"config": {"bits": 5}}, "quantization_config.bits is 5.*2, 3, 4, 8"),
        (gptq(), {"config": {"bits": "4"}}, "quantization_config.bits is '4'"),
        (gptq(), {"config": {"dynamic": {"+:(": {}}}}, "dynamic.*regular expressions"),
        (gptq(), {"config": {"dynamic": {"+:" + "(" * 10**5: {}}}}, "dynamic.*regular expressions"),
        (
            compressed(),
            {"config": {"config_groups": {"group_0": {"targets": ["re:a{" + "9" * 20 + "}"]}}}},
            "group_0.targets is .*regular expressions",
        ),
        (gptq(), {"config": {"group_size": 16}}, "up_proj.scales' is float16.*4, 48"),
        (gptq(), {"change": without(".scales")}, "no tensor 'model.layers.0.mlp.up_proj.scales'"),
        (gptq(sym=False), {"change": without(".qzeros")}, "no tensor .*qzeros.*symmetric"),
        (gptq(), {"change": cut(".qzeros")}, "up_proj.qzeros' is int32 .1, 6. where.*2, 6"),
        (gptq(), {"change": put(".g_idx", np.full(64, 2, np.int32))}, "beyond the 2 that"),
        (gptq(), {"change": put(".qweight", np.zeros(8, np.int32))}, "no whole rows of 4 bits"),
        (awq(), {"config": {"version": "gemv"}}, "one GPU kernel .'gemv'.*'gemm'"),
        (awq(), {"change": without(".qzeros")}, "no tensor .*qzeros.*zero_point: false"),
        (awq(), {"config": {"bits": 8}}, "quantization_config.bits is 8, but one of 4"),
        (
            compressed(),
            {"config": {"sparsity_config": {"format": "sparse-24-bitmask"}}},
            "leaves out zeros .'sparse-24-bitmask'",
        ),
        (compressed(), {"config": {"config_groups": {}}}, "config_groups is for 'model.layers.0"),
        (
            compressed(),
            {"config": {"config_groups": {"group_0": {"targets": "Linear"}}}},
            "config_groups.group_0.targets is 'Linear', but a list of strings",
        ),
        (compressed(), {"change": cut(".weight_packed")}, "weight_packed' is .47, 8., and with 4"),
        (compressed(), {"change": cut(".weight_scale")}, "weight_scale' is bfloat16 .47, 2."),
        (
            compressed(),
            {"change": put(".weight_shape", np.array([-1, -1]))},
            "weight_packed' is .48, 8.*-1",
        ),
        (fp8("block"), {"config": {"weight_block_size": [0, 32]}}, "two positive integers"),
        (fp8("block"), {"change": cut(".weight_scale_inv")}, "weight_scale_inv' is float32 .1, 2."),
        (fp8("output"), {"change": without(".weight_scale")}, "no tensor .*up_proj.weight_scale'"),
        (
            fp4("nvfp4"),
            {"change": put(".weight_global_scale", np.zeros(1, np.float32))},
            "weight_global_scale' is 0.0, and a scale must be a positive number",
        ),
        (fp4("nvfp4", "modelopt"), {"config": {"quant_algo": "W4A8"}}, "quant_algo is 'W4A8'"),
        (
            bitsandbytes_int8(),
            {"change": put(".weight_format", np.array(2, np.uint8))},
            "laid out for one GPU",
        ),
        (
            bitsandbytes_4bit("nf4", is_nested=False),
            {"change": put(".weight.quant_state.bitsandbytes__nf4", np.zeros(4, np.uint8))},
            "no description of an NF4 or FP4 matrix",
        ),
        (
            bitsandbytes_4bit("nf4", is_nested=True),
            {"change": cut(".weight.nested_absmax")},
            "nested_absmax' is float32",
        ),
        (
            bitsandbytes_4bit("nf4", is_nested=False),
            {"change": cut(".weight")},
            "has 1535 bytes for 48 rows of 64 weights of 4 bits",
        ),
    ],
)
def test_what_does_not_fit_its_format_is_refused(
    tmp_path: Path, case: Case, arguments: dict[str, Any], message: str
) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, case, **arguments)))
    assert checkpoint.config["hidden_size"] == 64  # metadata can be read in any case
    with pytest.raises(ConfigError, match=message):
        checkpoint.tensors  # noqa: B018


def state(**values: Any) -> Callable[[dict[str, np.ndarray]], object]:
    """Changes what a bitsandbytes matrix says of itself."""
    suffix = ".weight.quant_state.bitsandbytes__nf4"

    def change(parts: dict[str, np.ndarray]) -> None:
        text = json.dumps(json.loads(parts[suffix].tobytes()) | values)
        parts[suffix] = np.frombuffer(text.encode(), np.uint8)

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (gptq(), put(".qweight", np.zeros((0, 48), np.int32)), "qweight' of .0, 48. is empty"),
        (gptq(3), put(".qweight", np.zeros((6, 0), np.int32)), "qweight' of .6, 0. is empty"),
        (awq(), put(".qweight", np.zeros((0, 6), np.int32)), "qweight' of .0, 6. is empty"),
        (
            compressed(packed=False),
            put(".weight", np.zeros((48, 0), np.int8)),
            "weight' of .48, 0. is empty",
        ),
        (
            compressed(),
            put(".weight_shape", np.array([48, -1])),
            "weight_packed' is .48, 8., and with 4 bits a weight .48, 0. is expected",
        ),
        (bitsandbytes_4bit("nf4", is_nested=True), state(blocksize=2**70), "no description of an"),
        (
            bitsandbytes_4bit("nf4", is_nested=True),
            state(nested_blocksize=2**63),
            "no description of an",
        ),
        (
            bitsandbytes_4bit("nf4", is_nested=True),
            state(nested_offset=10**400),
            "no description of an",
        ),
        (
            bitsandbytes_4bit("nf4", is_nested=False),
            put(".weight.quant_map", np.full(16, np.inf, np.float32)),
            "quant_map' has values that are no numbers",
        ),
    ],
)
def test_sizes_that_nothing_can_have_are_refused(
    tmp_path: Path,
    case: Case,
    change: Callable[[dict[str, np.ndarray]], object],
    message: str,
) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, case, change=change)))
    with pytest.raises(ConfigError, match=message):
        checkpoint.tensors  # noqa: B018


@pytest.mark.parametrize("size", [2**70, "99999999999999999999x1", [128, 2**31], "128x"])
def test_blocks_larger_than_any_matrix_are_refused(tmp_path: Path, size: Any) -> None:
    block = size if isinstance(size, list | str) else [size, size]
    checkpoint = open_checkpoint(
        str(write(tmp_path, fp8("block"), config={"weight_block_size": block}))
    )
    with pytest.raises(ConfigError, match=r"weight_block_size is .*two positive integers up to"):
        checkpoint.tensors  # noqa: B018


@pytest.mark.parametrize(
    ("case", "suffix", "bad"),
    [
        (gptq(), ".scales", np.float16(np.nan)),
        (awq(), ".scales", np.float16(np.inf)),
        (compressed(), ".weight_scale", np.float32(-np.inf)),
        (fp8("tensor"), ".weight_scale", np.float32(np.nan)),
        (fp8("block"), ".weight_scale_inv", np.float32(np.inf)),
        (fp4("mxfp4"), ".weight_scale", np.uint8(255)),
        (fp4("nvfp4"), ".weight_scale", np.float32(np.nan)),
        (bitsandbytes_int8(), ".SCB", np.float32(np.inf)),
        (bitsandbytes_4bit("nf4", is_nested=False), ".weight.absmax", np.float32(np.nan)),
        (bitsandbytes_4bit("nf4", is_nested=True), ".weight.nested_absmax", np.float32(np.nan)),
    ],
)
def test_scales_that_are_no_numbers_are_refused(
    tmp_path: Path, case: Case, suffix: str, bad: Any
) -> None:
    def change(parts: dict[str, np.ndarray]) -> None:
        parts[suffix] = np.array(parts[suffix])
        parts[suffix].reshape(-1)[-1] = bad

    checkpoint = open_checkpoint(str(write(tmp_path, case, change=change)))
    grouped = checkpoint.grouped(f"{MODULE}.weight")
    assert grouped is not None
    message = f"matrix '{MODULE}.weight' has a scale that is .*(nan|inf), of its row [0-9]+; fetch"
    with pytest.raises(ConfigError, match=message):
        grouped.read(slice(0, 48))
    with pytest.raises(ConfigError, match=message):
        checkpoint.read(f"{MODULE}.weight")


def test_exponents_at_their_ends(tmp_path: Path) -> None:
    """E8M0: 2 ** -127, which is subnormal in float32, to 2 ** 127."""
    exponents = np.full((48, 2), 127, np.uint8)
    exponents[0] = 0, 254
    change = put(".weight_scale", exponents)
    checkpoint = open_checkpoint(str(write(tmp_path, fp4("mxfp4"), change=change)))
    grouped = checkpoint.grouped(f"{MODULE}.weight")
    assert grouped is not None
    scales = grouped.read(slice(0, 2)).scales
    # Their bits: where tests of the torch backend came before, subnormals are read as 0.
    assert scales.view(np.uint32).tolist() == [[1 << 22, 254 << 23], [127 << 23, 127 << 23]]


def test_a_matrix_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    more = {f"{MODULE}.weight": WEIGHTS}
    checkpoint = open_checkpoint(str(write(tmp_path, gptq(), **more)))
    with pytest.raises(ConfigError, match=r"up_proj.weight' is there as it is and again in GPTQ"):
        checkpoint.tensors  # noqa: B018


def test_a_group_of_one_module_is_not_for_others(tmp_path: Path) -> None:
    """ "lm_head" names a module, "Linear" a class of them, whichever comes first."""
    of_head = {"targets": ["lm_head"], "weights": {"num_bits": 8, "group_size": 16}}
    of_others = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    config = {"config_groups": {"group_0": of_head, "group_1": of_others}}
    checkpoint = open_checkpoint(str(write(tmp_path, compressed(), config=config)))
    expected = compressed().store(WEIGHTS).weights
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), expected)


@pytest.mark.parametrize("shape", [(48,), (48, 1)])
def test_zero_points_have_the_shape_of_scales(tmp_path: Path, shape: tuple[int, ...]) -> None:
    case = compressed(8, -1, packed=False, symmetric=False)
    zeros = case.store(WEIGHTS).parts[".weight_zero_point"]
    change = put(".weight_zero_point", zeros.reshape(shape))
    checkpoint = open_checkpoint(str(write(tmp_path, case, change=change)))
    expected = case.store(WEIGHTS).weights
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), expected)


def test_a_quantization_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write(tmp_path, gptq())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": "gptq"}))
    with pytest.raises(ConfigError, match="quantization_config is 'gptq', not an object"):
        open_checkpoint(str(tmp_path))


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    scale = {f"{MODULE}.input_scale": np.array(0.5, np.float32)}
    checkpoint = open_checkpoint(str(write(tmp_path, fp8("tensor"), **scale)))
    assert set(checkpoint.tensors) == {f"{MODULE}.weight"}
    assert checkpoint.tensors[f"{MODULE}.weight"].dtype == "FP8"


def test_biases_of_zeros_are_none(tmp_path: Path) -> None:
    bias = np.zeros(48, np.float16)
    checkpoint = open_checkpoint(str(write(tmp_path, gptq(), **{f"{MODULE}.bias": bias})))
    assert set(checkpoint.tensors) == {f"{MODULE}.weight"}
    bias[3] = 0.1
    checkpoint = open_checkpoint(str(write(tmp_path, gptq(), **{f"{MODULE}.bias": bias})))
    assert set(checkpoint.tensors) == {f"{MODULE}.weight", f"{MODULE}.bias"}


def test_the_content_changes_with_what_the_config_says_of_it(tmp_path: Path) -> None:
    write(tmp_path, gptq())
    before = open_checkpoint(str(tmp_path)).content_id()
    assert open_checkpoint(str(tmp_path)).content_id() == before
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"checkpoint_format": "gptq"', '"format": "gptq_v2"'))
    assert open_checkpoint(str(tmp_path)).content_id() != before


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_zero_point_of_0(tmp_path: Path, version: str) -> None:
    """Less 1, that is the largest there is."""
    case, weights = gptq(sym=False, version=version), np.abs(WEIGHTS)
    checkpoint = open_checkpoint(str(write(tmp_path, case, change=store(case, weights))))
    values = checkpoint.read(f"{MODULE}.weight")
    assert values.min() == 0
    np.testing.assert_array_equal(values, case.store(weights).weights)


@pytest.mark.parametrize("sizes", [(33, 31), (64, 0), (0, 64)])
def test_groups_of_other_sizes_than_the_config_says(tmp_path: Path, sizes: tuple[int, int]) -> None:
    group_of = np.repeat(np.arange(2, dtype=np.int32), sizes)
    checkpoint = open_checkpoint(str(write(tmp_path, gptq(), change=put(".g_idx", group_of))))
    assert checkpoint.grouped(f"{MODULE}.weight") is None
    parts = gptq().store(WEIGHTS).parts
    codes = gptq_codes(parts[".qweight"])
    expected = (codes - 8) * parts[".scales"].T[:, group_of].astype(np.float32)
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), expected)


def gptq_codes(qweight: np.ndarray) -> np.ndarray:
    """(I / 8, O) int32 -> (O, I)"""
    codes = qweight[:, None] >> np.arange(0, 32, 4)[:, None] & 15
    return codes.reshape(-1, qweight.shape[1]).T.astype(np.float32)


def test_modules_that_gptqmodel_treats_differently(tmp_path: Path) -> None:
    of_up = {r"+:.*\.up_proj": {"bits": 8, "group_size": 16}, r"-:.*\.down_proj": {}}
    config = {"dynamic": of_up, "bits": 4, "group_size": 32}
    checkpoint = open_checkpoint(str(write(tmp_path, gptq(8, 16), config=config)))
    expected = gptq(8, 16).store(WEIGHTS).weights
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), expected)


def test_what_is_said_of_a_format_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    def moved(case: Case, file: str, values: Mapping[str, Any]) -> np.ndarray:
        folder = write(tmp_path / file, case)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / file).write_text(json.dumps(values))
        return open_checkpoint(str(folder)).read(f"{MODULE}.weight")

    of_gptq = {"bits": 8, "group_size": 16, "desc_act": False, "sym": True}
    values = moved(gptq(8, 16), "quantize_config.json", of_gptq)
    np.testing.assert_array_equal(values, gptq(8, 16).store(WEIGHTS).weights)
    of_awq = {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}
    values = moved(awq(16), "quant_config.json", of_awq)
    np.testing.assert_array_equal(values, awq(16).store(WEIGHTS).weights)
    of_modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    values = moved(fp8("tensor"), "hf_quant_config.json", of_modelopt)
    np.testing.assert_array_equal(values, fp8("tensor").store(WEIGHTS).weights)


@pytest.mark.parametrize(("packing", "case"), [("auto_gptq", gptq(4, 16)), ("auto_awq", awq(16))])
def test_auto_round_packs_as_others_do(tmp_path: Path, packing: str, case: Case) -> None:
    config = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}"}
    checkpoint = open_checkpoint(str(write(tmp_path, case, config=config)))
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), case.store(WEIGHTS).weights)


def test_groups_of_a_compressed_config_are_found_by_name(tmp_path: Path) -> None:
    of_others = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    of_up = {"targets": [r"re:.*\.up_proj$"], "weights": {"num_bits": 8, "group_size": 16}}
    config = {"config_groups": {"group_0": of_others, "group_1": of_up}}
    checkpoint = open_checkpoint(str(write(tmp_path, compressed(8, 16), config=config)))
    expected = compressed(8, 16).store(WEIGHTS).weights
    np.testing.assert_array_equal(checkpoint.read(f"{MODULE}.weight"), expected)


def test_experts_in_mxfp4_are_seen_as_they_are_stored(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = generator.integers(256, size=(3, 10, 2, 16), dtype=np.uint8)
    exponents = generator.integers(120, 130, size=(3, 10, 2), dtype=np.uint8)
    tensors = {f"{experts}_blocks": blocks, f"{experts}_scales": exponents}
    write_safetensors(tmp_path / "model.safetensors", tensors, {})
    config = LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors[experts].shape == (3, 10, 64)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([magnitudes, -magnitudes])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 10, 2, 32)
    expected = table[codes] * np.exp2(exponents.astype(float) - 127)[..., None]
    expected = expected.reshape(3, 10, 64)
    np.testing.assert_array_equal(checkpoint.read(experts), expected)
    np.testing.assert_array_equal(checkpoint.read(experts, slice(1, 3)), expected[1:3])
    grouped = checkpoint.grouped(experts)
    assert grouped is not None
    assert grouped.layout.scale_dtype == "bfloat16"
    np.testing.assert_array_equal(grouped.read(slice(15, 20)).codes, codes[1, 5:].reshape(5, 64))

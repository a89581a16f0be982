"""Quantized checkpoints, written from the formats' specifications: nothing here is shared with the
readers.

`quantize_checkpoint("gptq", folder, out)` makes two folders of a tiny float checkpoint: one in the
format, and one with the floats that the format stands for. Weights are rounded to nearest; what a
quantizer would do better doesn't matter here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from octavo.weights.safetensors_file import SafetensorsFile
from octavo.weights.safetensors_writer import write_safetensors

Parts = dict[str, np.ndarray]


class Stored(NamedTuple):
    """parts: by what follows the module's name (".qweight"). weights: (O, I), what they mean."""

    parts: Parts
    weights: np.ndarray


@dataclass(frozen=True)
class Case:
    """config: the quantization_config. store: from the floats of a matrix (O, I)."""

    config: Mapping[str, Any]
    store: Callable[[np.ndarray], Stored]


def quantize_checkpoint(case: Case, source: Path, target: Path) -> tuple[Path, Path]:
    """Folders with the checkpoint `source` in this format, and as the floats that this means.

    Embeddings, heads, norms and biases stay as they are, as usual.
    """
    quantized, floats = target / "quantized", target / "floats"
    for folder in (quantized, floats):
        shutil.copytree(source, folder)
    file = SafetensorsFile(source / "model.safetensors")
    stored: Parts = {}
    plain: Parts = {}
    for name in file.tensors:
        values = file.read(name).astype(np.float32)
        plain[name] = stored[name] = values
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            parts, plain[name] = case.store(values)
            del stored[name]
            stored |= {f"{module}{suffix}": array for suffix, array in parts.items()}
    write_safetensors(quantized / "model.safetensors", stored, {"format": "pt"})
    write_safetensors(floats / "model.safetensors", plain, {"format": "pt"})
    path = quantized / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": dict(case.config)}
    path.write_text(json.dumps(config))
    return quantized, floats


# --- integers ---------------------------------------------------------------------------------


class _Codes(NamedTuple):
    codes: np.ndarray  # (O, I), 0 to 2 ** bits - 1
    scales: np.ndarray  # (O, groups) float32
    zeros: np.ndarray  # (O, groups) integers


def _integers(
    values: np.ndarray,
    bits: int,
    group_of: np.ndarray,
    *,
    is_symmetric: bool,
    dtype: Any = np.float16,
) -> _Codes:
    """Rounded to nearest. group_of: (I,)"""
    groups = group_of.max() + 1
    scales = np.zeros((len(values), groups), np.float32)
    zeros = np.full((len(values), groups), 1 << (bits - 1))
    codes = np.zeros(values.shape, np.int64)
    for group in range(groups):
        members = values[:, group_of == group]
        low, high = np.minimum(members.min(1), 0), np.maximum(members.max(1), 0)
        if is_symmetric:
            scale = np.maximum(-low, high) / ((1 << (bits - 1)) - 0.5)
        else:
            scale = (high - low) / ((1 << bits) - 1)
        scales[:, group] = scale = scale.astype(dtype).astype(np.float32)
        if not is_symmetric:
            zeros[:, group] = np.clip(np.round(-low / scale), 0, (1 << bits) - 1)
        exact = members / scale[:, None] + zeros[:, group, None]
        codes[:, group_of == group] = np.clip(np.round(exact), 0, (1 << bits) - 1)
    return _Codes(codes, scales, zeros)


def _weights(stored: _Codes, group_of: np.ndarray) -> np.ndarray:
    whole = (stored.codes - stored.zeros[:, group_of]) * stored.scales[:, group_of].astype(float)
    return whole.astype(np.float32)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """(R, n) -> (R, ceil(n * bits / 32)) int32: one stream of bits a row."""
    single = (codes[:, :, None] >> np.arange(bits)) & 1
    single = single.reshape(len(codes), -1)
    single = np.pad(single, ((0, 0), (0, -single.shape[1] % 32)))
    return np.packbits(single.astype(np.uint8), axis=1, bitorder="little").view("<i4")


def _side_by_side(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs) // (group if group > 0 else inputs)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    desc_act: bool = False,
    sym: bool = True,
    version: str | None = "gptq",
    has_zeros: bool = True,
    has_g_idx: bool = True,
) -> Case:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": desc_act,
        "sym": sym,
    }
    if version is not None:
        config["checkpoint_format"] = version

    def store(values: np.ndarray) -> Stored:
        inputs = values.shape[1]
        group_of = _side_by_side(inputs, group)
        if desc_act:  # inputs in order of their importance, which is any
            group_of = group_of[np.random.default_rng(inputs).permutation(inputs)]
        stored = _integers(values, bits, group_of, is_symmetric=sym)
        written = stored.zeros if version == "gptq_v2" else (stored.zeros - 1) % (1 << bits)
        parts = {
            ".qweight": np.ascontiguousarray(_words(stored.codes, bits).T),
            ".scales": np.ascontiguousarray(stored.scales.T).astype(np.float16),
        }
        if has_zeros:
            parts[".qzeros"] = _words(written.T, bits)
        if has_g_idx:
            parts[".g_idx"] = group_of.astype(np.int32)
        return Stored(parts, _weights(stored, group_of))

    return Case(config, store)


def awq(group: int = 32) -> Case:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: np.ndarray) -> np.ndarray:
        """(R, n) -> (R, n / 8) int32"""
        placed = codes.reshape(len(codes), -1, 8)[:, :, order].astype(np.uint32)
        shifted = placed << np.arange(0, 32, 4, dtype=np.uint32)
        return np.bitwise_or.reduce(shifted, axis=2).view(np.int32)

    def store(values: np.ndarray) -> Stored:
        group_of = _side_by_side(values.shape[1], group)
        stored = _integers(values, 4, group_of, is_symmetric=False)
        parts = {
            ".qweight": words(stored.codes.T),
            ".qzeros": words(stored.zeros.T),
            ".scales": np.ascontiguousarray(stored.scales.T).astype(np.float16),
        }
        return Stored(parts, _weights(stored, group_of))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Case(config, store)


def compressed(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    packed: bool = True,
    dtype: Any = ml_dtypes.bfloat16,
) -> Case:
    """group: -1 for one scale an output."""

    def store(values: np.ndarray) -> Stored:
        group_of = _side_by_side(values.shape[1], group)
        stored = _integers(values, bits, group_of, is_symmetric=symmetric, dtype=dtype)
        signed = stored.codes - (1 << (bits - 1))
        zeros = stored.zeros - (1 << (bits - 1))
        parts = {".weight_scale": stored.scales.astype(dtype)}
        if packed:
            parts[".weight_packed"] = _words(stored.codes, bits)
            parts[".weight_shape"] = np.array(values.shape, np.int64)
            if not symmetric:
                packed_zeros = _words(stored.zeros.T, bits).T
                parts[".weight_zero_point"] = np.ascontiguousarray(packed_zeros)
        else:
            parts[".weight"] = signed.astype(np.int8)
            if not symmetric:
                parts[".weight_zero_point"] = zeros.astype(np.int8)
        return Stored(parts, _weights(stored, group_of))

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    if group > 0:
        weights |= {"strategy": "group", "group_size": group}
    else:
        weights["strategy"] = "channel"
    return Case(_compressed_config(weights, "pack-quantized" if packed else "int-quantized"), store)


def _compressed_config(weights: Mapping[str, Any], format: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def bitsandbytes_int8() -> Case:
    def store(values: np.ndarray) -> Stored:
        largest = np.abs(values).max(1)
        codes = np.round(values / largest[:, None] * 127)
        weights = (codes * largest[:, None].astype(float) / 127).astype(np.float32)
        parts = {".weight": codes.astype(np.int8), ".SCB": largest}
        parts[".weight_format"] = np.array(0, np.uint8)
        return Stored(parts, weights)

    return Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, store)


# --- floats of few bits -------------------------------------------------------------------------


def fp8(shape: str, *, block: tuple[int, int] = (32, 32), method: str = "fp8") -> Case:
    """shape: "tensor", "output" or "block". method: or "compressed-tensors"."""

    def store(values: np.ndarray) -> Stored:
        outputs, inputs = values.shape
        rows, columns = {"tensor": (outputs, inputs), "output": (1, inputs)}.get(shape, block)
        of_rows, of_columns = np.arange(outputs) // rows, np.arange(inputs) // columns
        scales = np.zeros((of_rows[-1] + 1, of_columns[-1] + 1), np.float32)
        np.maximum.at(scales, (of_rows[:, None], of_columns), np.abs(values) / 448)
        whole = scales[of_rows[:, None], of_columns]
        codes = (values / whole).astype(ml_dtypes.float8_e4m3fn)
        weights = codes.astype(np.float32) * whole
        name = ".weight_scale_inv" if shape == "block" and method == "fp8" else ".weight_scale"
        return Stored(
            {".weight": codes, name: scales.reshape(()) if shape == "tensor" else scales}, weights
        )

    if method == "fp8":
        config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        if shape == "block":
            config["weight_block_size"] = list(block)
        return Case(config, store)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": shape}
    if shape == "block":
        weights["block_structure"] = list(block)
    return Case(_compressed_config(weights, "float-quantized"), store)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def fp4(kind: str, method: str = "compressed-tensors") -> Case:
    """kind: "mxfp4" or "nvfp4". method: or "modelopt"."""
    group = 32 if kind == "mxfp4" else 16

    def store(values: np.ndarray) -> Stored:
        groups = values.reshape(len(values), -1, group)
        wanted = np.abs(groups).max(2) / 6
        parts: Parts = {}
        if kind == "mxfp4":
            exponents = np.floor(np.log2(wanted))
            parts[".weight_scale"] = (exponents + 127).astype(np.uint8)
            scales = np.exp2(exponents).astype(np.float32)
        else:
            factor = np.float32(wanted.max() / 448)
            small = (wanted / factor).astype(ml_dtypes.float8_e4m3fn)
            scales = small.astype(np.float32) * factor
            parts[".weight_scale"] = small
            if method == "modelopt":
                parts[".weight_scale_2"] = factor.reshape(())
            else:
                parts[".weight_global_scale"] = (1 / factor).reshape(1)
        codes = _nearest(groups / np.maximum(scales, 1e-9)[:, :, None], _E2M1)
        weights = (_E2M1[codes] * scales[:, :, None]).reshape(values.shape)
        codes = codes.reshape(values.shape)
        name = ".weight" if method == "modelopt" else ".weight_packed"
        parts[name] = codes[:, ::2] | codes[:, 1::2] << 4
        return Stored(parts, weights)

    if method == "modelopt":
        return Case({"quant_method": "modelopt", "quant_algo": "NVFP4"}, store)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    weights["strategy"] = "group" if kind == "mxfp4" else "tensor_group"
    return Case(_compressed_config(weights, f"{kind}-pack-quantized"), store)


def bitsandbytes_4bit(kind: str, *, is_nested: bool, block: int = 64) -> Case:
    """kind: "nf4" or "fp4"."""
    table = np.array(NF4 if kind == "nf4" else FP4, np.float32)

    def store(values: np.ndarray) -> Stored:
        flat = values.reshape(-1)
        of_blocks = np.arange(flat.size) // block
        largest = np.zeros(of_blocks[-1] + 1, np.float32)
        np.maximum.at(largest, of_blocks, np.abs(flat))
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32"}
        state["shape"] = list(values.shape)
        parts: Parts = {".weight.absmax": largest}
        if is_nested:
            nested_block, offset = 16, np.float32(largest.mean())
            nested = np.linspace(-1, 1, 256, dtype=np.float32)
            of_nested = np.arange(largest.size) // nested_block
            scales = np.zeros(of_nested[-1] + 1, np.float32)
            np.maximum.at(scales, of_nested, np.abs(largest - offset))
            codes = _nearest((largest - offset) / np.maximum(scales[of_nested], 1e-9), nested)
            largest = nested[codes] * scales[of_nested] + offset
            parts |= {".weight.absmax": codes, ".weight.nested_absmax": scales}
            parts[".weight.nested_quant_map"] = nested
            state |= {"nested_blocksize": nested_block, "nested_offset": float(offset)}
        codes = _nearest(flat / largest[of_blocks], table)
        weights = (table[codes] * largest[of_blocks]).reshape(values.shape)
        parts[".weight"] = (codes[::2] << 4 | codes[1::2]).reshape(-1, 1)
        parts[".weight.quant_map"] = table
        text = json.dumps(state).encode()
        parts[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
        return Stored(parts, weights)

    return Case({"quant_method": "bitsandbytes", "load_in_4bit": True}, store)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_SIXTHS = (0, 1 / 32, 4, 6, 2, 3, 1, 1.5)
FP4 = tuple(sign * sixths / 6 for sign in (1, -1) for sixths in _FP4_SIXTHS)


def _all_cases() -> Iterator[tuple[str, Case]]:
    yield "gptq, 4 bits", gptq()
    yield "gptq, 2 bits", gptq(2, sym=False)
    yield "gptq, 3 bits", gptq(3)
    yield "gptq, 8 bits", gptq(8, 64)
    yield "gptq, 8 bits, asymmetric", gptq(8, 64, sym=False)
    yield "gptq, desc_act", gptq(desc_act=True)
    yield "gptq, desc_act, asymmetric", gptq(desc_act=True, sym=False)
    yield "gptq, one group (QNT-01)", gptq(group=-1)
    yield "gptq, one group, desc_act (QNT-01)", gptq(group=-1, desc_act=True)
    yield "gptq v1, symmetric with zeros (QNT-03)", gptq(version=None)
    yield "gptq v1, symmetric without zeros (QNT-03)", gptq(has_zeros=False, has_g_idx=False)
    yield "gptq v1, asymmetric (QNT-03)", gptq(sym=False)
    yield "gptq v2, symmetric with zeros (QNT-03)", gptq(version="gptq_v2")
    yield "gptq v2, symmetric without zeros (QNT-03)", gptq(version="gptq_v2", has_zeros=False)
    yield "gptq v2, asymmetric (QNT-03)", gptq(version="gptq_v2", sym=False)
    yield "gptq, groups of 16", gptq(group=16)
    yield "gptq, groups of 8", gptq(group=8)
    yield "awq", awq()
    yield "awq, one group", awq(-1)
    yield "compressed-tensors W4A16", compressed()
    yield "compressed-tensors W4A16, asymmetric", compressed(symmetric=False)
    yield "compressed-tensors W4A16 by channel", compressed(group=-1)
    yield "compressed-tensors W3A16", compressed(3)
    yield "compressed-tensors W8A16", compressed(8, 32)
    yield "compressed-tensors W8A8", compressed(8, -1, packed=False)
    yield "compressed-tensors W8A8, asymmetric", compressed(8, -1, packed=False, symmetric=False)
    yield "compressed-tensors FP8 by channel", fp8("output", method="compressed-tensors")
    yield "compressed-tensors FP8 by blocks", fp8("block", method="compressed-tensors")
    yield "compressed-tensors NVFP4", fp4("nvfp4")
    yield "compressed-tensors MXFP4", fp4("mxfp4")
    yield "modelopt NVFP4", fp4("nvfp4", "modelopt")
    yield "fp8 by tensor", fp8("tensor")
    yield "fp8 by channel", fp8("output")
    yield "fp8 by blocks", fp8("block")
    yield "bitsandbytes int8", bitsandbytes_int8()
    yield "bitsandbytes NF4", bitsandbytes_4bit("nf4", is_nested=False)
    yield "bitsandbytes NF4, nested", bitsandbytes_4bit("nf4", is_nested=True)
    yield "bitsandbytes FP4", bitsandbytes_4bit("fp4", is_nested=False)


CASES = dict(_all_cases())

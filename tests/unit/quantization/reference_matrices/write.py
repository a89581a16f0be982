"""Writes the files of this folder: a random matrix in each format, by the library that defines it.

    python tests/unit/quantization/reference_matrices/write.py

with auto-gptq 0.7, autoawq 0.2, compressed-tensors 0.20 and bitsandbytes 0.50 installed, which the
tests do without. A file has the tensors of a module "linear", the matrix that the library itself
makes of them, "expected", and config.json's quantization_config in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
OUTPUTS, INPUTS = 20, 128
GROUP = 32


def main() -> None:
    weights = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    for name, settings in COMPRESSED.items():
        write_compressed(name, settings, weights)
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            write_4bit(kind, is_nested, weights)
    write_int8(weights)
    weights = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(1))
    for bits in (2, 3, 4, 8):
        write_gptq(f"gptq-w{bits}", bits, weights, torch.arange(INPUTS) // GROUP)
    scattered = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2)) // GROUP
    write_gptq("gptq-w4-desc-act", 4, weights, scattered)
    write_awq(weights)


def write(name: str, parts: dict[str, torch.Tensor], expected: torch.Tensor, config: Any) -> None:
    tensors = {f"linear.{key}": value.contiguous() for key, value in parts.items()}
    tensors["expected"] = expected.float().contiguous()
    metadata = {"quantization_config": json.dumps(config)}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


COMPRESSED: dict[str, dict[str, Any]] = {
    "ct-w4-group": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "ct-w4-group-asymmetric": {
        "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False,
    },
    "ct-w3-channel": {"num_bits": 3, "strategy": "channel"},
    "ct-w8-channel": {"num_bits": 8, "strategy": "channel", "format": "int-quantized"},
    "ct-w8-channel-asymmetric": {
        "num_bits": 8, "strategy": "channel", "symmetric": False, "format": "int-quantized",
    },
    "ct-w8-tensor": {"num_bits": 8, "strategy": "tensor", "format": "int-quantized"},
    "ct-fp8-tensor": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "format": "float-quantized",
    },
    "ct-fp8-channel": {
        "num_bits": 8, "type": "float", "strategy": "channel", "format": "float-quantized",
    },
    "ct-fp8-block": {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 64],
        "format": "float-quantized",
    },
    "ct-nvfp4": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn, "format": "nvfp4-pack-quantized",
    },
    "ct-mxfp4": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
        "scale_dtype": torch.uint8, "format": "mxfp4-pack-quantized",
    },
    "ct-mxfp8": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
        "scale_dtype": torch.uint8, "format": "mxfp8-quantized",
    },
}  # fmt: skip


def write_compressed(name: str, settings: dict[str, Any], weights: torch.Tensor) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    settings = dict(settings)
    format_name = settings.pop("format", "pack-quantized")
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = _ranges(weights, args)
    parts: dict[str, torch.Tensor] = {"weight": weights}
    factor = None
    if args.strategy == "tensor_group":
        factor = generate_gparam(weights.min(), weights.max())
        parts["weight_global_scale"] = factor
    scale, zero = calculate_qparams(low, high, args, global_scale=factor)
    parts["weight_scale"] = scale.float()
    if not args.symmetric:
        parts["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    stored = compressor.compress(parts, scheme)
    if factor is None:
        expected = compressor.decompress(stored, scheme)["weight"]
    else:  # which would be rounded to bfloat16
        values = unpack_fp4_from_uint8(stored["weight_packed"], OUTPUTS, INPUTS, torch.float32)
        scale = stored["weight_scale"].float()
        expected = dequantize(values, scale, args=args, global_scale=factor)
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    write(name, stored, expected, config)


def _ranges(weights: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest weights of what shares a scale, in the shape that scales have."""
    if args.strategy == "tensor":
        return weights.min().reshape(1), weights.max().reshape(1)
    if args.strategy == "channel":
        return weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    rows, columns = args.block_structure or (1, args.group_size)
    padded = torch.nn.functional.pad(weights, (0, -INPUTS % columns, 0, -OUTPUTS % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def write_4bit(kind: str, is_nested: bool, weights: torch.Tensor) -> None:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weights, blocksize=64, compress_statistics=is_nested, quant_type=kind
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    expected = functional.dequantize_4bit(codes, state)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    name = f"bnb-{kind}-nested" if is_nested else f"bnb-{kind}"
    write(name, {"weight": codes, **parts}, expected, config)


def write_int8(weights: torch.Tensor) -> None:
    from bitsandbytes import functional

    codes, largest, _ = functional.int8_vectorwise_quant(weights.half())
    expected = functional.int8_vectorwise_dequant(codes, largest)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    write("bnb-int8", parts, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def write_gptq(name: str, bits: int, weights: torch.Tensor, group_of: torch.Tensor) -> None:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    scales, zeros = _asymmetric(weights, bits, group_of)
    zeros = zeros.clamp(min=1)  # 0 doesn't survive this library's packing: it borrows
    layer = QuantLinear(bits, GROUP, INPUTS, len(weights), bias=False, weight_dtype=torch.float32)
    linear = torch.nn.Linear(INPUTS, len(weights), bias=False)
    linear.weight.data = (weights / scales[:, group_of] + zeros[:, group_of]).round()
    linear.weight.data = linear.weight.data.clamp(0, 2**bits - 1) - zeros[:, group_of]
    linear.weight.data *= scales[:, group_of]
    layer.pack(linear, scales.clone(), zeros.clone(), group_of.int())
    expected = layer(torch.eye(INPUTS)).T
    parts = {key: value for key, value in layer.state_dict().items() if value is not None}
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False}
    write(name, parts, expected, config)


def write_awq(weights: torch.Tensor) -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = _asymmetric(weights, 4, torch.arange(INPUTS) // GROUP)
    scales = scales.half().float()
    linear = torch.nn.Linear(INPUTS, len(weights), bias=False)
    linear.weight.data = weights.clamp(  # codes beyond 15 would run into their neighbours
        ((0 - zeros) * scales).repeat_interleave(GROUP, 1),
        ((15 - zeros) * scales).repeat_interleave(GROUP, 1),
    )
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    write("awq-w4", layer.state_dict(), expected, config)


def _asymmetric(
    weights: torch.Tensor, bits: int, group_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points, (O, groups) each."""
    groups = [weights[:, group_of == group] for group in range(INPUTS // GROUP)]
    low = torch.stack([group.amin(1) for group in groups], 1)
    high = torch.stack([group.amax(1) for group in groups], 1)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round()


if __name__ == "__main__":
    main()

"""Writes the files of this folder: a random matrix in each format, by the library that defines it.

    python tests/unit/quantization/reference_matrices/write.py

with compressed-tensors and bitsandbytes installed, which the tests do without. A file has the
tensors of a module "linear", the matrix that the library itself makes of them, "expected"
(20, 128), and config.json's quantization_config in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
OUTPUTS, INPUTS = 20, 128


def main() -> None:
    weights = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    for name, settings in COMPRESSED.items():
        write_compressed(name, settings, weights)
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            write_4bit(kind, is_nested, weights)
    write_int8(weights)


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


if __name__ == "__main__":
    main()

"""Which format a checkpoint is quantized in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.core.errors import ConfigError
from octavo.quantization import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp4,
    fp8,
    gptq,
)
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.source import Scheme, Source

Reader = Callable[[Scheme, Source], Iterator[QuantizedMatrix]]


def _auto_round_matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """AutoRound packs as GPTQ or as AWQ does."""
    packing = scheme.text("packing_format", "auto_round:auto_gptq")
    if scheme.text("data_type", "int") == "int":
        for method, matrices in (("gptq", gptq.matrices), ("awq", awq.matrices)):
            if method in packing:
                return matrices(scheme, source)
    raise scheme.error("packing_format", "that of GPTQ or AWQ, of integers (data_type),")


READERS: Mapping[str, Reader] = {
    "auto-round": _auto_round_matrices,
    "awq": awq.matrices,
    "bitsandbytes": bitsandbytes.matrices,
    "compressed-tensors": compressed_tensors.matrices,
    "fbgemm_fp8": fp8.matrices,
    "fp8": fp8.matrices,
    "gptq": gptq.matrices,
    "modelopt": fp8.modelopt_matrices,
    "mxfp4": fp4.mxfp4_matrices,
}
"""By config.json's quant_method."""

_ACTIVATION_SCALES = ("input_scale", "output_scale", "input_global_scale", "activation_scale")


def quantized_matrices(quantization: Mapping[str, Any], source: Source) -> list[QuantizedMatrix]:
    """All that are, of a checkpoint with this quantization_config. Reads what is small.

    Raises ConfigError for a format that is not read here, naming those that are, and for tensors
    that don't fit together.
    """
    method = str(quantization.get("quant_method") or "")
    reader = READERS.get(method)
    if reader is None and quantization.get("quant_algo"):  # as ModelOpt's own file has it
        reader = fp8.modelopt_matrices
    if reader is None:
        raise ConfigError(
            f"{source.name} is quantized with {method[:80] or 'no named method'!r}, which is not "
            f"read; {', '.join(READERS)} and GGUF files are. Use the model in one of these, or the "
            "unquantized model with --quantization int8 or int4"
        )
    return list(reader(Scheme(quantization), source))


def is_for_activations(tensor: str) -> bool:
    """Whether a tensor is only for rounding activations, which isn't done here."""
    return tensor.endswith(_ACTIVATION_SCALES)

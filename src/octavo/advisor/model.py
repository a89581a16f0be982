"""The model of a plan: from a hub id, a folder, a GGUF file or a config.json, not from weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.model_spec import ModelSpec, MoESpec
from octavo.core.weight_format import WEIGHT_FORMATS, WeightFormat, weight_format
from octavo.parallel.layout import NO_BLOCKS, Blocks
from octavo.simulator.model_configs import spec_from_config
from octavo.weights.gguf_config import hf_config
from octavo.weights.gguf_header import BLOCK_FORMATS, GGUFHeader
from octavo.weights.source import DEFAULT

OCTAVO_FAMILIES = (
    "bloom",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "internlm2",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Model types that Octavo runs; a test compares them with the registry of models, which is not
imported here.
"""

_TOLERANCE = 0.02
"""Of a checkpoint's bytes: what its arithmetic may be off before the plan says so."""
_SHORT_GROUP = 32
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_REASONING = re.compile(r"deepseek-r1|qwq|thinking|reason|gpt-oss|magistral", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """name: as launch commands have it. matrices, rest: formats of the layers' matrices, and of
    tables and vectors, as planned. stored: that of the checkpoint's matrices. quant_group: weights
    that share a scale; 0: none. stored_blocks: what of the checkpoint Octavo can't part between
    tensor-parallel ranks. stored_bytes: of the checkpoint's tensors, None if only its config is
    known. notes: what is odd about it.
    """

    name: str
    config: Mapping[str, Any]
    spec: ModelSpec
    matrices: WeightFormat
    rest: WeightFormat
    stored: WeightFormat
    quant_group: int = 0
    stored_blocks: Blocks = NO_BLOCKS
    stored_bytes: int | None = None
    is_gguf: bool = False
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures") or [self.spec.family]
        return str(named[0])

    @property
    def is_stored_as_planned(self) -> bool:
        return self.matrices == self.stored

    @property
    def blocks(self) -> Blocks:
        """Of weights as planned: what is quantized only when it is loaded is divided before."""
        return self.stored_blocks if self.is_stored_as_planned else NO_BLOCKS

    @property
    def is_quantized_checkpoint(self) -> bool:
        return self.is_stored_as_planned and self.stored.bits < 16

    @property
    def is_reasoning(self) -> bool:
        return _REASONING.search(self.name) is not None

    @property
    def num_experts(self) -> int:
        found = [one.mlp.num_experts for one in self.spec.layers if isinstance(one.mlp, MoESpec)]
        return max(found, default=0)

    @property
    def inner_size(self) -> int:
        """Of the MLP whose rows tensor parallelism divides; 0 without one."""
        for layer in self.spec.layers:
            if layer.mlp is not None:
                mlp = layer.mlp.expert if isinstance(layer.mlp, MoESpec) else layer.mlp
                return mlp.inner_size
        return 0

    @property
    def weight_bytes(self) -> float:
        """Of all: as the checkpoint's headers say, where it is planned as it is stored."""
        if self.stored_bytes is not None and self.is_stored_as_planned:
            return self.stored_bytes
        return self.spec.weight_bytes(self.matrices, self.rest)

    def octavo_runs(self, *, is_gpu: bool) -> bool:
        """Whether Octavo has the family, and reads or makes the format on such a device."""
        if self.spec.family not in OCTAVO_FAMILIES:
            return False
        if self.is_gguf:
            return True
        if self.stored.name not in ("float32", "bfloat16", "float16"):
            return False
        return self.is_stored_as_planned or (not is_gpu and self.matrices.name in ("int8", "int4"))


def read_model(
    model: str,
    *,
    weights: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> PlannedModel:
    """model: "default", or one of those. weights: a format to plan with, None is as stored. name:
    for the commands, where `model` is only a config.json. Raises ConfigError, one sentence with the
    remedy.
    """
    if model == DEFAULT:
        from octavo.weights import default_model

        return _of_gguf(GGUFHeader(default_model.fetch()), name or DEFAULT, weights)
    path = Path(os.path.expanduser(model))
    if path.is_file() and path.suffix == ".gguf":
        return _of_gguf(GGUFHeader(path), name or model, weights)
    if path.is_file() and path.suffix == ".json":
        config = _json(path)
        return planned_from_config(config, name or _own_name(config), weights)
    if path.is_dir():
        return _of_folder(path, name or model, weights)
    if path.is_file():
        raise ConfigError(
            f"{path} is no model; pass a folder, a .gguf file, a config.json or a hub id (org/name)"
        )
    if model.startswith(("/", ".", "~")) or model.endswith(".json"):
        raise ConfigError(f"the model path {model} does not exist; check the path")
    from octavo.weights.hub_metadata import read_hub_gguf, read_hub_metadata

    if gguf := _HUB_GGUF.fullmatch(model):
        header = read_hub_gguf(gguf[1], gguf[2], revision=revision, token=token)
        return _of_gguf(header, name or model, weights)
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"there is no model {model!r}; pass a hub id (org/name), a folder, a .gguf file, or a "
            "config.json"
        )
    metadata = read_hub_metadata(model, revision=revision, token=token)
    stored = None if metadata.num_bytes is None else sum(metadata.num_bytes.values())
    return planned_from_config(metadata.config, name or model, weights, stored)


def _of_folder(path: Path, name: str, weights: str | None) -> PlannedModel:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the model folder {path} has no config.json; copy it from its repository"
        )
    stored = None
    if files := sorted(path.glob("*.safetensors")):
        stored = sum(map(_tensor_bytes, files))
    return planned_from_config(_json(path / "config.json"), name, weights, stored)


def _tensor_bytes(path: Path) -> int:
    """Of a safetensors file: all behind its header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def planned_from_config(
    config: Mapping[str, Any],
    name: str,
    weights: str | None = None,
    stored_bytes: int | None = None,
) -> PlannedModel:
    """Of a config.json. stored_bytes: of the checkpoint's tensors, if they are known."""
    spec = spec_from_config(config)
    stored, group = _stored_format(config)
    rest = weight_format(str(_text_config(config).get("torch_dtype") or _dtype(config)))
    if rest.bits > 16 and stored.bits < 16:
        rest = WEIGHT_FORMATS["bfloat16"]
    notes = []
    if stored_bytes is not None:
        expected = spec.weight_bytes(stored, rest)
        off = stored_bytes / expected - 1
        if abs(off) > _TOLERANCE:
            notes.append(
                f"the checkpoint's tensors are {stored_bytes / 1e9:.2f} GB, {off:+.1%} against the "
                f"{expected / 1e9:.2f} GB that config.json comes to: the files' size is used"
            )
    return _planned(
        name=name,
        config=config,
        spec=spec,
        stored=stored,
        rest=rest,
        quant_group=group,
        stored_blocks=_stored_blocks(config, stored, group),
        stored_bytes=stored_bytes,
        weights=weights,
        notes=tuple(notes),
    )


def _of_gguf(header: GGUFHeader, name: str, weights: str | None) -> PlannedModel:
    config = hf_config(header)
    spec = spec_from_config(config)
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.num_bytes
    total = sum(sizes.values())
    most = max(sizes, key=lambda kind: sizes[kind])
    # All tensors together, so that the parts of mixed formats (Q4_K_M) add up to the file.
    bits = 8 * total / spec.num_parameters
    known = weight_format({"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(most, most))
    stored = WeightFormat(known.name, bits, known.compute)
    return _planned(
        name=name,
        config=config,
        spec=spec,
        stored=stored,
        rest=stored,
        quant_group=0,
        stored_blocks=_gguf_blocks(header),
        stored_bytes=total,
        weights=weights,
        notes=(),
        is_gguf=True,
    )


def _planned(
    *, stored: WeightFormat, weights: str | None, quant_group: int, **others: Any
) -> PlannedModel:
    matrices = stored if weights in (None, "auto") else weight_format(str(weights))
    if matrices.name == stored.name:
        matrices = stored
    elif matrices.bits > stored.bits:
        raise ConfigError(
            f"--weights {weights} is wider than the {stored.name} that the checkpoint has; leave "
            "it out, or plan for the original model"
        )
    group = quant_group if matrices == stored else (128 if matrices.bits < 8 else 0)
    return PlannedModel(matrices=matrices, stored=stored, quant_group=group, **others)


def _stored_format(config: Mapping[str, Any]) -> tuple[WeightFormat, int]:
    """Of the layers' matrices, with how many weights share a scale (0: not in groups)."""
    quantization = config.get("quantization_config") or _text_config(config).get(
        "quantization_config"
    )
    if not isinstance(quantization, Mapping):
        return weight_format(_dtype(config)), 0
    method = str(quantization.get("quant_method", "")).lower()
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if method == "fp8":
        return WEIGHT_FORMATS["fp8"], int((quantization.get("weight_block_size") or [0])[0])
    if method == "mxfp4":
        return WEIGHT_FORMATS["mxfp4"], 32
    if method == "bitsandbytes":
        return WEIGHT_FORMATS["int4" if quantization.get("load_in_4bit") else "int8"], 0
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        group_of: Mapping[str, Any] = next(iter(groups.values()), {})
        weights = group_of.get("weights") or {}
        bits, group = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type") == "float":
            return WEIGHT_FORMATS["fp8" if bits == 8 else "nvfp4"], int(group or 0)
    if bits not in (4, 8):
        raise ConfigError(
            f"config.json: quantization_config {method!r} with {bits} bits is not known here; say "
            "the nearest format with --weights, on the original model's config.json"
        )
    return WEIGHT_FORMATS["int4" if bits == 4 else "int8"], max(0, int(group or 0))


def _stored_blocks(config: Mapping[str, Any], stored: WeightFormat, group: int) -> Blocks:
    """Octavo reads all groups as short ones, which have one scale (quantization/grouped.py)."""
    if stored.bits >= 16:
        return NO_BLOCKS
    quantization = config.get("quantization_config") or _text_config(config)["quantization_config"]
    short = min(group or _SHORT_GROUP, _SHORT_GROUP)
    return Blocks(short, short, are_scattered=bool(quantization.get("desc_act")))


def _gguf_blocks(header: GGUFHeader) -> Blocks:
    sizes = {
        tensor.name: BLOCK_FORMATS[tensor.type].elements
        for tensor in header.tensors.values()
        if len(tensor.shape) > 1
    }
    return Blocks(
        inner=max(sizes.values()),
        output=max((size for name, size in sizes.items() if "attn_output" in name), default=1),
    )


def _dtype(config: Mapping[str, Any]) -> str:
    """transformers 4 calls it torch_dtype, 5 dtype."""
    text = _text_config(config)
    for key in ("dtype", "torch_dtype"):
        for source in (config, text):
            if isinstance(value := source.get(key), str):
                return value.removeprefix("torch.")
    return "bfloat16"


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees or hears, its part that writes."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _own_name(config: Mapping[str, Any]) -> str:
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else "MODEL"


def _json(path: Path) -> Mapping[str, Any]:
    from octavo.weights.safetensors_folder import read_json_object

    return read_json_object(path)

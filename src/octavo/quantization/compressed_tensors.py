"""compressed-tensors, what llm-compressor writes and vLLM reads. Source:
https://github.com/vllm-project/compressed-tensors.

Which of its formats a matrix has shows in its tensors:

    weight_packed int32     integers of 1 to 8 bits, each row a stream of bits ("pack-quantized");
      weight_shape (2,)     the codes are the signed values plus 2 ** (bits - 1)
    weight int8             ("int-quantized", "naive-quantized")
    weight float8_e4m3fn    ("float-quantized", "naive-quantized", "mxfp8-quantized")
    weight_packed uint8     4-bit floats: NVFP4 with weight_global_scale, MXFP4 without

weight_scale has a shape of `scales.Scales`. weight_zero_point, where there is one: int8 of the same
shape, or packed like codes, each column a stream. weight_g_idx (I,) is the group of each input.
Activations are not rounded here, so what says how is left unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.bits import WORD_BITS, unpack
from octavo.quantization.fp4 import FP4Matrix
from octavo.quantization.fp8 import E4M3, FP8Matrix
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.scales import Scales, one_scale, scale_dtype
from octavo.quantization.source import MAX_SIZE, Part, Scheme, Source


def matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Raises ConfigError for sparse formats, and tensors that don't fit together."""
    sparsity = scheme.part("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise ConfigError(
            f"{source.name} leaves out zeros ({sparsity!r}), which is not read; use the model's "
            "dense version"
        )
    groups = _Groups(scheme)
    for name, spec in source.tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            weights = groups.weights_of(module)
            if spec.dtype == "uint8":
                yield _fp4_matrix(module, weights, source)
            else:
                yield IntegerMatrix(module, weights, source, is_packed=True)
        elif kind == "weight" and spec.dtype == "int8":
            yield IntegerMatrix(module, groups.weights_of(module), source, is_packed=False)
        elif kind == "weight" and spec.dtype == E4M3:
            yield _fp8_matrix(module, groups.weights_of(module), source)


class _Groups:
    """`config_groups`: how the weights of each module are quantized."""

    def __init__(self, scheme: Scheme) -> None:
        """Raises ConfigError for one without targets that can be looked for."""
        groups = scheme.part("config_groups")
        self._name = groups.name
        self._named: list[tuple[set[str], list[re.Pattern[str]], Scheme]] = []
        self._of_class: dict[str, Scheme] = {}
        for key in groups.values:
            group = groups.part(key)
            targets = group.values.get("targets")
            if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
                raise group.error("targets", "a list of strings")
            weights = group.part("weights")
            patterns = [
                group.expression("targets", target.removeprefix("re:"))
                for target in targets
                if target.startswith("re:")
            ]
            self._named.append((set(targets), patterns, weights))
            for target in targets:
                if target.isidentifier() and target[0].isupper():
                    self._of_class.setdefault(target, weights)

    def weights_of(self, module: str) -> Scheme:
        """By the first group that names it, or matches it by a regular expression, or else that is
        for a class of modules, preferably "Linear". Raises ConfigError if there is none.
        """
        for names, patterns, weights in self._named:
            if module in names or any(pattern.match(module) for pattern in patterns):
                return weights
        of_class = self._of_class.get("Linear") or next(iter(self._of_class.values()), None)
        if of_class is None:
            raise ConfigError(
                f"config.json: none of {self._name} is for {module!r}, which is quantized; fetch "
                "the model again"
            )
        return of_class


def _group_size(weights: Scheme) -> int | None:
    """Inputs that share a scale; None for all of a row."""
    size = weights.integer("group_size", -1, range(-1, MAX_SIZE + 1))
    return size if size > 0 else None


def _fp4_matrix(module: str, weights: Scheme, source: Source) -> FP4Matrix:
    weights.integer("num_bits", 4, (4,))
    packed = Part(source, f"{module}.weight_packed", ("uint8",))
    divisor = f"{module}.weight_global_scale"
    is_nvfp4 = divisor in source.tensors
    return FP4Matrix(
        f"{module}.weight",
        source,
        packed,
        f"{module}.weight_scale",
        group=16 if is_nvfp4 else 32,
        factor=1 / one_scale(source, divisor) if is_nvfp4 else None,
        parts=(divisor,) if is_nvfp4 else (),
    )


def _fp8_matrix(module: str, weights: Scheme, source: Source) -> FP8Matrix:
    block = weights.block("block_structure")
    if block is None and (size := _group_size(weights)) is not None:
        block = 1, size
    return FP8Matrix(f"{module}.weight", f"{module}.weight_scale", source, block)


class IntegerMatrix(QuantizedMatrix):
    """weights: what the config says of them. is_packed: into words; otherwise each takes a byte."""

    def __init__(self, module: str, weights: Scheme, source: Source, *, is_packed: bool) -> None:
        bits = weights.integer("num_bits", 8, range(1, 9)) if is_packed else 8
        if is_packed:
            self._weight = Part(source, f"{module}.weight_packed", ("int32",))
            shape = Part(source, f"{module}.weight_shape", ("int64", "int32"), (2,)).read()
            outputs, inputs = (int(n) for n in shape)
            parts = [self._weight.name, f"{module}.weight_shape"]
            needed = (outputs, -(-inputs * bits // WORD_BITS))
        else:
            self._weight = Part(source, f"{module}.weight", ("int8",))
            outputs, inputs = self._weight.shape if len(self._weight.shape) == 2 else (0, 0)
            parts = [self._weight.name]
            needed = (outputs, inputs)
        if self._weight.shape != needed or min(outputs, inputs) < 1:
            raise ConfigError(
                f"{source.name}: tensor {self._weight.name!r} is {list(self._weight.shape)}, and "
                f"with {bits} bits a weight {list(needed)} is expected; fetch the model again"
            )
        self._is_packed = is_packed
        self._scales = Scales(
            source, f"{module}.weight_scale", (outputs, inputs), group=_group_size(weights)
        )
        parts.append(self._scales.part.name)
        group, group_of = self._scales.group, None
        groups = -(-inputs // group)
        self._zeros: Part | None = None
        if (name := f"{module}.weight_zero_point") in source.tensors:
            packed = (-(-outputs * bits // WORD_BITS), groups)
            plain = ((outputs, groups), (outputs * groups,), (1, 1), (1,), ())
            shapes = {"int32": (packed,), "int8": plain if groups == 1 else plain[:1]}
            stored = str(source.tensors[name].dtype)
            self._zeros = Part(source, name, tuple(shapes), *shapes.get(stored, ()))
            parts.append(name)
        if (name := f"{module}.weight_g_idx") in source.tensors:
            indices = Part(source, name, ("int32", "int64"), (inputs,))
            parts.append(name)
            group_of = _groups_of_inputs(indices, groups, source)
        super().__init__(
            source,
            f"{module}.weight",
            (outputs, inputs),
            f"compressed-tensors int{bits}",
            tuple(parts),
            scale_dtype=scale_dtype(self._scales.part),
            group=group,
            bits=bits,
            group_of=group_of,
        )

    def codes(self, rows: slice) -> np.ndarray:
        stored = self._weight.read(rows)
        if self._is_packed:
            return unpack(stored, self._bits)[:, : self.inputs]
        return stored.view(np.uint8) ^ np.uint8(128)

    def scales(self, rows: slice) -> np.ndarray:
        return self._scales.read(rows)

    def zeros(self, rows: slice) -> np.ndarray | None:
        if self._zeros is None:
            return None
        first, last, _ = rows.indices(self.shape[0])
        if self._zeros.dtype == "int8":
            stored = self._zeros.read()
            wide = stored.astype(np.int16) + self._middle
            if stored.size == 1:
                return np.full((last - first, 1), wide.reshape(()))
            return wide.reshape(self.shape[0], -1)[rows]
        block = first // WORD_BITS  # so many outputs take whole words
        words = self._zeros.read(slice(block * self._bits, -(-last // WORD_BITS) * self._bits))
        return unpack(words.T, self._bits)[:, first - block * WORD_BITS :][:, : last - first].T


def _groups_of_inputs(indices: Part, groups: int, source: Source) -> np.ndarray | None:
    group_of = indices.read().astype(np.int64)
    if (group_of == -1).all():  # so it says that groups are side by side
        return None
    if not ((group_of >= 0) & (group_of < groups)).all():
        raise ConfigError(
            f"{source.name}: tensor {indices.name!r} names groups beyond the {groups} that there "
            "are; fetch the model again"
        )
    return group_of

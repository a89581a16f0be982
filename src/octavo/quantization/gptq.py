"""GPTQ: 2, 3, 4 or 8 bits, with a scale and a zero point a group. Source: arXiv 2210.17323, and the
tensors that AutoGPTQ and GPTQModel write.

    qweight (I * bits / 32, O)        int32: codes, each column a stream of bits
    qzeros  (groups, O * bits / 32)   int32: zero points, each row a stream of bits
    scales  (groups, O)               float
    g_idx   (I,)                      int32: the group of each input; desc_act scatters them

    weight[o, i] = scales[g, o] * (code[i, o] - zero[g, o]),  g = g_idx[i]

The first version of the format stores zero - 1, in as many bits: zero point 0 becomes all ones.
Symmetric matrices have one zero point in the middle, and some come without qzeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.bits import WORD_BITS, unpack
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.scales import scale_dtype
from octavo.quantization.source import FLOATS, MAX_SIZE, Part, Scheme, Source

_BITS = (2, 3, 4, 8)
_STORES_ZERO_LESS_1 = {"gptq": True, "gptq_v2": False}


def matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Raises ConfigError for layouts of other kernels, and tensors that don't fit together."""
    version = scheme.text("checkpoint_format", "") or scheme.text("format", "") or "gptq"
    if version not in _STORES_ZERO_LESS_1 or scheme.flag("is_marlin_format"):
        raise ConfigError(
            f"{source.name} is GPTQ in the layout of one GPU kernel ({version!r}); Octavo reads "
            f"{' and '.join(_STORES_ZERO_LESS_1)}: use the model's version in one of these"
        )
    exceptions = list(_exceptions(scheme))
    for name in source.tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            its = (changed for pattern, changed in exceptions if pattern.match(module))
            yield GPTQMatrix(module, next(its, scheme), source, version)


def _exceptions(scheme: Scheme) -> Iterator[tuple[re.Pattern[str], Scheme]]:
    """GPTQModel's `dynamic`: a mapping from regular expressions for modules, marked by "+:", to
    keys that differ for them.
    """
    for pattern, changed in scheme.part("dynamic").values.items():
        if pattern.startswith("-:") or not isinstance(changed, Mapping):
            continue  # not quantized, so it has no qweight
        differing = Scheme({**scheme.values, **changed}, f"{scheme.name}.dynamic")
        yield scheme.expression("dynamic", pattern.removeprefix("+:")), differing


class GPTQMatrix(QuantizedMatrix):
    def __init__(self, module: str, scheme: Scheme, source: Source, version: str) -> None:
        bits = scheme.integer("bits", 4, _BITS)
        self._qweight = Part(source, f"{module}.qweight", ("int32",))
        if len(self._qweight.shape) != 2 or self._qweight.shape[0] * WORD_BITS % bits:
            raise ConfigError(
                f"{source.name}: tensor {self._qweight.name!r} of {list(self._qweight.shape)} "
                f"holds no whole rows of {bits} bits; fetch the model again"
            )
        inputs, outputs = self._qweight.shape[0] * WORD_BITS // bits, self._qweight.shape[1]
        group = scheme.integer("group_size", 128, range(-1, MAX_SIZE + 1))
        group = inputs if group <= 0 else min(group, inputs)
        groups = -(-inputs // group)
        self._scales = Part(source, f"{module}.scales", FLOATS, (groups, outputs))
        parts = [self._qweight, self._scales]
        self._qzeros: Part | None = None
        if f"{module}.qzeros" in source.tensors:
            shape = (groups, -(-outputs * bits // WORD_BITS))
            self._qzeros = Part(source, f"{module}.qzeros", ("int32",), shape)
            parts.append(self._qzeros)
        elif not scheme.flag("sym"):
            raise ConfigError(
                f"{source.name} has no tensor '{module}.qzeros', and config.json doesn't say that "
                "its matrices are symmetric (sym); fetch the model again"
            )
        group_of = None
        if f"{module}.g_idx" in source.tensors:
            indices = Part(source, f"{module}.g_idx", ("int32", "int64"), (inputs,))
            parts.append(indices)
            group_of = indices.read().astype(np.int64)
            if not ((group_of >= 0) & (group_of < groups)).all():
                raise ConfigError(
                    f"{source.name}: tensor {indices.name!r} names groups beyond the {groups} that "
                    "there are; fetch the model again"
                )
        self._offset = int(_STORES_ZERO_LESS_1[version])
        super().__init__(
            source,
            f"{module}.weight",
            (outputs, inputs),
            f"GPTQ {bits}-bit",
            tuple(part.name for part in parts),
            scale_dtype=scale_dtype(self._scales),
            group=group,
            bits=bits,
            group_of=group_of,
        )

    def codes(self, rows: slice) -> np.ndarray:
        return unpack(self._qweight.read()[:, rows].T, self._bits)

    def scales(self, rows: slice) -> np.ndarray:
        return self._scales.read()[:, rows].T.astype(np.float32)

    def zeros(self, rows: slice) -> np.ndarray | None:
        if self._qzeros is None:
            return None
        first, last, _ = rows.indices(self.shape[0])
        block = first // WORD_BITS  # so many outputs take whole words
        words = self._qzeros.read()[:, block * self._bits : -(-last // WORD_BITS) * self._bits]
        stored = unpack(words, self._bits)[:, first - block * WORD_BITS :][:, : last - first]
        return (stored.T.astype(np.int16) + self._offset) & ((1 << self._bits) - 1)

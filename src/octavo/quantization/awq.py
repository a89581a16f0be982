"""AWQ: 4 bits, with a scale and a zero point a group. Source: arXiv 2306.00978, and the tensors of
AutoAWQ's "gemm" version.

    qweight (I, O / 8)        int32: codes of 8 outputs a word
    qzeros  (groups, O / 8)   int32: zero points, likewise
    scales  (groups, O)       float

    weight[o, i] = scales[i / group, o] * (code[i, o] - zero[i / group, o])

A word's eight values are not in the order of their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.core.errors import ConfigError
from octavo.quantization.matrix import QuantizedMatrix
from octavo.quantization.scales import scale_dtype
from octavo.quantization.source import FLOATS, MAX_SIZE, Part, Scheme, Source

_PER_WORD = 8
_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of a word's values, from its lowest bits on."""


def matrices(scheme: Scheme, source: Source) -> Iterator[QuantizedMatrix]:
    """Raises ConfigError for layouts of other kernels, and tensors that don't fit together."""
    version = scheme.text("version", "gemm")
    if version != "gemm":
        raise ConfigError(
            f"{source.name} is AWQ in the layout of one GPU kernel ({version!r}); Octavo reads "
            "'gemm', which nearly all AWQ models are: use the model's version in that"
        )
    scheme.integer("bits", 4, (4,))
    for name in source.tensors:
        if name.endswith(".qweight"):
            yield AWQMatrix(name.removesuffix(".qweight"), scheme, source)


class AWQMatrix(QuantizedMatrix):
    def __init__(self, module: str, scheme: Scheme, source: Source) -> None:
        self._qweight = Part(source, f"{module}.qweight", ("int32",))
        if len(self._qweight.shape) != 2:
            raise ConfigError(
                f"{source.name}: tensor {self._qweight.name!r} of {list(self._qweight.shape)} is "
                "no matrix; fetch the model again"
            )
        inputs, words = self._qweight.shape
        group = scheme.integer("group_size", 128, range(-1, MAX_SIZE + 1))
        group = inputs if group <= 0 else min(group, inputs)
        groups = -(-inputs // group)
        self._scales = Part(source, f"{module}.scales", FLOATS, (groups, words * _PER_WORD))
        parts = [self._qweight, self._scales]
        self._qzeros: Part | None = None
        if f"{module}.qzeros" in source.tensors:
            self._qzeros = Part(source, f"{module}.qzeros", ("int32",), (groups, words))
            parts.append(self._qzeros)
        elif scheme.values.get("zero_point") is not False:
            raise ConfigError(
                f"{source.name} has no tensor '{module}.qzeros', and config.json doesn't say that "
                "its matrices do without (zero_point: false); fetch the model again"
            )
        super().__init__(
            source,
            f"{module}.weight",
            (words * _PER_WORD, inputs),
            "AWQ 4-bit",
            tuple(part.name for part in parts),
            scale_dtype=scale_dtype(self._scales),
            group=group,
            bits=4,
        )

    def codes(self, rows: slice) -> np.ndarray:
        return self._outputs(self._qweight, rows)

    def scales(self, rows: slice) -> np.ndarray:
        return self._scales.read()[:, rows].T.astype(np.float32)

    def zeros(self, rows: slice) -> np.ndarray | None:
        return None if self._qzeros is None else self._outputs(self._qzeros, rows)

    def _outputs(self, part: Part, rows: slice) -> np.ndarray:
        """(rows of `part`, O / 8) words -> (outputs, rows of `part`) uint8."""
        first, last, _ = rows.indices(self.shape[0])
        word = first // _PER_WORD
        words = np.ascontiguousarray(part.read()[:, word : -(-last // _PER_WORD)].T)
        values = np.empty((len(words), _PER_WORD, words.shape[1]), np.uint8)
        for place, output in enumerate(_OUTPUTS):
            values[:, output] = words >> 4 * place & 15
        return values.reshape(-1, words.shape[1])[first - word * _PER_WORD :][: last - first]

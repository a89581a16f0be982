"""Tables of positions: from a config's rope parameters to cosines and sines, and factors of
queries.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError, InvariantError
from octavo.ops import Array


class PositionTable(ABC):
    """For the op `rotary`."""

    def __init__(self) -> None:
        self._array: Array | None = None

    @abstractmethod
    def compute(self, num_positions: int) -> np.ndarray:
        """(num_positions, R) float32."""

    @property
    def array(self) -> Array:
        if self._array is None:
            raise InvariantError("a table of positions is used before it is loaded")
        return self._array

    @array.setter
    def array(self, value: Array) -> None:
        self._array = value


class RopeTable(PositionTable):
    """Cosines and sines of every position, for layers that share their rope parameters.

    parameters: a config's `rope_parameters` (or `rope_scaling`) with `rope_theta`; the type is
    under "rope_type" or "type". context: the config's max_position_embeddings.
    size: values of a head that turn, R; not all with a "partial_rotary_factor" below 1.
    max_position: tokens that the scaling reaches. Raises ConfigError for an unknown type, or one
    whose parameters are missing or not positive numbers.
    """

    def __init__(self, head_dim: int, parameters: Mapping[str, Any], context: int) -> None:
        super().__init__()
        self.size = _rotated(head_dim, parameters)
        self._parameters = _Parameters(self.size, parameters, context)
        self.kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if self.kind not in _FREQUENCIES:
            known = ", ".join(_FREQUENCIES)
            raise ConfigError(f"rope type {self.kind!r} is not built yet; types that are: {known}")
        self.max_position = _max_position(self.kind, self._parameters)
        self.frequencies(self.max_position)  # a bad parameter is found before weights are read

    def frequencies(self, num_positions: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies (R / 2,) float32, and the factor on cosines and sines."""
        return _FREQUENCIES[self.kind](self._parameters, num_positions)

    def compute(self, num_positions: int) -> np.ndarray:
        """(num_positions, R) float32: R / 2 cosines, then R / 2 sines.

        In float32 throughout, as models are trained, though angles of far positions lose digits.
        """
        inverse, attention_factor = self.frequencies(num_positions)
        angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return table * np.float32(attention_factor)


class Temperature(PositionTable):
    """Factors of queries, which sharpen attention from far positions p on:
    1 + weight * ln(1 + floor((p + 1) / length)). As a table of cosines without sines, so that
    rotating multiplies. Source: Llama 4's module in transformers.
    """

    def __init__(self, head_dim: int, weight: float, length: float) -> None:
        super().__init__()
        self.size = head_dim
        self._weight = weight
        self._length = length

    def compute(self, num_positions: int) -> np.ndarray:
        positions = np.arange(1, num_positions + 1, dtype=np.float32)
        steps = np.log1p(np.floor(positions / np.float32(self._length)))
        table = np.zeros((num_positions, self.size), np.float32)
        table[:, : self.size // 2] = (1 + np.float32(self._weight) * steps)[:, None]
        return table


def _rotated(head_dim: int, parameters: Mapping[str, Any]) -> int:
    share = parameters.get("partial_rotary_factor", 1.0)
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    size = int(head_dim * share) if is_number and 0 < share <= 1 else 0
    if size < 2 or size % 2:
        raise ConfigError(
            f"partial_rotary_factor {share!r} of heads of {head_dim} must come to an even number of"
            " values; correct the model's config.json"
        )
    return size


class _Parameters:
    """Checked access to a rope configuration. size: values of a head that turn."""

    def __init__(self, size: int, values: Mapping[str, Any], context: int) -> None:
        self.size = size
        self.context = context
        self._values = values

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ConfigError(
                f"rope parameter {key!r} must be a positive number, got {value!r}; correct the"
                " model's config.json"
            )
        return float(value)

    def optional(self, key: str) -> float | None:
        """None where the parameter is absent, null or 0."""
        return self.number(key) if self._values.get(key) else None

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._values.get(key, default))

    @property
    def theta(self) -> float:
        theta = self.number("rope_theta", 10000.0)
        if theta <= 1.0:
            raise ConfigError(f"rope_theta must be above 1, got {theta}; correct config.json")
        return theta

    @property
    def original_context(self) -> float:
        return self.number("original_max_position_embeddings", self.context)

    def factors(self, key: str) -> np.ndarray:
        given = self._values.get(key, ())
        is_list = isinstance(given, list) and all(isinstance(one, int | float) for one in given)
        factors = np.asarray(given if is_list else (), np.float32)
        if factors.shape != (self.size // 2,) or not (factors > 0).all():
            raise ConfigError(
                f"rope parameter {key!r} must be {self.size // 2} positive numbers, got"
                f" {given!r:.80}; correct the model's config.json"
            )
        return factors

    def inverse_frequencies(self, theta: float | None = None) -> np.ndarray:
        """theta ** (-2 e / R), (R / 2,) float32. Source: arXiv 2104.09864, section 3.2.2."""
        theta = self.theta if theta is None else theta
        exponents = np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size)
        return np.float32(1.0) / np.float32(theta) ** exponents


def _max_position(kind: str, parameters: _Parameters) -> int:
    if kind == "yarn":
        reached = parameters.original_context * _yarn_factor(parameters)
        return max(parameters.context, int(reached))
    if kind == "dynamic":
        return max(parameters.context, int(parameters.context * parameters.number("factor")))
    return parameters.context


def _default(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    return parameters.inverse_frequencies(), 1.0


def _linear(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """Positions squeezed by `factor`. Source: arXiv 2306.15595."""
    return parameters.inverse_frequencies() / np.float32(parameters.number("factor")), 1.0


def _dynamic(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """NTK-aware theta for the longest sequence served; unscaled if the context reaches that far.

    One theta for all lengths, since keys in the cache can't be rotated again when a sequence grows.
    Source: arXiv 2309.00071, section 3.3 and appendix A.
    """
    size, factor = parameters.size, parameters.number("factor")
    length = max(num_positions, parameters.context)
    stretch = factor * length / parameters.context - (factor - 1)
    theta = parameters.theta * stretch ** (size / (size - 2))
    return parameters.inverse_frequencies(theta), 1.0


def _llama3(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """Long waves squeezed by `factor`, short ones kept, a smooth passage between them.

    Source: arXiv 2407.21783, section 3.4.2 and the reference code of Llama 3.1.
    """
    inverse = parameters.inverse_frequencies().astype(np.float64)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise ConfigError(
            f"rope parameter 'high_freq_factor' ({high}) must be above 'low_freq_factor' ({low})"
        )
    turns = parameters.original_context * inverse / (2 * math.pi)  # within the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled = inverse * (kept + (1.0 - kept) / parameters.number("factor"))
    return scaled.astype(np.float32), 1.0


def _yarn_factor(parameters: _Parameters) -> float:
    return parameters.number("factor", parameters.context / parameters.original_context)


def _yarn(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """Source: arXiv 2309.00071, section 3.2 (ramp) and 3.4 (attention factor)."""
    size, factor = parameters.size, _yarn_factor(parameters)

    def dimension(turns: float) -> float:
        """Where a dimension makes this many turns within the original context."""
        wave = parameters.original_context / (turns * 2 * math.pi)
        return size * math.log(wave) / (2 * math.log(parameters.theta))

    low = dimension(parameters.number("beta_fast", 32.0))
    high = dimension(parameters.number("beta_slow", 1.0))
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    squeezed = np.clip((np.arange(size // 2) - low) / (high - low), 0.0, 1.0)
    inverse = parameters.inverse_frequencies().astype(np.float64)
    scaled = inverse * (1.0 - squeezed) + inverse / factor * squeezed
    return scaled.astype(np.float32), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: _Parameters, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.optional("attention_factor")
    if given is not None:
        return given
    top, bottom = parameters.optional("mscale"), parameters.optional("mscale_all_dim")
    if top is None or bottom is None:
        return magnitude(1.0)
    return magnitude(top) / magnitude(bottom)


def _longrope(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """A factor for each frequency, of two sets: one for sequences within the original context, one
    if any that is served reaches further, since keys in the cache can't be rotated again when a
    sequence grows. Source: arXiv 2402.13753, section 3, and the reference code of Phi-3.
    """
    original = parameters.original_context
    key = "long_factor" if num_positions > original else "short_factor"
    inverse = parameters.inverse_frequencies() / parameters.factors(key)
    given = parameters.optional("attention_factor")
    if given is not None:
        return inverse, given
    stretch = parameters.number("factor", parameters.context / original)
    return inverse, math.sqrt(1 + max(math.log(stretch), 0.0) / math.log(original))


def _freq_factors(parameters: _Parameters, num_positions: int) -> tuple[np.ndarray, float]:
    """Frequencies divided by the factors that GGUF files carry in `rope_freqs`."""
    return parameters.inverse_frequencies() / parameters.factors("factors"), 1.0


_FREQUENCIES: dict[str, Callable[[_Parameters, int], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "freq_factors": _freq_factors,
}

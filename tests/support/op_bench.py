"""What a case of an op needs: one implementation, its inputs, and how its results are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops import latent_attention, paged_attention
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.ops.native import _native
from octavo.ops.native.weight_formats import Format, format_of_numbers
from octavo.ops.native.weights import PackedWeight, pack_rows
from support.forward import fill, fill_latents, host_batch
from support.panels import random_weight, unpack

KV_DTYPES = ("float32", "bfloat16", "int8", "fp8", "int4", "int8,int4")
LATENT_KV_DTYPES = ("float32", "bfloat16", "int8", "fp8")
QUANTIZING = (
    Format("f32"),
    Format("bf16"),
    Format("f16"),
    Format("q8"),
    Format("q4"),
    Format("q4", "min"),
    Format("f8", None, "f32"),
)
"""What floats can be packed into; of the others checkpoints come with codes."""
WEIGHT_FORMATS = {
    str(format): format for format in map(format_of_numbers, _native.weight_formats())
}


def packed_in(name: str, values: np.ndarray) -> PackedWeight:
    """These values in a format of WEIGHT_FORMATS, or random ones of their shape."""
    format = WEIGHT_FORMATS[name]
    return (
        pack_rows(values, format) if format in QUANTIZING else random_weight(format, *values.shape)
    )


@dataclass
class Bench:
    """One implementation of one op, with inputs and comparisons.

    kv_dtype: of caches. weight_format: of matrices, of WEIGHT_FORMATS; None takes plain arrays.
    rounds_operands: of attention over bfloat16, whose instruction wants both in this format.
    is_latent: caches hold a token's values and keys as one latent vector.
    """

    backend: Backend
    op: Callable[..., Any]
    kv_dtype: str = "float32"
    weight_format: str | None = None
    rounds_operands: bool = False
    is_latent: bool = False
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def put(self, array: np.ndarray) -> Any:
        return self.backend.from_host(array.copy())

    def matrix(self, values: np.ndarray) -> tuple[Any, np.ndarray]:
        """A weight, and its values: what its format made of these, or others of about the size."""
        if self.weight_format is None:
            return self.put(values), values
        packed = packed_in(self.weight_format, values)
        return packed, unpack(packed)

    def activations(self, x: np.ndarray) -> np.ndarray:
        """What products with this format of weights make of theirs, float64."""
        return in_8_bits(x) if self.is_integer else x.astype(np.float64)

    @property
    def is_integer(self) -> bool:
        """Whether products with these weights quantize their activations."""
        return self.weight_format is not None and WEIGHT_FORMATS[self.weight_format].is_integer

    def cache(self, keys: np.ndarray, values: np.ndarray) -> KVLayer:
        """A layer's cache with these contents, (N, B, G, E) each."""
        if self.is_latent:
            return self.latents(*(array.reshape(*array.shape[:2], -1) for array in (values, keys)))
        num_blocks, block_size, *heads = keys.shape
        kv_format = KVFormat(self.kv_dtype)
        (layer,) = self.backend.allocate_kv(num_blocks, block_size, [tuple(heads)], kv_format)
        fill(self.backend, layer, keys, values)
        return layer

    def latents(self, vectors: np.ndarray, rotated: np.ndarray) -> KVLayer:
        """A layer's cache of latent vectors, (N, B, C) and (N, B, R)."""
        num_blocks, block_size, rank = vectors.shape
        shape = LatentShape(rank, rotated.shape[2])
        (layer,) = self.backend.allocate_kv(
            num_blocks, block_size, [shape], KVFormat(self.kv_dtype)
        )
        fill_latents(self.backend, layer, vectors, rotated)
        return layer

    def kept(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the cache's format makes of keys and values (..., E), float32."""
        return kept(self.kv_dtype, keys, values)

    def holds(self, cache: KVLayer, keys: np.ndarray, values: np.ndarray) -> None:
        """The cache has these contents, seen by what attention makes of every token before it, and
        of each token alone: how they are laid out is the backend's own affair.
        """
        if self.is_latent:
            parts = (array.reshape(*array.shape[:2], -1) for array in (values, keys))
            return self.holds_latents(cache, *parts)
        num_blocks, block_size, *heads = keys.shape
        num_tokens = num_blocks * block_size
        host = host_batch([([0] * num_tokens, range(num_blocks), 0, num_tokens)], block_size)
        context = self.backend.batch_context(host, (cache,))
        queries = self.normal(num_tokens, *heads)
        k, v = (array.reshape(num_tokens, *heads) for array in self.kept(keys, values))
        exact = 1e-6 if self.kv_dtype.endswith("int4") else 0  # which is rotated back
        for window, tolerance in ((None, self.attention_tolerance), (1, exact)):
            actual = self.backend.compile(paged_attention)(
                self.put(queries), cache, context, softmax_scale=1.0, window=window
            )
            expected = attention_by_formula(
                queries, k, v, scale=1.0, window=window, rounds_queries=self.rounds_attention
            )
            self.close(actual, expected, tolerance * max(1.0, float(np.abs(v).max())))

    def holds_latents(self, cache: KVLayer, vectors: np.ndarray, rotated: np.ndarray) -> None:
        """The same of latent vectors (N, B, C) and (N, B, R)."""
        num_blocks, block_size, rank = vectors.shape
        num_tokens = num_blocks * block_size
        host = host_batch([([0] * num_tokens, range(num_blocks), 0, num_tokens)], block_size)
        queries = [self.normal(num_tokens, 3, size) for size in (rank, rotated.shape[2])]
        whole = KEPT[self.kv_dtype](np.concatenate([vectors, rotated], axis=2)).reshape(
            num_tokens, -1
        )
        actual = self.backend.compile(latent_attention)(
            *map(self.put, queries),
            cache,
            self.backend.batch_context(host, (cache,)),
            softmax_scale=0.5,
        )
        self.close(actual, latent_attention_by_formula(*queries, whole, 0.5), 2e-5)

    @property
    def rounds_attention(self) -> bool:
        """Over this cache queries and probabilities are rounded to bfloat16 as well."""
        return self.rounds_operands and self.kv_dtype == "bfloat16"

    @property
    def attention_tolerance(self) -> float:
        """Of attention's results, in units of the largest value."""
        return 2**-9 if self.rounds_attention else 1e-5

    def close(self, actual: Any, expected: np.ndarray, tolerance: float = 1e-5) -> None:
        actual = actual if isinstance(actual, np.ndarray) else self.backend.to_host(actual)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def attention_by_formula(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    window: int | None,
    chunk: int | None = None,
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,
    sinks: np.ndarray | None = None,
    rounds_queries: bool = False,
) -> np.ndarray:
    """Of a sequence's last tokens: queries (T, H, E), keys and values (L, G, E), in float64.
    rounds_queries: to bfloat16, times `scale`.
    """
    if rounds_queries:
        queries, scale = KEPT["bfloat16"](queries * np.float32(scale)), 1.0
    count, heads, size = queries.shape
    length, kv_heads, _ = keys.shape
    q = queries.reshape(count, kv_heads, -1, size).transpose(1, 2, 0, 3)
    q, k, v = (  # contiguous: matmul is many times slower otherwise
        np.array(array, np.float64, order="C")
        for array in (q, keys.transpose(1, 2, 0)[:, None], values.transpose(1, 0, 2)[:, None])
    )
    weights = scale * (q @ k)  # kv head, query head of it, query, token
    if softcap is not None:
        weights = softcap * np.tanh(weights / softcap)
    position, token = np.arange(length - count, length)[:, None], np.arange(length)
    if slopes is not None:
        weights += np.reshape(slopes, (kv_heads, -1, 1, 1)) * (token - position)
    weights[..., (token > position) | (token <= position - (window or length))] = -np.inf
    if chunk is not None:
        weights[..., token < position // chunk * chunk] = -np.inf
    top = weights.max(-1, keepdims=True)
    weights -= top
    np.exp(weights, out=weights)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.reshape(kv_heads, -1, 1, 1) - top)
    weights /= total
    outputs: np.ndarray = (weights @ v).transpose(2, 0, 1, 3)
    return outputs.reshape(count, heads, size)


def latent_attention_by_formula(
    queries: np.ndarray, rotated: np.ndarray, vectors: np.ndarray, scale: float
) -> np.ndarray:
    """Of a sequence's last tokens: (T, H, C) and (T, H, R) over (L, C + R), in float64."""
    keys = vectors[:, None].astype(np.float64)
    whole = np.concatenate([queries, rotated], axis=2)
    weighted = attention_by_formula(whole, keys, keys, scale=scale, window=None)
    return weighted[..., : queries.shape[2]]


def in_8_bits(x: np.ndarray) -> np.ndarray:
    """Rows in groups of 32 int8 values with a scale each, as QuantizedRows of csrc/formats.h says,
    float64.
    """
    rows, size = x.shape
    padded = np.zeros((rows, -(-size // 32) * 32), np.float32)
    padded[:, :size] = x
    q, scales = _quantized(padded.reshape(rows, -1, 32))
    wide: np.ndarray = q.astype(np.float64) * scales
    return wide.reshape(rows, -1)[:, :size]


def _quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers in -127..127, and the scale of each vector, rounded as float32 arithmetic does."""
    largest = np.abs(vectors).max(-1, keepdims=True).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return np.rint(vectors.astype(np.float32) * inverse), largest / np.float32(127)


def _kept_in_int8(vectors: np.ndarray) -> np.ndarray:
    q, scales = _quantized(vectors)
    kept: np.ndarray = q * scales
    return kept


def _kept_in_fp8(vectors: np.ndarray) -> np.ndarray:
    rounded = np.clip(vectors, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return rounded.astype(np.float32)


def _kept_in_int4(vectors: np.ndarray) -> np.ndarray:
    """Rotated, with the value of largest magnitude at -8 and the others in steps up to 7."""
    rotated = _rotated(vectors.astype(np.float32))
    at = np.abs(rotated).argmax(-1, keepdims=True)
    top = np.take_along_axis(rotated, at, -1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top != 0, np.float32(-8) / top, np.float32(0))
    codes = np.minimum(np.rint(rotated * inverse), np.float32(7))
    return _rotated(codes * (top / np.float32(-8)))


def _rotated(vectors: np.ndarray) -> np.ndarray:
    """By the Hadamard matrix of each block, in csrc/kernels/rotation.h's order of additions."""
    size = vectors.shape[-1]
    block = min(size & -size, 128)
    x = vectors.reshape(-1, block)
    half = 1
    while half < block:
        pairs = x.reshape(-1, block // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([low + high, low - high], axis=2).reshape(-1, block)
        half *= 2
    scaled = x * (np.float32(1) / np.sqrt(np.float32(block)))
    return scaled.reshape(vectors.shape)


def kept(kv_dtype: str, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a cache of this format makes of keys and values (..., E), float32."""
    return KEPT[kv_dtype.split(",")[0]](keys), KEPT[kv_dtype.split(",")[-1]](values)


KEPT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda vectors: vectors,
    "bfloat16": lambda vectors: vectors.astype(ml_dtypes.bfloat16).astype(np.float32),
    "int8": _kept_in_int8,
    "fp8": _kept_in_fp8,
    "int4": _kept_in_int4,
}

Case = Callable[[Bench], None]
CASES: dict[str, dict[str, Case]] = {}
"""Op name → case name → case."""


def cases(op: str, **choices: list[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One case for each combination of `choices`."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            label = ", ".join(f"{k}={v}" for k, v in arguments.items())
            named = CASES.setdefault(op, {})

            def run(bench: Bench, arguments: dict[str, Any] = arguments) -> None:
                function(bench, **arguments)

            named[f"{function.__name__} {label}".strip()] = run
        return function

    return add

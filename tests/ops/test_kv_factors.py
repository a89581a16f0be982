"""QNT-14: an fp8 cache with scales, written and read by them."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import ops
from octavo.core.model_spec import KVFormat
from octavo.ops.backend import Backend
from octavo.ops.native.ops import ISAS
from support.backends import native_backend
from support.forward import fill, host_batch
from support.op_bench import KEPT, attention_by_formula

BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE = 16, 6, 4, 2, 32
LENGTH = BLOCK * BLOCKS
FACTORS = (0.25, 0.5)


class Cached:
    """A sequence whose keys and values have magnitudes of about 100."""

    def __init__(self, backend: Backend, dtype: str, factors: tuple[float, float] | None) -> None:
        rng = np.random.default_rng(3)
        self.backend = backend
        vectors = rng.uniform(-100, 100, (2, LENGTH, KV_HEADS, SIZE))
        self.keys, self.values = vectors.astype(np.float32)
        self.queries = rng.normal(0, 0.02, (LENGTH, HEADS, SIZE)).astype(np.float32)
        given = None if factors is None else [factors]
        (self.layer,) = backend.allocate_kv(
            BLOCKS, BLOCK, [(KV_HEADS, SIZE)], KVFormat(dtype), given
        )
        shape = (BLOCKS, BLOCK, KV_HEADS, SIZE)
        fill(backend, self.layer, self.keys.reshape(shape), self.values.reshape(shape))

    def attend(self, first: int, last: int, window: int | None = None) -> np.ndarray:
        host = host_batch([([0] * last, range(BLOCKS), first, last - first)], BLOCK)
        y = self.backend.compile(ops.paged_attention)(
            self.backend.from_host(self.queries[first:last]),
            self.layer,
            self.backend.batch_context(host, (self.layer,)),
            softmax_scale=SIZE**-0.5,
            window=window,
        )
        return self.backend.to_host(y)

    def exact(self) -> np.ndarray:
        return attention_by_formula(
            self.queries, self.keys, self.values, scale=SIZE**-0.5, window=None
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp8", "fp8,int8", "int8,fp8"])
def test_qnt_14_a_prompt_chunks_and_decoding(isa: str, dtype: str) -> None:
    cached = Cached(native_backend(isa), dtype, FACTORS)
    exact, whole = cached.exact(), cached.attend(0, LENGTH)
    assert np.linalg.norm(whole - exact) < 0.04 * np.linalg.norm(exact)
    chunks = [cached.attend(first, first + 24) for first in range(0, LENGTH, 24)]
    assert np.array_equal(np.concatenate(chunks), whole)
    assert np.array_equal(cached.attend(LENGTH - 1, LENGTH), whole[-1:])  # or after a prefix hit


@pytest.mark.parametrize("isa", ISAS)
def test_qnt_14_scales_say_what_is_stored(isa: str) -> None:
    """A query that sees only itself gives back its own value."""
    for factor in (0.5, 0.3, 4.0):
        cached = Cached(native_backend(isa), "fp8", (1.0, factor))
        seen = cached.attend(0, LENGTH, window=1).reshape(LENGTH, KV_HEADS, -1, SIZE)[:, :, 0]
        kept = KEPT["fp8"](cached.values / np.float32(factor)) * np.float32(factor)
        np.testing.assert_allclose(seen, kept, rtol=1e-6)
    saturated = Cached(native_backend(isa), "fp8", (1.0, 0.1)).attend(0, LENGTH, window=1)
    assert np.abs(saturated).max() == pytest.approx(44.8)


def test_without_scales_values_are_stored_as_they_are() -> None:
    backend = native_backend("portable")
    plain, ones = Cached(backend, "fp8", None), Cached(backend, "fp8", (1.0, 1.0))
    assert np.array_equal(plain.attend(0, LENGTH), ones.attend(0, LENGTH))

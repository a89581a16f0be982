"""A row's bits don't depend on the rows beside it, on chunks, on threads, nor on vectors' length:
what makes greedy text the same under load and on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from octavo import ops
from octavo.core.model_spec import KVFormat, LatentShape
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.ops.native.ops import ISAS
from octavo.ops.native.weights import pack_rows
from support.backends import KERNELS, backend_of, native_backend, torch_backend
from support.forward import fill, fill_latents, host_batch
from support.op_bench import KV_DTYPES, LATENT_KV_DTYPES, WEIGHT_FORMATS, packed_in

NUM_ROWS = 600
SIZES = (1, 2, 3, 5, 7, 14, 16, 33, 64, 129)


@cache
def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def normal(*shape: int) -> np.ndarray:
    return _normal(*shape).copy()


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


def assert_rows_stand_alone(backend: Backend, op: Callable[[Any], Any], x: np.ndarray) -> None:
    """op: of a batch of rows. Compared with batches of 1, 2, 3, 5, ... rows, first and last."""
    run = backend.compile(op)

    def rows_of(rows: np.ndarray) -> np.ndarray:
        return backend.to_host(run(backend.from_host(np.ascontiguousarray(rows))))

    together = rows_of(x)
    for size in SIZES:
        for rows in (slice(0, size), slice(len(x) - size, len(x))):
            assert np.array_equal(rows_of(x[rows]), together[rows]), f"{size} rows"


# --- alone and in company ------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(33, 77), (64, 960), (576, 576), (1536, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(backend: Backend, inputs: int, outputs: int, has_bias: bool) -> None:
    weight, bias = backend.from_host(normal(outputs, inputs)), backend.from_host(normal(outputs))
    assert_rows_stand_alone(
        backend,
        lambda x: ops.linear(x, weight, bias if has_bias else None),
        normal(NUM_ROWS, inputs),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 77), (576, 320)])
def test_linear_with_packed_weights(
    isa: str, weight_format: str, inputs: int, outputs: int
) -> None:
    weight = packed(weight_format, outputs, inputs)
    assert_rows_stand_alone(
        native_backend(isa), lambda x: ops.linear(x, weight), normal(NUM_ROWS, inputs)
    )


def packed(weight_format: str, outputs: int, inputs: int) -> Any:
    return packed_in(weight_format, normal(outputs, inputs))


@pytest.mark.parametrize("size", [33, 576])
def test_rms_norm(backend: Backend, size: int) -> None:
    weight = backend.from_host(normal(size))
    assert_rows_stand_alone(
        backend, lambda x: ops.rms_norm(x, weight, 1e-6), normal(NUM_ROWS, size)
    )


@pytest.mark.parametrize("size", [33, 576])
def test_layer_norm(backend: Backend, size: int) -> None:
    weight = backend.from_host(normal(size))
    assert_rows_stand_alone(
        backend, lambda x: ops.layer_norm(x, weight, weight, 1e-6), normal(NUM_ROWS, size)
    )


ACTIVATIONS = (
    ops.silu,
    ops.gelu,
    ops.gelu_tanh,
    ops.silu_mul,
    ops.gelu_tanh_mul,
    ops.clamped_silu_mul,
)


@pytest.mark.parametrize("op", ACTIVATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("size", [33, 96, 1536])
def test_activations(backend: Backend, op: Callable[[Any], Any], size: int) -> None:
    assert_rows_stand_alone(backend, op, normal(501, 2 * size))


class Mixture:
    """Experts behind their router, in a format of weights; None takes plain arrays."""

    def __init__(self, backend: Backend, weight_format: str | None) -> None:
        experts, size, inner = 24, 64, 48
        self.scores, self.gate_up, self.down, self.heads = (
            backend.from_host(normal(rows, columns))
            if weight_format is None
            else packed(weight_format, rows, columns)
            for rows, columns in (
                (experts, size),
                (experts * 2 * inner, size),
                (experts * size, inner),
                (4 * 32, size // 4),
            )
        )

    def __call__(self, x: Any) -> Any:
        by_head = ops.head_linear(x.reshape(-1, 4, 16), self.heads).reshape(-1, 128)
        routing = ops.route(ops.linear(x, self.scores), None, ops.Router(5))
        y = ops.experts(x, routing, self.gate_up, self.down, gate="silu_mul")
        return ops.add(ops.sigmoid_mul(y, ops.split_columns(x, (1, 63))[0]), ops.silu_mul(by_head))


def test_experts(backend: Backend) -> None:
    assert_rows_stand_alone(backend, Mixture(backend, None), normal(300, 64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_experts_with_packed_weights(isa: str, weight_format: str) -> None:
    backend = native_backend(isa)
    assert_rows_stand_alone(backend, Mixture(backend, weight_format), normal(300, 64))


def test_log_probabilities(backend: Backend) -> None:
    logits = normal(129, 50_000)
    tokens = np.arange(129)
    together = ops.log_probabilities(backend.from_host(logits), tokens, 5)
    for row in (0, 1, 77, 128):
        part = slice(row, row + 1)
        alone = ops.log_probabilities(backend.from_host(logits[part]), tokens[part], 5)
        for one, all_rows in zip(alone, together, strict=True):
            assert np.array_equal(one, all_rows[part])


def test_sample_and_probabilities(backend: Backend) -> None:
    logits, uniform = normal(129, 50_000), np.random.default_rng(4).uniform(size=129)
    settings = [np.full(129, v, np.float32) for v in (0.8, 0.95, 0.0)]
    settings[0][::3] = 0.0

    def draw(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        temperature, top_p, min_p = (values[rows] for values in settings)
        asked = (temperature, np.zeros(len(temperature), np.int64), top_p, min_p)
        device_logits = backend.from_host(logits[rows].copy())
        tokens = ops.sample(device_logits, *asked, uniform[rows])
        return tokens, ops.probabilities(device_logits, *asked)

    together = draw(slice(None))
    for row in range(20):
        for one, all_rows in zip(draw(slice(row, row + 1)), together, strict=True):
            assert np.array_equal(one[0], all_rows[row])


# --- attention -----------------------------------------------------------------------------------

LENGTH = 700  # tokens of the sequence that is looked at; chunks of the context have 256
# Query heads, key/value heads, head size, block size, window, softcap, slopes; chunk.
SHAPES: dict[str, tuple[Any, ...]] = {
    "grouped": (6, 2, 64, 16, None, None, None),
    "one kv head": (9, 1, 24, 32, None, None, None),
    "no groups": (2, 2, 40, 7, None, None, None),
    "window": (6, 2, 64, 16, 100, None, None),
    "softcap": (6, 2, 64, 16, 300, 20.0, None),
    "slopes and sinks": (3, 1, 24, 16, None, None, [0.1, 0.03, 0.001]),
    "blocks larger than chunks": (4, 2, 16, 300, None, None, None),
    "chunks of the text": (6, 2, 64, 16, None, None, None, 150),
}
EVERY_SHAPE = ("float32", "bfloat16")
SHAPES_IN_FEW_BITS = ("grouped", "one kv head", "no groups", "window", "softcap")
"""Other masks are the code of float32, for all formats but bfloat16, which has pairs of tokens."""
OTHERS = [(1, 1), (300, 1), (40, 40), (513, 100)]
"""(context, queries) of sequences that come along."""


class Prompt:
    """A sequence's queries over its cache, of which any part can be computed."""

    def __init__(self, backend: Backend, shape: str, kv_dtype: str) -> None:
        self.heads, kv_heads, self.size, self.block_size, *masking = SHAPES[shape]
        self.window, self.softcap, self.slopes, self.chunk = (*masking, None)[:4]
        self.sinks = None if self.slopes is None else backend.from_host(normal(self.heads))
        self.backend = backend
        lengths = [LENGTH, *(context for context, _ in OTHERS)]
        counts = [-(-length // self.block_size) for length in lengths]
        blocks = np.random.default_rng(5).permutation(sum(counts))
        self.tables = np.split(blocks, np.cumsum(counts)[:-1])
        heads = (kv_heads, self.size)
        self.layer: KVLayer
        (self.layer,) = backend.allocate_kv(
            len(blocks), self.block_size, [heads], KVFormat(kv_dtype)
        )
        keys = normal(2, len(blocks), self.block_size, *heads)
        fill(backend, self.layer, *keys)
        self.queries = normal(LENGTH, self.heads, self.size)

    def attend(self, work: Sequence[tuple[int, int]], *, others: bool = False) -> np.ndarray:
        """work: (first, last) queries of the prompt, each a sequence of the batch."""
        sequences = [([0] * last, self.tables[0], first, last - first) for first, last in work]
        queries = [self.queries[first:last] for first, last in work]
        num_own = sum(map(len, queries))
        if others:
            for table, (context, count) in zip(self.tables[1:], OTHERS, strict=True):
                sequences.append(([0] * context, table, context - count, count))
                queries.append(self.queries[:count])
        host = host_batch(sequences, self.block_size)
        rows = self.backend.compile(ops.paged_attention)(
            self.backend.from_host(np.concatenate(queries)),
            self.layer,
            self.backend.batch_context(host, (self.layer,)),
            softmax_scale=0.2,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            slopes=self.slopes,
            sinks=self.sinks,
        )
        return self.backend.to_host(rows)[:num_own]


@pytest.mark.parametrize(
    ("kernels", "kv_dtype", "shape"),
    [
        (kernels, dtype, shape)
        for kernels in KERNELS
        for dtype in (KV_DTYPES if kernels in ISAS else ("float32",))
        for shape in (SHAPES if dtype in EVERY_SHAPE else SHAPES_IN_FEW_BITS)
    ],
)
def test_attention(kernels: str, kv_dtype: str, shape: str) -> None:
    """A prompt as a whole, in chunks, token by token, and in company."""
    prompt = Prompt(backend_of(kernels), shape, kv_dtype)
    whole = prompt.attend([(0, LENGTH)])
    assert np.array_equal(prompt.attend([(0, LENGTH)], others=True), whole)
    for chunk in (1, 13, 64, 256):
        chunks = [(first, min(first + chunk, LENGTH)) for first in range(0, LENGTH, chunk)]
        assert np.array_equal(prompt.attend(chunks), whole), f"chunks of {chunk} at once"
        for first, last in chunks[:: max(1, len(chunks) // 5)]:
            alone = prompt.attend([(first, last)])
            assert np.array_equal(alone, whole[first:last]), f"chunk of {chunk} at {first}"
            together = prompt.attend([(first, last)], others=True)
            assert np.array_equal(together, whole[first:last]), f"chunk of {chunk} in company"


class LatentPrompt:
    """As `Prompt`, over latent vectors."""

    def __init__(self, backend: Backend, heads: int, kv_dtype: str, block_size: int = 16) -> None:
        self.backend, self.block_size = backend, block_size
        num_blocks = -(-LENGTH // block_size)
        self.table = np.random.default_rng(5).permutation(num_blocks)
        rank, rope_dim = 40, 16
        self.layer: KVLayer
        (self.layer,) = backend.allocate_kv(
            num_blocks, block_size, [LatentShape(rank, rope_dim)], KVFormat(kv_dtype)
        )
        blocks = (num_blocks, block_size)
        fill_latents(backend, self.layer, normal(*blocks, rank), normal(*blocks, rope_dim))
        self.queries = normal(LENGTH, heads, rank), normal(LENGTH, heads, rope_dim)

    def attend(self, work: Sequence[tuple[int, int]]) -> np.ndarray:
        sequences = [([0] * last, self.table, first, last - first) for first, last in work]
        host = host_batch(sequences, self.block_size)
        rows = self.backend.compile(ops.latent_attention)(
            *(
                self.backend.from_host(np.concatenate([part[first:last] for first, last in work]))
                for part in self.queries
            ),
            self.layer,
            self.backend.batch_context(host, (self.layer,)),
            softmax_scale=0.2,
        )
        return self.backend.to_host(rows)


@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize(
    ("kernels", "kv_dtype"),
    [("torch", "float32"), *((isa, dtype) for isa in ISAS for dtype in LATENT_KV_DTYPES)],
)
def test_latent_attention(kernels: str, kv_dtype: str, heads: int) -> None:
    """A prompt as a whole, in chunks, token by token, and in company of its other chunks."""
    prompt = LatentPrompt(backend_of(kernels), heads, kv_dtype)
    whole = prompt.attend([(0, LENGTH)])
    for chunk in (1, 13, 256):
        chunks = [(first, min(first + chunk, LENGTH)) for first in range(0, LENGTH, chunk)]
        assert np.array_equal(prompt.attend(chunks), whole), f"chunks of {chunk} at once"
        for first, last in chunks[:: max(1, len(chunks) // 5)]:
            alone = prompt.attend([(first, last)])
            assert np.array_equal(alone, whole[first:last]), f"chunk of {chunk} at {first}"


# --- threads and instruction sets ----------------------------------------------------------------


def results_of(backend: Backend) -> list[np.ndarray]:
    """Of every op that computes, in every format, on enough rows to be shared out."""
    found: list[np.ndarray] = []

    def keep(arrays: Any) -> None:
        parts = arrays if isinstance(arrays, tuple) else (arrays,)
        found.extend(
            part if isinstance(part, np.ndarray) else backend.to_host(part) for part in parts
        )

    def put(array: np.ndarray) -> Any:
        return backend.from_host(array.copy())

    for rows in (1, 5, 300):
        x = put(normal(rows, 576))
        for weight_format in WEIGHT_FORMATS:
            keep(ops.linear(x, packed(weight_format, 333, 576)))
            keep(backend.compile(Mixture(backend, weight_format))(put(normal(rows, 64))))
        keep(ops.rms_norm(x, put(normal(576)), 1e-6))
        keep(ops.layer_norm(x, put(normal(576)), put(normal(576)), 1e-6))
        for activation in ACTIVATIONS:
            keep(activation(x))
        keep(ops.softcap(x, 3.0))
        table = put(normal(50, 64))
        positions = put(np.arange(rows) % 50)
        keep(ops.rotary(put(normal(rows, 9, 64)), table, positions))
    wide = put(normal(300, 8000))  # so much that rows are cut into blocks, too
    for weight_format in WEIGHT_FORMATS:
        keep(ops.linear(wide, packed(weight_format, 40, 8000)))
    for kv_dtype in KV_DTYPES:
        for shape in SHAPES:
            prompt = Prompt(backend, shape, kv_dtype)
            keep(prompt.attend([(0, 300), (400, 401), (690, LENGTH)], others=True))
            keep(prompt.attend([(LENGTH - 1, LENGTH)]))
    for kv_dtype in LATENT_KV_DTYPES:
        latent = LatentPrompt(backend, 9, kv_dtype)
        keep(latent.attend([(0, 300), (400, 401), (690, LENGTH)]))
        keep(latent.attend([(LENGTH - 1, LENGTH)]))
    logits = normal(8, 50_000)
    keep(ops.log_probabilities(put(logits), np.arange(8), 5))
    settings = [np.full(8, v, np.float32) for v in (0.8, 0.95, 0.0)]
    top_k, uniform = np.array([0, 40] * 4), np.random.default_rng(4).uniform(size=8)
    keep(ops.sample(put(logits), settings[0], top_k, *settings[1:], uniform))
    keep(ops.probabilities(put(logits), settings[0], top_k, *settings[1:]))
    return found


def assert_equal(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for number, (one, other) in enumerate(zip(results, expected, strict=True)):
        assert np.array_equal(one, other), f"result {number}"


@pytest.mark.parametrize("isa", ISAS)
def test_threads(isa: str) -> None:
    """More of them than CPUs, too; they cut the work otherwise."""
    expected = results_of(native_backend(isa, threads=1))
    for threads in (2, 5):
        assert_equal(results_of(native_backend(isa, threads=threads)), expected)


def test_vectors_of_256_and_512_bits() -> None:
    assert_equal(results_of(native_backend("avx512")), results_of(native_backend("avx2")))


def test_a_library_that_flushes_subnormals_changes_nothing() -> None:
    """Not even on the thread that it set so."""
    import torch

    torch_backend()
    backend = native_backend("portable")
    halves = np.arange(1024, dtype=np.uint16).view(np.float16).reshape(-1, 16)  # all subnormal
    weight: Any = pack_rows(halves.astype(np.float32), WEIGHT_FORMATS["float16"])
    for flush in (True, False):
        torch.set_flush_denormal(flush)
        product = backend.to_host(ops.linear(backend.from_host(np.eye(16)), weight))
        assert np.array_equal(product.T, halves)
    torch.set_flush_denormal(True)  # as the torch backend has it

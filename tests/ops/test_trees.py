"""A row of a tree of drafts has the bits of a chain of its path: what makes text with speculation
over trees the same as without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo import ops
from octavo.core.model_spec import KVFormat
from octavo.ops.backend import Backend
from octavo.ops.batch import HostBatch
from octavo.ops.native.ops import ISAS
from support.backends import native_backend, torch_backend
from support.forward import fill, host_batch
from support.op_bench import KV_DTYPES
from support.trees import TREES, leaves_of, path_of, with_trees

SHAPES = {  # query heads, key/value heads, head size, block size, window, softcap; chunk
    "grouped": (6, 2, 64, 16, None, None),
    "blocks of 32": (9, 1, 24, 32, None, None),
    "no groups": (2, 2, 40, 7, None, None),
    "window": (6, 2, 64, 16, 100, None),
    "window shorter than paths": (6, 2, 16, 32, 3, None),
    "softcap": (6, 2, 64, 16, 300, 20.0),
    "blocks larger than chunks": (4, 2, 16, 300, None, None),
    "chunks of the text": (6, 2, 64, 16, None, None, 10),
}
EVERY_SHAPE = ("float32", "bfloat16")
SHAPES_IN_FEW_BITS = ("grouped", "no groups", "window", "softcap")
"""Other masks are the code of float32, for all formats but bfloat16, which has pairs of tokens."""
PREFIXES = {  # cached tokens before each tree: its rows lie within a block, or cross borders
    "a chain": 3,
    "two guesses": 0,
    "by depth": 251,
    "by branches": 300,
    "a late branch": 292,
    "64 rows": 246,
}
OTHERS = [(1, 1), (300, 1), (40, 40), (513, 100)]
"""(context, queries) of chains that come along."""


class Tree:
    """A tree after its prefix, and beside it the chain of each leaf's path: the same tokens, in
    blocks of its own.
    """

    def __init__(self, backend: Backend, name: str, shape: str, kv_dtype: str) -> None:
        self.heads, kv_heads, size, self.block_size, *masking = SHAPES[shape]
        self.window, self.softcap, self.chunk = (*masking, None)[:3]
        self.backend = backend
        self.parents, self.prefix = TREES[name], PREFIXES[name]
        self.paths = [path_of(self.parents, leaf) for leaf in leaves_of(self.parents)]
        rng = np.random.default_rng(6)
        self.queries = rng.normal(size=(len(self.parents), self.heads, size)).astype(np.float32)
        self.others = rng.normal(size=(200, self.heads, size)).astype(np.float32)

        rows = [range(len(self.parents)), *self.paths]
        lengths = [self.prefix + len(own) for own in rows] + [context for context, _ in OTHERS]
        counts = [-(-length // self.block_size) for length in lengths]
        blocks = rng.permutation(sum(counts))
        tables = np.split(blocks, np.cumsum(counts)[:-1])
        self.table, *self.chain_tables = tables[: len(rows)]
        self.other_tables = tables[len(rows) :]
        self.num_blocks = len(blocks)
        heads = (kv_heads, size)
        tokens = rng.normal(size=(2, self.prefix + len(self.parents), *heads)).astype(np.float32)
        self.cached = rng.normal(size=(2, len(blocks), self.block_size, *heads)).astype(np.float32)
        for table, own in zip(tables, rows, strict=False):
            # What lies beyond a sequence may be anything.
            self.cached[:, table[-1]] = np.nan
            chosen = np.concatenate([np.arange(self.prefix), self.prefix + np.array(own)])
            at = np.arange(len(chosen))
            places = table[at // self.block_size], at % self.block_size
            self.cached[:, *places] = tokens[:, chosen]
        (self.layer,) = backend.allocate_kv(
            len(blocks), self.block_size, [heads], KVFormat(kv_dtype)
        )
        self.fill()

    def fill(self) -> None:
        fill(self.backend, self.layer, *self.cached)

    def _attend(self, queries: np.ndarray, host: HostBatch) -> np.ndarray:
        rows = self.backend.compile(ops.paged_attention)(
            self.backend.from_host(queries),
            self.layer,
            self.backend.batch_context(host, (self.layer,)),
            softmax_scale=0.2,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
        )
        return self.backend.to_host(rows)

    def chains(self) -> list[np.ndarray]:
        """The rows of each path, computed as a sequence of the batch."""
        host = host_batch(
            [
                ([0] * (self.prefix + len(path)), table, self.prefix, len(path))
                for path, table in zip(self.paths, self.chain_tables, strict=True)
            ],
            self.block_size,
        )
        queries = np.concatenate([self.queries[path] for path in self.paths])
        return np.split(self._attend(queries, host), host.query_starts[1:-1])

    def rows(self, *, in_company: bool = False) -> np.ndarray:
        """The tree's rows; in company it is the middle one of a batch."""
        count = len(self.parents)
        tree = ([0] * (self.prefix + count), self.table, self.prefix, count)
        if not in_company:
            host = host_batch([tree], self.block_size)
            return self._attend(self.queries, with_trees(host, [self.parents]))
        chains = [
            ([0] * context, table, context - n, n)
            for (context, n), table in zip(OTHERS, self.other_tables, strict=True)
        ]
        host = host_batch([*chains[:2], tree, *chains[2:]], self.block_size)
        host = with_trees(host, [None, None, self.parents, None, None])
        first, last = host.query_starts[2:4]
        queries = np.concatenate([self.others[:first], self.queries, self.others[first:142]])
        result: np.ndarray = self._attend(queries, host)
        without = self._attend(queries, host._replace(parents=None))
        for chain in (slice(0, first), slice(last, None)):
            assert np.array_equal(result[chain], without[chain])
        return result[first:last]

    def slots(self, tokens: Sequence[int]) -> np.ndarray:
        at = np.array(tokens, np.int64)
        slots: np.ndarray = self.table[at // self.block_size] * self.block_size
        return slots + at % self.block_size


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    [
        (dtype, shape)
        for dtype in KV_DTYPES
        for shape in (SHAPES if dtype in EVERY_SHAPE else SHAPES_IN_FEW_BITS)
    ],
)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_a_tree_have_the_bits_of_their_paths(isa: str, kv_dtype: str, shape: str) -> None:
    for name in TREES:
        tree = Tree(native_backend(isa), name, shape, kv_dtype)
        alone, together = tree.rows(), tree.rows(in_company=True)
        assert np.array_equal(alone, together), name
        for path, chain in zip(tree.paths, tree.chains(), strict=True):
            assert np.array_equal(alone[path], chain), f"{name}: {path}"
        one_thread = Tree(native_backend(isa, threads=1), name, shape, kv_dtype)
        assert np.array_equal(one_thread.rows(), alone), name


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_depends_on_nothing_beside_its_path(kv_dtype: str) -> None:
    tree = Tree(native_backend("portable"), "by depth", "grouped", kv_dtype)
    expected = tree.rows()
    for row in range(1, len(tree.parents)):
        token = tree.prefix + row
        place = tree.table[token // tree.block_size], token % tree.block_size
        kept = tree.cached[:, *place].copy()
        tree.cached[:, *place] = np.nan
        tree.fill()
        tree.cached[:, *place] = kept
        free = [r for r in range(len(expected)) if row not in path_of(tree.parents, r)]
        assert np.array_equal(tree.rows()[free], expected[free])
        assert np.isnan(tree.rows()[row]).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_both_backends_agree(shape: str) -> None:
    for name in TREES:
        native = Tree(native_backend("portable"), name, shape, "float32")
        torch = Tree(torch_backend(), name, shape, "float32")
        for in_company in (False, True):
            rows = torch.rows(in_company=in_company)
            np.testing.assert_allclose(rows, native.rows(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", ["grouped", "blocks of 32", "no groups"])
@pytest.mark.parametrize(
    ("kernels", "kv_dtype"), [("torch", "float32"), *(("portable", dtype) for dtype in KV_DTYPES)]
)
def test_a_path_moved_into_place_is_a_chain(kernels: str, kv_dtype: str, block_size: str) -> None:
    backend = torch_backend() if kernels == "torch" else native_backend(kernels)
    for name in TREES:
        tree = Tree(backend, name, block_size, kv_dtype)
        chains = tree.chains()
        for index in range(0, len(chains), 4):
            path, table = tree.paths[index], tree.chain_tables[index]
            tree.fill()
            moved = [(to, row) for to, row in enumerate(path) if to != row]
            sources, targets = (
                tree.slots([tree.prefix + number for number in numbers])
                for numbers in ([row for _, row in moved], [to for to, _ in moved])
            )
            ops.move_kv(tree.layer, sources, targets)
            table[:] = tree.table[: len(table)]
            assert np.array_equal(tree.chains()[index], chains[index]), f"{name}: {path}"

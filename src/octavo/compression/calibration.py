"""What a model's matrices are multiplied by, seen over a text: one block after another, each with
the inputs that the blocks before it give once they are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.layers.decoder import DecoderBlock
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_layer, make_rope_tables, renamed
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array, BatchContext
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.quantization.grouped import GroupedTensor
from octavo.runner.batch import in_passes, whole_sequences

_PASS_TOKENS = 1024
_BLOCK_SIZE = 16
_DTYPE = "float32"  # nothing but the weights that are quantized is to be rounded


class Replaced:
    """A checkpoint, some of whose tensors have other values. A `models.loader.Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, np.ndarray]) -> None:
        self.name = checkpoint.name
        self._checkpoint = checkpoint
        self._values = values
        self.tensors: Mapping[str, Any] = {**checkpoint.tensors, **values}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name in self._values:
            return self._values[name] if rows is None else self._values[name][rows]
        return self._checkpoint.read(name, rows)

    def read_stored(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name in self._values:
            return self.read(name, rows)
        return self._checkpoint.read_stored(name, rows)

    def grouped(self, name: str) -> GroupedTensor | None:
        return None if name in self._values else self._checkpoint.grouped(name)

    def content_id(self) -> str:
        return f"{self._checkpoint.content_id()} with other values"


class Calibration:
    """Hidden states of a text, which go through the model block by block.

    A block has its weights only while it computes, so that memory holds one at a time.
    """

    def __init__(
        self,
        model: CausalLM,
        checkpoint: Checkpoint,
        backend: Backend,
        sequences: Sequence[np.ndarray],
    ) -> None:
        """sequences: token ids (T,) each. Raises ConfigError if there are none."""
        if not sequences:
            raise ConfigError(
                "there is no text to calibrate with; give a longer one, or use --method rtn"
            )
        self._model = model
        self._checkpoint = renamed(model, checkpoint)
        self._backend = backend
        backend.choose(_DTYPE, {})
        make_rope_tables(model, backend, max(map(len, sequences)))
        self._passes = list(in_passes(sequences, _PASS_TOKENS))
        self._kv_shapes = model.spec.kv_shapes
        for layer in (model.embedding, model.positions, model.embedding_norm):
            if layer is not None:
                load_layer(layer, self._checkpoint, backend, _DTYPE)
        embed = backend.compile(model.embed)
        self._hidden = [
            backend.to_host(embed(backend.batch_context(whole_sequences(chosen, _BLOCK_SIZE), ())))
            for chosen in self._passes
        ]

    def hessians(self, index: int) -> dict[str, np.ndarray]:
        """By name of a matrix of block `index`: the mean of x x^T over its inputs x, (I, I)
        float64. Blocks come in order.
        """
        block = self._model.blocks[index]
        load_layer(block, self._checkpoint, self._backend, _DTYPE)
        linears = list(_linears(block))
        sums = [np.zeros((linear.weight.shape[1],) * 2) for linear in linears]
        num_tokens = 0
        for _, *inputs in self._run(index, _observed(block, linears)):
            for total, x in zip(sums, inputs, strict=True):
                total += (x.T @ x).astype(np.float64)
            num_tokens += len(inputs[0]) if inputs else 0
        return {
            name: total / num_tokens
            for linear, total in zip(linears, sums, strict=True)
            for name in linear.weight.names
        }

    def advance(self, index: int, values: Mapping[str, np.ndarray]) -> None:
        """Let the hidden states go through block `index` with other values of some tensors."""
        block = self._model.blocks[index]
        load_layer(block, Replaced(self._checkpoint, values), self._backend, _DTYPE)

        def function(x: Array, ctx: BatchContext) -> tuple[Array, ...]:
            return (block(x, ctx),)

        self._hidden = [y for (y,) in self._run(index, function)]
        for weight in block.weights():
            weight.release()

    def _run(
        self, index: int, function: Callable[[Array, BatchContext], tuple[Array, ...]]
    ) -> Iterator[list[np.ndarray]]:
        """Results of all passes through one block, as rows."""
        compiled = self._backend.compile(function)
        caches = self._caches(index)
        for chosen, hidden in zip(self._passes, self._hidden, strict=True):
            ctx = self._backend.batch_context(whole_sequences(chosen, _BLOCK_SIZE), caches)
            results = compiled(self._backend.from_host(hidden), ctx)
            yield [self._backend.to_host(one).reshape(len(hidden), -1) for one in results]

    def _caches(self, index: int) -> tuple[KVLayer, ...]:
        """The block's own, in its place; the others' places are never looked at."""
        num_blocks = max(
            sum(-(-len(tokens) // _BLOCK_SIZE) for tokens in chosen) for chosen in self._passes
        )
        layers = self._backend.allocate_kv(
            num_blocks, _BLOCK_SIZE, [self._kv_shapes[index]], KVFormat(_DTYPE)
        )
        return layers * len(self._kv_shapes)


def _observed(
    block: DecoderBlock, linears: Sequence[Linear]
) -> Callable[[Array, BatchContext], tuple[Array, ...]]:
    """What the block gives, then what each of its projections is given."""

    def function(x: Array, ctx: BatchContext) -> tuple[Array, ...]:
        seen: dict[int, Array] = {}
        for place, linear in enumerate(linears):
            linear.observer = partial(seen.__setitem__, place)
        try:
            y = block(x, ctx)
        finally:
            for linear in linears:
                linear.observer = None
        return (y, *(seen[place] for place in range(len(linears))))

    return function


def _linears(layer: Layer) -> Iterator[Linear]:
    for value in vars(layer).values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Linear):
                yield part
            elif isinstance(part, Layer):
                yield from _linears(part)

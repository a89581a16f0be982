"""What a model's matrices are multiplied by, seen over a text: one block after another, each with
the inputs that the blocks before it give once they are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from octavo.compression.hessians import ExpertInputs, Hessians
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.layers.decoder import DecoderBlock
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.moe import Experts
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_layer, make_rope_tables, renamed
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array, BatchContext
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.quantization.grouped import GroupedTensor
from octavo.runner.batch import in_passes, whole_sequences

P = TypeVar("P", bound=Layer)

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

    def hessians(self, index: int) -> Hessians:
        """Of the matrices of block `index` whose inputs can be seen: projections, and experts that
        are tensors of their own. Blocks come in order.
        """
        block = self._model.blocks[index]
        load_layer(block, self._checkpoint, self._backend, _DTYPE)
        linears = list(_parts(block, Linear))
        mixtures = [one for one in _parts(block, Experts) if one.separate is not None]
        sums = [np.zeros((linear.weight.shape[1],) * 2) for linear in linears]
        routed: list[list[np.ndarray]] = [[] for _ in range(2 * len(mixtures))]
        for _, *inputs in self._run(index, _observed(block, linears, mixtures)):
            for total, x in zip(sums, inputs, strict=False):
                total += x.T @ x
            for rows, x in zip(routed, inputs[len(linears) :], strict=True):
                rows.append(x)
        num_tokens = sum(map(len, self._hidden))
        ready: dict[str, np.ndarray] = {}
        for linear, total in zip(linears, sums, strict=True):
            total /= num_tokens
            ready |= dict.fromkeys(linear.weight.names, total)
        experts = []
        for place, mixture in enumerate(mixtures):
            x, routing = (np.concatenate(rows) for rows in routed[2 * place : 2 * place + 2])
            if mixture.separate is not None:
                layers = mixture.separate()
                experts.append(ExpertInputs(layers, x, routing, self._checkpoint, self._backend))
        return Hessians(ready, experts)

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
    block: DecoderBlock, linears: Sequence[Linear], mixtures: Sequence[Experts]
) -> Callable[[Array, BatchContext], tuple[Array, ...]]:
    """What the block gives, then what each of its projections is given, then what its experts are:
    tokens and their routing.
    """
    parts: list[Linear | Experts] = [*linears, *mixtures]

    def function(x: Array, ctx: BatchContext) -> tuple[Array, ...]:
        seen: dict[int, tuple[Array, ...]] = {}

        def keep(place: int, *inputs: Array) -> None:
            seen[place] = inputs

        for place, part in enumerate(parts):
            part.observer = partial(keep, place)
        try:
            y = block(x, ctx)
        finally:
            for part in parts:
                part.observer = None
        return (y, *(array for place in range(len(parts)) for array in seen[place]))

    return function


def _parts(layer: Layer, kind: type[P]) -> Iterator[P]:
    """Those of a kind, at any depth."""
    for value in vars(layer).values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, kind):
                yield part
            elif isinstance(part, Layer):
                yield from _parts(part, kind)

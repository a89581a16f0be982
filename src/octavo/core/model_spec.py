"""The shape of a model in numbers: what sizing, planning and simulation need to know, without its
weights.

Sizes: hidden D, heads H, key/value heads G, head size E, vocabulary V. A parameter of a matrix
costs a multiplication and an addition a token; those of vectors (norms, biases) cost nothing worth
counting.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import InvariantError
from octavo.core.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the KV cache stores values. dtype: a name of `BYTES_PER_VALUE`, "int8" or "int4" (each
    head's keys, and its values, of a token with a float32 scale of their own) or "fp8" (e4m3); two
    of them, "int8,int4", are the keys' and the values'.
    """

    dtype: str

    @property
    def keys(self) -> str:
        return self.dtype.partition(",")[0]

    @property
    def values(self) -> str:
        return self.dtype.rpartition(",")[2]

    @property
    def has_fp8(self) -> bool:
        return "fp8" in (self.keys, self.values)

    def key_bytes(self, head_dim: int) -> int:
        """One head's keys of one token, with all that belongs to them. A backend may pad them."""
        return _vector_bytes(self.keys, head_dim)

    def value_bytes(self, head_dim: int) -> int:
        """As `key_bytes`."""
        return _vector_bytes(self.values, head_dim)

    def bytes_per_pair(self, head_dim: int) -> int:
        """One head's key and value of one token."""
        return self.key_bytes(head_dim) + self.value_bytes(head_dim)

    def token_bytes(self, shape: tuple[int, int] | LatentShape) -> int:
        """What one layer caches of a token: keys and values (G, E), or a latent vector."""
        if isinstance(shape, LatentShape):
            return self.key_bytes(sum(shape))
        return shape[0] * self.bytes_per_pair(shape[1])


def _vector_bytes(dtype: str, head_dim: int) -> int:
    if dtype == "int4":
        return (head_dim + 1) // 2 + 4
    if dtype == "int8":
        return head_dim + 4
    return head_dim * (BYTES_PER_VALUE | {"fp8": 1})[dtype]


class LatentShape(NamedTuple):
    """What a layer caches of a token in place of (G, E): one vector of `rank` values and `rope_dim`
    with its position.
    """

    rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention with grouped heads. window: tokens that a query sees, itself included
    (None: all). has_output_gate: what comes out is multiplied by a projection of the input.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    has_output_gate: bool = False

    def num_matrix_parameters(self, hidden_size: int) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return hidden_size * ((3 if self.has_output_gate else 2) * queries + 2 * keys)

    def kv_bytes_per_token(self, kv_format: KVFormat) -> int:
        return self.num_kv_heads * kv_format.bytes_per_pair(self.head_dim)

    def flops_per_pair(self, *, is_decoding: bool) -> int:
        """For one query and one key: q k, then the value times its weight, in all heads."""
        return 4 * self.num_heads * self.head_dim

    @property
    def flops_per_known_key(self) -> int:
        """In chunks: for each key that an earlier step has computed, however many see it."""
        return 0


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention: what is cached of a token is one vector for all heads. Source:
    DeepSeek-V2, arXiv 2405.04434.

    query_rank: of the queries' projection; None: they have one matrix. kv_rank: size of the cached
    vector, to which rope_dim values with positions are added. nope_dim, value_dim: sizes of a
    head's keys, without positions, and values. index_heads, index_dim: of an indexer that picks the
    keys to attend to (DeepSeek-V3.2), whose own keys are cached as well; that fewer pairs are
    computed then is left out.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    window: int | None = None
    index_heads: int = 0
    index_dim: int = 0

    def num_matrix_parameters(self, hidden_size: int) -> int:
        queries = self.num_heads * (self.nope_dim + self.rope_dim)
        rank = self.query_rank
        of_queries = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        of_cache = hidden_size * (self.kv_rank + self.rope_dim)
        of_heads = self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)
        of_output = self.num_heads * self.value_dim * hidden_size
        of_index = self.index_heads * ((rank or hidden_size) * self.index_dim + hidden_size)
        of_index += hidden_size * self.index_dim
        return of_queries + of_cache + of_heads + of_output + of_index

    def kv_bytes_per_token(self, kv_format: KVFormat) -> int:
        num_bytes = kv_format.key_bytes(self.kv_rank + self.rope_dim)
        return num_bytes + (kv_format.key_bytes(self.index_dim) if self.index_dim else 0)

    def flops_per_pair(self, *, is_decoding: bool) -> int:
        """Decoding works on the cached vectors themselves, which are larger than the heads' keys
        and values but are read once for all heads.
        """
        if is_decoding:
            return 2 * self.num_heads * (2 * self.kv_rank + self.rope_dim)
        return 2 * self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def flops_per_known_key(self) -> int:
        """In chunks: of making the heads' keys and values from a cached vector again. Those of new
        tokens are among the products with matrices.
        """
        return 2 * self.kv_rank * self.num_heads * (self.nope_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """One layer of linear attention or of a state space model: a state of constant size a sequence
    in place of keys and values.

    matrix_parameters: of all its projections. state_bytes: of one sequence. flops_per_token: of
    updating the state and reading from it.
    """

    matrix_parameters: int
    state_bytes: int
    flops_per_token: int

    def num_matrix_parameters(self, hidden_size: int) -> int:
        return self.matrix_parameters


Mixer = AttentionSpec | LatentAttentionSpec | RecurrentSpec
"""What lets tokens see those before them."""


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """is_gated: three matrices (gate, up, down), else two."""

    inner_size: int
    is_gated: bool = True

    def num_parameters(self, hidden_size: int) -> int:
        return (3 if self.is_gated else 2) * hidden_size * self.inner_size

    def num_active_parameters(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    def num_touched_parameters(self, hidden_size: int, num_tokens: float) -> float:
        return self.num_parameters(hidden_size)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of experts: a router, of whose experts each token uses num_active, and a shared one
    that all use.
    """

    expert: MLPSpec
    num_experts: int
    num_active: int
    shared: MLPSpec | None = None

    def num_parameters(self, hidden_size: int) -> int:
        return self._common(hidden_size) + self.num_experts * self.expert.num_parameters(
            hidden_size
        )

    def num_active_parameters(self, hidden_size: int) -> int:
        return self._common(hidden_size) + self.num_active * self.expert.num_parameters(hidden_size)

    def num_touched_experts(self, num_tokens: float) -> float:
        """That a step of so many tokens uses, if these are spread evenly: if they aren't, fewer."""
        missed: float = (1 - self.num_active / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def num_touched_parameters(self, hidden_size: int, num_tokens: float) -> float:
        """Of which a step of so many tokens reads the weights."""
        touched = self.num_touched_experts(num_tokens)
        return self._common(hidden_size) + touched * self.expert.num_parameters(hidden_size)

    def _common(self, hidden_size: int) -> int:
        shared = 0 if self.shared is None else self.shared.num_parameters(hidden_size)
        return hidden_size * self.num_experts + shared


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """mixer, mlp: None where a layer has only the other. num_vector_parameters: of norms, biases
    and all else that is no matrix.
    """

    mixer: Mixer | None
    mlp: MLPSpec | MoESpec | None
    num_vector_parameters: int = 0

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec | None:
        """What keeps keys and values."""
        return None if isinstance(self.mixer, RecurrentSpec) else self.mixer

    def num_matrix_parameters(self, hidden_size: int) -> int:
        mlp = 0 if self.mlp is None else self.mlp.num_parameters(hidden_size)
        return self._of_mixer(hidden_size) + mlp

    def num_active_parameters(self, hidden_size: int) -> int:
        """Of matrices that one token is multiplied by."""
        mlp = 0 if self.mlp is None else self.mlp.num_active_parameters(hidden_size)
        return self._of_mixer(hidden_size) + mlp

    def num_touched_parameters(self, hidden_size: int, num_tokens: float) -> float:
        """Of matrices that a step of so many tokens reads."""
        mlp = 0.0 if self.mlp is None else self.mlp.num_touched_parameters(hidden_size, num_tokens)
        return self._of_mixer(hidden_size) + mlp

    def _of_mixer(self, hidden_size: int) -> int:
        return 0 if self.mixer is None else self.mixer.num_matrix_parameters(hidden_size)


@dataclass(frozen=True)
class ModelSpec:
    """family: the model type's name. ties_embeddings: the head is the embedding's table.
    num_vector_parameters: outside the layers and no matrix that tokens are multiplied by: the final
    norm, a table of positions.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    ties_embeddings: bool
    num_vector_parameters: int

    # --- parameters -------------------------------------------------------------------------------

    @property
    def num_embedding_parameters(self) -> int:
        """Of the table, and of the head as well: V D each."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def num_matrix_parameters(self) -> int:
        """Of the layers' matrices, all experts included."""
        return sum(layer.num_matrix_parameters(self.hidden_size) for layer in self.layers)

    @cached_property
    def num_active_matrix_parameters(self) -> int:
        """Of the layers' matrices, what one token is multiplied by."""
        return sum(layer.num_active_parameters(self.hidden_size) for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """All; tied weights count once."""
        tables = self.num_embedding_parameters * (1 if self.ties_embeddings else 2)
        vectors = sum(layer.num_vector_parameters for layer in self.layers)
        return self.num_matrix_parameters + tables + vectors + self.num_vector_parameters

    @property
    def num_active_parameters(self) -> int:
        """All but the experts that a token doesn't use."""
        return self.num_parameters - self.num_matrix_parameters + self.num_active_matrix_parameters

    def num_touched_parameters(self, num_tokens: float) -> float:
        """Of the layers' matrices, what a step of so many tokens reads."""
        return sum(
            count * layer.num_touched_parameters(self.hidden_size, num_tokens)
            for layer, count in self._counts.items()
        )

    def weight_bytes(
        self, matrices: WeightFormat, rest: WeightFormat, head: WeightFormat | None = None
    ) -> float:
        """Of all weights. matrices: the format of the layers' matrices; rest: of tables and
        vectors; head: of a head that is not tied (None: as `rest`). A tied one is `rest`, too.
        """
        tables = rest.num_bytes(self.num_embedding_parameters)
        if not self.ties_embeddings:
            tables += (head or rest).num_bytes(self.num_embedding_parameters)
        vectors = self.num_vector_parameters + sum(
            layer.num_vector_parameters for layer in self.layers
        )
        in_layers = matrices.num_bytes(self.num_matrix_parameters)
        return in_layers + tables + rest.num_bytes(vectors)

    # --- cache ------------------------------------------------------------------------------------

    @property
    def grouped_attention(self) -> list[AttentionSpec]:
        """Of each layer, for models that have nothing else."""
        found = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]
        if len(found) < len(self.layers):
            raise InvariantError(f"{self.family}: a layer has no grouped heads")
        return found

    @property
    def kv_shapes(self) -> list[tuple[int, int] | LatentShape]:
        """What each layer caches of a token: keys and values as (G, E), or one vector for all
        heads. Of models in which every layer caches something.
        """
        shapes: list[tuple[int, int] | LatentShape] = []
        for layer in self.layers:
            if isinstance(layer.mixer, AttentionSpec):
                shapes.append((layer.mixer.num_kv_heads, layer.mixer.head_dim))
            elif isinstance(layer.mixer, LatentAttentionSpec):
                shapes.append(LatentShape(layer.mixer.kv_rank, layer.mixer.rope_dim))
            else:
                raise InvariantError(f"{self.family}: a layer caches nothing")
        return shapes

    @property
    def kv_heads(self) -> list[tuple[int, int]]:
        """(G, E) of each layer, for caches that hold grouped heads and nothing else."""
        return [(one.num_kv_heads, one.head_dim) for one in self.grouped_attention]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Every window that a layer with keys and values has, once, in order of appearance; None is
        unlimited.
        """
        found = [layer.attention.window for layer in self.layers if layer.attention is not None]
        return tuple(dict.fromkeys(found))

    @property
    def state_bytes(self) -> int:
        """Of one sequence, whatever its length: what recurrent layers keep."""
        return sum(
            layer.mixer.state_bytes
            for layer in self.layers
            if isinstance(layer.mixer, RecurrentSpec)
        )

    def kv_bytes_per_token(self, kv_format: KVFormat) -> int:
        """Keys and values of all layers for one token. Octavo keeps every block of sliding-window
        layers too.
        """
        return sum(
            layer.attention.kv_bytes_per_token(kv_format)
            for layer in self.layers
            if layer.attention is not None
        )

    def kv_bytes_per_sequence(
        self,
        num_tokens: int,
        kv_format: KVFormat,
        *,
        block_size: int = 1,
        frees_windows: bool = False,
    ) -> int:
        """What a sequence of so many tokens keeps, in whole blocks, with the states of recurrent
        layers. frees_windows: blocks that lie before a layer's window are given back.
        """
        total = self.state_bytes
        for layer in self.layers:
            if (attention := layer.attention) is None:
                continue
            blocks = math.ceil(num_tokens / block_size)
            if frees_windows and attention.window is not None:
                # One that begins within a block ends in one block more.
                blocks = min(blocks, math.ceil((attention.window - 1) / block_size) + 1)
            total += blocks * block_size * attention.kv_bytes_per_token(kv_format)
        return total

    # --- work -------------------------------------------------------------------------------------

    def linear_flops(self, num_tokens: float, num_logit_rows: float) -> float:
        """Of all products with weights, and of recurrent layers' states. The head is computed for
        rows whose logits are needed, not for all tokens of a prompt; the embedding costs nothing.
        """
        in_layers = self._flops_per_token * num_tokens
        return in_layers + 2 * self.num_embedding_parameters * num_logit_rows

    @cached_property
    def recurrent_flops_per_token(self) -> int:
        """Of recurrent layers' states: of updating them and reading from them."""
        return sum(
            layer.mixer.flops_per_token
            for layer in self.layers
            if isinstance(layer.mixer, RecurrentSpec)
        )

    @cached_property
    def _flops_per_token(self) -> int:
        return 2 * self.num_active_matrix_parameters + self.recurrent_flops_per_token

    @cached_property
    def _counts(self) -> Counter[LayerSpec]:
        """How many layers are alike."""
        return Counter(self.layers)

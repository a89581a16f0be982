"""What csrc/module.cpp and the other *bindings.cpp export. Arrays are C-contiguous unless a comment
says otherwise, and no smaller than the shapes given.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, overload

import numpy as np

_Place = tuple[int, int]
"""Where a value lies on a tape: buffer, column."""

_Format = tuple[int, int, int, int]
"""WeightFormat of csrc/formats.h: values, scales, offset, span."""

_Batch = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None
]
"""Token ids, positions and kv slots (T,) int64; query starts (S + 1,) and context lengths (S,)
int32; block tables (S, blocks) int32, whose rows may lie apart; parents (T,) int32 or None.
"""

def isas() -> list[tuple[str, str, str]]:
    """(name, why it can't run here or "", where it was tested or "") of each instruction set that
    was built, the most general first.
    """

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Kernels:
    """Raises ValueError for an instruction set that is not built or can't run here."""

    def __init__(self, isa_by_op: Mapping[str, str]) -> None: ...

class PackedMatrix:
    """data: (bytes,) uint8, order: (I,) int32, kept alive."""

    def __init__(
        self,
        format: _Format,
        outputs: int,
        inputs: int,
        data: np.ndarray,
        panel_stride: int,
        order: np.ndarray | None = None,
    ) -> None: ...

def panel_bytes(format: _Format, inputs: int, /) -> int: ...
def weight_formats() -> list[_Format]: ...
def tables() -> dict[str, list[float]]: ...

class KVCache:
    """k_format, v_format: KVFormat in csrc/formats.h. shift: of the first block, as a share of a
    huge page. k_factor, v_factor: of fp8.
    """

    def __init__(
        self,
        k_format: int,
        v_format: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        head_dim: int,
        shift: float = 0.0,
        k_factor: float = 1.0,
        v_factor: float = 1.0,
    ) -> None: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]], /) -> None: ...
    def move_kv(self, sources: np.ndarray, targets: np.ndarray, /) -> None:
        """(M,) int64 each."""

def kv_block_bytes(
    k_format: int, v_format: int, block_size: int, heads: int, head_dim: int
) -> int: ...

class LatentCache:
    """As KVCache, of latent vectors."""

    def __init__(
        self,
        format: int,
        num_blocks: int,
        block_size: int,
        rank: int,
        rope_dim: int,
        shift: float = 0.0,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]], /) -> None: ...
    def move_kv(self, sources: np.ndarray, targets: np.ndarray, /) -> None:
        """(M,) int64 each."""

def latent_block_bytes(format: int, block_size: int, rank: int, rope_dim: int) -> int: ...

class GroupMemory:
    """Memory that ranks of one machine share; without a name. Raises OSError if the system has
    none.
    """

    def __init__(self, ranks: int, key: int) -> None: ...
    @property
    def file(self) -> int:
        """The number of the open file that it is, by which other processes open it."""
    @staticmethod
    def open(path: str, ranks: int, key: int) -> GroupMemory:
        """Raises OSError if there is no such file, ValueError if it is another."""

class Collective:
    """How ranks exchange rows; see csrc/collective.h.

    seconds: that replays have spent on exchanges, waiting for the other ranks included.
    """

    @property
    def seconds(self) -> float: ...

class SharedGroup(Collective):
    """patience_s: after which a rank gives up waiting for the others. Raises ValueError if the
    memory has such a rank already.
    """

    def __init__(self, memory: GroupMemory, rank: int, patience_s: float) -> None: ...

class CalledGroup(Collective):
    """exchange: is given what this rank sends, (bytes,) uint8, and fills (ranks, bytes) uint8 with
    what each does; valid until it returns.
    """

    def __init__(
        self, rank: int, ranks: int, exchange: Callable[[np.ndarray, np.ndarray], None]
    ) -> None: ...

class RegionTimes:
    def tell(self) -> list[tuple[str, float, float, float]]:
        """Name, nanoseconds, bytes and operations of each region."""

class Tape:
    """The ops' arguments are those of csrc/tape.h. symbol: 0 tokens, 1 rows. Arrays and caches that
    it is given must outlive it.
    """

    def __init__(self, pool: Pool, kernels: Kernels) -> None: ...
    def input(self, symbol: int, columns: int, /) -> _Place: ...
    def int_input(self, symbol: int, /) -> _Place: ...
    def embedding(self, table: PackedMatrix, ids: _Place, first: int, /) -> _Place: ...
    def linear(
        self, weights: Sequence[PackedMatrix], x: _Place, bias: np.ndarray | None
    ) -> _Place: ...
    def rms_norm(
        self, x: _Place, heads: int, size: int, weight: np.ndarray | None, eps: float
    ) -> _Place: ...
    def rotary(
        self, x: _Place, heads: int, size: int, table: np.ndarray, positions: _Place, /
    ) -> _Place: ...
    def layer_norm(
        self,
        x: _Place,
        heads: int,
        size: int,
        weight: np.ndarray | None,
        bias: np.ndarray | None,
        eps: float,
    ) -> _Place:
        """weight, bias: (size,), or (heads * size,)."""

    def silu(self, x: _Place, size: int, /) -> _Place: ...
    def gelu(self, x: _Place, size: int, /) -> _Place: ...
    def gelu_tanh(self, x: _Place, size: int, /) -> _Place: ...
    def relu(self, x: _Place, size: int, /) -> _Place: ...
    def silu_mul(self, x: _Place, size: int, /) -> _Place: ...
    def gelu_tanh_mul(self, x: _Place, size: int, /) -> _Place: ...
    def clamped_silu_mul(self, x: _Place, size: int, /) -> _Place: ...
    def sigmoid_mul(self, x: _Place, gates: _Place, size: int, /) -> _Place: ...
    def route(
        self,
        logits: _Place,
        size: int,
        bias: np.ndarray | None,
        active: int,
        is_softmax: bool,
        renormalizes: bool,
        factor: float,
        groups: int,
        kept_groups: int,
        group_votes: int,
    ) -> _Place: ...
    def experts(
        self,
        x: _Place,
        routing: _Place,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        size: int,
        active: int,
        gate: str,
        gate_up_bias: np.ndarray | None,
        down_bias: np.ndarray | None,
        weighs_inputs: bool,
    ) -> _Place: ...
    def head_linear(self, weight: PackedMatrix, x: _Place, heads: int, /) -> _Place: ...
    def add(self, x: _Place, z: _Place, size: int, /) -> _Place: ...
    def scale(self, x: _Place, size: int, factor: float, /) -> _Place: ...
    def clamp(self, x: _Place, size: int, limit: float, /) -> _Place: ...
    def softcap(self, x: _Place, size: int, cap: float, /) -> _Place: ...
    def take_rows(self, x: _Place, size: int, rows: _Place, /) -> _Place: ...
    def all_reduce(self, x: _Place, size: int, group: Collective, /) -> _Place: ...
    def all_gather(self, x: _Place, columns: Sequence[int], group: Collective, /) -> _Place: ...
    def write_kv(self, k: _Place, v: _Place, cache: KVCache, /) -> None: ...
    def attention(
        self,
        q: _Place,
        cache: KVCache,
        heads: int,
        softmax_scale: float,
        window: int,
        chunk: int,
        softcap: float,
        slopes: np.ndarray | None,
        sinks: np.ndarray | None,
    ) -> _Place:
        """slopes, sinks: (heads,)."""

    def write_latent(self, latents: _Place, rotated: _Place, cache: LatentCache, /) -> None: ...
    def latent_attention(
        self, q: _Place, rotated: _Place, cache: LatentCache, heads: int, softmax_scale: float, /
    ) -> _Place: ...
    def finish(self, outputs: Sequence[tuple[_Place, int]], /) -> None: ...
    @overload
    def run(
        self,
        tokens: int,
        rows: int,
        inputs: Sequence[np.ndarray],
        batch: _Batch | None,
        timed: Literal[False] = False,
    ) -> list[np.ndarray]:
        """The outputs, (rows, columns) float32 in the tape's memory, valid until it runs again."""
    @overload
    def run(
        self,
        tokens: int,
        rows: int,
        inputs: Sequence[np.ndarray],
        batch: _Batch | None,
        timed: Literal[True],
    ) -> tuple[list[np.ndarray], RegionTimes]: ...
    @property
    def buffer_bytes(self) -> int: ...

def seconds_to_read(pool: Pool, isa: str, memory: np.ndarray) -> float: ...
def float_operations_per_second(pool: Pool, isa: str, seconds: float) -> float: ...
def byte_operations_per_second(pool: Pool, isa: str, seconds: float) -> float: ...
def pack(
    panels: np.ndarray,
    format: _Format,
    inputs: int,
    parts: Sequence[tuple[int, np.ndarray, np.ndarray | None, np.ndarray | None]],
    scale_group: int,
) -> None:
    """panels: (bytes,) uint8, written. parts: StoredType in csrc/stored_rows.h; (rows, bytes),
    of codes also scales and offsets, (rows, groups) float32.
    """

def adjust_logits(
    pool: Pool,
    logits: np.ndarray,
    penalty_rows: np.ndarray,
    penalty_tokens: np.ndarray,
    penalty_counts: np.ndarray,
    repetition: np.ndarray,
    presence: np.ndarray,
    frequency: np.ndarray,
    bias_rows: np.ndarray,
    bias_tokens: np.ndarray,
    bias_values: np.ndarray,
    allowed_rows: np.ndarray,
    allowed_pair_rows: np.ndarray,
    allowed_pair_tokens: np.ndarray,
) -> None:
    """logits: (N, V) float32, whose rows may lie apart; changed. The others: LogitEdits."""

def sample(
    pool: Pool,
    kernels: Kernels,
    logits: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """tokens: (N,) int64, written."""

def probabilities(
    pool: Pool,
    kernels: Kernels,
    logits: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    result: np.ndarray,
) -> None:
    """result: (N, V) float32, written."""

def log_probabilities(
    pool: Pool,
    kernels: Kernels,
    logits: np.ndarray,
    tokens: np.ndarray,
    own: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_values: np.ndarray,
) -> None:
    """own (N,) float32, ranks (N,), top_ids (N, K) int64 and top_values (N, K) are written."""

def non_finite_rows(pool: Pool, kernels: Kernels, logits: np.ndarray, rows: np.ndarray) -> None:
    """rows: (N,) bool, written."""

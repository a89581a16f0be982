"""What an engine needs of a model, whoever wrote its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.layers.share import Share
from octavo.models.stored_piece import Checkpoint
from octavo.ops import Array, BatchContext
from octavo.ops.backend import KVShape, WeightFormats

if TYPE_CHECKING:
    from octavo.ops.backend import Backend


class ModelWeights(WeightFormats, Protocol):
    """How a model's weights will be held; nothing is read yet."""

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read them into the model. progress: called with the bytes loaded and the bytes in all."""
        ...


class EngineModel(Protocol):
    """A decoder, from token ids to logits, without weights at first.

    family: the model type. module: whose module it is, if it is none of Octavo's. only_backend:
    name of the one that it runs on; None is any. kv_shapes: what each of `ctx.kv_layers` holds.
    vocab_size: V, of the logits. max_position: tokens that it was made for. num_parameters: tied
    ones count once.
    """

    @property
    def family(self) -> str: ...

    @property
    def module(self) -> str | None: ...

    @property
    def only_backend(self) -> str | None: ...

    @property
    def kv_shapes(self) -> list[KVShape]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def shard(self, share: Share) -> None:
        """Become a rank's part of this model, before its weights are planned. What a layer caches
        is then the rank's; the vocabulary stays the model's.

        Raises ConfigError, with the numbers, if the model can't be divided so.
        """
        ...

    def plan_weights(
        self, checkpoint: Checkpoint, backend: Backend, dtype: str, quantization: str | None = None
    ) -> ModelWeights:
        """dtype, quantization: as of `Backend.plan_weights`. Raises ConfigError for a checkpoint or
        a format that doesn't suit the model.
        """
        ...

    def prepare(self, backend: Backend, num_positions: int) -> None:
        """After loading: all that must be there before texts of so many tokens."""
        ...

    def forward(self, ctx: BatchContext) -> Array:
        """Hidden states after the final norm, (T, D)."""
        ...

    def forward_with_taps(self, ctx: BatchContext, taps: Sequence[int]) -> tuple[Array, ...]:
        """What `forward` gives, then the output of each block that `taps` names, (T, D) each."""
        ...

    def logits(self, hidden: Array, rows: Array) -> Array:
        """hidden (T, D), rows (R,) int64: those wanted -> (R, V), in the model's dtype."""
        ...

"""A model of transformers behind the interface of Octavo's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from octavo.core.dtypes import BYTES_PER_VALUE
from octavo.core.errors import ConfigError, InvariantError
from octavo.layers.share import Share
from octavo.models.stored_piece import Checkpoint
from octavo.models.through_transformers.architecture import (
    VERSION,
    refusal,
    told,
    transformers_architecture,
)
from octavo.models.through_transformers.attention import (
    MAX_POSITIONS,
    STEP,
    Call,
    PagedStep,
    Unsupported,
    register,
)
from octavo.models.through_transformers.check import (
    own_logits,
    refuse_other_logits,
    relative_error,
)
from octavo.models.through_transformers.trial import attention_calls
from octavo.models.through_transformers.weights import loaded_module, weight_format
from octavo.ops import Array, BatchContext, linear
from octavo.ops.backend import Backend, KVShape


def build(config: Mapping[str, Any]) -> TransformersModel:
    """The model that a config.json describes, as transformers has it, without weights.

    Raises ConfigError, which names the architecture, for what can't be run in this way.
    """
    register()
    architecture, theirs = transformers_architecture(config)
    try:
        calls, num_parameters = attention_calls(architecture, theirs)
    except Unsupported as error:
        raise refusal(config, str(error)) from None
    except Exception as error:
        raise refusal(config, f"a forward without weights fails: {told(error)}") from error
    if not calls:
        raise refusal(config, "it calls no attention that could be replaced")
    return TransformersModel(architecture, theirs, calls, num_parameters)


@dataclass(frozen=True)
class _Weights:
    """`ModelWeights`: everything as one, since transformers renames and joins what is stored."""

    model: TransformersModel
    checkpoint: Checkpoint
    backend: Backend
    dtype: str

    @property
    def num_bytes(self) -> tuple[int, ...]:
        return (self.model.num_parameters * BYTES_PER_VALUE[self.dtype],)

    @property
    def formats(self) -> tuple[str, ...]:
        return (weight_format(self.checkpoint, self.dtype),)

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.model.load(self.checkpoint, self.backend, self.dtype, self.num_bytes[0], progress)


class TransformersModel:
    """A `EngineModel`: transformers' modules between Octavo's batches and Octavo's attention."""

    only_backend: str | None = "torch"

    def __init__(
        self, architecture: Any, config: Any, calls: list[Call], num_parameters: int
    ) -> None:
        """calls, num_parameters: from `attention_calls`."""
        self.family: str = config.model_type
        self.module: str = f"{architecture.__name__} of transformers {VERSION}"
        self.max_position = min(int(config.max_position_embeddings), MAX_POSITIONS)
        self.num_parameters = num_parameters
        self.vocab_size = int(config.vocab_size)
        self._architecture = architecture
        self._config = config
        self._calls = calls
        self._decoder: nn.Module | None = None
        self._head: nn.Module | None = None

    @property
    def kv_shapes(self) -> list[KVShape]:
        return [(call.spec.num_kv_heads, call.spec.head_dim) for call in self._calls]

    def shard(self, share: Share) -> None:
        raise ConfigError(
            f"--tensor-parallel-size {share.size}: {self.family} runs as transformers' module, "
            "which can't be divided; leave it out, and use --data-parallel-size for more replicas"
        )

    def plan_weights(
        self, checkpoint: Checkpoint, backend: Backend, dtype: str, quantization: str | None = None
    ) -> _Weights:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization}: {self.family} runs as transformers' module, whose "
                "weights are not quantized; leave it out"
            )
        return _Weights(self, checkpoint, backend, dtype)

    def load(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        dtype: str,
        num_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Take the weights, and compare what comes of them with transformers' own attention."""
        module = loaded_module(
            self._architecture,
            self._config,
            checkpoint,
            dtype,
            backend.device,
            num_bytes,
            progress,
        )
        try:
            expected = own_logits(module, self.vocab_size)
            self._take_apart(module)
            difference = relative_error(self, expected, backend, dtype)
        except Exception as error:
            raise ConfigError(
                f"{self.module} can't be run with Octavo's attention and cache: {told(error)}. "
                "`octavo models` lists the families that Octavo has itself"
            ) from error
        refuse_other_logits(self.module, difference, dtype)

    def _take_apart(self, module: Any) -> None:
        """Into the decoder, from tokens to hidden states, and the head."""
        self._decoder, self._head = module.base_model, module
        setattr(module, module.base_model_prefix, _Given())

    def prepare(self, backend: Backend, num_positions: int) -> None:
        """Nothing: transformers' modules work their positions out step by step."""

    def forward(self, ctx: BatchContext) -> Array:
        if self._decoder is None:
            raise InvariantError(f"{self.family} is used before its weights are loaded")
        ids, positions = (cast(torch.Tensor, one)[None] for one in (ctx.token_ids, ctx.positions))
        step = PagedStep(ctx, self._calls)
        with _SteadyProducts():
            output = self._decoder(
                input_ids=ids, position_ids=positions, use_cache=False, **{STEP: step}
            )
        step.finish()
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def forward_with_taps(self, ctx: BatchContext, taps: Sequence[int]) -> tuple[Array, ...]:
        if taps:
            raise InvariantError("outputs of blocks are not seen in transformers' modules")
        return (self.forward(ctx),)

    def logits(self, hidden: Array, rows: Array) -> Array:
        if self._head is None:
            raise InvariantError(f"{self.family} is used before its weights are loaded")
        states, wanted = cast(torch.Tensor, hidden), cast(torch.Tensor, rows)
        given = states.index_select(0, wanted)[None]
        with _SteadyProducts():
            output = self._head(inputs_embeds=given, use_cache=False)
        logits: torch.Tensor = output.logits[0].to(states.dtype)
        return logits


class _Output(BaseModelOutputWithPast):
    """Of a decoder, which may have given more than hidden states: nothing of that is there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """In place of the decoder in a causal language model: its output is what it is given, so that
    the model is the head alone, with all that it does to logits.
    """

    def forward(
        self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **_: object
    ) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _SteadyProducts(TorchFunctionMode):
    """Products with matrices by the op, in which a row doesn't depend on its batch."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs:
            x, weight, *bias = args
            y = linear(x.reshape(-1, x.shape[-1]), weight, *bias)
            return y.reshape(*x.shape[:-1], weight.shape[0])
        return func(*args, **kwargs or {})

"""What a step costs at least on a device of these specifications, and how near engines come to it.

Each part of a step is limited by memory or by arithmetic, whichever is slower; what engines reach
of either (`Efficiency`) is a prior with a spread. Formulas: docs/accuracy.md.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from octavo.core.model_spec import (
    AttentionSpec,
    KVFormat,
    LatentAttentionSpec,
    ModelSpec,
    MoESpec,
)
from octavo.core.weight_format import WEIGHT_FORMATS, WeightFormat
from octavo.simulator.cost_model import Provenance
from octavo.simulator.hardware import Efficiency, Hardware
from octavo.simulator.work import AttentionFlops, StepWork, work_of_drafter

_OVERLAP = 0.15
"""Of the smaller of two times, what is not hidden behind the larger: rounds the roof's edge."""
_ACTIVATION_VALUES = 10
"""Read or written a layer, token and value of the hidden state, by all that is no product."""
_ACTIVATION_BYTES = 2
_KV = KVFormat("bfloat16")


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model that guesses, in the formats of the one that it guesses for. num_own_parameters: that
    are not the other's, too. has_own_cache: its keys and values are kept beside the other's.
    """

    spec: ModelSpec
    num_own_parameters: int
    has_own_cache: bool


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a model is laid out on devices. tensor_parallel of them share each layer, and so many
    groups as pipeline_parallel says share the layers. matrices: the format of the layers' matrices;
    rest: of embedding and head. kv: of the cache.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    matrices: WeightFormat = WEIGHT_FORMATS["bfloat16"]
    rest: WeightFormat = WEIGHT_FORMATS["bfloat16"]
    kv: KVFormat = _KV
    drafter: Drafter | None = None


class Roofline:
    """A `CostModel` from specifications. efficiency: None is what is usual on the hardware."""

    num_stages: int
    windows: tuple[int | None, ...]
    provenance: Provenance = "specification"

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        deployment: Deployment | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.deployment = deployment = deployment or Deployment()
        self.efficiency = efficiency = efficiency or hardware.device.efficiency
        self.windows = spec.windows
        self.num_stages = deployment.pipeline_parallel
        device, ranks = hardware.device, deployment.tensor_parallel
        self._memory = device.read_bytes_per_second * efficiency.memory
        self._linear_flops = (
            device.peak_flops(deployment.matrices.compute) * efficiency.compute * ranks
        )
        self._head_flops = device.peak_flops(deployment.rest.compute) * efficiency.compute * ranks
        self._attention_flops = device.peak_flops("bfloat16") * efficiency.attention * ranks
        self._ranks = ranks
        head_bytes = deployment.rest.num_bytes(spec.num_embedding_parameters)
        self._head_seconds = head_bytes / ranks / self._memory
        self._kv_bytes = {window: self._token_bytes(window) for window in spec.windows}
        self._flops = {window: AttentionFlops.of(spec, window) for window in spec.windows}
        self._has_experts = any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)
        self._touched = spec.num_touched_parameters(1.0)
        self._state_bytes = spec.state_bytes / ranks
        # One after each mixer, and one after each MLP.
        self._num_reduces = sum(
            (layer.mixer is not None) + (layer.mlp is not None) for layer in spec.layers
        )
        values = _ACTIVATION_VALUES * len(spec.layers) * spec.hidden_size
        self._activation_bytes = values * _ACTIVATION_BYTES / ranks
        self._drafter = None
        if deployment.drafter is not None:
            self._drafter = Roofline(
                deployment.drafter.spec,
                hardware,
                replace(deployment, pipeline_parallel=1, drafter=None),
                efficiency,
            )

    def seconds(self, work: StepWork) -> float:
        device_seconds = self._linear(work) + self._attention(work) + self._communication(work)
        host_seconds = self.efficiency.step_seconds
        host_seconds += self.efficiency.sequence_seconds * work.num_sequences
        return device_seconds + host_seconds

    def draft_seconds(self, work: StepWork) -> float:
        """A drafter's steps, one after another; other methods only look up what they guess."""
        if self._drafter is None or not work.longest_draft:
            return 0.0
        one = work_of_drafter(work, self._drafter.windows)
        return work.longest_draft * self._drafter.seconds(one)

    def draw(self, rng: random.Random) -> Roofline:
        efficiency = self.efficiency.draw(rng)
        return Roofline(self.spec, self.hardware, self.deployment, efficiency)

    # --- parts ----------------------------------------------------------------------------------

    def _linear(self, work: StepWork) -> float:
        """Products with weights, norms and the like, and recurrent layers' states."""
        tokens = work.num_tokens
        touched = self.spec.num_touched_parameters(tokens) if self._has_experts else self._touched
        num_bytes = self.deployment.matrices.num_bytes(touched) / self._ranks
        num_bytes += self._activation_bytes * tokens
        num_bytes += 2 * self._state_bytes * work.num_sequences
        flops = self.spec.linear_flops(tokens, 0)
        seconds = _slower(num_bytes / self._memory, flops / self._linear_flops)
        if work.num_logit_rows:
            flops = self.spec.linear_flops(0, work.num_logit_rows)
            seconds += _slower(self._head_seconds, flops / self._head_flops)
        return seconds

    def _attention(self, work: StepWork) -> float:
        seconds = 0.0
        for one in work.attention:
            kv_bytes, flops = self._kv_bytes[one.window], self._flops[one.window]
            written = work.num_tokens * kv_bytes
            seconds += _slower(
                (one.decoding_context * kv_bytes + written) / self._memory,
                one.decoding_context * flops.decoding_pair / self._attention_flops,
            )
            if one.chunk_pairs:
                seconds += _slower(
                    one.chunk_context * kv_bytes / self._memory,
                    flops.of_chunks(one) / self._attention_flops,
                )
        return seconds

    def _communication(self, work: StepWork) -> float:
        """All-reduces, and what one stage hands to the next."""
        ranks, stages, link = self._ranks, self.num_stages, self.hardware.device.link
        if ranks * stages == 1 or link is None:
            return 0.0
        speed = link.bytes_per_second * self.efficiency.link
        message = work.num_tokens * self.spec.hidden_size * _ACTIVATION_BYTES
        seconds = 0.0
        if ranks > 1:
            moved = 2 * (ranks - 1) / ranks * message
            seconds += self._num_reduces * (self.efficiency.reduce_seconds + moved / speed)
        seconds += (stages - 1) * (self.efficiency.reduce_seconds + message / speed)
        return seconds

    def _token_bytes(self, window: int | None) -> float:
        """Of one token's cache in all layers with this window, on one device."""
        return sum(
            layer.attention.kv_bytes_per_token(self.deployment.kv)
            / kv_shares(layer.attention, self._ranks)
            for layer in self.spec.layers
            if layer.attention is not None and layer.attention.window == window
        )


def kv_shares(attention: AttentionSpec | LatentAttentionSpec, ranks: int) -> float:
    """Into how many parts tensor parallelism divides a layer's cache, by the rank that has most of
    it: of three heads, one of two ranks has two. Ranks beyond the number of heads have copies; a
    latent vector is one for all heads, so all have it.
    """
    if isinstance(attention, LatentAttentionSpec):
        return 1
    heads = attention.num_kv_heads
    return heads / math.ceil(heads / ranks)


def _slower(one: float, other: float) -> float:
    return max(one, other) + _OVERLAP * min(one, other)

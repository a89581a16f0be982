"""The batch and the KV cache on a torch device, and what attention works out once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from octavo.ops.batch import BatchContext, KVLayer

if TYPE_CHECKING:
    from octavo.ops.torch.attention_plan import AttentionPlan, PlanKey


@dataclass(frozen=True, slots=True)
class TorchKVLayer(KVLayer):
    """keys, values (N, B, G, E)."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchLatentLayer(KVLayer):
    """vectors (N, B, C + R)."""

    vectors: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchBatchContext(BatchContext):
    """kv_slots: the host's, on the device. plans: filled by the first layer of each kind, used by
    the others.
    """

    kv_slots: torch.Tensor
    plans: dict[PlanKey, AttentionPlan] = field(default_factory=dict)

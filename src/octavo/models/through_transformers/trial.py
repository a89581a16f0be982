"""A forward without weights, which shows what a module asks of attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from octavo.models.through_transformers.attention import STEP, TRIAL, Call, Trial, Unsupported

_NUM_TOKENS = 3


def attention_calls(architecture: Any, config: Any) -> tuple[list[Call], int]:
    """The calls of attention in each forward of the causal language model, in their order, and how
    many parameters it has. config: left as it is.

    Raises `Unsupported`, and whatever the module raises.
    """
    ExpertsInterface.register(TRIAL, _trial_experts)
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = TRIAL
    trial = Trial()
    with torch.device("meta"):
        module = architecture(config).eval()
        token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
    if module.base_model is module:
        raise Unsupported("its decoder and its head are one")
    with torch.inference_mode():
        module.base_model(
            input_ids=token_ids,
            position_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            use_cache=False,
            **{STEP: trial},
        )
    return trial.calls, sum(parameter.numel() for parameter in module.parameters())


def _trial_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """In place of experts, whose rows depend on values, which there are none of."""
    return torch.empty_like(hidden_states)

"""The methods that can be trained: which modules they are, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.ops.torch.dtypes import to_array
from octavo.speculative.training.eagle import EagleHead, EagleShape
from octavo.speculative.training.medusa import MedusaHeads
from octavo.speculative.training.target import Target
from octavo.weights.model_config import ModelConfig
from octavo.weights.safetensors_writer import write_safetensors

METHODS = ("eagle", "medusa")
_EAGLE_CHAIN = 3
_EAGLE_POSITIONS = 5
_EAGLE_FEATURE_WEIGHT = 4.0


@dataclass(frozen=True)
class Blueprint:
    """A head that is to be made. config: what its config.json says of it. first_chain, last_chain,
    feature_weight: see TrainingSettings. positions: that it drafts, as far as that is measured.
    """

    method: str
    config: dict[str, Any]
    first_chain: int
    last_chain: int
    positions: int
    feature_weight: float

    def build(self, seed: int) -> EagleHead | MedusaHeads:
        """With the weights that it has before training."""
        head: EagleHead | MedusaHeads
        if self.method == "eagle":
            head = EagleHead(EagleShape.of(self.config))
        else:
            head = MedusaHeads(self.config["hidden_size"], self.config["medusa_num_heads"])
        head.initialize(torch.Generator().manual_seed(seed))
        return head


def eagle_blueprint(target: Target, *, inner_size: int | None) -> Blueprint:
    """One layer as wide as the target's. inner_size: of its MLP (None: the target's)."""
    config = ModelConfig(target.config)
    attention = target.spec.grouped_attention[0]
    return Blueprint(
        "eagle",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": target.spec.hidden_size,
            "intermediate_size": inner_size or config.integer("intermediate_size"),
            "num_hidden_layers": 1,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": config.rope()["rope_theta"],
            "max_position_embeddings": target.spec.max_position,
            "vocab_size": target.spec.vocab_size,
        },
        first_chain=1,
        last_chain=_EAGLE_CHAIN,
        positions=_EAGLE_POSITIONS,
        feature_weight=_EAGLE_FEATURE_WEIGHT,
    )


def medusa_blueprint(target: Target, *, num_heads: int) -> Blueprint:
    """Heads of one block each. They have no features of their own to be compared."""
    return Blueprint(
        "medusa",
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.spec.hidden_size,
            "medusa_num_heads": num_heads,
            "medusa_num_layers": 1,
            "vocab_size": target.spec.vocab_size,
        },
        first_chain=num_heads,
        last_chain=num_heads,
        positions=num_heads,
        feature_weight=0.0,
    )


def write_head(
    folder: Path,
    head: EagleHead | MedusaHeads,
    blueprint: Blueprint,
    token_ids: np.ndarray,
    facts: Mapping[str, Any],
) -> int:
    """The folder of a head: config.json and model.safetensors, whose size in bytes is returned.

    Matrices are bfloat16. d2t (W,): token id = row + d2t[row], as EAGLE-3 keeps it. facts: how it
    was trained, which nothing reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: to_array(tensor.to(torch.bfloat16)) for name, tensor in head.published().items()
    }
    tensors["d2t"] = token_ids - np.arange(len(token_ids))
    path = folder / "model.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    config = {
        **blueprint.config,
        "draft_vocab_size": len(token_ids),
        "torch_dtype": "bfloat16",
        "training": dict(facts),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path.stat().st_size

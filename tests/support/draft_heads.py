"""Tiny random draft heads in the layouts that are published, and their formulas in numpy.

What a head computes is written out here once more, in float64, over whole sequences, with no cache
and no batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.checkpoints import VOCAB_SIZE

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 80, 4, 2, 16
EPS, THETA = 1e-5, 10000.0

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
}
Tensors = dict[str, np.ndarray]


def save_head(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class _Random:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, scale: float = 0.3) -> np.ndarray:
        return (scale * self._rng.standard_normal((rows, columns))).astype(np.float32)

    def vector(self, size: int, mean: float = 0.0) -> np.ndarray:
        return (mean + 0.2 * self._rng.standard_normal(size)).astype(np.float32)

    def offsets(self, count: int) -> np.ndarray:
        """A `d2t` of so many tokens."""
        chosen = np.sort(self._rng.permutation(VOCAB_SIZE)[:count])
        return chosen - np.arange(count)


def _layer(random: _Random, name: str, width: int) -> Tensors:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{name}.self_attn.q_proj.weight": random.matrix(queries, width),
        f"{name}.self_attn.k_proj.weight": random.matrix(keys, width),
        f"{name}.self_attn.v_proj.weight": random.matrix(keys, width),
        f"{name}.self_attn.o_proj.weight": random.matrix(HIDDEN, queries),
        f"{name}.post_attention_layernorm.weight": random.vector(HIDDEN, 1.0),
        f"{name}.mlp.gate_proj.weight": random.matrix(INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": random.matrix(INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": random.matrix(HIDDEN, INNER),
    }


def eagle_tensors(*, seed: int = 5, num_draft_tokens: int | None = None) -> Tensors:
    """EAGLE-1, with a bias."""
    random = _Random(seed)
    tensors = {"fc.weight": random.matrix(HIDDEN, 2 * HIDDEN), "fc.bias": random.vector(HIDDEN)}
    tensors |= _layer(random, "layers.0", HIDDEN)
    tensors["embed_tokens.weight"] = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)  # never looked at
    if num_draft_tokens is not None:
        tensors["d2t"] = random.offsets(num_draft_tokens)
    return tensors


def eagle3_tensors(*, seed: int = 16, num_draft_tokens: int = 300) -> Tensors:
    random = _Random(seed)
    tensors = {"fc.weight": random.matrix(HIDDEN, 3 * HIDDEN)}
    tensors |= _layer(random, "midlayer", 2 * HIDDEN)
    tensors["midlayer.input_layernorm.weight"] = random.vector(HIDDEN, 1.0)
    tensors["midlayer.hidden_norm.weight"] = random.vector(HIDDEN, 1.0)
    tensors["norm.weight"] = random.vector(HIDDEN, 1.0)
    tensors["lm_head.weight"] = random.matrix(num_draft_tokens, HIDDEN)
    tensors["d2t"] = random.offsets(num_draft_tokens)
    known = np.zeros(VOCAB_SIZE, np.bool_)
    known[np.arange(num_draft_tokens) + tensors["d2t"]] = True
    return {**tensors, "t2d": known}


def medusa_tensors(
    *, seed: int = 7, num_heads: int = 3, num_layers: int = 1, has_lm_heads: bool = True
) -> Tensors:
    """Medusa's own names."""
    random = _Random(seed)
    tensors: Tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = random.matrix(HIDDEN, HIDDEN, 0.1)
            tensors[f"{head}.{layer}.linear.bias"] = random.vector(HIDDEN)
        if has_lm_heads:
            tensors[f"{head}.{num_layers}.weight"] = random.matrix(VOCAB_SIZE, HIDDEN)
    return tensors


# --- the formulas -----------------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    return result


def silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result


def _rotated(x: np.ndarray) -> np.ndarray:
    """x (T, H, E) at positions 0 to T - 1."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    pairs = x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]
    turned = pairs * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    """Causal, over rows x (T, D)."""
    size = len(x)

    def heads(part: str, count: int) -> np.ndarray:
        projected = x @ tensors[f"{name}.{part}_proj.weight"].T
        return projected.reshape(size, count, HEAD_DIM)

    queries, keys = _rotated(heads("q", HEADS)), _rotated(heads("k", KV_HEADS))
    keys, values = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (keys, heads("v", KV_HEADS)))
    scores = np.einsum("qhe,khe->hqk", queries, keys) / np.sqrt(HEAD_DIM)
    scores[:, ~np.tri(size, dtype=np.bool_)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khe->qhe", weights, values).reshape(size, -1)
    return mixed @ tensors[f"{name}.o_proj.weight"].T


def _mlp(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    gate, up = (x @ tensors[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    result: np.ndarray = silu(gate) * up @ tensors[f"{name}.down_proj.weight"].T
    return result


class EagleFormula:
    """EAGLE-1 or 3 over a whole text. embedding (V, D), head (V, D): the target's."""

    def __init__(self, tensors: Tensors, embedding: np.ndarray, head: np.ndarray) -> None:
        self._tensors = {
            name: tensor.astype(np.float64) if tensor.dtype == np.float32 else tensor
            for name, tensor in tensors.items()
        }
        self._embedding = embedding.astype(np.float64)
        self._is_eagle3 = "midlayer.hidden_norm.weight" in tensors
        self.token_ids = np.arange(len(embedding))
        if "d2t" in tensors:
            self.token_ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
        lm_head = tensors["lm_head.weight"] if self._is_eagle3 else head[self.token_ids]
        self._head = lm_head.astype(np.float64)

    def draft(
        self, features: np.ndarray, tokens: Sequence[int], count: int, *, floor: float = 0.0
    ) -> list[tuple[int, ...]]:
        """The `count` likeliest paths behind tokens (T + 1), of which all but the last have
        features (T, F): those of the likeliest tokens one after another, and of the three next to
        the last of them; none of less probability than `floor`.
        """
        found: list[tuple[float, tuple[int, ...]]] = []
        chain: tuple[int, ...] = ()
        reached = 1.0
        while len(chain) < count:
            weights = self.probabilities_after(features, tokens, chain)
            best = np.argsort(-weights)[:4]
            found += [(reached * weights[i], (*chain, int(self.token_ids[i]))) for i in best]
            reached *= weights[best[0]]
            chain = (*chain, int(self.token_ids[best[0]]))
        return [path for p, path in sorted(found, reverse=True)[:count] if p >= floor]

    def probabilities_after(
        self,
        features: np.ndarray,
        tokens: Sequence[int],
        drafted: Sequence[int],
        temperature: float = 1.0,
    ) -> np.ndarray:
        """(K,) of the tokens that may follow what was drafted so far."""
        logits = self.logits_after(features, tokens, drafted) / temperature
        weights = np.exp(logits - logits.max())
        result: np.ndarray = weights / weights.sum()
        return result

    def logits_after(
        self, features: np.ndarray, tokens: Sequence[int], drafted: Sequence[int]
    ) -> np.ndarray:
        """(K,) behind what was drafted so far."""
        rows = features.astype(np.float64)
        if self._is_eagle3:
            rows = rows @ self._tensors["fc.weight"].T
        after = [*tokens[1:], *drafted]
        while True:
            own = self._forward(rows, self._embedding[after[: len(rows)]])[-1]
            if len(rows) == len(after):
                return self._logits(own)
            rows = np.concatenate([rows, own[None]])

    def _logits(self, own: np.ndarray) -> np.ndarray:
        if self._is_eagle3:
            own = norm(own, self._tensors["norm.weight"])
        return self._head @ own

    def _forward(self, features: np.ndarray, embedded: np.ndarray) -> np.ndarray:
        tensors = self._tensors
        if not self._is_eagle3:
            joined = np.concatenate([embedded, features], axis=1)
            x, layer = joined @ tensors["fc.weight"].T + tensors["fc.bias"], "layers.0"
            x = x + attention(x, tensors, f"{layer}.self_attn")
        else:
            layer = "midlayer"
            normed = norm(features, tensors[f"{layer}.hidden_norm.weight"])
            of_tokens = norm(embedded, tensors[f"{layer}.input_layernorm.weight"])
            joined = np.concatenate([of_tokens, normed], axis=1)
            x = features + attention(joined, tensors, f"{layer}.self_attn")
        normed = norm(x, tensors[f"{layer}.post_attention_layernorm.weight"])
        return x + _mlp(normed, tensors, f"{layer}.mlp")


def medusa_logits(tensors: Tensors, feature: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Of each head (H, V) behind a feature (D,). head (V, D): the target's."""
    found, index = [], 0
    while f"{index}.0.linear.weight" in tensors:
        x, layer = feature.astype(np.float64), 0
        while f"{index}.{layer}.linear.weight" in tensors:
            name = f"{index}.{layer}.linear"
            x = x + silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
            layer += 1
        found.append(tensors.get(f"{index}.{layer}.weight", head) @ x)
        index += 1
    return np.array(found)

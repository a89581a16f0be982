"""EAGLE's draft head in torch: one decoder layer that foresees the target's features.

Position i takes the feature f_i (the target's hidden state after its final norm) and the token
t_{i+1}, and gives f_{i+1}, of which the target's head makes the logits of t_{i+2}. Names and shapes
of its parameters are those of EAGLE's published checkpoints. Source: arXiv 2401.15077, section 4.1.

Axes: B sequences, L positions, D hidden, H heads, G key and value heads, E head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

_RIDGE = 1e-3


@dataclass(frozen=True)
class EagleShape:
    """hidden D, inner: of the MLP, heads H, kv_heads G, head_dim E."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleShape:
        """config: keys of a head's config.json."""
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        )


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Norm(nn.RMSNorm):
    """In float32, whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class _Layer(nn.Module):
    """There is no norm before the attention: features come out of one."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.eps)
        self.mlp = _MLP(shape)


class EagleHead(nn.Module):
    """Weights of a head, and how it runs over texts that are known.

    Embeddings are much smaller numbers than features. They are scaled to the same size for training
    (`embedding_gain`), which else would hardly reach their part of `fc`; `published` undoes it.
    """

    embedding_gain: torch.Tensor

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.register_buffer("embedding_gain", torch.ones(()))

    @property
    def _layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def initialize(self, generator: torch.Generator) -> None:
        """Random weights; attention and MLP add nothing yet."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self._layer.self_attn.o_proj.weight.zero_()
            self._layer.mlp.down_proj.weight.zero_()

    def fit(self, features: torch.Tensor, embeddings: torch.Tensor, truth: torch.Tensor) -> None:
        """Let `fc` be the best linear guess of `truth` (N, D), the features after `features`
        (N, D), so that training begins from there: least squares, a little regularised.
        """
        self.embedding_gain.copy_((features.square().mean() / embeddings.square().mean()).sqrt())
        inputs = torch.cat([embeddings * self.embedding_gain, features], dim=-1)
        products = (inputs.T @ inputs).double()
        products += _RIDGE * products.diagonal().diag()
        solution = torch.linalg.solve(products, (inputs.T @ truth).double())
        with torch.no_grad():
            self.fc.weight.copy_(solution.T)

    def published(self) -> dict[str, torch.Tensor]:
        """The weights under their published names, for embeddings as they are."""
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()}
        fc = weights["fc.weight"].clone()
        fc[:, : self.shape.hidden] *= self.embedding_gain
        return weights | {"fc.weight": fc}

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Drafting `num_steps` tokens from every position at once: [(B, L, D)] * num_steps.

        features (B, L, D): f_i. embeddings (B, L, D): of t_{i+1}. Step j at position i is the j-th
        step (from 0) of the chain that begins at position i - j: its feature is the head's own of
        step j - 1, and so are keys and values of the chain's positions, while those before are made
        of the target's features. What step j gives at positions below j means nothing. This is the
        training-time test of arXiv 2503.01840, section 3.2, and figure 6.
        """
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        embeddings = embeddings * self.embedding_gain
        for _ in range(num_steps):
            x = self.fc(torch.cat([embeddings, features], dim=-1))
            layer = self._layer
            x = x + self._attend(x, keys, values)
            outputs.append(x + layer.mlp(layer.post_attention_layernorm(x)))
            features = later(outputs[-1], 1)
        return outputs

    def _attend(
        self,
        x: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One step's attention. keys, values: (B, L, G, E) of the steps before; this one's are
        added.
        """
        batch, length, _ = x.shape
        shape, step, attention = self.shape, len(keys), self._layer.self_attn
        q = attention.q_proj(x).view(batch, length, shape.heads, shape.head_dim)
        k = attention.k_proj(x).view(batch, length, shape.kv_heads, shape.head_dim)
        v = attention.v_proj(x).view(batch, length, shape.kv_heads, shape.head_dim)
        rotation = self._rotation(length, x)
        q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        keys.append(k)
        values.append(v)
        group = shape.heads // shape.kv_heads
        q = q.view(batch, length, shape.kv_heads, group, shape.head_dim) * shape.head_dim**-0.5
        # Of the target's features: a chain that is `step` long sees what is before its beginning.
        scores = torch.einsum("blgre,bmge->bgrlm", q, keys[0])
        places = torch.arange(length, device=x.device)
        scores = scores.masked_fill(places[None, :] > places[:, None] - step, float("-inf"))
        own = [
            torch.einsum("blgre,blge->bgrl", q, later(keys[s], step - s))
            for s in range(1, step + 1)
        ]
        if own:
            scores = torch.cat([scores, torch.stack(own, dim=-1)], dim=-1)
        shares = torch.softmax(scores.float(), dim=-1).to(q.dtype)
        y = torch.einsum("bgrlm,bmge->blgre", shares[..., :length], values[0])
        for s in range(1, step + 1):
            share = shares[..., length + s - 1].permute(0, 3, 1, 2)[..., None]
            y = y + share * later(values[s], step - s)[:, :, :, None]
        result: torch.Tensor = attention.o_proj(y.reshape(batch, length, -1))
        return result

    def _rotation(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (L, 1, E / 2) each."""
        exponents = (
            torch.arange(0, self.shape.head_dim, 2, device=like.device) / self.shape.head_dim
        )
        angles = torch.outer(
            torch.arange(length, device=like.device), self.shape.rope_theta**-exponents
        )
        return angles.cos()[:, None], angles.sin()[:, None]


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Halves are pairs, as in the target's families. Source: arXiv 2104.09864, section 3.2.2."""
    first, second = x.float().chunk(2, dim=-1)
    pair = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(pair, dim=-1).to(x.dtype)


def later(x: torch.Tensor, places: int) -> torch.Tensor:
    """x (B, L, ...) moved to later positions; the first ones are zero."""
    return x if places == 0 else F.pad(x, (0, 0) * (x.dim() - 2) + (places, 0))[:, : x.shape[1]]

"""The modules that are trained."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from octavo.speculative.training.eagle import EagleHead, EagleShape, _rotated
from octavo.speculative.training.medusa import MedusaHeads

SHAPE = EagleShape(
    hidden=24, inner=40, heads=4, kv_heads=2, head_dim=8, eps=1e-5, rope_theta=1000.0
)
LENGTH, STEPS = 9, 4


def random_head() -> EagleHead:
    head = EagleHead(SHAPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head


def drafted_one_by_one(
    head: EagleHead, features: torch.Tensor, embeddings: torch.Tensor, begin: int
) -> list[torch.Tensor]:
    """The chain that begins at position `begin`, as an engine drafts it: keys and values of the
    target's features up to there, then the head's own, one at a time.
    """
    layer = head.layers[0]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs = []
    for position in range(begin + STEPS):
        is_own = position > begin
        feature = outputs[-1] if is_own else features[position]
        if position >= len(embeddings):
            break
        x = head.fc(torch.cat([embeddings[position], feature]))
        attention = layer.self_attn
        q = attention.q_proj(x).view(1, 1, SHAPE.heads, SHAPE.head_dim)
        k = attention.k_proj(x).view(1, 1, SHAPE.kv_heads, SHAPE.head_dim)
        rotation = [part[position] for part in head._rotation(LENGTH, x)]
        q, k = (_rotated(part, *rotation)[0, 0] for part in (q, k))
        keys.append(k)
        values.append(attention.v_proj(x).view(SHAPE.kv_heads, SHAPE.head_dim))
        group = SHAPE.heads // SHAPE.kv_heads
        y = F.scaled_dot_product_attention(
            q[:, None],
            torch.stack(keys, 1).repeat_interleave(group, 0),
            torch.stack(values, 1).repeat_interleave(group, 0),
        )
        x = x + attention.o_proj(y.reshape(-1))
        output = x + layer.mlp(layer.post_attention_layernorm(x))
        if position >= begin:
            outputs.append(output)
    return outputs


def test_all_chains_at_once_are_those_drafted_one_by_one() -> None:
    head = random_head()
    generator = torch.Generator().manual_seed(1)
    features, embeddings = torch.randn(2, 2, LENGTH, SHAPE.hidden, generator=generator)
    with torch.inference_mode():
        outputs = head(features, embeddings, STEPS)
        for row in range(2):
            for begin in range(LENGTH):
                chain = drafted_one_by_one(head, features[row], embeddings[row], begin)
                for step, output in enumerate(chain):
                    found = outputs[step][row, begin + step]
                    torch.testing.assert_close(found, output, atol=1e-3, rtol=1e-3)


def test_a_head_begins_as_the_best_linear_guess() -> None:
    generator = torch.Generator().manual_seed(2)
    features, embeddings = torch.randn(2, 400, SHAPE.hidden, generator=generator)
    matrix = torch.randn(2 * SHAPE.hidden, SHAPE.hidden, generator=generator)
    truth = torch.cat([embeddings, features], -1) @ matrix
    head = EagleHead(SHAPE)
    head.initialize(generator)
    head.fit(features, embeddings, truth)
    (output,) = head(features[None], embeddings[None], 1)
    error = (output[0] - truth).square().mean() / truth.square().mean()
    assert error < 1e-4


def test_medusas_heads_begin_as_the_targets() -> None:
    heads = MedusaHeads(SHAPE.hidden, 3)
    heads.initialize(torch.Generator())
    features = torch.randn(1, LENGTH, SHAPE.hidden)
    outputs = heads(features, features, 3)
    assert len(outputs) == 3
    # Step j at position i looks at the feature of position i - j.
    for step, output in enumerate(outputs):
        assert torch.equal(output[:, step:], features[:, : LENGTH - step])

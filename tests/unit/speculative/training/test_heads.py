"""The modules that are trained."""

from __future__ import annotations

import numpy as np
import torch

from octavo.speculative.training.eagle import EagleHead, EagleShape
from octavo.speculative.training.medusa import MedusaHeads
from support.checkpoints import VOCAB_SIZE
from support.draft_heads import CONFIG, HEAD_DIM, EagleFormula, eagle_tensors

SHAPE = EagleShape.of({**CONFIG, "head_dim": HEAD_DIM})
LENGTH, STEPS = 9, 4


def test_all_chains_at_once_are_those_drafted_one_by_one() -> None:
    """As the engine's head drafts, whose tests have the same formula."""
    tensors = eagle_tensors()
    tensors["fc.bias"] *= 0  # heads that are trained here have none
    head = EagleHead(SHAPE)
    head.load_state_dict({n: torch.from_numpy(t) for n, t in tensors.items()}, strict=False)
    rng = np.random.default_rng(1)
    embedding, lm_head = rng.standard_normal((2, VOCAB_SIZE, SHAPE.hidden)).astype(np.float32)
    features = rng.standard_normal((LENGTH, SHAPE.hidden)).astype(np.float32)
    tokens = rng.integers(0, VOCAB_SIZE, LENGTH + 1).tolist()
    formula = EagleFormula(tensors, embedding, 0.1 * lm_head)
    with torch.inference_mode():
        outputs = head(
            torch.from_numpy(features)[None], torch.from_numpy(embedding[tokens[1:]])[None], STEPS
        )
    for step, output in enumerate(outputs):
        logits = 0.1 * output[0].double() @ torch.from_numpy(lm_head).double().T
        for begin in range(LENGTH - step):
            drafted = tokens[begin + 2 : begin + 2 + step]
            expected = formula.probabilities_after(
                features[: begin + 1], tokens[: begin + 2], drafted
            )
            found = torch.softmax(logits[begin + step], -1).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


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

"""What is told of a head's guesses, on texts whose features are made up."""

from __future__ import annotations

import pytest
import torch

from octavo.speculative.training.eagle import later
from octavo.speculative.training.examples import Batch, Vocabulary
from octavo.speculative.training.learning import Acceptance, count_accepted, loss

NUM_TOKENS = 6
# Token 5 can't be drafted.
VOCABULARY = Vocabulary(
    embeddings=torch.eye(NUM_TOKENS),
    token_ids=torch.arange(5),
    head=torch.eye(NUM_TOKENS)[:5],
    coverage=1.0,
)


def batch_of(tokens: list[int], num_prompt: int) -> Batch:
    """Each token's feature tells the next one."""
    ids = torch.tensor([[*tokens, 0, 0]])
    following = torch.tensor([[*tokens[1:], 0, 0, 0]])
    features = 9.0 * torch.eye(NUM_TOKENS)[following]
    return Batch(features, ids, torch.tensor([len(tokens)]), torch.tensor([num_prompt]))


class Guessing:
    """Always right, but where it drafts `wrong_after` (a step and the token that it is given)."""

    def __init__(self, batch: Batch, wrong_after: tuple[int, int] | None = None) -> None:
        self._truth = batch.features[:, 1:]
        self._wrong_after = wrong_after
        self._tokens = batch.tokens

    def __call__(
        self, features: torch.Tensor, embeddings: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        outputs = [self._truth.clone() for _ in range(num_steps)]
        if self._wrong_after is not None:
            step, token = self._wrong_after
            outputs[step][self._tokens[:, 1:] == token] *= -1
        return outputs


def count(batch: Batch, head: Guessing, length: int) -> Acceptance:
    acceptance = Acceptance([0] * length, [0] * length)
    count_accepted(head, batch, VOCABULARY, acceptance)
    return acceptance


def test_chains_begin_after_the_answers_first_token_and_end_with_it() -> None:
    batch = batch_of([1, 2, 3, 4, 1, 2, 3], num_prompt=3)  # the answer is 4 1 2 3
    acceptance = count(batch, Guessing(batch), 4)
    assert acceptance.drafted == [3, 2, 1, 0]  # 1, 2 and 3 can be drafted
    assert acceptance.accepted == [3, 2, 1, 0]
    assert acceptance.rates == [1.0, 1.0, 1.0, 0.0]
    assert acceptance.expected_length == 3.0


def test_a_chain_ends_at_its_first_wrong_token() -> None:
    batch = batch_of([1, 2, 3, 4, 1, 2, 3], num_prompt=3)
    wrong = count(batch, Guessing(batch, wrong_after=(0, 1)), 3)  # drafts no 2 after 1
    # After 4 comes 1, then 2, then 3; after 1 nothing right; after 2 comes 3, which ends the text.
    assert (wrong.drafted, wrong.accepted) == ([3, 1, 1], [2, 1, 1])
    later_wrong = count(batch, Guessing(batch, wrong_after=(1, 1)), 3)
    assert (later_wrong.drafted, later_wrong.accepted) == ([3, 2, 0], [3, 1, 0])


def test_a_token_outside_the_vocabulary_is_never_right() -> None:
    batch = batch_of([1, 2, 3, 5, 5, 5], num_prompt=3)
    assert count(batch, Guessing(batch), 2).accepted == [0, 0]


def test_padding_and_the_prompt_teach_nothing() -> None:
    batch = batch_of([1, 2, 3, 4, 1, 2, 3], num_prompt=3)
    features = batch.features.clone()
    features[:, :3] = 7.0  # of which the prompt is foreseen
    features[:, 6:] = 7.0
    settings = {"num_steps": 2, "feature_weight": 1.0, "feature_scale": 1.0}
    head = Guessing(batch)
    wanted = loss(head, batch, VOCABULARY, **settings)
    found = loss(head, batch._replace(features=features), VOCABULARY, **settings)
    torch.testing.assert_close(found.total, wanted.total)


def test_a_right_guess_costs_less_at_every_step() -> None:
    batch = batch_of([1, 2, 3, 4, 1, 2, 3], num_prompt=3)
    settings = {"num_steps": 3, "feature_weight": 0.0, "feature_scale": 1.0}
    right = loss(Guessing(batch), batch, VOCABULARY, **settings)
    assert right.agreement == 1.0
    costs = [
        loss(Guessing(batch, (step, 1)), batch, VOCABULARY, **settings).total.item()
        for step in range(3)
    ]
    assert min(costs[:2]) > right.total + 1
    # A third step after the answer's second token would be of a chain that began in the prompt.
    assert costs[2] == pytest.approx(right.total.item())


def test_later_moves_along_the_text() -> None:
    x = torch.arange(1.0, 7.0).view(1, 3, 2)
    assert later(x, 1).tolist() == [[[0, 0], [1, 2], [3, 4]]]
    assert later(x, 0) is x

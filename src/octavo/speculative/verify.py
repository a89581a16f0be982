"""Which guesses of a draft stand.

Each row of a draft has its own token, which is distributed as the target wants it after the row's
guesses (`Sampler.sample`): where guesses were chosen, it is the very token that would come without
them; where they were drawn, the one of algorithm 1 of arXiv 2211.17192 (`sampling.rejection`). In
both cases a guess stands if it is the token of the row before it. So verifying is one walk down
from the last known token: it goes on for as long as a guess equals the token that it meets, and the
token that no guess equals comes for free.
"""

from __future__ import annotations

from octavo.runner.speculation import Draft, Verified
from octavo.sampling.sampler import SampledRows


def verify(draft: Draft, sampled: SampledRows, first_row: int) -> Verified:
    """Walk down a draft of K guesses whose rows are first_row (the last known token's) and
    first_row + 1 + i (guess i's).

    A guess whose own row failed counts as a token that nobody guessed: it is the last one, and the
    next step comes to the failure, if there still is one, with no guesses in between.
    """
    if first_row in sampled.errors:
        return Verified(
            (), (), (), sampled.errors[first_row], is_refusal=first_row in sampled.refused
        )
    guesses = draft.token_ids.tolist()
    parents = range(-1, len(guesses) - 1) if draft.parents is None else draft.parents.tolist()
    index_of = {edge: index for index, edge in enumerate(zip(parents, guesses, strict=True))}
    token_ids: list[int] = []
    accepted: list[int] = []
    rows: list[int] = []
    guess, row = -1, first_row
    while True:
        token = int(sampled.token_ids[row])
        token_ids.append(token)
        rows.append(row)
        guess = index_of.get((guess, token), -1)
        row = first_row + 1 + guess
        if guess < 0 or row in sampled.errors:
            return Verified(tuple(token_ids), tuple(accepted), tuple(rows))
        accepted.append(guess)

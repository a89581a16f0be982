"""What of a step costs time: counts, from what the scheduler told the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from octavo.core.model_spec import ModelSpec
from octavo.core.step import ScheduledStep


class AttentionWork(NamedTuple):
    """Of one layer with this window (None: unlimited).

    decoding_context: keys that sequences with one new token see, added up; as many pairs of a query
    and a key. chunk_context: keys that longer chunks see, each read at least once. chunk_pairs: of
    these a query and a key that it sees, new tokens among themselves included. known_context: of
    chunk_context, keys that earlier steps have computed.
    """

    window: int | None
    decoding_context: int
    chunk_context: int
    chunk_pairs: int
    known_context: int


class AttentionFlops(NamedTuple):
    """In all layers with one window, for a query and a key. decoding_pair: where a sequence has one
    query. chunk_pair: where it has several; known_key: then besides, of each key in the cache.
    """

    decoding_pair: int
    chunk_pair: int
    known_key: int

    @classmethod
    def of(cls, spec: ModelSpec, window: int | None) -> Self:
        found = [
            layer.attention
            for layer in spec.layers
            if layer.attention is not None and layer.attention.window == window
        ]
        return cls(
            sum(one.flops_per_pair(is_decoding=True) for one in found),
            sum(one.flops_per_pair(is_decoding=False) for one in found),
            sum(one.flops_per_known_key for one in found),
        )

    def of_chunks(self, work: AttentionWork) -> int:
        """As engines do it: short ones, such as guesses to verify, like decoding where that is less
        (latent attention), all of a step alike.
        """
        as_chunks = work.chunk_pairs * self.chunk_pair + work.known_context * self.known_key
        return min(as_chunks, work.chunk_pairs * self.decoding_pair)


class StepWork(NamedTuple):
    """num_tokens: rows of the forward pass, guessed tokens among them. num_logit_rows: whose logits
    are needed. num_sequences: that have rows.

    num_drafting: sequences that tokens are guessed for; num_draft_tokens: these, and
    longest_draft: of the longest. num_new: sequences that took a slot. attention: for each window
    of the model.
    """

    num_tokens: int
    num_logit_rows: int
    num_sequences: int
    num_drafting: int
    num_draft_tokens: int
    longest_draft: int
    num_new: int
    attention: tuple[AttentionWork, ...]


def work_of(
    step: ScheduledStep,
    windows: Sequence[int | None] = (None,),
    draft_lengths: Sequence[int] | None = None,
) -> StepWork:
    """windows: of the model (`ModelSpec.windows`). draft_lengths: of each sequence of the step, how
    many tokens were guessed for it; None: as many as were asked for.
    """
    num_logit_rows = num_drafting = num_draft_tokens = longest_draft = 0
    singles: list[int] = []  # contexts of sequences with one row, its own token included
    chunks: list[tuple[int, int]] = []  # first position and rows of the others
    for index, (_, start, num_tokens, _, samples, draft) in enumerate(step.sequences):
        if num_tokens == 1 and draft is None:  # most of them
            num_logit_rows += samples
            singles.append(start + 1)
            continue
        guesses = 0
        if draft is not None:
            guesses = draft.length if draft_lengths is None else draft_lengths[index]
            if guesses:
                num_drafting += 1
                num_draft_tokens += guesses
                if guesses > longest_draft:
                    longest_draft = guesses
        if samples:
            num_logit_rows += 1 + guesses
        if num_tokens + guesses == 1:
            singles.append(start + 1)
        else:
            chunks.append((start, num_tokens + guesses))
    return StepWork(
        num_tokens=step.num_tokens + num_draft_tokens,
        num_logit_rows=num_logit_rows,
        num_sequences=len(step.sequences),
        num_drafting=num_drafting,
        num_draft_tokens=num_draft_tokens,
        longest_draft=longest_draft,
        num_new=len(step.bindings),
        attention=tuple([_attention(window, singles, chunks) for window in windows]),
    )


def work_of_drafter(work: StepWork, windows: Sequence[int | None]) -> StepWork:
    """Of each of a drafter's steps, in which the sequences that are guessed for get a token each.
    windows: of the drafter. Their contexts are taken to be as long as those of the others.
    """
    count = work.num_drafting
    context = sum(one.decoding_context + one.chunk_context for one in work.attention[:1])
    seen = round(context * count / max(1, work.num_sequences))
    return StepWork(
        num_tokens=count,
        num_logit_rows=count,
        num_sequences=count,
        num_drafting=0,
        num_draft_tokens=0,
        longest_draft=0,
        num_new=0,
        attention=tuple([AttentionWork(window, seen, 0, 0, 0) for window in windows]),
    )


def _attention(
    window: int | None, singles: list[int], chunks: list[tuple[int, int]]
) -> AttentionWork:
    known = pairs = 0
    new = sum([rows for _, rows in chunks])
    if window is None:
        for start, rows in chunks:
            known += start
            pairs += rows * start + rows * (rows + 1) // 2
        return AttentionWork(None, sum(singles), known + new, pairs, known)
    for start, rows in chunks:
        known += min(start, window - 1)
        # Queries before the window is full see one key more each.
        growing = min(max(window - start, 0), rows)
        pairs += growing * start + growing * (growing + 1) // 2 + (rows - growing) * window
    seen = sum([min(one, window) for one in singles])
    return AttentionWork(window, seen, known + new, pairs, known)

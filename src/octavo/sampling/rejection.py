"""Lossless use of guesses that were drawn at random: algorithm 1 of arXiv 2211.17192, row by row.

A row is the position of one guess x, drawn from q, where the target's own distribution is p. The
row's token is x with probability min(1, p(x) / q(x)), else one drawn from norm(max(0, p - q)); so
it is distributed as p, whatever q is (the paper's appendix A.1).

The paper walks along a chain of guesses and stops at the first that is rejected. Here all rows are
computed at once: whether a row's guess is accepted does not depend on the rows before it. Where it
is rejected it can't be drawn again, since p - q is negative there. So a guess was accepted if and
only if it is its row's token, and the walk only has to compare (`octavo.speculative.verify`).
"""

from __future__ import annotations

import numpy as np

_BLOCK_BYTES = 2**20
"""Of float32 temporaries, so that they stay in the cache."""

_CHUNK = 256
"""Tokens whose weights are first added up as a whole: sums are quick, cumulative sums are not (10
and 170 us for 49152 tokens).
"""


def accept_or_resample(
    p: np.ndarray,
    q: np.ndarray,
    drafts: np.ndarray,
    acceptance: np.ndarray,
    resampling: np.ndarray,
) -> np.ndarray:
    """Each row's token: its guess, or what replaces it.

    p, q: what the target and the draft were sampled from, after all filters; drafts[d] was drawn
    from q[d]. acceptance, resampling: independent random numbers in [0, 1).
    Shapes: p, q (D, V) float32; drafts (D,) int64; acceptance, resampling (D,) float64 -> (D,)
    int64.
    """
    rows = np.arange(len(drafts))
    # r < p(x) / q(x), without a division: r is below 1, so p(x) >= q(x) > 0 always accepts.
    is_accepted = acceptance * q[rows, drafts] < p[rows, drafts]
    tokens = drafts.copy()
    rejected = np.flatnonzero(~is_accepted)
    block = max(1, _BLOCK_BYTES // (p.itemsize * p.shape[1]))
    for start in range(0, len(rejected), block):
        part = rejected[start : start + block]
        residual = np.maximum(p[part] - q[part], 0)
        # Where p and q are equal but for rounding, nothing may be left; p is as good then.
        is_empty = ~residual.any(axis=1)
        residual[is_empty] = p[part[is_empty]]
        tokens[part] = draw(residual, resampling[part])
    return tokens


def draw(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """One token per row with probabilities in proportion to `weights`, by inverse transform; none
    whose weight is 0.

    Shapes: weights (D, V) float32, not negative, each row's sum positive; uniform (D,) float64 in
    [0, 1) -> (D,) int64.
    """
    size = weights.shape[1]
    starts = np.arange(0, size, _CHUNK)
    sums = np.add.reduceat(weights, starts, axis=1, dtype=np.float64)
    chunks, rest = _reach(sums, uniform * sums.sum(axis=1))
    # The last chunk may be short: it is taken with tokens before it, whose weights don't count.
    firsts = starts[chunks][:, np.newaxis]
    columns = np.minimum(firsts, size - min(_CHUNK, size)) + np.arange(min(_CHUNK, size))
    own = np.take_along_axis(weights, columns, axis=1) * (columns >= firsts)
    places, _ = _reach(own, rest)
    tokens: np.ndarray = np.take_along_axis(columns, places[:, np.newaxis], axis=1)[:, 0]
    return tokens


def _reach(weights: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's first place at which the sum of the weights exceeds `target`, and what is left of
    `target` behind the places before. Rounding leads to no place whose weight is 0.
    """
    rows = np.arange(len(weights))
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    target = np.clip(target, 0, np.nextafter(mass[:, -1], 0))
    places: np.ndarray = (mass > target[:, np.newaxis]).argmax(axis=1)
    return places, target - (mass[rows, places] - weights[rows, places])

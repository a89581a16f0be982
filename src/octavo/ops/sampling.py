"""From logits to tokens. Rows are independent: nothing in one row changes another's result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.ops.array import Array
from octavo.ops.op import op


class LogitEdits(NamedTuple):
    """Sparse changes to a batch of logits, as flat parallel arrays in host memory.

    Penalties: entry i says that token penalty_tokens[i] occurred penalty_counts[i] times in the
    output of row penalty_rows[i] (0: only in its prompt). repetition, presence, frequency (R,)
    float32: each row's penalties.
    Biases: bias_values[i] is added to logits[bias_rows[i], bias_tokens[i]]; -inf forbids the token.
    Allowed: in each row of allowed_rows (sorted, unique) every token is forbidden but those listed
    as pairs (allowed_pair_rows[i], allowed_pair_tokens[i]).
    Row and token indices are int64; no (row, token) pair occurs twice in one kind, except that
    biases add up.
    """

    penalty_rows: np.ndarray
    penalty_tokens: np.ndarray
    penalty_counts: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    bias_rows: np.ndarray
    bias_tokens: np.ndarray
    bias_values: np.ndarray
    allowed_rows: np.ndarray
    allowed_pair_rows: np.ndarray
    allowed_pair_tokens: np.ndarray


@op
def adjust_logits(logits: Array, edits: LogitEdits) -> Array:
    """Penalties, then biases, then masks.

    For each penalty entry with count c: l = l / repetition if l > 0 else l * repetition (arXiv
    1909.05858); and if c > 0, l -= presence + frequency * c. Shapes: logits (R, V) float32 -> (R,
    V), possibly the same memory.
    """
    raise NotImplementedError


@op
def sample(
    logits: Array,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    """One token per row. Temperature 0: the arg-max, the lowest id among equals. Else by inverse
    transform.

    p = softmax(logits / temperature); keep tokens with p >= min_p * max(p), of these the top_k
    likeliest (0: all), of these the smallest prefix in descending order (ties by id) whose mass
    reaches top_p of what the filters before left; renormalise; the token is the first, in that
    order, at which the cumulative mass exceeds `uniform`.

    Shapes: logits (R, V) float32; temperature, top_p, min_p (R,) float32, top_k (R,) int64, uniform
    (R,) float64 in [0, 1) -> (R,) int64 in host memory.
    """
    raise NotImplementedError


@op
def probabilities(
    logits: Array,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    """The distribution that `sample` draws from: p as it is there after the filters. Temperature 0,
    and a row without a distribution (see `non_finite_rows`): 1 at one token, at the arg-max if the
    row is not broken.

    Shapes: logits (R, V) float32; temperature, top_p, min_p (R,) float32, top_k (R,) int64 -> (R,
    V) float32 in host memory; each row's sum is 1 but for rounding.
    """
    raise NotImplementedError


@op
def log_probabilities(
    logits: Array, tokens: np.ndarray, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """log_softmax(logits[r])[tokens[r]], its rank (1 + number of strictly likelier tokens), and the
    likeliest tokens.

    Shapes: logits (R, V), tokens (R,) int64 -> (R,) float32, (R,) int64, ids (R, num_top) int64,
    best first (ties by id), and their log-probabilities (R, num_top) float32; all in host memory.
    """
    raise NotImplementedError


@op
def non_finite_rows(logits: Array) -> np.ndarray:
    """Rows with a NaN or +inf anywhere, or nothing but -inf. Shapes: (R, V) -> (R,) bool in host
    memory.
    """
    raise NotImplementedError

"""From logits to tokens. Reductions run along single rows, in kernels that treat each row alike.

Models in half precision give their logits in it; from there on all is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from octavo import ops
from octavo.ops.op import implements
from octavo.ops.sampling import LogitEdits

NUM_CANDIDATES = 1024
"""Likeliest tokens that a draw looks at first."""


@implements(ops.adjust_logits, backend="torch", array_type=torch.Tensor)
@torch.inference_mode()
def adjust_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    def device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    logits = logits.float()  # half-precision heads leave theirs as they are
    if len(edits.penalty_rows):
        rows, tokens = device(edits.penalty_rows), device(edits.penalty_tokens)
        counts = device(edits.penalty_counts)
        values = logits[rows, tokens]
        repetition = device(edits.repetition)[rows]
        values = torch.where(values > 0, values / repetition, values * repetition)
        generated = device(edits.presence)[rows] + device(edits.frequency)[rows] * counts
        logits[rows, tokens] = values - torch.where(counts > 0, generated, 0.0)
    if len(edits.bias_rows):
        where = (device(edits.bias_rows), device(edits.bias_tokens))
        logits.index_put_(where, device(edits.bias_values), accumulate=True)
    if len(edits.allowed_rows):
        pairs = (device(edits.allowed_pair_rows), device(edits.allowed_pair_tokens))
        kept = logits[pairs]
        logits.index_fill_(0, device(edits.allowed_rows), float("-inf"))
        logits[pairs] = kept
    return logits


@implements(ops.sample, backend="torch", array_type=torch.Tensor)
def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    tokens = np.empty(len(temperature), np.int64)
    greedy = np.flatnonzero(temperature == 0)
    drawn = np.flatnonzero(temperature != 0)
    if len(greedy):
        tokens[greedy] = _rows(logits, greedy).argmax(dim=-1).cpu().numpy()
    if len(drawn):
        rows = _softmax(logits, drawn, temperature)
        candidates, ids = _likeliest(rows, min(NUM_CANDIDATES, logits.shape[1]))
        for i, row in enumerate(drawn):
            setting = (int(top_k[row]), float(top_p[row]), float(min_p[row]))
            for prefix in _prefixes(rows[i], candidates[i], ids[i]):
                place = _draw(_filter(prefix, *setting), float(uniform[row]))
                if place is not None:
                    tokens[row] = prefix.ids[place]
                    break
    return tokens


@implements(ops.probabilities, backend="torch", array_type=torch.Tensor)
def probabilities(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    result = np.zeros(logits.shape, np.float32)
    is_random = (temperature != 0) & ~non_finite_rows(logits)
    is_filtered = (top_k != 0) | (top_p < 1) | (min_p > 0)
    certain = np.flatnonzero(~is_random)
    whole = np.flatnonzero(is_random & ~is_filtered)
    filtered = np.flatnonzero(is_random & is_filtered)
    if len(certain):
        result[certain, _rows(logits, certain).argmax(dim=-1).cpu().numpy()] = 1
    if len(whole):
        result[whole] = _softmax(logits, whole, temperature).cpu().numpy()
    if len(filtered):
        rows = _softmax(logits, filtered, temperature)
        candidates, ids = _likeliest(rows, min(NUM_CANDIDATES, logits.shape[1]))
        for i, row in enumerate(filtered):
            setting = (int(top_k[row]), float(top_p[row]), float(min_p[row]))
            for prefix in _prefixes(rows[i], candidates[i], ids[i]):
                mass, ends = _filter(prefix, *setting)
                if ends:
                    kept = slice(len(mass))
                    result[row, prefix.ids[kept]] = prefix.p[kept] / mass[-1]
                    break
    return result


def _softmax(logits: torch.Tensor, rows: np.ndarray, temperature: np.ndarray) -> torch.Tensor:
    """Of some rows, after their temperatures, in float32."""
    heat = torch.from_numpy(temperature[rows]).to(logits.device)
    return torch.softmax(_rows(logits, rows).float() / heat.unsqueeze(-1), dim=-1)


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _likeliest(rows: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest of each row, best first, ties by id: (R, count) values and ids.

    Which of several equal values make it to the end of the list is left open.
    """
    ids = rows.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = rows.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values.cpu().numpy(), ids.gather(-1, order).cpu().numpy()


class _Prefix(NamedTuple):
    """The likeliest tokens of a row, best first, ties by id. is_whole: there are no others."""

    p: np.ndarray
    ids: np.ndarray
    is_whole: bool


def _prefixes(row: torch.Tensor, likeliest: np.ndarray, ids: np.ndarray) -> Iterator[_Prefix]:
    """Ever longer ones, up to the whole row: a draw seldom needs the second, and sorting a whole
    vocabulary takes longer than all the rest.
    """
    floor = float(likeliest[-1])
    if len(likeliest) == len(row):
        yield _Prefix(likeliest, ids, is_whole=True)
        return
    certain = int((likeliest > floor).sum())  # some equals of the last may be missing
    if certain:
        yield _Prefix(likeliest[:certain], ids[:certain], is_whole=False)
    while floor >= 0:
        floor = floor / 8 if floor > 1e-9 else -1.0
        above = torch.nonzero(row > floor)[:, 0]
        p, order = torch.sort(row[above], descending=True, stable=True)
        yield _Prefix(p.cpu().numpy(), above[order].cpu().numpy(), is_whole=floor < 0)


class _Filtered(NamedTuple):
    """What the filters leave of a prefix. mass: of all tokens up to each; empty if more of the row
    must be seen. ends: nothing is left beyond the prefix.
    """

    mass: np.ndarray
    ends: bool


_UNKNOWN = _Filtered(np.empty(0), ends=False)


def _filter(prefix: _Prefix, top_k: int, top_p: float, min_p: float) -> _Filtered:
    p = prefix.p
    kept = p[p >= np.float32(min_p) * p[0]]
    ends = prefix.is_whole or len(kept) < len(p)
    if 0 < top_k <= len(kept):
        kept, ends = kept[:top_k], True
    if not ends and (top_k or min_p > 0.0):
        return _UNKNOWN  # some of their mass lies beyond `p`
    mass = np.cumsum(kept, dtype=np.float64)
    if top_p < 1.0:
        total = mass[-1] if ends else 1.0
        reached = int(np.searchsorted(mass, top_p * total, side="left"))
        if reached < len(mass):
            return _Filtered(mass[: reached + 1], ends=True)
        if not ends:
            return _UNKNOWN
    return _Filtered(mass, ends)


def _draw(filtered: _Filtered, uniform: float) -> int | None:
    """Place in the prefix of the token that `uniform` selects; None if that may lie beyond it."""
    mass, ends = filtered
    total = mass[-1] if ends else 1.0
    place = int(np.searchsorted(mass, uniform * total, side="right"))
    if place < len(mass):
        return place
    # Rounding can leave the target at the end of the sum: then it is the last token with any mass.
    return int(np.searchsorted(mass, mass[-1], side="left")) if ends else None


@implements(ops.log_probabilities, backend="torch", array_type=torch.Tensor)
def log_probabilities(
    logits: torch.Tensor, tokens: np.ndarray, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = torch.from_numpy(tokens).to(logits.device).unsqueeze(-1)
    # Log-probabilities may be equal by rounding where logits are not.
    ranks = (logits > logits.gather(-1, chosen)).sum(-1) + 1
    top_ids = _top(logits, num_top)
    top = logprobs.gather(-1, torch.from_numpy(top_ids).to(logits.device))
    own = logprobs.gather(-1, chosen)
    return own[:, 0].cpu().numpy(), ranks.cpu().numpy(), top_ids, top.cpu().numpy()


def _top(logits: torch.Tensor, count: int) -> np.ndarray:
    """Ids (R, count) of the largest, best first, ties by id."""
    if count == 0:
        return np.empty((logits.shape[0], 0), np.int64)
    values, ids = _likeliest(logits, count)
    threshold = torch.from_numpy(values[:, -1:]).to(logits.device)
    at_least = (logits >= threshold).sum(-1).cpu().numpy()
    for row in np.flatnonzero(at_least > count):  # equals at the end: the lowest ids belong here
        ordered = torch.sort(logits[row], descending=True, stable=True)
        ids[row] = ordered.indices[:count].cpu().numpy()
    return ids


@implements(ops.non_finite_rows, backend="torch", array_type=torch.Tensor)
def non_finite_rows(logits: torch.Tensor) -> np.ndarray:
    # The maximum is NaN if any is, +inf if any is, and -inf only if all are.
    bad: np.ndarray = (~torch.isfinite(logits.amax(dim=-1))).cpu().numpy()
    return bad

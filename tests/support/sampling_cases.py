"""Cases of the ops that turn logits into tokens, from tiny vocabularies to large ones."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from octavo.ops.sampling import LogitEdits
from support.op_bench import Bench, cases

NO_ROWS = np.zeros(0, np.int64)
LARGE_VOCAB = 151_936

PENALTIES = ("repetition", "presence", "frequency")

# --- edits ---------------------------------------------------------------------------------------


def edits(num_rows: int, **changes: np.ndarray) -> LogitEdits:
    """Without any effect but `changes`."""
    fields = dict.fromkeys(LogitEdits._fields, NO_ROWS)
    fields |= {"bias_values": np.zeros(0, np.float32)}
    neutral = {"repetition": 1, "presence": 0, "frequency": 0}
    fields |= {name: np.full(num_rows, v, np.float32) for name, v in neutral.items()}
    return LogitEdits(**(fields | changes))


@cases("adjust_logits")
def nothing_to_change(b: Bench) -> None:
    logits = b.normal(2, 9)
    b.close(b.op(b.put(logits), edits(2)), logits, 0)


@cases("adjust_logits")
def penalties_then_biases_then_masks(b: Bench) -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]])
    changes = edits(
        3,
        repetition=np.array([2.0, 1.0, 1.0], np.float32),
        presence=np.array([0.5, 1.0, 0.0], np.float32),
        frequency=np.array([0.25, 0.0, 0.0], np.float32),
        penalty_rows=np.array([0, 0, 0, 1]),
        penalty_tokens=np.array([0, 1, 2, 3]),
        penalty_counts=np.array([0, 2, 1, 3]),
        bias_rows=np.array([0, 1, 1, 1, 2]),
        bias_tokens=np.array([3, 0, 0, 1, 2]),
        bias_values=np.array([100.0, 1.0, 2.0, -np.inf, 100.0], np.float32),
        allowed_rows=np.array([2]),
        allowed_pair_rows=np.array([2, 2]),
        allowed_pair_tokens=np.array([0, 2]),
    )
    expected = np.array(
        [
            [1.0, -4.0 - 1.0, 0.5 - 0.75, 100.5],  # token 0 occurred in the prompt only
            [5.0, -np.inf, 1.0, -0.5],
            [1.0, -np.inf, 103.0, -np.inf],
        ]
    )
    b.close(b.op(b.put(logits.astype(np.float32)), changes), expected)


@cases("adjust_logits", vocab=[300, LARGE_VOCAB])
def edits_of_many_rows(b: Bench, vocab: int) -> None:
    num_rows = 9
    logits = b.normal(num_rows, vocab)

    def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
        places = b.rng.choice(num_rows * vocab, count, replace=False)
        return places // vocab, places % vocab

    factors = {name: b.rng.uniform(0.5, 2, num_rows).astype(np.float32) for name in PENALTIES}
    penalised, biased, allowed = pairs(200), pairs(100), pairs(150)
    allowed_rows = np.unique(allowed[0][::2])
    is_kept = np.isin(allowed[0], allowed_rows)
    allowed = allowed[0][is_kept], allowed[1][is_kept]
    counts, biases = b.rng.integers(0, 4, 200), b.normal(100)
    changes = edits(
        num_rows,
        **factors,
        penalty_rows=penalised[0],
        penalty_tokens=penalised[1],
        penalty_counts=counts,
        bias_rows=biased[0],
        bias_tokens=biased[1],
        bias_values=biases,
        allowed_rows=allowed_rows,
        allowed_pair_rows=allowed[0],
        allowed_pair_tokens=allowed[1],
    )
    expected = logits.astype(np.float64)
    repetition, presence, frequency = (factors[name][penalised[0]] for name in PENALTIES)
    old = expected[penalised]
    expected[penalised] = np.where(old > 0, old / repetition, old * repetition) - np.where(
        counts > 0, presence + frequency * counts, 0
    )
    expected[biased] += biases
    masked = np.full_like(expected[allowed_rows], -np.inf)
    places = np.searchsorted(allowed_rows, allowed[0]), allowed[1]
    masked[places] = expected[allowed]
    expected[allowed_rows] = masked
    b.close(b.op(b.put(logits), changes), expected)


# --- drawing -------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What a row asks for, as float32 has it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5


class Falling:
    """A row's tokens in falling order: the op's own words, in float64."""

    def __init__(self, logits: np.ndarray, temperature: float) -> None:
        wide = logits.astype(np.float64)
        self.order = np.lexsort((np.arange(len(wide)), -wide))
        weights = np.exp((wide[self.order] - wide.max()) / (temperature or 1.0))
        self.p = weights / weights.sum()

    def mass(self, draw: Draw) -> np.ndarray:
        """Of all tokens up to each of those that the filters leave."""
        if draw.temperature == 0:
            return np.ones(1)
        mass = np.cumsum(self.p[self.p >= draw.min_p * self.p[0]][: draw.top_k or None])
        if draw.top_p < 1:
            mass = mass[: int(np.argmax(mass >= draw.top_p * mass[-1])) + 1]
        return mass

    def place(self, draw: Draw) -> int:
        """Where in the order the token is."""
        mass = self.mass(draw)
        return int(np.argmax(mass > draw.uniform * mass[-1]))

    def probabilities(self, draw: Draw) -> np.ndarray:
        """By token id."""
        mass = self.mass(draw)
        found = np.zeros(len(self.p))
        found[self.order[: len(mass)]] = self.p[: len(mass)] / mass[-1] if draw.temperature else 1.0
        return found

    def places(self, draw: Draw, error: float) -> range:
        """All places that float32's rounding may lead to: each limit may be off by `error`."""
        low, high = (
            draw._replace(
                top_p=draw.top_p * (1 + sign * error) if draw.top_p < 1 else 1.0,
                min_p=min(draw.min_p * (1 - sign * error), 1.0),
                uniform=min(max(draw.uniform + sign * error, 0.0), np.nextafter(1.0, 0.0)),
            )
            for sign in (-1, 1)
        )
        return range(self.place(low), self.place(high) + 1)


def columns_of(draws: list[Draw]) -> list[np.ndarray]:
    """Temperature, top_k, top_p, min_p, uniform of each row, as the ops take them."""
    dtypes = (np.float32, np.int64, np.float32, np.float32, np.float64)
    columns = zip(*draws, strict=True)
    return [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]


def draw_all(b: Bench, logits: np.ndarray, draws: list[Draw]) -> list[int]:
    """One token for each row."""
    tokens = b.op(b.put(logits), *columns_of(draws))
    assert tokens.dtype == np.int64
    found: list[int] = tokens.tolist()
    return found


def in_float32(draw: Draw) -> Draw:
    temperature, top_p, min_p = (
        float(np.float32(x)) for x in (draw.temperature, draw.top_p, draw.min_p)
    )
    return draw._replace(temperature=temperature, top_p=top_p, min_p=min_p)


def all_filters(rng: np.random.Generator) -> list[Draw]:
    """Alone and together."""
    wanted = [
        in_float32(Draw(t, k, top_p, min_p, rng.uniform()))
        for t in (0.0, 0.7, 2.0)
        for k in (0, 1, 5, 2000)
        for top_p in (1.0, 0.8763, 0.0313)  # of no number of equal tokens exactly
        for min_p in (0.0, 0.3)
    ]
    wanted[::9] = [draw._replace(uniform=0.0) for draw in wanted[::9]]
    return wanted


# Flat and peaked rows (0: all tokens are equal).
@cases("sample", vocab=[1, 50, 5000], spread=[0.0, 0.5, 6.0])
def draws(b: Bench, vocab: int, spread: float) -> None:
    wanted = all_filters(b.rng)
    logits = (spread * b.normal(len(wanted), vocab)).astype(np.float32)
    rows = [Falling(row, draw.temperature) for row, draw in zip(logits, wanted, strict=True)]
    expected = [int(row.order[row.place(draw)]) for row, draw in zip(rows, wanted, strict=True)]
    assert draw_all(b, logits, wanted) == expected


@cases("probabilities", vocab=[1, 50, 5000], spread=[0.0, 0.5, 6.0])
def distributions(b: Bench, vocab: int, spread: float) -> None:
    wanted = all_filters(b.rng)
    logits = (spread * b.normal(len(wanted), vocab)).astype(np.float32)
    found = b.op(b.put(logits), *columns_of(wanted)[:-1])
    assert found.dtype == np.float32
    for actual, row, draw in zip(found, logits, wanted, strict=True):
        expected = Falling(row, draw.temperature).probabilities(draw)
        assert np.array_equal(actual > 0, expected > 0), draw
        b.close(actual, expected)


EXTREMES = [
    in_float32(draw)
    for draw in (
        Draw(),
        Draw(temperature=1e-3),
        Draw(temperature=1e-3, top_p=0.5),
        Draw(temperature=0.05, uniform=0.999),
        Draw(temperature=30.0, uniform=0.3),
        Draw(temperature=1e6, uniform=0.7),
        Draw(temperature=1e6, top_p=0.9, uniform=0.99),
        Draw(temperature=1e6, top_k=1000, uniform=0.1),
        Draw(temperature=2.0, min_p=1.0, uniform=0.9),
        Draw(top_p=1e-6),
        Draw(top_p=0.999999, uniform=0.9999),
        Draw(top_k=40, top_p=0.95, uniform=0.8),
        Draw(top_k=10_000, min_p=1e-3, uniform=0.9),
        Draw(min_p=0.9, uniform=0.6),
        Draw(top_k=2**31 - 1, uniform=0.2),
        Draw(uniform=0.0),
        Draw(uniform=float(np.nextafter(1.0, 0.0))),
    )
]
ROUNDING = 4e-6
"""Weights are exponentials in float32."""


@cache
def large_rows(spread: float) -> tuple[np.ndarray, tuple[Falling, ...]]:
    """Logits for EXTREMES, many of them equal."""
    rng = np.random.default_rng(1)
    logits = (spread * rng.normal(size=(len(EXTREMES), LARGE_VOCAB))).astype(np.float16)
    logits = logits.astype(np.float32)
    rows = zip(logits, EXTREMES, strict=True)
    return logits, tuple(Falling(row, draw.temperature) for row, draw in rows)


@cases("sample", spread=[1e-3, 3.0])
def draws_from_a_large_vocabulary(b: Bench, spread: float) -> None:
    logits, rows = large_rows(spread)
    tokens = draw_all(b, logits, EXTREMES)
    for token, row, draw in zip(tokens, rows, EXTREMES, strict=True):
        if b.backend.name == "native":
            places = row.places(draw, ROUNDING)
            assert token in row.order[places.start : places.stop], draw
        else:
            # torch goes by probabilities in float32, of which many are equal by rounding.
            places = row.places(draw, 5 * ROUNDING)
            p = row.p[row.order == token]
            slack = 1 + ROUNDING
            assert row.p[places.stop - 1] / slack <= p <= row.p[places.start] * slack, draw


@cases("probabilities", spread=[1e-3, 3.0])
def distributions_over_a_large_vocabulary(b: Bench, spread: float) -> None:
    logits, rows = large_rows(spread)
    found = b.op(b.put(logits), *columns_of(EXTREMES)[:-1])
    for actual, row, draw in zip(found, rows, EXTREMES, strict=True):
        expected = row.probabilities(draw)
        if b.backend.name != "native":  # see above: equals may stand for each other
            actual, expected = np.sort(actual), np.sort(expected)
        # Where a filter's limit is near, rounding may put a few of many tokens on its other side.
        assert np.abs(actual - expected).sum() < 1e-4, draw


@cases("probabilities", bad=[np.nan, np.inf, -np.inf])
def a_row_without_a_distribution_is_certain_of_something(b: Bench, bad: float) -> None:
    wanted = [Draw(), Draw(top_p=0.5), Draw(min_p=0.1), Draw(top_k=3), Draw(temperature=0.0)]
    logits = b.normal(len(wanted), 40)
    broken = logits.copy()
    broken[:, 7] = bad
    if bad == -np.inf:
        broken[:] = bad
    for row in b.op(b.put(broken), *columns_of(wanted)[:-1]):
        assert sorted(row.tolist())[-2:] == [0.0, 1.0]


@cases("sample", temperature=[0.0, 1e-3, 1.0, 1e6], vocab=[17, 3000, LARGE_VOCAB])
def forbidden_tokens_are_never_drawn(b: Bench, temperature: float, vocab: int) -> None:
    only = vocab * 5 // 6
    wanted = [
        Draw(temperature, top_k, top_p, min_p, uniform)
        for uniform in (0.0, 0.5, float(np.nextafter(1.0, 0.0)))
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.1))
    ]
    logits = np.full((len(wanted), vocab), -np.inf, np.float32)
    logits[:, only] = -5.0
    assert draw_all(b, logits, wanted) == [only] * len(wanted)


@cases("sample", temperature=[1e-3, 1.0, 1e6])
def equal_tokens_are_drawn_in_order_of_their_ids(b: Bench, temperature: float) -> None:
    """Three likeliest, far above the others even at a high temperature."""
    best = [3, 70, 700]
    wanted = [
        Draw(temperature, top_k=top_k, top_p=top_p, uniform=uniform)
        for top_k, top_p, uniform in (
            *((0, 1.0, u) for u in (0.0, 0.3, 0.4, 0.6, 0.7, 0.99)),
            *((2, 1.0, u) for u in (0.0, 0.49, 0.51, 0.99)),
            *((0, 0.5, u) for u in (0.0, 0.49, 0.51, 0.99)),
        )
    ]
    expected = [3, 3, 70, 70, 700, 700, 3, 3, 70, 70, 3, 3, 70, 70]
    logits = np.full((len(wanted), 900), -1e30, np.float32)
    logits[:, best] = 7.25
    assert draw_all(b, logits, wanted) == expected


@cases("sample", temperature=[0.0, 1.0, 1e6])
def logits_as_far_apart_as_can_be(b: Bench, temperature: float) -> None:
    logits = np.full((2, 100), -3e38, np.float32)
    logits[0, 60], logits[1, 0] = 3e38, 2e38
    assert draw_all(b, logits, [Draw(temperature)] * 2) == [60, 0]


# --- log-probabilities ---------------------------------------------------------------------------


@cases("log_probabilities", vocab=[3, 2000], num_top=[0, 1, 3])
@cases("log_probabilities", vocab=[LARGE_VOCAB], num_top=[0, 20, 300])
def likeliest(b: Bench, vocab: int, num_top: int) -> None:
    logits = 3 * b.normal(4, vocab)
    logits[2] = 1.0  # all equal: the lowest ids come first, and every rank is 1
    logits[3, :-1] = -np.inf
    tokens = np.array([0, vocab - 1, 1, vocab - 1])
    own, ranks, ids, values = b.op(b.put(logits), tokens, num_top)
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    logprobs = wide - largest - np.log(np.exp(wide - largest).sum(-1, keepdims=True))
    order = np.lexsort((np.broadcast_to(np.arange(vocab), wide.shape), -wide))[:, :num_top]
    b.close(own, logprobs[np.arange(4), tokens])
    strictly_likelier = (wide > np.take_along_axis(wide, tokens[:, None], axis=1)).sum(-1)
    assert np.array_equal(ranks, 1 + strictly_likelier)
    assert np.array_equal(ids, order)
    b.close(values, np.take_along_axis(logprobs, order, axis=1))


@cases("log_probabilities")
def of_logits_far_apart(b: Bench) -> None:
    logits = np.array([[3e38, -3e38, 2e38], [-50.0, -60.0, -1e4]], np.float32)
    own, ranks, _, values = b.op(b.put(logits), np.array([0, 1]), 1)
    b.close(own, np.array([0.0, -10.0 - np.log1p(np.exp(-10.0))]))
    assert ranks.tolist() == [1, 2]
    b.close(values, np.array([[0.0], [-np.log1p(np.exp(-10.0))]]))


@cases("non_finite_rows")
def rows_without_a_distribution(b: Bench) -> None:
    logits = b.normal(5, 300)
    logits[0, :200] = -np.inf
    logits[1, 299] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    assert b.op(b.put(logits)).tolist() == [False, True, True, True, False]


@cases("non_finite_rows", vocab=[1, 33, LARGE_VOCAB])
def one_bad_logit_anywhere(b: Bench, vocab: int) -> None:
    places = sorted({0, vocab // 2, vocab - 1})
    for bad in (np.nan, np.inf):
        logits = b.normal(len(places) + 1, vocab)
        logits[np.arange(len(places)), places] = bad
        assert b.op(b.put(logits)).tolist() == [True] * len(places) + [False]
    logits = np.full((len(places), vocab), -np.inf, np.float32)
    logits[np.arange(len(places)), places] = -3e38
    assert not b.op(b.put(logits)).any()

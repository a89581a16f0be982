from __future__ import annotations

import math
import random

import pytest

from octavo.advisor.tuning.final import Final, judged, play_final
from octavo.advisor.tuning.objective import Load, Outcome
from octavo.advisor.tuning.space import Setting

DEFAULT: Setting = ("default",)
A: Setting = ("a",)
B: Setting = ("b",)
C: Setting = ("c",)


class TestWhoWins:
    def test_the_highest_bound_does(self) -> None:
        edges = {DEFAULT: [4.0, 5.0, 6.0], A: [4.9, 6.0, 7.3], B: [4.4, 5.5, 6.6]}
        gains, winner = judged(edges, DEFAULT)
        assert winner == A
        assert gains[A].ratio.value == pytest.approx(1.21, abs=0.01)
        assert gains[B].ratio.value == pytest.approx(1.1, abs=0.001)
        assert gains[A].bound is not None
        assert 1.1 < gains[A].bound < gains[A].ratio.value

    def test_what_all_have_in_common_cancels(self) -> None:
        """Seeds differ tenfold, ratios hardly."""
        gains, winner = judged({DEFAULT: [1.0, 10.0, 3.0], A: [1.1, 11.2, 3.3]}, DEFAULT)
        assert winner == A
        assert gains[A].ratio.low is not None
        assert gains[A].ratio.low > 1.05

    def test_a_mean_that_varies_much_loses_to_one_that_is_sure(self) -> None:
        edges = {DEFAULT: [5.0] * 4, A: [5.6, 5.5, 5.6, 5.5], B: [9.0, 3.2, 8.4, 3.9]}
        gains, winner = judged(edges, DEFAULT)
        assert gains[B].ratio.value > 1.1
        assert winner in (A, DEFAULT)
        assert gains[B].bound is not None
        assert gains[A].bound is not None
        assert gains[B].bound < gains[A].bound

    def test_the_default_if_nothing_is_better_beyond_doubt(self) -> None:
        gains, winner = judged({DEFAULT: [4.0, 5.0, 6.0], A: [4.4, 4.9, 6.3]}, DEFAULT)
        assert winner == DEFAULT
        assert gains[A].bound is not None
        assert gains[A].bound < 1

    def test_the_default_after_one_seed(self) -> None:
        gains, winner = judged({DEFAULT: [4.0], A: [8.0]}, DEFAULT)
        assert winner == DEFAULT
        assert gains[A].ratio.value == pytest.approx(2)
        assert gains[A].bound is None
        assert judged({DEFAULT: [], A: []}, DEFAULT)[1] == DEFAULT

    def test_not_what_failed(self) -> None:
        edges = {DEFAULT: [4.0, 4.1, 4.2], A: [9.0, 0.0, 9.0], B: [5.0, 5.1, 5.25]}
        gains, winner = judged(edges, DEFAULT)
        assert winner == B
        assert gains[A].ratio.value == 0

    def test_what_works_if_the_default_does_not(self) -> None:
        assert judged({DEFAULT: [0.0, 0.0], A: [2.0, 2.1], B: [3.0, 3.1]}, DEFAULT)[1] == B
        assert judged({DEFAULT: [0.0, 0.0], A: [0.0, 0.0]}, DEFAULT)[1] == DEFAULT

    def test_a_false_winner_is_as_rare_as_it_says(self) -> None:
        """2.5 % over all three together; more than 5 % of 400 finals would not be luck."""
        rng = random.Random(3)
        false = 0
        for _ in range(400):
            edges = {
                setting: [4 * math.exp(rng.gauss(0, 0.05)) for _ in range(4)]
                for setting in (DEFAULT, A, B, C)
            }
            false += judged(edges, DEFAULT)[1] != DEFAULT
        assert false / 400 <= 0.05

    def test_intervals_hold_the_truth_as_often_as_they_say(self) -> None:
        rng = random.Random(5)
        held = 0
        for _ in range(400):
            edges = {
                setting: [edge * math.exp(rng.gauss(0, 0.05)) for _ in range(3)]
                for setting, edge in ((DEFAULT, 4.0), (A, 5.0), (B, 4.4), (C, 4.4))
            }
            ratio = judged(edges, DEFAULT)[0][A].ratio
            assert ratio.low is not None
            assert ratio.high is not None
            held += ratio.low <= 1.25 <= ratio.high
        assert held / 400 >= 0.9


EDGES = {DEFAULT: 4.0, A: 5.0, B: 4.2}


class TestHowItIsPlayed:
    def final(
        self, num_seeds: int = 3, **options: object
    ) -> tuple[list[tuple[Setting, Load]], Final]:
        plays: list[tuple[Setting, Load]] = []

        def measure(setting: Setting, load: Load) -> Outcome:
            plays.append((setting, load))
            return Outcome(use=(load.rate / EDGES[setting]) ** 3)

        found = play_final(
            measure,
            [A, B],
            DEFAULT,
            common_rate=3.9,
            guesses={A: 5.1, B: 4.1, DEFAULT: 3.9},
            steepness=3.0,
            seeds=range(1000, 1000 + num_seeds),
            seconds=10.0,
            **options,  # type: ignore[arg-type]
        )
        return plays, found

    def test_all_are_played_at_the_common_rate_with_each_seed(self) -> None:
        plays, found = self.final()
        at_common = [(s, load.seed) for s, load in plays if load.rate == 3.9]
        assert sorted(at_common) == sorted((s, seed) for s in EDGES for seed in found.seeds)
        assert found.winner == A
        assert found.mean_edge(A) == pytest.approx(5.0, rel=0.01)

    def test_in_turns_forwards_and_backwards(self) -> None:
        plays, _ = self.final()
        turns = list(dict.fromkeys((load.seed, setting) for setting, load in plays))
        order = [setting for _, setting in turns]
        assert order == [DEFAULT, A, B, B, A, DEFAULT, DEFAULT, A, B]

    def test_no_round_is_begun_without_time(self) -> None:
        _, found = self.final(may_begin=lambda number, players: number < 2)
        assert found.seeds == (1000, 1001)
        _, none = self.final(may_begin=lambda number, players: False)
        assert none.winner == DEFAULT

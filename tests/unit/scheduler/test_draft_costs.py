from __future__ import annotations

import pytest

from octavo.scheduler.draft_costs import DraftSeconds, StepSeconds


def test_lines_join_what_was_measured_and_go_on() -> None:
    seconds = StepSeconds([(2, 3.0), (4, 5.0), (8, 6.0)])
    assert seconds.ahead(1, 5) == pytest.approx([3, 3, 4, 5, 5.25, 5.5])
    assert seconds.at(14) == pytest.approx(9)  # half a second a row, from first to last
    assert seconds.at(100_000) == pytest.approx(6 + 0.5 * 99_992)


def test_one_measurement_is_enough_to_begin() -> None:
    assert StepSeconds([(4, 2.0)]).ahead(3, 2) == [2, 2, 2]


def test_disturbed_measurements_do_not_count() -> None:
    assert StepSeconds([(1, 9.0), (1, 2.0), (2, 8.0), (4, 4.0)]).ahead(1, 3) == pytest.approx(
        [2, 4, 4, 4]
    )


def test_an_interrupted_step_changes_little() -> None:
    seconds = StepSeconds([(1, 2.0), (64, 40.0)])
    for _ in range(6):
        seconds.observe(1, 2.0)
    seconds.observe(1, 10.0)
    assert 2 < seconds.at(1) < 2.1


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_all_of_it_follows_when_the_machine_is_slower_or_faster(factor: float) -> None:
    seconds = StepSeconds([(1, 2.0), (8, 6.0)])
    for _ in range(60):
        seconds.observe(2, factor * 2.0 * (1 + 4 / 14))
    assert seconds.at(2) == pytest.approx(factor * 2.0 * (1 + 4 / 14), rel=0.02)
    assert seconds.at(8) == pytest.approx(factor * 6.0, rel=0.25)


def test_the_shape_follows_where_steps_are_measured() -> None:
    seconds = StepSeconds([(1, 2.0), (4, 2.0), (8, 6.0)])
    for _ in range(100):
        seconds.observe(1, 2.0)
        seconds.observe(4, 4.0)
    assert seconds.at(1) == pytest.approx(2, rel=0.05)
    assert seconds.at(4) == pytest.approx(4, rel=0.05)


def test_more_rows_never_seem_faster() -> None:
    seconds = StepSeconds([(1, 2.0), (4, 3.0), (16, 6.0)])
    for _ in range(50):
        seconds.observe(4, 9.0)
        ahead = seconds.ahead(1, 30)
        assert ahead == sorted(ahead)


def test_guessing_is_told_apart_by_sequence_depth_and_token() -> None:
    costs = DraftSeconds()
    for _ in range(300):
        for lengths in ([0], [1], [4], [2, 2], [4, 4, 4, 4], [8], [1, 8]):
            costs.observe(8, lengths, len(lengths) + 3 * max(lengths) + 0.5 * sum(lengths))
    assert costs.per_sequence == pytest.approx(1, rel=0.15)
    assert costs.per_depth == pytest.approx(3, rel=0.15)
    assert costs.per_token == pytest.approx(0.5, rel=0.3)


def test_taking_note_of_a_step_is_no_cost_of_guessing() -> None:
    costs = DraftSeconds()
    for _ in range(100):
        costs.observe(512, [], 51.2)
        costs.observe(1, [], 0.1)
        costs.observe(1, [2], 4.1)
    assert costs.of_guessing(1, 2, 2) == pytest.approx(4, rel=0.05)


def test_an_outlier_of_guessing_is_soon_forgotten() -> None:
    costs = DraftSeconds()
    for _ in range(20):
        costs.observe(1, [2], 1.0)
    costs.observe(1, [2], 100.0)
    assert costs.of_guessing(1, 2, 2) < 2
    for _ in range(10):
        costs.observe(1, [2], 1.0)
    assert costs.of_guessing(1, 2, 2) == pytest.approx(1, rel=0.15)


def test_one_number_of_rows_is_the_first_of_those_ahead() -> None:
    seconds = StepSeconds([(1, 1e-3), (4, 2e-3), (16, 9e-3)])
    for rows in (1, 2, 3, 5, 16, 100, 60_000):
        assert seconds.at(rows) == pytest.approx(seconds.ahead(rows, 3)[0], rel=1e-12)

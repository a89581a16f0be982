from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from octavo.advisor.tuning.space import Dimension, Space, as_text, distance, require_choice
from octavo.core.errors import ConfigError, InvariantError

SEQS = Dimension("seqs", (None, 4, 8, 16, 32), is_ordered=True)
CHUNKED = Dimension("chunked", (None, False))
POLICY = Dimension("policy", (None, "a", "b"))
SPACE = Space((SEQS, CHUNKED, POLICY))


def test_a_setting_is_told_by_what_it_changes() -> None:
    setting = SPACE.setting({"seqs": 8, "chunked": False})
    assert setting == (8, False, None)
    assert SPACE.changes(setting) == {"seqs": 8, "chunked": False}
    assert as_text(SPACE.changes(setting)) == "seqs=8 chunked=false"
    assert as_text(SPACE.changes(SPACE.default)) == "default"
    assert SPACE.size == 30


def test_neighbours_of_an_ordered_knob_are_a_step_away_or_its_default() -> None:
    near = {
        setting[0] for setting in SPACE.neighbours((8, None, None)) if setting[1:] == (None,) * 2
    }
    assert near == {4, 16, None}
    assert {s[2] for s in SPACE.neighbours((8, None, "a")) if s[:2] == (8, None)} == {None, "b"}
    from_default = {s[0] for s in SPACE.neighbours(SPACE.default) if distance(s, SPACE.default)}
    assert from_default == {None, 4, 8, 16, 32}  # it stands outside of the order


def test_one_knob_away_and_taken_back() -> None:
    assert len(list(SPACE.one_knob_away((8, None, None)))) == 4 + 1 + 2
    assert SPACE.taken_back((8, False, None)) == [(None, False, None), (8, None, None)]


def test_a_sample_has_each_value_about_equally_often() -> None:
    found = SPACE.sample(10, random.Random(1))
    assert len(set(found)) == 10
    counts = Counter(setting[0] for setting in found)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_sample_of_more_than_there_are_is_all() -> None:
    assert len(SPACE.sample(1000, random.Random(1))) == SPACE.size


def test_what_is_not_allowed_does_not_come_up() -> None:
    space = replace(SPACE, allows=lambda setting: setting[0] != 8)
    assert all(setting[0] != 8 for setting in space.sample(1000, random.Random(1)))
    assert all(setting[0] != 8 for setting in space.sample(5, random.Random(1)))
    assert all(setting[0] != 8 for setting in space.neighbours((4, None, None)))
    assert all(setting[0] != 8 for setting in space.one_knob_away((4, None, None)))


def test_fewer_values_keep_the_default() -> None:
    assert SPACE.only("seqs", [16]).dimensions[0].values == (None, 16)


def test_values_differ_and_have_the_default() -> None:
    with pytest.raises(InvariantError, match="x"):
        Dimension("x", (1, 2))
    with pytest.raises(InvariantError, match="x"):
        Dimension("x", (None, 2, 2))


def test_a_space_needs_a_choice() -> None:
    with pytest.raises(ConfigError, match="no knob is left to tune"):
        require_choice(Space((Dimension("x", (None,)),)))

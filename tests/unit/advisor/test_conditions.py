"""The language of conditions: what it says, and that it can do nothing else."""

from __future__ import annotations

import pytest

from octavo.advisor.conditions import Condition
from octavo.core.errors import InvariantError

FACTS = {"tp": 4, "link": "bus", "limit": None, "is_gpu": True, "share": 0.4, "one": 1}


@pytest.mark.parametrize(
    ("text", "is_true"),
    [
        ("True", True),
        ("is_gpu and tp > 1", True),
        ("not is_gpu or tp == 1", False),
        ('link == "bus"', True),
        ('link in ("bus", "none")', True),
        ('link not in ("bus", "none")', False),
        ("1 < tp <= 4", True),
        ("tp % 3 != 1", False),
        ("tp * share >= 1.6", True),
        ("-tp < 0", True),
        ("limit > 0", False),
        ("limit < 0", False),
        ("limit * 2 > 0", False),
        ("limit == 5", False),
        ("not limit > 0", True),
    ],
)
def test_conditions_say_what_they_say(text: str, is_true: bool) -> None:
    assert Condition(text).holds(FACTS) is is_true


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "tp.bit_length",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "tp if is_gpu else 1",
        "tp ** 9",
        "link[0]",
        "f'{tp}'",
        "tp is 4",
        "(yield)",
        "1 +",
        "b'x' == link",
        "",
    ],
)
def test_what_is_not_in_the_language_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(InvariantError, match="condition"):
        Condition(text)


def test_names_are_known_without_evaluating() -> None:
    assert Condition('tp > one and link == "x"').names == {"tp", "one", "link"}

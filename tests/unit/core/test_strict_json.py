from __future__ import annotations

import json

import pytest

from octavo.core.strict_json import MAX_DEPTH, loads, unique_names
from support.processor_time import takes_less_than


def test_names_that_differ_make_an_object() -> None:
    text = '{"a": {"a": 1, "b": 2}, "b": []}'
    assert json.loads(text, object_pairs_hook=unique_names) == json.loads(text)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^'b' is given twice$"):
        json.loads(
            '{"a": 1, "x": {"b": 1, "c": 2, "b": 3}, "a": 2}', object_pairs_hook=unique_names
        )
    long = "n" * 10_000
    with pytest.raises(ValueError, match="is given twice") as caught:
        unique_names([(long, 1), (long, 2)])
    assert len(str(caught.value)) < 200


def test_a_name_given_twice_among_many_is_found_in_linear_time() -> None:
    names = [*map(str, range(200_000)), "199999"]
    with takes_less_than(1), pytest.raises(ValueError, match="'199999' is given twice"):
        unique_names([(name, None) for name in names])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("[NaN]", "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('["\\ud800"]', "half of a surrogate pair"),
        ("9" * 5000, "a number has more than 4300 digits$"),
        ("[" * 100_000, "nests deeper than 64 levels"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nests deeper than 64 levels"),
    ],
)
def test_loads_refuses_what_json_leaves_open(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        loads(text)


def test_loads_takes_the_rest() -> None:
    assert loads('{"a": ["\\ud83c\\udf36", 1.5, null]}') == {"a": ["🌶", 1.5, None]}
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert loads("[[1]" + ", [1]" * 500 + "]") == [[1]] * 501

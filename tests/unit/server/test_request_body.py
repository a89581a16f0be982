"""Bodies from clients that mean no good, or are just odd."""

from __future__ import annotations

import json

import pytest

from octavo.core.errors import RequestError
from octavo.server.request_body import MAX_DEPTH, parse, parse_json
from octavo.server.schemas import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"x": {"b": 1, "b": 2}}', "'b' is given twice"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": ["\\udc00\\ud800"]}', "half of a surrogate pair"),
        (b'{"\\udbff": 1}', "half of a surrogate pair"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nests deeper"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nests deeper"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nests deeper"),
    ],
)
def test_bad_json_is_refused(body: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 500


def test_good_json_is_taken() -> None:
    deep = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert "a" in parse_json(deep)
    assert parse_json('{"a": "é\\ud83c\\udf36\\u0000"}'.encode()) == {"a": "é🌶\0"}
    wide = {"prompt": [[1, 2]] * 500}
    assert parse_json(json.dumps(wide).encode()) == wide


def test_unknown_field_names_the_nearest() -> None:
    body = json.dumps({"prompt": "a", "max_token": 3}).encode()
    with pytest.raises(RequestError, match="did you mean 'max_tokens'") as caught:
        parse(body, CompletionRequest, ignore_unknown=False)
    assert caught.value.param == "max_token"

    parsed = parse(body, CompletionRequest, ignore_unknown=True)
    assert parsed.fields.max_tokens is None
    assert parsed.warning_headers == {"X-Octavo-Ignored-Fields": "max_token"}


def test_ignored_names_make_a_safe_header() -> None:
    body = json.dumps({"prompt": "a", "x\r\nSet-Cookie: b": 1, "é": 2}).encode()
    header = parse(body, CompletionRequest, ignore_unknown=True).warning_headers
    assert header == {"X-Octavo-Ignored-Fields": "x%0D%0ASet-Cookie%3A%20b, %C3%A9"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 2), ("suffix", "x"), ("guided_choice", ["a"]), ("structured_outputs", {})],
)
def test_fields_that_are_not_built_are_refused_by_name(name: str, value: object) -> None:
    body = json.dumps({"prompt": "a", name: value}).encode()
    for ignore in (False, True):  # ignoring is for unknown names; these are known to matter
        with pytest.raises(RequestError, match=name) as caught:
            parse(body, CompletionRequest, ignore_unknown=ignore)
        assert caught.value.param == name


def test_null_is_not_given() -> None:
    message = {"role": "user", "content": "x"}
    body = {"messages": [message], "best_of": None, "stop": None, "unheard_of": None}
    parsed = parse(json.dumps(body).encode(), ChatRequest, ignore_unknown=False)
    assert parsed.fields.model_fields_set == {"messages"}
    with pytest.raises(RequestError, match="prompt is required"):
        parse(b'{"prompt": null}', CompletionRequest, ignore_unknown=False)


def test_at_most_ten_errors_with_short_inputs() -> None:
    body = {"messages": [{"role": 1, "content": "y" * 10_000}] * 50}
    with pytest.raises(RequestError, match="and 40 more errors") as caught:
        parse(json.dumps(body).encode(), ChatRequest, ignore_unknown=False)
    assert caught.value.param == "messages[0]"
    assert len(caught.value.message) < 10 * 700

"""Bodies from clients that mean no good, or are just odd."""

from __future__ import annotations

import json

import pytest

from octavo.core.errors import RequestError
from octavo.core.strict_json import MAX_DEPTH
from octavo.server.request_body import parse, parse_json
from octavo.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, RequestBody
from support.processor_time import takes_less_than


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


@pytest.mark.parametrize(
    ("fields", "name", "hint"),
    [
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "usage'"),
        ({"response_format": {"type": "text", "shema": 1}}, "response_format.shema", "schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schem": {}}}},
            "response_format.json_schema.schem",
            "'schema'",
        ),
    ],
)
def test_unknown_fields_of_nested_objects(fields: dict[str, object], name: str, hint: str) -> None:
    body = json.dumps({"prompt": "a", "stream": True, **fields}).encode()
    with pytest.raises(RequestError, match=f"{name}.*did you mean.*{hint}") as caught:
        parse(body, CompletionRequest, ignore_unknown=False)
    assert caught.value.param == name


def test_unknown_fields_of_nested_objects_can_be_ignored() -> None:
    fields = {"prompt": "a", "stream": True, "response_format": {"type": "text"}, "y": {"x": 2}}
    body = json.dumps({**fields, "stream_options": {"include_usage": True, "x": 1}}).encode()
    parsed = parse(body, CompletionRequest, ignore_unknown=True)
    assert parsed.ignored == ("y", "stream_options.x")
    assert parsed.fields.stream_options is not None
    assert parsed.fields.stream_options.include_usage


def test_many_names_are_checked_in_linear_time() -> None:
    names = ",".join(f'"{i}":0' for i in range(200_000))
    with takes_less_than(1), pytest.raises(RequestError, match="'199999' is given twice"):
        parse_json(f'{{{names},"199999":0}}'.encode())


def test_ignored_names_make_a_safe_header() -> None:
    body = json.dumps({"prompt": "a", "x\r\nSet-Cookie: b": 1, "é": 2, "": 3}).encode()
    header = parse(body, CompletionRequest, ignore_unknown=True).warning_headers
    assert header == {"X-Octavo-Ignored-Fields": "x%0D%0ASet-Cookie%3A%20b, %C3%A9, ''"}


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
    names = ["n", "top_p", "top_k", "min_p", "seed", "stop", "echo", "stream", "temperature"]
    wrong = {"y" * 10_000: 1}
    body = {"messages": [], **dict.fromkeys([*names, "bad_words", "max_tokens"], wrong)}
    with pytest.raises(RequestError, match="and 2 more errors") as caught:
        parse(json.dumps(body).encode(), ChatRequest, ignore_unknown=False)
    assert len(caught.value.message) < 10 * 700


ITEMS = 300_000


@pytest.mark.parametrize(
    ("schema", "fields", "param"),
    [
        (ChatRequest, {"messages": [1] * ITEMS}, "messages[0]"),
        (ChatRequest, {"tools": [1] * ITEMS}, "tools[0]"),
        (ChatRequest, {"modalities": [1] * ITEMS}, "modalities[0]"),
        (CompletionRequest, {"stop": [1] * ITEMS}, "stop[0]"),
        (CompletionRequest, {"stop_token_ids": ["x"] * ITEMS}, "stop_token_ids[0]"),
        (CompletionRequest, {"allowed_token_ids": [[]] * ITEMS}, "allowed_token_ids[0]"),
        (CompletionRequest, {"bad_words": [{}] * ITEMS}, "bad_words[0]"),
        (CompletionRequest, {"logit_bias": dict.fromkeys(range(ITEMS), "x")}, "logit_bias"),
        (CompletionRequest, {"stop": [{"a": [["b" * 100] * ITEMS]}]}, "stop[0]"),
        (DetokenizeRequest, {"tokens": ["x"] * ITEMS}, "tokens[0]"),
    ],
)
def test_a_list_ends_at_its_first_error(
    schema: type[RequestBody], fields: dict[str, object], param: str
) -> None:
    needed = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    given = {name: needed[name] for name in needed if name in schema.model_fields} | fields
    body = json.dumps(given).encode()
    # 300000 errors take several seconds.
    with takes_less_than(1), pytest.raises(RequestError) as caught:
        parse(body, schema, ignore_unknown=False)
    assert (caught.value.param, len(caught.value.message) < 1000) == (param, True)


def test_numbers_without_end_get_no_advice_for_programmers() -> None:
    with pytest.raises(RequestError, match="a number has more than 4300 digits") as caught:
        parse_json(b'{"a": ' + b"9" * 5000 + b"}")
    assert "sys." not in caught.value.message

"""Files that others write: what their rows are, and what is said of broken ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from octavo.bench.workloads import files
from octavo.bench.workloads.files import READERS, Row, read_rows
from octavo.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens
5,a,1,ChatGPT,472,18,490
45.5,b,1,ChatGPT,1087,0,1087
118,c,1,GPT-4,417,276,693
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 3000, "input_length": 6, "output_length": 1, "hash_ids": [46]}
"""
CUSTOM = '{"prompt": "Hello there", "output_tokens": 5}\n\n{"prompt": " "}\n{"prompt": "And?"}\n'
SHAREGPT = json.dumps(
    [
        {
            "id": "1",
            "conversations": [
                {"from": "human", "value": "What, [then]? \n{"},
                {"from": "gpt", "value": "This."},
                {"from": "human", "value": "Thanks"},
            ],
        },
        {"id": "2", "conversations": [{"from": "human", "value": "Alone"}]},
        {
            "id": "3",
            "conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}],
        },
    ],
    indent=2,
)


def rows(tmp_path: Path, text: str, kind: str | None = None) -> tuple[list[Row], Counter[str]]:
    path = tmp_path / "requests"
    path.write_text(text, encoding="utf-8")
    dropped: Counter[str] = Counter()
    return list(read_rows(path, kind, dropped)), dropped


def test_azure(tmp_path: Path) -> None:
    (first, second), dropped = rows(tmp_path, AZURE)
    assert (first.line, first.input_len, first.output_len) == (2, 4808, 10)
    assert first.time_s is not None
    assert second.time_s is not None
    assert second.time_s - first.time_s == pytest.approx(0.052)
    assert not dropped


def test_burstgpt_drops_requests_that_failed(tmp_path: Path) -> None:
    found, dropped = rows(tmp_path, BURSTGPT)
    assert [(r.time_s, r.input_len, r.output_len) for r in found] == [(5, 472, 18), (118, 417, 276)]
    assert dropped == {"failed in the trace (no response tokens)": 1}


def test_the_first_release_of_burstgpt_has_fewer_columns(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,G,7,8,15,API\n"
    [row], _ = rows(tmp_path, text)
    assert (row.input_len, row.output_len) == (7, 8)


def test_mooncake(tmp_path: Path) -> None:
    (first, second), _ = rows(tmp_path, MOONCAKE)
    assert first == Row(line=1, input_len=1100, output_len=52, time_s=0, block_ids=(46, 47, 48))
    assert second.time_s == 3


def test_custom(tmp_path: Path) -> None:
    found, dropped = rows(tmp_path, CUSTOM)
    assert found == [
        Row(line=1, text="Hello there", output_len=5),
        Row(line=4, text="And?"),
    ]
    assert dropped == {"an empty prompt": 1}


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_sharegpt_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(files, "_CHUNK_CHARS", chunk)
    found, dropped = rows(tmp_path, SHAREGPT, "sharegpt")
    assert [(r.line, r.text, r.answer) for r in found] == [
        (2, "What, [then]? \n{", "This."),
        (28, "A", "B"),
    ]
    assert SHAREGPT.splitlines()[27].strip() == "{"
    assert dropped == {"fewer than two turns": 1}


def test_each_kind_is_known_by_its_first_line(tmp_path: Path) -> None:
    for text in (AZURE, BURSTGPT, MOONCAKE, CUSTOM, SHAREGPT):
        assert rows(tmp_path, text)[0]
    with pytest.raises(ConfigError, match=r"no format that is known here .* begins with 'hello'"):
        rows(tmp_path, "hello\n")
    with pytest.raises(ConfigError, match="there are azure, burstgpt"):
        rows(tmp_path, "hello\n", "csv")
    with pytest.raises(ConfigError, match="can't be read"):
        list(read_rows(tmp_path / "none", None, Counter()))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("azure", "TIMESTAMP,Tokens\n", "line 1: has no column 'ContextTokens'"),
        ("azure", "", "line 1: has no column 'TIMESTAMP'"),
        ("azure", AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP is 'yesterday'"),
        ("azure", AZURE + "2023-11-16 18:17:05,many,2\n", "line 4: ContextTokens is 'many'"),
        ("azure", AZURE + "2023-11-16 18:17:05\n", "line 4: has 1 of 3 columns"),
        ("azure", AZURE + f"2023-11-16 18:17:05,{10**9},2\n", "not a number from 0 to 10000000"),
        ("azure", AZURE + '2023-11-16 18:17:05,"' + "1" * 200_000, "line 4: is not CSV"),
        ("burstgpt", BURSTGPT + "nan,d,1,m,5,5,10\n", "line 5: Timestamp is 'nan'"),
        ("burstgpt", BURSTGPT + "9,d,1,m,-5,5,0\n", "line 5: Request tokens is '-5'"),
        ("mooncake", MOONCAKE + "{", "line 3: is not JSON"),
        ("mooncake", MOONCAKE + "[" * 100_000, "line 3: is not JSON"),
        ("mooncake", MOONCAKE + "[]", "line 3: is a JSON list, not an object"),
        ("mooncake", '{"input_length": true, "output_length": 1}', "input_length is True"),
        ("mooncake", '{"input_length": 1}', "output_length is None"),
        (
            "mooncake",
            '{"timestamp": 1' + "0" * 400 + ', "input_length": 1, "output_length": 1}',
            "milliseconds",
        ),
        (
            "mooncake",
            '{"hash_ids": ["a"], "input_length": 1, "output_length": 1}',
            "hash_ids is ['a']",
        ),
        ("custom", CUSTOM + '{"prompt": 7}', "line 5: prompt is 7, not a text"),
        ("custom", '{"prompt": "a", "output_tokens": 1.5}', "output_tokens is 1.5"),
        ("sharegpt", "{}", "line 1: does not begin with a JSON list"),
        ("sharegpt", "[\n\n{}", "line 3: has no list of conversations"),
        ("sharegpt", "[\n 7]", "line 2: is a JSON int"),
        ("sharegpt", '[\n{"conversations": [{}, {}]}]', "line 2: has a turn without a text"),
        ("sharegpt", "[\n{ [", "line 2: is no JSON object"),
        ("sharegpt", "[" * 100_000, "line 1: is no JSON object"),
        ("sharegpt", '[{"conversations": []}', "ends inside the list"),
        ("sharegpt", "", "ends inside the list"),
    ],
)
def test_a_broken_row_is_told_with_file_and_line(
    tmp_path: Path, kind: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        rows(tmp_path, text, kind)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'requests'}, line ")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_text_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        list(read_rows(path, kind, Counter()))


@pytest.mark.parametrize(("kind", "begin"), [("custom", '{"prompt": "'), ("sharegpt", '[{"a": "')])
def test_one_endless_line_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, begin: str
) -> None:
    monkeypatch.setattr(files, "_MOST_CHARS", 1000)
    monkeypatch.setattr(files, "_CHUNK_CHARS", 100)
    with pytest.raises(ConfigError, match="1000 characters"):
        rows(tmp_path, begin + "a" * 100_000, kind)

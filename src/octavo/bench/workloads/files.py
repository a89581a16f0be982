"""Rows of requests in the files that others write: traces with lengths and times, sets of prompts.

Files are read as they are needed and never whole. What they hold is not trusted: a row that makes
no sense is an error with the file and the line, one that asks for nothing is dropped and counted.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO

from octavo.core.errors import ConfigError

_CHUNK_CHARS = 1 << 20
_MOST_CHARS = 1 << 24
"""Of one line, or of one conversation."""
_MOST_TOKENS = 10_000_000
_MOST_SECONDS = 1e12
_UNITS = {1.0: "seconds", 1e-3: "milliseconds"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Dropped = Counter[str]
"""Why rows were left out -> how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of a file; line: where it stands. Either input_len is known or text, the prompt;
    answer: the text that came back. time_s: on the file's own clock. block_ids: of the prompt's
    blocks of block_len tokens; equal ids are equal blocks after equal blocks.
    """

    line: int
    input_len: int | None = None
    output_len: int | None = None
    text: str | None = None
    answer: str | None = None
    time_s: float | None = None
    block_ids: tuple[int, ...] = ()


Reader = Callable[[Path, Dropped], Iterator[Row]]

MOONCAKE_BLOCK_LEN = 512


def read_rows(path: Path, kind: str | None, dropped: Dropped) -> Iterator[Row]:
    """The rows of a file, in its order. kind: one of READERS, or None to find out by its first
    characters. Raises ConfigError.
    """
    kind = kind or _kind_of(path)
    if kind not in READERS:
        raise ConfigError(f"there is no file format {kind!r}; there are {', '.join(READERS)}")
    return READERS[kind](path, dropped)


def _kind_of(path: Path) -> str:
    with _opened(path) as file:
        start = file.read(_CHUNK_CHARS)
    first_line = start.lstrip().split("\n", 1)[0]
    if first_line.startswith("["):
        return "sharegpt"
    for kind, marks in _MARKS.items():
        if all(mark in first_line for mark in marks):
            return kind
    raise ConfigError(
        f"{path} is in no format that is known here ({', '.join(READERS)}); it begins with "
        f'{first_line[:60]!r}. Name the format, or write one line {{"prompt": …}} for each prompt'
    )


# --- tables ------------------------------------------------------------------------------------


def _azure(path: Path, dropped: Dropped) -> Iterator[Row]:
    """TIMESTAMP,ContextTokens,GeneratedTokens of the Azure LLM inference traces."""
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for line, (stamp, input_len, output_len) in _table(path, columns):
        try:
            when = datetime.fromisoformat(stamp)
        except ValueError:
            _refuse(path, line, f"TIMESTAMP is {stamp[:40]!r}, not a date and a time")
        # Without a zone, any will do, but one whose clocks are never changed.
        since = (when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH
        yield Row(
            line=line,
            input_len=_tokens(path, line, "ContextTokens", input_len),
            output_len=_tokens(path, line, "GeneratedTokens", output_len),
            time_s=since.total_seconds(),
        )


def _burstgpt(path: Path, dropped: Dropped) -> Iterator[Row]:
    """Timestamp (s), Request tokens, Response tokens of BurstGPT, among others in any order. A
    response of no tokens is a request that failed there.
    """
    columns = ("Timestamp", "Request tokens", "Response tokens")
    for line, (stamp, input_len, output_len) in _table(path, columns):
        time_s = _seconds(path, line, "Timestamp", stamp, 1.0)
        num_output = _tokens(path, line, "Response tokens", output_len)
        if num_output == 0:
            dropped["failed in the trace (no response tokens)"] += 1
            continue
        num_input = _tokens(path, line, "Request tokens", input_len)
        yield Row(line=line, input_len=num_input, output_len=num_output, time_s=time_s)


def _table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Of each row of a CSV file: its line, and its values in these columns."""
    with _opened(path) as file:
        rows = csv.reader(text for _, text in _lines(path, file))
        try:
            header = [name.strip().removeprefix("\ufeff") for name in next(rows, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                _refuse(path, 1, f"has no column {missing[0]!r}; its columns are {header!r:.200}")
            places = [header.index(name) for name in columns]
            for row in rows:
                if not row:
                    continue
                if len(row) <= max(places):
                    _refuse(path, rows.line_num, f"has {len(row)} of {len(header)} columns")
                yield rows.line_num, [row[place].strip() for place in places]
        except csv.Error as error:
            _refuse(path, rows.line_num, f"is not CSV: {error}")


# --- JSON --------------------------------------------------------------------------------------


def _mooncake(path: Path, dropped: Dropped) -> Iterator[Row]:
    """timestamp (ms), input_length, output_length, hash_ids of Mooncake's traces."""
    for line, values in _json_lines(path):
        ids = values.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            _refuse(path, line, f"hash_ids is {ids!r:.60}, not a list of numbers")
        stamp = values.get("timestamp")
        yield Row(
            line=line,
            input_len=_tokens(path, line, "input_length", values.get("input_length")),
            output_len=_tokens(path, line, "output_length", values.get("output_length")),
            time_s=None if stamp is None else _seconds(path, line, "timestamp", stamp, 1e-3),
            block_ids=tuple(ids),
        )


def _custom(path: Path, dropped: Dropped) -> Iterator[Row]:
    """prompt and, if it is there, output_tokens of vLLM's custom data sets."""
    for line, values in _json_lines(path):
        text = values.get("prompt")
        if not isinstance(text, str):
            _refuse(path, line, f"prompt is {text!r:.60}, not a text")
        output_len = values.get("output_tokens")
        if output_len is not None:
            output_len = _tokens(path, line, "output_tokens", output_len)
        if not text.strip():
            dropped["an empty prompt"] += 1
            continue
        yield Row(line=line, text=text, output_len=output_len)


def _sharegpt(path: Path, dropped: Dropped) -> Iterator[Row]:
    """The first two turns of each conversation of a ShareGPT file, as vLLM takes them."""
    for line, values in _json_items(path):
        turns = values.get("conversations", values.get("conversation"))
        if not isinstance(turns, list):
            _refuse(path, line, "has no list of conversations")
        if len(turns) < 2:
            dropped["fewer than two turns"] += 1
            continue
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        prompt, answer = texts
        if not isinstance(prompt, str) or not isinstance(answer, str):
            _refuse(path, line, "has a turn without a text as its value")
        yield Row(line=line, text=prompt, answer=answer)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _opened(path) as file:
        for line, text in _lines(path, file):
            if text.strip():
                yield line, _as_object(path, line, text)


def _as_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, line, f"is not JSON: {_problem(error)}")
    if not isinstance(values, dict):
        _refuse(path, line, f"is a JSON {type(values).__name__}, not an object")
    return values


def _problem(error: ValueError | RecursionError) -> str:
    """Without the place, which is told otherwise."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _json_items(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of one long JSON list, each with its first line."""
    decoder = json.JSONDecoder()
    with _opened(path) as file:
        buffer, place, line = "", 0, 1

        def skip(characters: str) -> None:
            """Past these, reading on."""
            nonlocal buffer, place, line
            while True:
                while place < len(buffer) and buffer[place] in characters:
                    line += buffer[place] == "\n"
                    place += 1
                if place < len(buffer):
                    return
                buffer, place = file.read(_CHUNK_CHARS), 0
                if not buffer:
                    _refuse(path, line, "ends inside the list")

        skip(" \t\r\n\ufeff")
        if buffer[place] != "[":
            _refuse(path, line, "does not begin with a JSON list")
        place += 1
        while True:
            skip(" \t\r\n,")
            if buffer[place] == "]":
                return
            while True:
                try:
                    values, end = decoder.raw_decode(buffer, place)
                    break
                except (ValueError, RecursionError) as error:
                    have = len(buffer) - place
                    more = "" if have > _MOST_CHARS else file.read(max(_CHUNK_CHARS, have))
                    if not more:
                        _refuse(
                            path,
                            line,
                            f"is no JSON object of {_MOST_CHARS} characters: {_problem(error)}",
                        )
                    buffer, place = buffer[place:] + more, 0
            if not isinstance(values, dict):
                _refuse(path, line, f"is a JSON {type(values).__name__}, not an object")
            yield line, values
            line += buffer.count("\n", place, end)
            place = end


# --- what all have in common -------------------------------------------------------------------

READERS: dict[str, Reader] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "custom": _custom,
    "sharegpt": _sharegpt,
}
_MARKS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ('"input_length"', '"output_length"'),
    "custom": ('"prompt"',),
}
"""What the first line of a file of each kind contains."""


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    line = 0
    while text := file.readline(_MOST_CHARS):
        line += 1
        if len(text) == _MOST_CHARS:
            _refuse(path, line, f"is longer than {_MOST_CHARS} characters")
        yield line, text


def _tokens(path: Path, line: int, name: str, value: Any) -> int:
    try:
        tokens = int(value) if isinstance(value, str) else value
    except ValueError:
        tokens = None
    if type(tokens) is not int or not 0 <= tokens <= _MOST_TOKENS:
        _refuse(path, line, f"{name} is {value!r:.40}, not a number from 0 to {_MOST_TOKENS}")
    return tokens


def _seconds(path: Path, line: int, name: str, value: Any, unit_s: float) -> float:
    try:
        seconds = unit_s * float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not abs(seconds) < _MOST_SECONDS:
        _refuse(path, line, f"{name} is {value!r:.40}, not a number of {_UNITS[unit_s]}")
    return seconds


def _refuse(path: Path, line: int, problem: str) -> NoReturn:
    raise ConfigError(f"{path}, line {line}: {problem}; correct or remove it")

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.speculative.training.prompts import Conversation
from octavo.speculative.training.responses import (
    Answer,
    Question,
    Response,
    collect,
    questions,
    read_responses,
)

CONVERSATIONS: list[Conversation] = [[{"role": "user", "content": str(n)}] for n in range(300)]


def asked(count: int = 300) -> Iterator[Question]:
    return questions(CONVERSATIONS[:count], num_held_out=2, answer_tokens=8, seed_of_all=3)


class Answering:
    """Answers with the question's number, ten tokens each."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Answer]:
        def answer(questions: Sequence[Question]) -> list[tuple[list[int], list[int]]]:
            numbers = [int((q.conversation or [])[0]["content"]) for q in questions]
            self.numbers += numbers
            return [([1, 2], [number] * 10) for number in numbers]

        yield answer


def gather(path: Path, num_tokens: int, answering: Answering) -> list[Response]:
    return collect(path, asked(), answering, num_tokens=num_tokens, show=lambda done: None)


def test_all_but_the_held_out_are_asked_at_every_temperature() -> None:
    given = list(asked(4))
    kinds = [
        ((q.conversation or [])[0]["content"], q.sampling.temperature, q.held_out) for q in given
    ]
    assert kinds == [
        ("0", 0.0, True),
        ("1", 0.0, True),
        ("2", 0.8, False),
        ("3", 0.8, False),
        ("2", 0.0, False),
        ("3", 0.0, False),
    ]
    seeds = [q.sampling.seed for q in given[2:]]
    assert len(set(seeds)) == 4
    assert seeds == [q.sampling.seed for q in list(asked(4))[2:]]


def test_collecting_stops_at_the_tokens_and_goes_on_from_there(tmp_path: Path) -> None:
    path, answering = tmp_path / "responses.jsonl", Answering()
    first = gather(path, 1000, answering)
    assert len(first) == 128  # a round
    assert answering.numbers == list(range(128))
    again = Answering()
    assert gather(path, 1000, again) == first
    assert again.numbers == []
    more = gather(path, 1300, again)
    assert again.numbers == list(range(128, 256))
    assert more[:128] == first
    assert read_responses(path) == more


def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    whole = gather(path, 1000, Answering())
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert len(read_responses(path)) == 127
    answering = Answering()
    assert gather(path, 1280, answering)[:128] == whole
    assert answering.numbers[0] == 127


def test_a_file_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ConfigError, match="is damaged"):
        read_responses(path)

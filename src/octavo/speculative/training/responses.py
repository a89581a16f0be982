"""The target's answers: asked for in rounds, kept line by line, so that what is there stays."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from octavo.core.errors import ConfigError
from octavo.core.sampling_params import SamplingParams
from octavo.speculative.training.prompts import Conversation

# Half of the answers as greedy decoding gives them, half as a request that samples sees them. Text
# that was drawn strays further than the likeliest one does, and so shows the head more.
TEMPERATURES = (0.0, 0.8)
_ROUND = 128


class Response(NamedTuple):
    """A prompt's and an answer's token ids. temperature: that the answer was sampled at. held_out:
    not to be learned from, but to measure with; such answers are greedy.
    """

    prompt: list[int]
    answer: list[int]
    temperature: float
    held_out: bool


class Question(NamedTuple):
    """What the target shall answer, and how. conversation: None where the target itself first
    writes what it is asked, by `seed`.
    """

    conversation: Conversation | None
    sampling: SamplingParams
    held_out: bool
    seed: int


Answer = Callable[[Sequence[Question]], Sequence[tuple[Sequence[int], Sequence[int]]]]
"""Answers many questions at once: the token ids of each one's prompt and answer."""


def questions(
    conversations: Iterable[Conversation | None],
    *,
    num_held_out: int,
    answer_tokens: int,
    seed_of_all: int,
) -> Iterator[Question]:
    """Each conversation at the temperatures in turn, until all have had all; the first
    `num_held_out` are asked greedily and only once. answer_tokens: the most that an answer gets.
    """
    kept: list[Conversation | None] = []

    def question(
        conversation: Conversation | None, number: int, turn: int, *, held_out: bool = False
    ) -> Question:
        seed = random.Random(f"{seed_of_all} {turn} {number}").getrandbits(32)
        # Two by two: every other conversation may be of another kind.
        index = 0 if held_out else (number // 2 + turn) % len(TEMPERATURES)
        sampling = SamplingParams(
            temperature=TEMPERATURES[index], max_tokens=answer_tokens, seed=seed
        )
        return Question(conversation, sampling, held_out, seed)

    for number, conversation in enumerate(conversations):
        if number >= num_held_out:
            kept.append(conversation)
        yield question(conversation, number, 0, held_out=number < num_held_out)
    for turn in range(1, len(TEMPERATURES)):
        for number, conversation in enumerate(kept, num_held_out):
            yield question(conversation, number, turn)


def collect(
    path: Path,
    asked: Iterator[Question],
    answering: Callable[[], AbstractContextManager[Answer]],
    *,
    num_tokens: int,
    show: Callable[[int], None],
) -> list[Response]:
    """Add answers to the file until it has `num_tokens` tokens of them, or no question is left, and
    return all. Questions that it has the answers of are passed over. answering: gives what answers,
    if that is needed. show: told the tokens so far.
    """
    responses = read_responses(path)
    done = sum(len(response.answer) for response in responses)
    show(done)
    if done >= num_tokens:
        return responses
    asked = itertools.islice(asked, len(responses), None)
    with answering() as answer, path.open("a", encoding="utf-8") as file:
        while done < num_tokens and (round_ := list(itertools.islice(asked, _ROUND))):
            for question, (prompt, tokens) in zip(round_, answer(round_), strict=True):
                response = Response(
                    list(prompt),
                    list(tokens),
                    question.sampling.temperature,
                    question.held_out,
                )
                responses.append(response)
                done += len(response.answer)
                file.write(json.dumps(response._asdict()) + "\n")
            file.flush()
            show(done)
    return responses


def read_responses(path: Path) -> list[Response]:
    """Those of a file, if it is there. A last line without an end, which a process that was stopped
    leaves behind, is removed. Raises ConfigError for what this module hasn't written.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    try:
        return [Response(**json.loads(line)) for line in whole.decode().splitlines()]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it to generate it again") from error

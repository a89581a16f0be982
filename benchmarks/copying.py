"""Work that copies from its prompt, one request at a time, on servers that take turns."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from octavo.bench.launch import Arm, parse_arm, started
from octavo.bench.statistics import Spread
from serving import client, stream


@dataclass(frozen=True)
class Task:
    name: str
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """num_tokens: of the output. Seconds from the request to its first and to its last token. text:
    None if the rival doesn't say.
    """

    num_tokens: int
    first_s: float
    last_s: float
    text: str | None = None


class Rival(Protocol):
    @property
    def name(self) -> str:
        """What precedes a "+" in it names the arm that this one is compared with."""
        ...

    def answer(self, tasks: Sequence[Task], folder: Path, label: str) -> list[Answer]:
        """Start, warm up with the first task, whose answer doesn't count, play the others, end."""
        ...


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible one; extra: fields of its requests."""

    arm: Arm
    extra: dict[str, Any]

    @property
    def name(self) -> str:
        return self.arm.name

    def answer(self, tasks: Sequence[Task], folder: Path, label: str) -> list[Answer]:
        with started(self.arm, folder, label=label) as url:
            return asyncio.run(self._play(url, tasks))[1:]

    async def _play(self, url: str, tasks: Sequence[Task]) -> list[Answer]:
        # Each request has its own connection: llama.cpp's server may just be closing the last one.
        async with client(url, keep_alive=False) as http:
            models = (await http.get("/v1/models")).raise_for_status().json()
            options = {"model": models["data"][0]["id"], "ignore_eos": False, **self.extra}
            answers = []
            for task in tasks:
                got = await stream(http, task.token_ids, task.max_tokens, **options)
                first, last = got.arrivals[0] - got.sent, got.arrivals[-1] - got.sent
                answers.append(Answer(got.num_tokens, first, last, got.text))
            return answers


@dataclass(frozen=True)
class Program:
    """One that plays the tasks in its own process. Its command has {tasks} in it, a file with a
    list of {"token_ids", "max_tokens"}; the last line that it prints is a list of what `Answer`
    has, the text left out.
    """

    name: str
    command: str

    def answer(self, tasks: Sequence[Task], folder: Path, label: str) -> list[Answer]:
        file = folder / f"{label}.json"
        file.write_text(
            json.dumps([{"token_ids": t.token_ids, "max_tokens": t.max_tokens} for t in tasks])
        )
        words = [
            os.path.expanduser(w).replace("{tasks}", str(file)) for w in shlex.split(self.command)
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{self.name} ended with {done.returncode}: {done.stderr[-2000:]}")
        return [Answer(*figures) for figures in json.loads(done.stdout.splitlines()[-1])][1:]


def octavo(name: str, speculation: str, flags: Sequence[str]) -> Server:
    text = shlex.join(["octavo", *flags, "--speculative-config", speculation])
    return Server(parse_arm(f"{name}={text}"), {})


def rival(text: str) -> Rival:
    """From NAME=COMMAND, with {port} for a server and {tasks} for a program. llama.cpp is asked
    not to reuse what it has in its cache.
    """
    name, _, command = text.partition("=")
    if "{tasks}" in command:
        return Program(name, command)
    return Server(parse_arm(text), {"cache_prompt": False} if "llama-server" in command else {})


def measure(rivals: Sequence[Rival], tasks: Sequence[Task], rounds: int) -> dict[str, Any]:
    """Each arm's rounds: tokens per second of decoding (from the first token to the last), of all,
    and each task's tokens and seconds. The first task only warms up.
    """
    found: dict[str, list[list[Answer]]] = {rival.name: [] for rival in rivals}
    with TemporaryDirectory(prefix="octavo-speculation-") as name:
        for number in range(rounds):
            for one in in_turn(rivals, number):
                found[one.name].append(one.answer(tasks, Path(name), f"{one.name}.{number}"))
                print(f"round {number + 1}, {one.name}: {decode_rate(found[one.name][-1]):.1f}")
    return {
        name: {
            "decode_rates": [decode_rate(answers) for answers in each],
            "whole_rates": [whole_rate(answers) for answers in each],
            "tasks": {
                task.name: [
                    [answers[index].num_tokens, answers[index].first_s, answers[index].last_s]
                    for answers in each
                ]
                for index, task in enumerate(tasks[1:])
            },
            "texts": [answer.text for answer in each[0]],
        }
        for name, each in found.items()
    }


def in_turn(arms: Sequence[Any], number: int) -> list[Any]:
    """Another one begins each time, and every other time they go backwards."""
    shift = number // 2 % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned[::-1] if number % 2 else turned


def decode_rate(answers: Sequence[Answer]) -> float:
    seconds = sum(answer.last_s - answer.first_s for answer in answers)
    return sum(answer.num_tokens - 1 for answer in answers) / seconds


def whole_rate(answers: Sequence[Answer]) -> float:
    return sum(a.num_tokens for a in answers) / sum(a.last_s for a in answers)


def table(found: dict[str, Any]) -> list[list[str]]:
    """Rows of Markdown: arm, tokens/s, times its own baseline, and both with the prompts."""
    rows = [["arm", "tokens/s", "to its baseline", "with the prompt", "to its baseline"]]
    for name, arm in found.items():
        base = found.get(name.partition("+")[0], arm)
        row = [name]
        for kind in ("decode_rates", "whole_rates"):
            row += [spread(arm[kind]), "" if base is arm else spread(ratios(arm[kind], base[kind]))]
        rows.append(row)
    return rows


def ahead(found: dict[str, Any], ours: Sequence[str]) -> str:
    """The fastest of our arms against the fastest of the others, in a sentence."""
    others = [name for name in found if name not in ours]
    best, rival = (
        max(names, key=lambda name: median(found[name]["decode_rates"])) for names in (ours, others)
    )
    times = ratios(found[best]["decode_rates"], found[rival]["decode_rates"])
    return f"{best} against {rival}: {spread(times)} times the tokens/s"


def ratios(rates: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(rates, base, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Median, and from which to which."""
    of = Spread.of(values)
    if of is None:
        return "–"
    digits = 1 if of.median >= 20 else 2
    return f"{of.median:.{digits}f} ({of.lowest:.{digits}f}–{of.highest:.{digits}f})"

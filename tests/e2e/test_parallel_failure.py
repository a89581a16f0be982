"""kill -9 of any one process of a server, at any moment: 50 random trials.

OCTAVO_CHAOS_SEED=N chooses others, OCTAVO_CHAOS_TRIALS=N how many of them there are.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo import LLM, SamplingParams
from support.chaos import (
    END_SECONDS,
    START_SECONDS,
    Asked,
    DoomedServer,
    Process,
    Reply,
    wait_for,
)
from support.checkpoints import VOCAB_SIZE

pytestmark = pytest.mark.alone  # many processes, and limits of time

SEED = int(os.environ.get("OCTAVO_CHAOS_SEED", "8"))
NUM_TRIALS = int(os.environ.get("OCTAVO_CHAOS_TRIALS", "50"))

LAYOUTS = {
    "tp2": ("--tensor-parallel-size", "2"),
    "pp2": ("--pipeline-parallel-size", "2"),
    "tp2 pp2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "dp2": ("--data-parallel-size", "2"),
}
# Servers at a time: much of a trial is waiting.
SIDE_BY_SIDE = 3
# A server starts workers three times and then gives up, unless its engine is a new one.
MOST_WORKERS_LOST = 3


class Trial(NamedTuple):
    """kind: of the process that is killed. moment: "start", "idle", "prefill", "stream"; "twice" is
    as "stream", and once more while what was lost is coming back. delay: 0 to 1.
    """

    kind: str
    moment: str
    delay: float


class Life(NamedTuple):
    """One server's, to its end or to that of its trials."""

    seed: int
    layout: str
    restarts: bool
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        trials = "; ".join(f"{one.kind} {one.moment} {one.delay:.2f}" for one in self.trials)
        return f"{self.layout}{' --restart-workers' * self.restarts} (seed {self.seed}): {trials}"


def lives(layout: str, rng: random.Random, num_trials: int) -> list[Life]:
    """Half of the trials with restarts, several on each server."""
    kinds = ["engine", "worker", "worker"] if layout != "dp2" else ["engine"]
    found = []
    left = num_trials // 2
    while left > 0:
        trials, num_lost = [], 0
        for _ in range(min(left, 6)):
            moment = rng.choice(["idle", "prefill", "stream", "stream", "twice"])
            kind = rng.choice(kinds)
            if kind == "worker" and num_lost + 1 + (moment == "twice") > MOST_WORKERS_LOST:
                kind = "engine"
            num_lost = 0 if kind == "engine" else num_lost + 1 + (moment == "twice")
            trials.append(Trial(kind, moment, rng.random()))
        left -= len(trials)
        found.append(Life(rng.getrandbits(32), layout, True, tuple(trials)))
    left = num_trials - num_trials // 2
    while left > 0:
        moments = [rng.choice(["start", "idle", "prefill", "stream", "stream"])]
        if layout == "dp2" and left > 1 and moments[0] != "start":
            moments.append(rng.choice(["idle", "prefill", "stream"]))
        trials = [Trial(rng.choice([*kinds, "api"]), one, rng.random()) for one in moments]
        if trials[0].kind == "api":
            del trials[1:]
        left -= len(trials)
        found.append(Life(rng.getrandbits(32), layout, False, tuple(trials)))
    return found


@pytest.fixture(scope="module")
def questions(long_folder: Path) -> dict[str, list[Asked]]:
    """short: prompts with long answers. long: the other way."""
    rng = random.Random(5)
    shapes = {"short": (4, 8, 300), "long": (3, 3000, 30)}
    llm = LLM(str(long_folder), dtype="float32")
    found: dict[str, list[Asked]] = {}
    for name, (count, num_tokens, max_tokens) in shapes.items():
        prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        found[name] = [
            Asked(
                {
                    "prompt": list(prompt),
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                output.outputs[0].text,
            )
            for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True)
        ]
    llm.shutdown()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_process(
    layout: str, long_folder: Path, questions: dict[str, list[Asked]], tmp_path: Path
) -> None:
    number = list(LAYOUTS).index(layout)
    num_trials = (NUM_TRIALS + len(LAYOUTS) - 1 - number) // len(LAYOUTS)
    planned = lives(layout, random.Random(f"{SEED} {layout}"), num_trials)
    print(f"seed {SEED}: {num_trials} trials on {len(planned)} servers")

    def play(number: int) -> str | None:
        life, log = planned[number], tmp_path / f"{number}.log"
        start = time.monotonic()
        try:
            with doomed(log, str(long_folder), *LAYOUTS[layout], restarts=life.restarts) as server:
                _Player(life, server, questions).play()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            return f"{life}\n{error!r}\n{log.read_text()[-4000:]}"
        print(f"{time.monotonic() - start:5.1f} s  {life}")
        return None

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        problems = [one for one in pool.map(play, range(len(planned))) if one is not None]
    assert not problems, "\n\n".join(problems)


@contextmanager
def doomed(log: Path, *arguments: str, restarts: bool) -> Iterator[DoomedServer]:
    more = ("--dtype", "float32", *["--restart-workers"] * restarts)
    server = DoomedServer(log, *arguments, *more)
    try:
        yield server
    finally:
        server.end()


class _Player:
    """Plays a server's trials, and asserts what becomes of it."""

    def __init__(self, life: Life, server: DoomedServer, questions: dict[str, list[Asked]]) -> None:
        self._life = life
        self._server = server
        self._questions = questions
        self._rng = random.Random(life.seed)
        self._trial = life.trials[0]
        self._replies: list[Reply] = []
        self._streams: list[Reply] = []

    def play(self) -> None:
        if self._trial.moment == "start":
            self._kill_while_it_starts()
            return
        self._server.wait_until_ready()
        for trial in self._life.trials:
            self._trial = trial
            before = self._server.processes()
            assert self._server.shared_files() == []
            self._ask()
            victims = [self._kill(before)]
            if self._life.restarts:
                if self._trial.moment == "twice":
                    time.sleep(self._trial.delay * 2)
                    victims += [self._kill(self._server.processes())]
                self._expect_that_it_comes_back(before, victims)
            elif self._has_another_engine(before, victims[0]):
                self._expect_that_the_other_goes_on()
            else:
                self._expect_the_end(victims[0].name)

    def _kill_while_it_starts(self) -> None:
        """Or soon after, which one of two engines survives."""
        wait_for(lambda: bool(self._server.processes()), 5, "no process")
        time.sleep(self._trial.delay * 3)
        named = [one for one in self._server.processes() if self._trial.kind in one.name]
        victim = self._kill(named or self._server.processes())
        process = self._server.process
        if self._life.layout == "dp2" and victim.name != "api":
            wait_for(
                lambda: process.poll() is not None or self._server.is_ready, START_SECONDS, "no end"
            )
            if process.poll() is None:
                self._expect_that_the_other_goes_on()
                process.kill()
                self._replies = []
        self._expect_the_end("start")

    def _ask(self) -> None:
        """What the server is to be busy with."""
        name = {"prefill": "long", "idle": ""}.get(self._trial.moment, "short")
        asked = self._questions.get(name, [])
        asked = self._rng.sample(asked, min(3, len(asked)))
        self._streams = [Reply(self._server, one, streams=True) for one in asked[:2]]
        self._replies = [Reply(self._server, one, streams=False) for one in asked[1:]]
        if self._trial.moment != "prefill":
            for one in self._streams:
                assert one.begun.wait(30), "no stream"
        time.sleep(self._trial.delay * 0.2)

    def _kill(self, processes: Sequence[Process]) -> Process:
        kind = self._trial.kind
        victims = [one for one in processes if kind in one.name]
        if not victims:  # it is on its way back
            victims = [one for one in processes if one.name != "api"] or list(processes)
            victims = victims if kind != "api" else list(processes)
        victim = self._rng.choice(victims)
        if self._life.restarts:
            assert victim.name != "api"
        os.kill(victim.pid, signal.SIGKILL)
        return victim

    def _has_another_engine(self, before: Sequence[Process], victim: Process) -> bool:
        engines = [one for one in before if one.name == "octavo-engine"]
        return victim in engines and len(engines) > 1

    def _expect_that_it_comes_back(
        self, before: Sequence[Process], victims: Sequence[Process]
    ) -> None:
        """Only what an engine had begun to stream may end; that two deaths met, too."""
        loses_streams = len(victims) > 1 or victims[0].name == "octavo-engine"
        asked = self._questions["short"][0]
        self._replies.append(Reply(self._server, asked, streams=False))
        self._check(whole_may_fail=len(victims) > 1, streams_may_fail=loses_streams)
        wait_for(lambda: self._server.health() == 200, START_SECONDS, "no health")

        def names(processes: Sequence[Process]) -> list[str]:
            return sorted(one.name for one in processes)

        wait_for(
            lambda: names(self._server.processes()) == names(before),
            START_SECONDS,
            "other processes than before",
        )
        wait_for(lambda: not self._server.zombies(), 10, "zombies are left")
        self._replies = [Reply(self._server, asked, streams=False)]
        self._streams = []
        self._check()

    def _expect_that_the_other_goes_on(self) -> None:
        self._replies.append(Reply(self._server, self._questions["short"][0], streams=False))
        self._check(streams_may_fail=True)
        assert self._server.health() == 200
        wait_for(lambda: not self._server.zombies(), 10, "zombies are left")

    def _expect_the_end(self, victim: str) -> None:
        if victim not in ("api", "start"):
            wait_for(lambda: self._server.health() != 200, 10, "it still says that it is well")
        code = self._server.process.wait(START_SECONDS if victim == "start" else END_SECONDS)
        assert code == -signal.SIGKILL if victim == "api" else code not in (0, None)
        wait_for(lambda: not self._server.processes(), 10, "processes are left")
        self._check(whole_may_fail=True, streams_may_fail=True, may_be_cut=victim == "api")
        if "worker" in victim:
            number = victim.rpartition("-")[2]
            errors = [one.error for one in (*self._streams, *self._replies) if one.error]
            for error in errors:
                assert f"worker {number} " in error
                assert "was killed (signal 9)" in error

    def _check(
        self,
        *,
        whole_may_fail: bool = False,
        streams_may_fail: bool = False,
        may_be_cut: bool = False,
    ) -> None:
        for one in (*self._streams, *self._replies):
            one.join(START_SECONDS)
        problems = [
            one.problem(may_fail=may_fail, may_be_cut=may_be_cut)
            for group, may_fail in (
                (self._streams, streams_may_fail),
                (self._replies, whole_may_fail),
            )
            for one in group
        ]
        found = [one for one in problems if one is not None]
        assert not found, found

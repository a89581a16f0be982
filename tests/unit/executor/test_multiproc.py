"""Workers as an executor: steps, and what happens when they are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.executor.base import PendingStep
from octavo.executor.messages import Place, places
from octavo.executor.multiproc import MultiprocExecutor
from octavo.executor.workers import Workers
from support.checkpoints import make_checkpoint
from support.fake_workers import SIZES, FakeWorker, Script, launching, setups, step
from support.serve_command import descendants, is_alive, wait_until

TWO, THREE = places(2, 1), places(1, 3)


class FakeLauncher:
    """Starts fake workers; the n-th time by the n-th scripts, and then faithful ones."""

    def __init__(
        self, at: Sequence[Place], *scripts: dict[int, Script] | ConfigError | EngineDeadError
    ) -> None:
        self.started: list[FakeWorker] = []
        self.closed_with: list[str | None] = []
        self.num_starts = 0
        self._at = at
        self._scripts = list(scripts)

    def start(self) -> Workers:
        self.num_starts += 1
        scripts = self._scripts.pop(0) if self._scripts else {}
        if isinstance(scripts, Exception):
            raise scripts
        launch = launching(scripts, started=self.started.append)  # type: ignore[arg-type]
        return Workers(launch, setups(*self._at), timeout_s=20.0)

    def executor(self) -> MultiprocExecutor:
        num_stages = self._at[-1].num_stages
        return MultiprocExecutor(self.start, self, num_stages)  # type: ignore[arg-type]

    def kill(self, rank: int) -> None:
        """One of those that were started last."""
        os.kill(self.started[-len(self._at) :][rank].pid, signal.SIGKILL)

    def close(self, error: str | None = None) -> None:
        self.closed_with.append(error)


def connections() -> set[str]:
    """All open files that have no path."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {one for one in found if not one.startswith("/")}


@pytest.fixture(autouse=True)
def _no_connections_are_left() -> Iterator[None]:
    before = connections()
    yield
    assert connections() - before == set()


def test_stages_hear_of_outcomes_once_and_in_order() -> None:
    launcher = FakeLauncher(THREE)
    with closing(launcher.executor()) as executor:
        assert executor.load(SIZES) == (executor, ((1, 0.5),))
        assert (executor.max_steps_in_flight, executor.num_blocks) == (3, SIZES.num_blocks)
        pending = [executor.submit(step(number)) for number in range(3)]
        told = []
        for number in range(3, 8):
            output = pending.pop(0).result()
            told.append((output.step_id, output.seconds))
            pending.append(executor.submit(step(number)))
        told += [(output.step_id, output.seconds) for output in (p.result() for p in pending)]
        # Each step but the first ones tells of the one whose output came before it.
        assert told == [(0, 0.0), (1, 0.0), (2, 0.0), *((number, 1.0) for number in range(3, 8))]
        executor.check()
    assert launcher.closed_with == [None]
    assert not any(is_alive(worker.pid) for worker in launcher.started)


def test_tensor_ranks_are_told_of_no_outcomes() -> None:
    with closing(FakeLauncher(TWO).executor()) as executor:
        executor.load(SIZES)
        assert [executor.submit(step(n)).result().seconds for n in range(3)] == [0.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_it_comes_back_as_often_as_it_is_asked(rank: int) -> None:
    """And has no more files open then, and no children."""
    launcher = FakeLauncher(TWO)
    with closing(launcher.executor()) as executor:
        executor.load(SIZES)
        counts = set()
        for _ in range(3):
            pending = [executor.submit(step(0)), executor.submit(step(1))]
            pending[0].result()
            launcher.kill(rank)
            with pytest.raises(EngineDeadError, match=f"worker {rank} .* was killed"):
                run_on(executor, pending[-1])
            with pytest.raises(EngineDeadError, match=f"worker {rank} .* was killed"):
                executor.submit(step(1000)).result()
            with pytest.raises(EngineDeadError, match=f"worker {rank} .* was killed"):
                executor.check()
            executor.restart()
            executor.check()
            assert executor.submit(step(7)).result().step_id == 7, "nothing is left of the others"
            counts.add(len(os.listdir("/proc/self/fd")))
            assert len(descendants(os.getpid())) == 2
        assert len(counts) == 1
    assert launcher.num_starts == 4


def run_on(executor: MultiprocExecutor, pending: PendingStep) -> None:
    """One step after another, until there is an error."""
    for number in range(2, 1000):
        pending.result()
        pending = executor.submit(step(number))


def test_outcomes_of_lost_workers_are_not_told_to_new_ones() -> None:
    launcher = FakeLauncher(THREE)
    with closing(launcher.executor()) as executor:
        executor.load(SIZES)
        executor.submit(step(0)).result()
        launcher.kill(1)
        wait_until(lambda: is_lost(executor), 20)
        executor.restart()
        assert executor.submit(step(1)).result().seconds == 0.0


def is_lost(executor: MultiprocExecutor) -> bool:
    try:
        executor.check()
    except EngineDeadError:
        return True
    return False


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (ConfigError("machine 1 has not joined; start it"), "machine 1 has not joined; start it"),
        (EngineDeadError("worker 0 is gone"), "worker 0 is gone"),
        ({1: Script("plan", "die")}, "worker 1 .* was killed"),
        ({0: Script("load", "say words")}, "worker 0 .* has run out of memory"),
        ({1: Script("load", "refuse")}, "it does not fit; use less"),
    ],
)
def test_what_is_lost_while_it_comes_back_may_come_back_later(
    again: dict[int, Script] | ConfigError | EngineDeadError, why: str
) -> None:
    launcher = FakeLauncher(TWO, {}, again)
    with closing(launcher.executor()) as executor:
        executor.load(SIZES)
        launcher.kill(0)
        wait_until(lambda: is_lost(executor), 20)
        with pytest.raises(EngineDeadError, match=f"could not be started again: {why}"):
            executor.restart()
        assert descendants(os.getpid()) == []
        with pytest.raises(EngineDeadError):
            executor.check()
        with pytest.raises(EngineDeadError):
            executor.submit(step(1)).result()
        executor.restart()
        assert executor.submit(step(2)).result().step_id == 2


@pytest.mark.parametrize(
    ("scripts", "kind"),
    [
        ({0: Script("plan", "refuse")}, ConfigError),
        ({1: Script("offer", "exit")}, EngineDeadError),
        (ConfigError("there is no room"), ConfigError),
    ],
)
def test_what_cannot_be_started_leaves_nothing(
    scripts: dict[int, Script] | ConfigError, kind: type[Exception]
) -> None:
    launcher = FakeLauncher(TWO, scripts)
    with pytest.raises(kind) as caught:
        launcher.executor()
    assert launcher.closed_with == [str(caught.value)]
    assert descendants(os.getpid()) == []


def test_it_tells_its_launcher_why_it_ends() -> None:
    launcher = FakeLauncher(TWO)
    with closing(launcher.executor()) as executor:
        executor.load(SIZES)
        launcher.kill(1)
        wait_until(lambda: is_lost(executor), 20)
    [why] = launcher.closed_with
    assert why is not None
    assert why.startswith("worker 1 (tensor rank 1) was killed (signal 9)")


def test_workers_that_were_not_ready_cannot_come_back() -> None:
    executor = FakeLauncher(TWO).executor()
    with closing(executor), pytest.raises(EngineDeadError, match="before they were ready"):
        executor.restart()


# --- real workers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "tiny")


def workers_of_this_process() -> list[int]:
    return [
        pid
        for pid in descendants(os.getpid())
        if b"octavo-worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_model_comes_back_with_the_same_tokens(tiny: Path, layout: dict[str, int]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 10, 11, 12]]

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, sampling)
        return [list(output.outputs[0].token_ids) for output in outputs]

    alone = LLM(str(tiny), dtype="float32")
    expected = tokens(alone)
    alone.shutdown()
    llm = LLM(str(tiny), dtype="float32", restart_workers=True, **layout)  # type: ignore[arg-type]
    try:
        assert tokens(llm) == expected
        for rank in (0, 1):
            pids = workers_of_this_process()
            os.kill(pids[rank], signal.SIGKILL)
            assert tokens(llm) == expected
            assert not set(pids) & set(workers_of_this_process())
        shared = [maps(pid) for pid in workers_of_this_process()]
        assert not any("/dev/shm/" in one for one in shared), "what has a name could be left behind"
    finally:
        llm.shutdown()
    assert workers_of_this_process() == []


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_model_that_is_refused_leaves_no_workers(tiny: Path) -> None:
    """After they have been started: none of them has read any weights."""
    with pytest.raises(ConfigError, match="KV cache"):
        LLM(str(tiny), dtype="float32", tensor_parallel_size=2, kv_cache_memory_bytes=100)
    assert descendants(os.getpid()) == []

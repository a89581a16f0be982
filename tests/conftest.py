"""What all tests share: the default model, few threads, nothing left over between tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Whatever else the machine does, an example may take its time.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")

# Read by torch's libraries when they are loaded. Tests are small: more threads only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the torch backend sets it
# numpy's wait for each other in loops: with two, formulas took ten times the processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if TYPE_CHECKING:
    from octavo.weights import Checkpoint


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The default model, fetched on first use and kept in OCTAVO_CACHE_ROOT."""
    from octavo.weights import open_checkpoint

    return open_checkpoint("default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers (`pytest -n 2`), a test marked `alone` runs while no other does."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with contextlib.ExitStack() as room:
        # Who waits for its turn holds the door: the others can't go on taking turns before it.
        with _locked(Path(__file__).parent, fcntl.LOCK_EX):
            room.enter_context(_locked(Path(__file__), kind))
        return (yield)


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """On what is there anyway: nothing is left behind."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting in the developer's environment must not change what a test sees."""
    for variable in os.environ:
        if variable.startswith("OCTAVO_") and variable != "OCTAVO_CACHE_ROOT":
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test ends the threads and processes that it starts; wider fixtures may keep theirs."""
    before = {*threading.enumerate(), *_children()}
    yield
    # concurrent.futures keeps idle workers until the interpreter ends; they hold nothing.
    threads = [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and not thread.name.startswith("ThreadPoolExecutor")
    ]
    left = [one for one in (*threads, *_children()) if one not in before]
    assert not left, f"left running: {left}"


def _children() -> list[int]:
    """Process ids, also of children that have ended and were not waited for."""
    try:  # a hundred times as quick as the files, which most tests have nothing in
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    found = []
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that ended
            found += [int(pid) for pid in file.read_text().split()]
    return found

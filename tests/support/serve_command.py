"""`octavo serve` as a process of its own, as users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

COMMAND = [sys.executable, "-m", "octavo.cli.main", "serve"]
_URL = re.compile(r"http://[\d.]+:\d+")


class ServeProcess:
    """A running server. url: without a path. log: what it printed so far, as a file.

    verify=False: there are no certificates, and reading the list of authorities takes 20 ms.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def completion(self, **fields: object) -> httpx.Response:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, verify=False)

    def metric(self, name: str) -> float:
        """The sum over labels of a sample in /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, verify=False).text
        found = re.findall(rf"^octavo:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def children(self) -> list[int]:
        """Process ids of all descendants."""
        return descendants(self.process.pid)


def descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@contextmanager
def serving(
    log: Path,
    *arguments: str,
    command: Sequence[str] = COMMAND,
    environ: Mapping[str, str] = os.environ,
    seconds: float = 60,
) -> Iterator[ServeProcess]:
    """Start and wait until it serves, so many seconds at most; killed at the end if the test has
    not ended it.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *arguments, "--port", "0"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**environ, "OMP_NUM_THREADS": "1"},
        )
    children: list[int] = []
    try:
        deadline = time.monotonic() + seconds
        while not (found := _URL.search(log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {log.read_text()}")
            time.sleep(0.05)
        children = descendants(process.pid)
        yield ServeProcess(process, found.group(), log)
    finally:
        process.kill()
        process.wait(10)
        for pid in children:
            if is_alive(pid):
                os.kill(pid, 9)


def refusal(*arguments: str, timeout: float = 60) -> tuple[int, str]:
    """Exit code and stderr of a server that can't start; on a free port unless one is given."""
    port = [] if "--port" in arguments else ["--port", "0"]
    done = subprocess.run(
        [*COMMAND, *arguments, *port], capture_output=True, text=True, check=False, timeout=timeout
    )
    return done.returncode, done.stderr

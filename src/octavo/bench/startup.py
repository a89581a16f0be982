"""From the start of `octavo serve` to its first token, as users run it: a process of its own.

A warm start finds what an earlier one kept: packed weights, the kernels' measured speed, and the
model's files in memory. A cold one finds none of it, as the first after the model was fetched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from octavo import assembly, machine
from octavo.bench.progress import progress_bar
from octavo.config import Config, knobs
from octavo.core.errors import OctavoError

if TYPE_CHECKING:
    import httpx

_CACHE_ROOT = "OCTAVO_CACHE_ROOT"
_URL = re.compile(r"http://[\w.:\[\]-]+:\d+")
_TIMEOUT_S = 600.0
_TERM_S = 30.0
_LINES_OF_LOG = 8
_PROMPT = "Say something about rivers and mountains"


@dataclass(frozen=True)
class Start:
    """Seconds since the process was started: to the line that says where it listens, and to the
    first token of a request that is sent then.
    """

    ready_s: float
    first_token_s: float


@dataclass(frozen=True)
class StartupReport:
    """model: as it was given. command: what was started. was_evicted: the model's files were
    dropped from memory before each cold start; not possible outside Linux.
    """

    model: str
    command: str
    cold: list[Start]
    warm: list[Start]
    was_evicted: bool


def measure_startup(
    config: Config, *, num_iters_cold: int, num_iters_warmup: int, num_iters_warm: int
) -> StartupReport:
    """Start the server again and again, one at a time. The model is fetched before, if need be.

    Raises ConfigError for a model that there isn't, OctavoError for a server that ends.
    """
    path = assembly.open_model(config.model).path
    command = serve_command(config)
    evicted = False
    cold, warm = [], []
    total = num_iters_cold + num_iters_warmup + num_iters_warm
    with progress_bar("Starts", total) as advance:
        for _ in range(num_iters_cold):
            with _empty_cache() as root:
                evicted = evict(path)
                cold.append(_start(command, config, {_CACHE_ROOT: str(root)}))
            advance()
        for number in range(num_iters_warmup + num_iters_warm):
            found = _start(command, config, {})
            if number >= num_iters_warmup:
                warm.append(found)
            advance()
    return StartupReport(
        model=config.model.model,
        command=f"octavo {' '.join(command[3:])}",
        cold=cold,
        warm=warm,
        was_evicted=evicted and num_iters_cold > 0,
    )


def serve_command(config: Config) -> list[str]:
    """`octavo serve` with every setting that isn't the default as a flag, on a free port. Secrets
    are not among them: other users can see a process's flags.
    """
    command = [sys.executable, "-m", "octavo", "serve"]
    values = config.to_flat() | {"port": 0}
    for knob in knobs():
        value = values[knob.name]
        if value == knob.default or knob.secret:
            continue
        if knob.kind is bool:
            command.append(knob.flag if value else knob.flag.replace("--", "--no-", 1))
        elif knob.kind is list:
            command += [knob.flag, ",".join(map(str, value))]
        else:
            command += [knob.flag, json.dumps(value) if knob.kind is dict else str(value)]
    return command


def evict(path: Path) -> bool:
    """Ask the system to forget the contents of a file, or of all files in a folder; what another
    process has mapped stays. False where there is no way to ask.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True


@contextmanager
def _empty_cache() -> Iterator[Path]:
    """A folder that keeps nothing yet but the fetched models."""
    with tempfile.TemporaryDirectory(prefix="octavo-cold-") as folder:
        root = Path(folder)
        models = machine.cache_root() / "models"
        if models.is_dir():
            (root / "models").symlink_to(models.resolve(), target_is_directory=True)
        yield root


def _start(command: list[str], config: Config, variables: Mapping[str, str]) -> Start:
    import httpx

    # Made before: a client of httpx sets TLS up, which takes 20 ms of a core that the server needs.
    with (
        httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http,
        tempfile.TemporaryFile("w+") as log,
    ):
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**_environment(config), **variables},
            text=True,
        )
        watchdog = threading.Timer(_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            url = _url_of(process, log)
            ready_s = time.perf_counter() - begin
            return Start(ready_s, _first_token(http, url, config) - begin)
        finally:
            watchdog.cancel()
            watchdog.join()
            _end(process)


def _environment(config: Config) -> dict[str, str]:
    """This process's, with no settings but the secrets: the others are flags."""
    values = config.to_flat()
    secrets = {
        knob.env: ",".join(value) if isinstance(value, list) else str(value)
        for knob in knobs()
        if knob.secret and (value := values[knob.name])
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OCTAVO_") or name == _CACHE_ROOT
    }
    return kept | secrets


def _url_of(process: subprocess.Popen[str], log: IO[str]) -> str:
    """What it prints when it listens."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := _URL.search(line):
            return found.group()
    status = process.wait()
    log.seek(0)
    lines = log.read().strip().splitlines()[-_LINES_OF_LOG:]
    printed = "".join(f"\n  | {line}" for line in lines) or " and printed nothing"
    raise OctavoError(f"the server ended with exit status {status} before it listened{printed}")


def _first_token(http: httpx.Client, url: str, config: Config) -> float:
    """When it came."""
    body: dict[str, Any] = {
        "prompt": _PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    keys = config.server.api_key
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        for line in response.iter_lines():
            if response.is_error:
                raise OctavoError(f"the server refused a request ({response.status_code}): {line}")
            if line.startswith("data: {"):
                return time.perf_counter()
    raise OctavoError("the server ended its answer without a token")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_S)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

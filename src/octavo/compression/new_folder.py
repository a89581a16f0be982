"""A folder that is complete, or isn't there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.core.signals import exiting_on_sigterm


def check_is_free(path: Path) -> None:
    """Raises ConfigError if there is something at `path`, other than an empty folder."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ConfigError(f"--out {path} is there already; name a folder that is new or empty")


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """For a block that fills the folder `path`, which is new or empty: if it fails, or Ctrl-C or
    SIGTERM ends it, the folder is again as it was.

    Raises ConfigError if `path` is not free, or can't be written: no space, no permission.
    """
    check_is_free(path)
    was_there = path.exists()  # perhaps where a volume is mounted, which must stay
    is_done = False
    try:
        path.mkdir(parents=True, exist_ok=True)
        with exiting_on_sigterm():
            yield
        is_done = True
    except OSError as error:
        raise ConfigError(
            f"--out {path} can't be written ({error.strerror or error}); make room or name another "
            "folder"
        ) from error
    finally:
        if not is_done:
            _empty(path)
            if not was_there and path.is_dir():
                path.rmdir()


def _empty(folder: Path) -> None:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()

"""Files as memory: pages come in when they are touched, and are shared between processes."""

from __future__ import annotations

import mmap
from pathlib import Path

from octavo.core.errors import ConfigError


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole file, copy on write: arrays over it are writable without reaching the file.

    Writable because torch warns about arrays that aren't. Raises ConfigError for an empty or
    unreadable file.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # mmap's word for an empty file
        raise ConfigError(f"{path} is empty; download it again") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error

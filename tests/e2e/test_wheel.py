"""The wheel that `make wheel` builds, in an environment without torch, without any compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.serve_command import serving

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]  # it may compile everything

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of that environment."""
    folder = tmp_path_factory.mktemp("wheel")
    run(["make", "wheel", f"DIST={folder}"])
    (wheel,) = folder.glob("octavo-*.whl")
    environment = folder / "environment"
    run([sys.executable, "-m", "venv", str(environment)])
    python = environment / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", str(wheel)])
    return environment / "bin"


def run(command: list[str]) -> str:
    """Outside of the `make` that may run the tests."""
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def only(binaries: Path, home: Path) -> dict[str, str]:
    """An environment in which nothing but those programs is found."""
    return {"PATH": str(binaries), "HOME": str(home)}


def run_python(binaries: Path, home: Path, code: str) -> str:
    return subprocess.run(
        [str(binaries / "python"), "-c", code],
        cwd=home,
        env=only(binaries, home),
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_it_installs_less_than_150_mb_and_no_torch(binaries: Path, tmp_path: Path) -> None:
    """Without the bytecode that pip writes unless told not to."""
    code = """
import importlib.metadata, json
sizes = {}
for package in importlib.metadata.distributions():
    files = [package.locate_file(file) for file in package.files]
    sizes[package.name] = sum(file.stat().st_size for file in files if file.is_file())
print(json.dumps(sizes))
"""
    sizes = json.loads(run_python(binaries, tmp_path, code))
    assert "octavo" in sizes
    assert "torch" not in sizes
    assert sum(sizes.values()) - sizes["pip"] - sizes.get("setuptools", 0) < 150e6


def test_it_generates_over_http(binaries: Path, folder: Path, tmp_path: Path) -> None:
    command = [str(binaries / "octavo"), "serve"]
    environ = only(binaries, tmp_path)
    with serving(tmp_path / "log", str(folder), command=command, environ=environ) as server:
        reply = server.completion(max_tokens=4, ignore_eos=True)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_its_kernels_are_listed(binaries: Path, tmp_path: Path) -> None:
    listed = subprocess.run(
        [str(binaries / "octavo"), "kernels"],
        cwd=tmp_path,
        env=only(binaries, tmp_path),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "native" in listed

"""What the README and the examples tell users to run, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- run -->\n```(bash|python)\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """Where `octavo serve` says that it serves the default model."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/v1", process.stdout.readline())
        assert found, "the server did not start"
        yield found[0]
        process.terminate()
        assert process.wait(30) == 0


def run(command: list[str], server_url: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "OPENAI_BASE_URL": server_url}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_blocks_to_run() -> None:
    assert [language for language, _ in BLOCKS].count("bash") >= 3
    assert "python" in dict(BLOCKS)


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_a_block_of_the_readme_runs(language: str, code: str, server_url: str) -> None:
    code = code.replace("http://127.0.0.1:8000/v1", server_url)
    shell = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-c"]
    output = run([*shell, code], server_url)
    assert output.strip()
    assert '"error"' not in output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, server_url: str) -> None:
    assert run([sys.executable, str(example)], server_url).strip()

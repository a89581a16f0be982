"""Documents that must keep up with the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_every_direct_dependency_has_a_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)
    required = [*PROJECT["dependencies"], *(spec for extra in EXTRAS.values() for spec in extra)]
    names = (re.split(r"[\[<>=]", spec)[0] for spec in required)
    assert sorted(listed) == sorted(name for name in names if name != "octavo")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_traced_functions_exist() -> None:
    trace = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", trace)
    assert len(steps) > 10
    for file, name in steps:
        tree = ast.parse((ROOT / "src" / "octavo" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            tree = _definition(tree, part, f"{file}:{name}")


def _definition(tree: ast.AST, name: str, where: str) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and node.name == name:
            return node
    pytest.fail(f"ARCHITECTURE.md: there is no {where}")


def test_ci_runs_the_readmes_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "```bash\nmake test\n```" in readme
    assert "run make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_make_names_the_package_that_debian_leaves_out(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ]\n')  # new enough, but makes no environment
    python.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), f"PYTHON={python}", ".venv/.created"]
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr

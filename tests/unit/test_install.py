"""What an installation needs and how it says so; what was compiled."""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = Path(sys.prefix) / "native"
"""Where `make` compiles; an environment made in another way has no such folder."""


def test_an_installation_is_small() -> None:
    names = {re.split(r"[<>=;]", spec)[0] for spec in PROJECT["dependencies"]}
    assert len(names) <= 15
    assert "torch" not in names


@pytest.mark.parametrize(
    ("compiler", "package"), [(False, "apt install g++"), (True, "python3-dev")]
)
def test_make_names_what_is_missing_to_compile(
    compiler: bool, package: str, tmp_path: Path
) -> None:
    """A PATH with or without a compiler, and a Python that finds no headers."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", *(["c++"] if compiler else [])):
        (binaries / name).write_text("#!/bin/sh\nexit 1\n")
        (binaries / name).chmod(0o755)
    for file in (tmp_path / "pyproject.toml", tmp_path / ".venv" / ".created"):
        file.touch()
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "-f", str(ROOT / "Makefile"), ".venv/.build-tools"],
        cwd=tmp_path,
        env={"PATH": str(binaries)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert package in done.stderr


def test_the_torch_backend_says_how_to_get_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from octavo.core.errors import ConfigError
from octavo.ops.backend import load_backend
try:
    load_backend("torch")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'octavo[torch]'" in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads /proc/cpuinfo"
)
def test_instruction_sets_are_those_that_the_system_reports() -> None:
    from octavo.ops.native import _native

    found = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    avx2 = {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2"}
    avx512 = avx2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
    bf16 = avx512 | {"avx512_bf16"}
    needs = {"portable": set(), "avx2": avx2, "avx512": avx512, "avx512_bf16": bf16}
    problems = {name: problem for name, problem, _ in _native.isas()}
    assert "portable" in problems
    for name, problem in problems.items():
        missing = needs[name] - flags
        assert bool(problem) == bool(missing), name
        assert not missing or any(flag in problem for flag in missing)


def test_a_kernel_set_that_is_not_there_is_refused_by_name() -> None:
    from octavo.ops.native import _native

    with pytest.raises(ValueError, match=r"sse9.*there are portable"):
        _native.Kernels({"add": "sse9"})


def test_the_stub_of_the_module_is_complete() -> None:
    """Names and numbers of parameters, against what nanobind says; its types are broader."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    from octavo.ops.native import _native

    generated = stubgen.StubGen(_native)
    generated.put(_native)
    written = Path(_native.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    assert _signatures(written) == _signatures(generated.get())


def _signatures(stub: str) -> dict[str, tuple[str, ...] | int]:
    """Parameters by function: their names, or their number where names can't be used."""
    found: dict[str, tuple[str, ...] | int] = {}
    tree = ast.parse(stub)
    classes = [(node.name + ".", node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, scope in [("", tree), *classes]:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef):
                args = node.args
                names = tuple(arg.arg for arg in args.args)
                found[prefix + node.name] = len(args.posonlyargs) or names
    return found


@pytest.mark.skipif(not BUILD.is_dir(), reason="compiled elsewhere")
def test_code_for_newer_processors_is_linked_last() -> None:
    """The linker keeps the first of several definitions of an inline function, and whoever calls
    one out of line defines it: so code only ever calls what older processors run, too.
    """
    from octavo.ops.native import _native

    ninja = (BUILD / "build.ninja").read_text(encoding="utf-8")
    link = re.search(r"^build _native\S*: .*\n(?:  .*\n)*?  LINK_LIBRARIES = (.*)$", ninja, re.M)
    assert link is not None
    assert re.findall(r"libkernels_(\w+)\.a", link[1]) == [name for name, *_ in _native.isas()]

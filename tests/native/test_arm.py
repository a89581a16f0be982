"""The kernels for Arm on emulated processors: they have the bits of AVX2's, which all other tests
are about. Debian and Ubuntu have what this needs in g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from octavo.ops.native.ops import ISAS

ROOT = Path(__file__).parents[2]
BUILDS = Path(sys.prefix)
"""Where `make` compiles, in a folder `native`; an environment made in another way has none."""

COMPILERS = ("aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{n}" for n in range(15, 10, -1)))

SETS = {"cortex-a57": ["portable"], "neoverse-n1": ["portable", "dotprod"]}
"""By processor, of Armv8.0 and of Armv8.2 with dot products: what it runs."""


def build(folder: Path, *settings: str) -> Path:
    """Compile what changed. Two tests, or a test and a make, take turns in a folder."""
    environ = {**os.environ, "PATH": f"{BUILDS / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    commands = [["cmake", "--build", str(folder), "--target", "kernel_results"]]
    if settings:
        commands.insert(0, ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *settings])
    with (BUILDS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in commands:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "kernel_results"


@cache
def arm_program() -> Path:
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        pytest.skip("no cross compiler: aarch64-linux-gnu-g++")
    return build(
        BUILDS / "native-aarch64",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DOCTAVO_MODULE=OFF",
    )


def results_of(*command: str | Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Digests by set and result; of sets that can't run the reason."""
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    digests: dict[str, dict[str, str]] = {}
    problems: dict[str, str] = {}
    for line in run.stdout.splitlines():
        if found := re.fullmatch(r"(\w+) can't run: (.*)", line):
            problems[found[1]] = found[2]
        else:
            name, result, digest = line.split()
            digests.setdefault(name, {})[result] = digest
    return digests, problems


@cache
def emulated(processor: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("no emulator: qemu-aarch64")
    return results_of(emulator, "-cpu", processor, arm_program())


@cache
def expected() -> dict[str, dict[str, str]]:
    if "avx2" not in ISAS or ISAS["avx2"]:
        pytest.skip("nothing to compare with: this processor has no AVX2")
    if not (BUILDS / "native").is_dir():
        pytest.skip("compiled elsewhere")
    return results_of(build(BUILDS / "native"))[0]


@pytest.mark.parametrize("processor", SETS)
def test_a_processor_runs_what_it_can(processor: str) -> None:
    digests, problems = emulated(processor)
    assert [name for name in digests if name != "packing"] == SETS[processor]
    assert problems.keys() == {"portable", "dotprod"} - set(SETS[processor])
    assert all("asimddp" in problem for problem in problems.values())


@pytest.mark.parametrize(
    ("processor", "name"), [(cpu, name) for cpu, names in SETS.items() for name in names]
)
def test_kernels_have_the_bits_of_avx2(processor: str, name: str) -> None:
    wanted = expected()["avx2"]
    found = emulated(processor)[0][name]
    assert found.keys() == wanted.keys()
    assert [result for result in found if found[result] != wanted[result]] == []


def test_packing_has_the_same_bits() -> None:
    assert emulated("neoverse-n1")[0]["packing"] == expected()["packing"]

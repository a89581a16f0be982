"""What may import what, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.processor_time import seconds_of

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


def test_the_import_contract_holds() -> None:
    """The contract is [tool.importlinter] in pyproject.toml."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_octavo_is_quick_and_light() -> None:
    assert seconds_of("import octavo") < 0.3
    loaded = run_python("import octavo, sys; print(*sys.modules)").split()
    assert {"torch", "numpy", "starlette", "tokenizers", "rich"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    "module",
    [
        "octavo.core.step",
        "octavo.engine.client",
        "octavo.kvcache.block_pool",
        "octavo.scheduler.scheduler",
        "octavo.server.app",
        "octavo.text.served_model",
        "octavo.weights",
        "octavo.cli.main",
    ],
)
def test_what_decides_loads_no_tensors(module: str) -> None:
    loaded = run_python(f"import {module}, sys; print(*sys.modules)").split()
    assert {"torch", "transformers"}.isdisjoint(loaded)


def test_the_command_line_loads_no_verb_before_it_is_used() -> None:
    """Each of these would be waited for by `octavo --help` and by every other verb."""
    loaded = run_python("import octavo.cli.main, sys; print(*sys.modules)").split()
    waited_for = ("asyncio", "yaml", "numpy", "pydantic", "octavo.bench", "octavo.advisor")
    assert {*waited_for, "octavo.simulator", "octavo.engine"}.isdisjoint(loaded)


def test_the_api_process_needs_no_numpy() -> None:
    """It would take a fifth of the time to the first token."""
    code = """
import octavo.cli.serve, octavo.server.app, octavo.server.run, octavo.engine.process
import octavo.text.chat_template, octavo.weights.gguf_checkpoint, octavo.weights.default_model
import sys
print(*sys.modules)
"""
    assert {"numpy", "gguf", "octavo.scheduler"}.isdisjoint(run_python(code).split())


def test_the_engines_process_is_started_before_the_http_side_is_loaded() -> None:
    loaded = run_python("import octavo.cli.serve, sys; print(*sys.modules)").split()
    assert {"asyncio", "starlette", "uvicorn", "pydantic", "jinja2"}.isdisjoint(loaded)


def test_nothing_but_the_torch_backend_training_and_transformers_modules_needs_torch() -> None:
    """Every module of Octavo is imported with torch blocked."""
    code = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
import octavo
with_torch = (
    "octavo.models.through_transformers.", "octavo.ops.torch", "octavo.speculative.training."
)
names = [m.name for m in pkgutil.walk_packages(octavo.__path__, "octavo.")
         if not m.name.startswith(with_torch) and not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
    assert int(run_python(code)) > 100


def test_the_offline_api_is_loaded_on_first_use() -> None:
    code = "import octavo, sys; octavo.SamplingParams(); print('octavo.llm' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_the_simulator_loads_no_arrays_and_nothing_that_computes() -> None:
    code = """
import octavo.simulator.real_time, octavo.simulator.replay, octavo.simulator.simulation
import octavo.simulator.trace
import sys
print(*sys.modules)
"""
    loaded = run_python(code).split()
    assert {"numpy", "torch", "pydantic"}.isdisjoint(loaded)
    assert {"octavo.layers", "octavo.models", "octavo.ops", "octavo.runner"}.isdisjoint(loaded)

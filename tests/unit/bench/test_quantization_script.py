"""benchmarks/quantization.py on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from octavo.weights import open_checkpoint
from support.backends import cpu_backend
from support.checkpoints import make_checkpoint
from support.forward import Forward, load_model

FOLDER = Path(__file__).parents[3] / "benchmarks"
TOKENS = np.random.default_rng(0).integers(3, 320, 50).tolist()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantization", FOLDER / "quantization.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quantization"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("quantization")
    return str(make_checkpoint("llama", folder, max_position_embeddings=1024))


def test_the_same_function_with_other_weights(
    script: ModuleType, model: str, tmp_path: Path
) -> None:
    folder = script.write_off_grid(model, tmp_path)
    backend = cpu_backend("native")
    before, after = (
        Forward(load_model(one, backend), backend).prompt(TOKENS) for one in (model, folder)
    )
    np.testing.assert_allclose(after, before, atol=2e-3, rtol=2e-3)
    stored, moved = open_checkpoint(model), open_checkpoint(folder)
    for name in stored.tensors:
        if name.endswith("_proj.weight"):
            assert not np.allclose(stored.read(name), moved.read(name), rtol=1e-3)


def test_tables_and_a_picture(
    script: ModuleType,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(script, "NEW_TOKENS", 8)
    monkeypatch.setattr(script, "CACHES", ("int8", "int8,int4"))
    arguments = ["--model", model, "--off-grid", "--context", "64", "--windows", "2"]
    arguments += ["--long-context", "128", "--long-windows", "1", "--threads", "1"]
    arguments += ["--calibration-tokens", "512", "--iterations", "1"]
    arguments += ["--only", "float32,int4-g64", "--json", str(tmp_path / "figures.json")]
    script.main([*arguments, "--picture", str(tmp_path / "picture.svg")])
    out = capsys.readouterr().out
    assert "| int4-g64, gptq |" in out
    assert "int4-g64: calibration lowers KL by" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    exact, nearest, calibrated = figures["weights"]
    assert [row["name"] for row in figures["weights"]] == [
        "float32",
        "int4-g64, rtn",
        "int4-g64, gptq",
    ]
    assert abs(exact["quality"]["kl"]) < 1e-9
    assert calibrated["quality"]["kl"] > 0
    assert nearest["num_bytes"] < exact["num_bytes"]
    assert all(speed > 0 for row in figures["weights"] for speed in row["decode"].values())
    int8, mixed = figures["caches"]
    assert int8["quality"]["kl"] < mixed["quality"]["kl"]
    assert int8["tokens_per_gib"] < mixed["tokens_per_gib"]
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")

"""Scales of fp8 caches in checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import assembly
from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.models.kv_factors import kv_factors
from support.checkpoints import make_checkpoint


def checkpoint(tensors: dict[str, Any]) -> Any:
    arrays = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    return SimpleNamespace(name="tiny", tensors=arrays, read=lambda name: arrays[name])


def of_layer(index: int, **scales: Any) -> dict[str, Any]:
    return {f"model.layers.{index}.self_attn.{name}": value for name, value in scales.items()}


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ],
)
def test_scales_by_the_names_that_others_give_them(names: tuple[str, str]) -> None:
    keys, values = names
    tensors = {
        **of_layer(1, **{keys: [0.5], values: 2.0}),
        **of_layer(0, **{keys: 0.25, values: [[1.0]]}),
    }
    assert kv_factors(checkpoint(tensors), 2) == [(0.25, 1.0), (0.5, 2.0)]


def test_one_scale_for_both() -> None:
    assert kv_factors(checkpoint(of_layer(0, kv_scale=0.5)), 1) == [(0.5, 0.5)]


def test_other_scales_are_none_of_the_caches() -> None:
    tensors = of_layer(0, **{"q_scale": 1.0, "k_proj.weight_scale": 1.0, "k_proj.input_scale": 1.0})
    assert kv_factors(checkpoint(tensors | {"model.layers.0.mlp.k_scale": 1.0}), 1) is None
    far = (
        f"model.layers.{'9' * 5000}.self_attn.k_scale"  # more digits than Python reads as a number
    )
    assert kv_factors(checkpoint({far: 1.0}), 1) is None


@pytest.mark.parametrize("bad", [0.0, -0.25, np.nan, np.inf, [0.5, 0.5], []])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_qnt_16_a_scale_that_is_no_positive_number_is_refused_with_its_layer(
    bad: Any, name: str
) -> None:
    tensors = {**of_layer(0, k_scale=1.0, v_scale=1.0), **of_layer(1, k_scale=1.0, v_scale=1.0)}
    tensors |= of_layer(1, **{name: bad})
    with pytest.raises(
        ConfigError, match=rf"layers\.1\.self_attn\.{name} is .*one positive number"
    ):
        kv_factors(checkpoint(tensors), 2)


def test_a_layer_without_its_scales_is_named() -> None:
    one = of_layer(0, k_scale=1.0, v_scale=1.0)
    with pytest.raises(ConfigError, match="layer 1 has no k_scale"):
        kv_factors(checkpoint(one), 2)
    with pytest.raises(ConfigError, match="layer 1 has no v_scale"):
        kv_factors(checkpoint(one | of_layer(1, k_scale=1.0)), 2)
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn.*the model has 2 layers"):
        kv_factors(checkpoint(one | of_layer(2, k_scale=1.0)), 2)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose keys and values go far beyond what fp8 holds."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("scaled"))
    weights = load_file(folder / "model.safetensors")
    for index in range(2):
        weights |= {
            name: np.array(value, np.float32)
            for name, value in of_layer(index, k_scale=0.25, v_scale=0.5).items()
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("asked", "used"), [("fp8", True), ("fp8,int8", True), ("int8", False)])
def test_an_fp8_cache_takes_the_checkpoints_scales(scaled: Path, asked: str, used: bool) -> None:
    config = Config.from_flat(
        {"model": str(scaled), "kv_cache_dtype": asked, "kv_cache_memory_bytes": "1M", "threads": 1}
    )
    loop, facts = assembly.build_engine(config, 320)
    loop.close()
    (told,) = [one for one in facts.decisions if one.what == "KV cache dtype"]
    assert told.value == asked
    assert ("the checkpoint's scales" in told.reason) == used
    assert "times the tokens of bfloat16" in told.reason


def test_qnt_16_a_bad_scale_stops_the_start(scaled: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(scaled, tmp_path / "bad"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_scale"] = np.array(np.nan, np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = Config.from_flat({"model": str(folder), "kv_cache_dtype": "fp8", "threads": 1})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_scale is nan"):
        assembly.build_engine(config, 320)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2

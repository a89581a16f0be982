"""The arithmetic of benchmarks/quality.py."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from octavo.ops.backend import load_backend
from octavo.quality.distance import log_softmax
from support.forward import Forward, load_model

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality.py"


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_windows_and_prompts_share_no_token(quality: ModuleType) -> None:
    needed = 2 * quality.WINDOW + quality.NUM_PROMPTS * quality.PROMPT_TOKENS
    sample = quality.Sample.of(range(needed + 5), 2)
    tokens = [*sample.windows.reshape(-1).tolist(), *(t for p in sample.prompts for t in p)]
    assert tokens == list(range(needed))
    assert {len(prompt) for prompt in sample.prompts} == {quality.PROMPT_TOKENS}
    with pytest.raises(SystemExit, match="lower --windows"):
        quality.Sample.of(range(needed - 1), 2)


@pytest.mark.parametrize("vocab_size", [50, 51])
def test_llama_cpp_reads_the_reference(
    quality: ModuleType, tmp_path: Path, vocab_size: int
) -> None:
    """As llama-perplexity does: `_logits_`, sizes, tokens, then rows of 16-bit numbers."""
    rows = quality.WINDOW - 1 - quality.FIRST
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 9, (2, rows, vocab_size)).astype(np.float32)
    windows = rng.integers(0, vocab_size, (2, quality.WINDOW))
    path = tmp_path / "reference"
    quality.save_reference(path, windows, logits)
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    assert struct.unpack("<3i", data[8:20]) == (quality.WINDOW, vocab_size, 2)
    tokens = np.frombuffer(data, np.int32, windows.size, 20)
    np.testing.assert_array_equal(tokens, windows.reshape(-1))
    width = 2 * -(-vocab_size // 2) + 4
    stored = np.frombuffer(data, np.uint16, -1, 20 + tokens.nbytes).reshape(-1, width)
    steps, lowest = np.ascontiguousarray(stored[:, :4]).view(np.float32).T
    found = steps[:, None] * stored[:, 4 : 4 + vocab_size] + lowest[:, None]
    true = log_softmax(logits.reshape(-1, vocab_size))
    floor = np.maximum(true, true.max(1, keepdims=True) - 16)
    np.testing.assert_allclose(found, floor, atol=1.3e-4)  # half a step
    assert (found.max(1) - found.min(1) <= 16.001).all()


def test_the_positions_that_count(quality: ModuleType, tiny: str) -> None:
    window = np.random.default_rng(0).integers(3, 320, quality.WINDOW)
    loaded = quality.load(tiny, quality.Format("float32"), 1)
    backend = load_backend("native", threads=1)
    every = Forward(load_model(tiny, backend), backend).prompt(window.tolist())
    np.testing.assert_array_equal(quality.logits_of(loaded, window), every[quality.FIRST : -1])


def test_a_row_of_the_table(quality: ModuleType, tiny: str) -> None:
    tokens = np.random.default_rng(0).integers(3, 320, 2000).tolist()
    sample = quality.Sample.of(tokens, 1)
    loaded = quality.load(tiny, quality.REFERENCE, 1)
    texts = quality.greedy_texts(tiny, quality.REFERENCE, 1, sample.prompts)
    reference = quality.Reference(quality.logits_of(loaded, sample.windows[0])[None], texts)
    same = quality.measure(tiny, quality.REFERENCE, 1, sample, reference)
    assert (same.divergence, same.worst_divergence) == pytest.approx((0, 0), abs=1e-12)
    assert (same.top1_agreement, same.greedy_tokens) == (100, quality.NEW_TOKENS)
    assert same.bits_per_weight == pytest.approx(32, rel=0.01)
    assert same.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, bytes
    rough = quality.measure(tiny, quality.Format("auto", "int4", "fp8"), 1, sample, reference)
    assert rough.divergence > 1e-4
    assert rough.top1_agreement < 100
    assert rough.kv_bytes_per_token == same.kv_bytes_per_token / 4

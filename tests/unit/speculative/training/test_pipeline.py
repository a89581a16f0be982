"""A whole training of a tiny random model."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.speculative.training import trainer
from octavo.speculative.training.eagle import EagleHead
from octavo.speculative.training.pipeline import Request, Result, train
from octavo.speculative.training.responses import Answer, Question
from octavo.weights import Checkpoint, open_checkpoint
from octavo.weights.safetensors_file import SafetensorsFile
from support.checkpoints import VOCAB_SIZE, make_checkpoint

HIDDEN = 64
WORDS = [10, 20, 30, 40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint("llama", tmp_path_factory.mktemp("tiny"))))


@contextlib.contextmanager
def answering() -> Iterator[Answer]:
    """Answers of few words, so that they can be foreseen."""

    def answer(questions: Sequence[Question]) -> list[tuple[list[int], list[int]]]:
        rng = random.Random(0)
        starts = [rng.randrange(8) for _ in questions]
        return [([1, 5, 2], [WORDS[(s + n) % 8] for n in range(20)]) for s in starts]

    yield answer


class Losses:
    """A Progress that keeps what training says."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[float] = []
        self._stop_after = stop_after

    def part(self, title: str, total: float) -> Callable[[float, str], None]:
        def show(done: float, remark: str) -> None:
            if title == "Training":
                self.losses.append(float(remark.split("loss ")[1].split(",")[0]))
                if len(self.losses) == self._stop_after:
                    raise KeyboardInterrupt

        return show


def request(folder: Path, **changes: Any) -> Request:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {n}" for n in range(20)))
    settings: dict[str, Any] = {
        "method": "eagle",
        "vocab_size": VOCAB_SIZE,
        "out": folder / "out",
        "prompts": prompts,
        "epochs": 6,
        "draft_vocab_size": 100,
        "inner_size": 32,
        "num_heads": 3,
        "batch_tokens": 128,
    }
    return Request(**(settings | changes))


def run(asked: Request, checkpoint: Checkpoint, progress: Losses) -> Result:
    config = Config.from_flat({"model": str(checkpoint.path), "threads": 1})
    return train(asked, checkpoint, config, answering, progress)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_training_makes_a_head_of_the_published_layout(
    method: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few examples are fitted by least squares already, which leaves nothing to learn.
    monkeypatch.setattr(EagleHead, "fit", lambda self, *rows: None)
    progress = Losses()
    result = run(request(tmp_path, method=method), checkpoint, progress)
    assert sum(progress.losses[-5:]) < 0.97 * sum(progress.losses[:5])
    assert result.vocabulary_coverage == 1.0
    assert max(result.acceptance.rates) <= 1.0
    assert result.acceptance.drafted[0] == 2 * 19  # two held-out answers
    file = SafetensorsFile(result.folder / "model.safetensors")
    shapes = {name: (spec.shape, spec.dtype) for name, spec in file.tensors.items()}
    assert shapes.pop("d2t") == ((100,), "int64")
    token_ids = file.read("d2t") + np.arange(100)
    assert set(WORDS) <= set(token_ids.tolist())
    assert (np.diff(token_ids) > 0).all()
    if method == "eagle":
        expected = {
            "fc.weight": (HIDDEN, 2 * HIDDEN),
            "layers.0.self_attn.q_proj.weight": (64, HIDDEN),
            "layers.0.self_attn.k_proj.weight": (32, HIDDEN),
            "layers.0.self_attn.v_proj.weight": (32, HIDDEN),
            "layers.0.self_attn.o_proj.weight": (HIDDEN, 64),
            "layers.0.post_attention_layernorm.weight": (HIDDEN,),
            "layers.0.mlp.gate_proj.weight": (32, HIDDEN),
            "layers.0.mlp.up_proj.weight": (32, HIDDEN),
            "layers.0.mlp.down_proj.weight": (HIDDEN, 32),
        }
    else:
        expected = {f"{h}.0.linear.weight": (HIDDEN, HIDDEN) for h in range(3)}
        expected |= {f"{h}.0.linear.bias": (HIDDEN,) for h in range(3)}
    assert shapes == {name: (shape, "bfloat16") for name, shape in expected.items()}
    config = json.loads((result.folder / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["draft_vocab_size"] == 100
    assert config["training"]["acceptance_by_position"] == [
        round(rate, 3) for rate in result.acceptance.rates
    ]


def test_a_stopped_training_goes_on_to_the_same_head(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = run(request(tmp_path / "whole"), checkpoint, Losses())
    monkeypatch.setattr(trainer, "_SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(request(tmp_path / "stopped"), checkpoint, Losses(stop_after=7))
    progress = Losses()
    stopped = run(request(tmp_path / "stopped"), checkpoint, progress)
    assert len(progress.losses) == whole.facts["steps"] - 6  # the seventh wasn't saved yet
    weights = [(r.folder / "model.safetensors").read_bytes() for r in (whole, stopped)]
    assert weights[0] == weights[1]
    assert stopped.acceptance == whole.acceptance
    again = Losses()
    assert run(request(tmp_path / "stopped"), checkpoint, again).facts == stopped.facts
    assert again.losses == []


def test_minutes_end_a_training(checkpoint: Checkpoint, tmp_path: Path) -> None:
    progress = Losses()
    result = run(request(tmp_path, minutes=1e-9), checkpoint, progress)
    assert len(progress.losses) == result.facts["steps"] == 1


def test_a_folder_of_other_settings_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = request(tmp_path, epochs=1)
    run(asked, checkpoint, Losses())
    with pytest.raises(ConfigError, match=r"with epochs 1, and 2 is wanted; give another folder"):
        run(replace(asked, epochs=2), checkpoint, Losses())
    with pytest.raises(ConfigError, match=r"with answer_tokens 320, and 100 is wanted"):
        run(replace(asked, answer_tokens=100), checkpoint, Losses())
    # Another head may use the same answers.
    other = replace(asked, method="medusa", out=tmp_path / "other", data=asked.out / "data")
    assert run(other, checkpoint, Losses()).file_bytes > 0
    assert not (other.out / "data").exists()


def test_an_unknown_method_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--method 'lookahead' is unknown; it can be eagle"):
        run(request(tmp_path, method="lookahead"), checkpoint, Losses())


def test_what_pads_the_targets_vocabulary_is_never_drafted(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """A head that could is one for another model to whoever serves it."""
    asked = request(tmp_path, vocab_size=VOCAB_SIZE - 30, draft_vocab_size=10**6, epochs=1)
    result = run(asked, checkpoint, Losses())
    offsets = SafetensorsFile(result.folder / "model.safetensors").read("d2t")
    assert (np.arange(len(offsets)) + offsets).max() == VOCAB_SIZE - 31

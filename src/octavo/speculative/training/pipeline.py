"""From prompts to a head's folder. Each part keeps what it makes and is passed over when that is
there, so that a stopped training goes on with the same command.

The folder of a training:

    config.json, model.safetensors   the trained head
    training.json                    what it depends on
    training.pt                      the head in training
    data/                            where it learns from, which several trainings may share:
        settings.json                what the answers depend on
        responses.jsonl              prompts and answers, as token ids
        features.bf16                the target's hidden states over them
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.ops.backend import cpu_threads
from octavo.speculative.training import heads
from octavo.speculative.training.examples import Examples, Vocabulary
from octavo.speculative.training.learning import Acceptance
from octavo.speculative.training.prompts import (
    Conversation,
    built_in_conversations,
    read_conversations,
)
from octavo.speculative.training.responses import Answer, Response, collect, questions
from octavo.speculative.training.target import Target
from octavo.speculative.training.trainer import Learned, Trainer, TrainingSettings
from octavo.weights import Checkpoint

_HELD_OUT_SHARE = 0.1
_MOST_HELD_OUT = 48


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained.

    vocab_size: of the tokenizer. out: folder of the training. data: of answers and features, None
    for one in `out`. prompts: a file, None for the built-in ones. num_tokens: of answers, and
    answer_tokens of each at most. minutes: that training itself may take, earlier runs included.
    draft_vocab_size: tokens that the head may draft. inner_size: of EAGLE's MLP, None for the
    target's. num_heads: Medusa's.
    """

    method: str
    vocab_size: int
    out: Path
    data: Path | None = None
    prompts: Path | None = None
    num_tokens: int = 200_000
    answer_tokens: int = 320
    minutes: float | None = None
    epochs: int = 4
    draft_vocab_size: int = 6144
    inner_size: int | None = None
    num_heads: int = 4
    learning_rate: float = 8e-4
    batch_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """folder: of the head. file_bytes: of its weights. vocabulary_coverage: share of the answers'
    tokens that it can draft.
    """

    folder: Path
    file_bytes: int
    acceptance: Acceptance
    vocabulary_coverage: float
    facts: Mapping[str, Any]


class Progress(Protocol):
    """Told what goes on."""

    def part(self, title: str, total: float) -> Callable[[float, str], None]:
        """A part of the work begins, of `total` units; what is returned is called with the units
        done and a remark.
        """
        ...


def train(
    request: Request,
    checkpoint: Checkpoint,
    config: Config,
    answering: Callable[[], AbstractContextManager[Answer]],
    progress: Progress,
) -> Result:
    """Do what is left to do. answering: loads the target into an engine; used only if answers are
    missing. Raises ConfigError for prompts that can't be read, and for a folder of a training with
    other settings.
    """
    if request.method not in heads.METHODS:
        known = ", ".join(heads.METHODS)
        raise ConfigError(f"--method {request.method!r} is unknown; it can be {known}")
    target = Target(checkpoint, config)
    data = request.data or request.out / "data"
    responses = _responses(request, checkpoint, data, answering, progress)
    features = data / "features.bf16"
    sequences = [response.prompt + response.answer for response in responses]
    show = progress.part("Hidden states", sum(map(len, sequences)))
    target.write_features(features, sequences, lambda done: show(done, _megabytes(features)))

    device = _device(config)
    blueprint = _blueprint(request, target)
    settings = TrainingSettings(
        epochs=request.epochs,
        learning_rate=request.learning_rate,
        batch_tokens=request.batch_tokens,
        first_chain=blueprint.first_chain,
        last_chain=blueprint.last_chain,
        feature_weight=blueprint.feature_weight,
        seed=request.seed,
    )
    _keep_settings(
        request.out / "training.json",
        {
            "method": request.method,
            **blueprint.config,
            **asdict(settings),
            "draft_vocab_size": request.draft_vocab_size,
            "num_responses": len(responses),
        },
    )
    examples = Examples(responses, features, target.spec.hidden_size)
    vocabulary = Vocabulary.of(
        target, responses, request.draft_vocab_size, device, vocab_size=request.vocab_size
    )
    head = blueprint.build(request.seed).to(device)
    trainer = Trainer(head, examples, vocabulary, settings, request.out / "training.pt")
    _learn(trainer, request, progress)
    acceptance = trainer.measure(blueprint.positions)
    facts = _facts(request, checkpoint, responses, trainer, acceptance, vocabulary.coverage)
    file_bytes = heads.write_head(
        request.out, head, blueprint, vocabulary.token_ids.cpu().numpy(), facts
    )
    return Result(request.out, file_bytes, acceptance, vocabulary.coverage, facts)


def _responses(
    request: Request,
    checkpoint: Checkpoint,
    folder: Path,
    answering: Callable[[], AbstractContextManager[Answer]],
    progress: Progress,
) -> list[Response]:
    """Those that there are, and those that are missing."""
    conversations: Iterator[Conversation | None]
    if request.prompts is None:
        conversations = _half_self_asked(built_in_conversations(random.Random(request.seed)))
        num_held_out, source = _MOST_HELD_OUT, "built-in and self-asked"
    else:
        given = read_conversations(request.prompts)
        random.Random(request.seed).shuffle(given)
        conversations = iter(given)
        num_held_out = min(_MOST_HELD_OUT, max(1, round(_HELD_OUT_SHARE * len(given))))
        source = hashlib.sha256(request.prompts.read_bytes()).hexdigest()
    _keep_settings(
        folder / "settings.json",
        {
            "target": checkpoint.name,
            "weights": checkpoint.content_id(),
            "prompts": source,
            "answer_tokens": request.answer_tokens,
            "seed": request.seed,
        },
    )
    asked = questions(
        conversations,
        num_held_out=num_held_out,
        answer_tokens=request.answer_tokens,
        seed_of_all=request.seed,
    )
    show = progress.part("Answers", request.num_tokens)
    return collect(
        folder / "responses.jsonl",
        asked,
        answering,
        num_tokens=request.num_tokens,
        show=lambda done: show(done, f"{done:,} tokens"),
    )


def _half_self_asked(conversations: Iterator[Conversation]) -> Iterator[Conversation | None]:
    """What the target asks itself has no end of kinds: arXiv 2406.08464."""
    for conversation in conversations:
        yield conversation
        yield None


def _blueprint(request: Request, target: Target) -> heads.Blueprint:
    if request.method == "medusa":
        return heads.medusa_blueprint(target, num_heads=request.num_heads)
    return heads.eagle_blueprint(target, inner_size=request.inner_size)


def _device(config: Config) -> torch.device:
    """Where training computes: as the engine, on a GPU if there is one."""
    name = config.backend.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no NVIDIA GPU here; use --device cpu")
    if name == "cpu":
        torch.set_num_threads(cpu_threads(config.backend.threads))
    return torch.device(name)


def _learn(trainer: Trainer, request: Request, progress: Progress) -> None:
    seconds = None if request.minutes is None else 60 * request.minutes
    show = progress.part("Training", 1.0)

    def tell(learned: Learned) -> None:
        share = max(learned.step / learned.num_steps, learned.seconds / (seconds or float("inf")))
        show(
            min(share, 1.0),
            f"step {learned.step:,} of at most {learned.num_steps:,}, loss {learned.loss:.3f}, "
            f"first token right {learned.agreement:.0%}",
        )

    trainer.run(seconds, tell)


def _keep_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Note them at the first time; later ones must be the same, or what is there is no beginning of
    what is wanted.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove {path.parent}") from error
    for key, value in settings.items():
        if kept.get(key) != value:
            raise ConfigError(
                f"{path.parent} is of a training with {key} {kept.get(key)!r}, and {value!r} is "
                "wanted; give another folder with --out or --data, or remove this one"
            )


def _facts(
    request: Request,
    checkpoint: Checkpoint,
    responses: list[Response],
    trainer: Trainer,
    acceptance: Acceptance,
    coverage: float,
) -> dict[str, Any]:
    return {
        "target": checkpoint.name,
        "prompts": "built-in and self-asked" if request.prompts is None else "a file",
        "answers": sum(not response.held_out for response in responses),
        "answer_tokens": sum(len(r.answer) for r in responses if not r.held_out),
        "steps": trainer.num_steps_done,
        "minutes": round(trainer.seconds / 60, 1),
        "seed": request.seed,
        "vocabulary_coverage": round(coverage, 4),
        "held_out_answers": sum(response.held_out for response in responses),
        "acceptance_by_position": [round(rate, 3) for rate in acceptance.rates],
        "expected_accepted_tokens": round(acceptance.expected_length, 3),
    }


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:,.0f} MB" if path.exists() else ""

"""The loop that trains a head: steps, their rate, and what is kept to go on after a stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from octavo.core.errors import ConfigError
from octavo.ops.native.ops import ISAS
from octavo.speculative.training.eagle import EagleHead
from octavo.speculative.training.examples import Examples, Vocabulary
from octavo.speculative.training.learning import Acceptance, count_accepted, loss
from octavo.speculative.training.medusa import MedusaHeads

_WARMUP_STEPS = 20
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_FIT_BATCHES = 32
_SECONDS_BETWEEN_SAVES = 60.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """learning_rate: at its highest. batch_tokens: of a step, padding included. feature_weight: of
    the features' distance in the loss.

    first_chain, last_chain: tokens that are drafted from every position, at first and in the end.
    Chains that grow cost less than ones that are long all the time, and a head that can't do the
    first token yet learns little from the third.
    """

    epochs: int
    learning_rate: float
    batch_tokens: int
    first_chain: int
    last_chain: int
    feature_weight: float
    seed: int

    def chain(self, done: float) -> int:
        """Tokens to draft when this share of the training is done."""
        growth = int(done * (self.last_chain - self.first_chain + 1))
        return min(self.first_chain + growth, self.last_chain)


@dataclass(frozen=True)
class Learned:
    """What a step showed: how many there were and how many there will be at most, seconds that all
    took, and Loss's numbers.
    """

    step: int
    num_steps: int
    seconds: float
    loss: float
    agreement: float


class Trainer:
    """Trains `head` on the examples that are not held out.

    state: the file in which a stopped training finds what it needs to go on as if it hadn't
    stopped. num_steps_done, seconds: of this run and those before.
    """

    def __init__(
        self,
        head: EagleHead | MedusaHeads,
        examples: Examples,
        vocabulary: Vocabulary,
        settings: TrainingSettings,
        state: Path,
    ) -> None:
        self._head = head
        self._examples = examples
        self._vocabulary = vocabulary
        self._settings = settings
        self._state = state
        self._device = vocabulary.head.device
        learned = [i for i, r in enumerate(examples.responses) if not r.held_out]
        self._held_out = [i for i, r in enumerate(examples.responses) if r.held_out]
        self._batches = [
            batch
            for epoch in range(settings.epochs)
            for batch in examples.epoch(learned, settings.batch_tokens, f"{settings.seed} {epoch}")
        ]
        self._optimizer = torch.optim.AdamW(
            head.parameters(), settings.learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        self.num_steps_done = 0
        self.seconds = 0.0
        features, embeddings, truth = self._rows(self._batches[:_FIT_BATCHES])
        self._feature_scale = float(truth.square().mean().sqrt())
        if state.exists():
            self._load()
        else:
            head.fit(features, embeddings, truth)

    def run(self, seconds: float | None, show: Callable[[Learned], None]) -> None:
        """All steps, or as many as `seconds` allow, earlier runs' included. The learning rate falls
        to zero towards whichever end comes first.
        """
        began, saved = time.monotonic() - self.seconds, time.monotonic()
        limit = float("inf") if seconds is None else seconds
        while self.num_steps_done < len(self._batches) and self.seconds < limit:
            done = max(self.num_steps_done / len(self._batches), self.seconds / limit)
            learned = self._learn(self._batches[self.num_steps_done], done)
            self.num_steps_done += 1
            now = time.monotonic()
            self.seconds = now - began
            show(Learned(self.num_steps_done, len(self._batches), self.seconds, *learned))
            if now - saved > _SECONDS_BETWEEN_SAVES:
                self._save()
                saved = now
        self._save()

    def measure(self, length: int) -> Acceptance:
        """Acceptance of chains of `length` tokens on what is held out."""
        acceptance = Acceptance([0] * length, [0] * length)
        for batch in self._examples.batches(self._held_out, self._settings.batch_tokens):
            inputs = self._examples.batch(batch, self._device)
            with self._precision():
                count_accepted(self._head, inputs, self._vocabulary, acceptance)
        return acceptance

    def _learn(self, indices: Sequence[int], done: float) -> tuple[float, float]:
        warm = min(1.0, (self.num_steps_done + 1) / _WARMUP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * warm * (1.0 - done)
        self._optimizer.zero_grad()
        batch = self._examples.batch(indices, self._device)
        with self._precision():
            found = loss(
                self._head,
                batch,
                self._vocabulary,
                num_steps=self._settings.chain(done),
                feature_weight=self._settings.feature_weight,
                feature_scale=self._feature_scale,
            )
        torch.autograd.backward(found.total)
        nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return found.total.item(), found.agreement

    def _precision(self) -> torch.autocast:
        """Products in bfloat16 where the processor multiplies it: three times as fast there, and
        many times slower elsewhere.
        """
        is_quick = self._device.type != "cpu" or ISAS.get("avx512_bf16", "missing") == ""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=is_quick)

    def _rows(self, batches: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """(N, D) each: features, embeddings of the tokens after theirs, and features of those."""
        rows: list[tuple[torch.Tensor, ...]] = []
        for indices in batches:
            batch = self._examples.batch(indices, self._device)
            asked, features = batch.learnable(), batch.features.float()
            embeddings = self._vocabulary.embeddings[batch.tokens[:, 1:]]
            rows.append((features[:, :-1][asked], embeddings[asked], features[:, 1:][asked]))
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def _save(self) -> None:
        """Under another name first, so that a stop in between leaves the last one."""
        written = self._state.with_suffix(".part")
        torch.save(
            {
                "step": self.num_steps_done,
                "seconds": self.seconds,
                "head": self._head.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            },
            written,
        )
        os.replace(written, self._state)

    def _load(self) -> None:
        try:
            kept = torch.load(self._state, map_location=self._device, weights_only=True)
            self._head.load_state_dict(kept["head"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self.num_steps_done, self.seconds = int(kept["step"]), float(kept["seconds"])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{self._state} can't be read ({error}); remove it to train from the start"
            ) from error

"""Several heads guess several of the next tokens at once, from one state of the target.

Source: arXiv 2401.10774 (Medusa).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from octavo.core.step import ScheduledStep
from octavo.ops import Array, log_probabilities, split_columns
from octavo.ops.backend import Backend
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft
from octavo.speculative.demand import Demand
from octavo.speculative.head_checkpoint import (
    LM_HEAD,
    HeadCheckpoint,
    draft_token_ids,
    load_head,
)
from octavo.speculative.heads import head_name
from octavo.speculative.host_rows import HostRows
from octavo.speculative.medusa_heads import MedusaHeads
from octavo.speculative.proposer import Capabilities, DraftTask
from octavo.speculative.registry import Options, Target, register
from octavo.weights.model_config import ModelConfig

_WIDTH = 10
"""Likeliest tokens of a head that a tree may have side by side, as in the published trees."""


@register("medusa")
def build(options: Options, target: Target) -> Medusa:
    decoder = target.decoder("medusa")
    name = head_name(options, target)
    checkpoint = target.open_model(name)
    config = ModelConfig(checkpoint.config)
    token_ids = draft_token_ids(checkpoint, config, target)
    is_shared = config.flag("original_lm_head", False)
    view = HeadCheckpoint(checkpoint, lambda stored: _name_of(stored, is_shared))
    has_lm_head = any(name.startswith(("lm_heads.", LM_HEAD)) for name in view.tensors)
    if token_ids is not None and not has_lm_head:
        view.take_target_head(target.checkpoint, decoder, token_ids)
    num_rows = None if token_ids is None else len(token_ids)
    heads = MedusaHeads(config, view.tensors, decoder, num_rows)
    load_head(heads, view, target)
    return Medusa(heads, target.backend, vocab_size=target.vocab_size, token_ids=token_ids)


_OF_MEDUSA = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")


def _name_of(stored: str, is_shared: bool) -> str | None:
    """vLLM's name of a tensor; None for those that are read by themselves."""
    name = re.sub(r"^medusa_heads?\.", "", stored)
    if name in ("d2t", "t2d", "token_map"):
        return None
    if (own := _OF_MEDUSA.fullmatch(name)) is not None:
        head, layer, part = own.groups()
        is_product = ".linear." not in name
        name = f"lm_heads.{head}.{part}" if is_product else f"blocks.{head}.layers.{layer}.{part}"
    return LM_HEAD if is_shared and name == "lm_heads.0.weight" else name


class Medusa:
    """A Proposer of trees. It needs the state of a sequence's last computed token, no more."""

    name = "medusa"
    capabilities = Capabilities(needs_hidden_states=True, makes_trees=True, knows_confidence=True)
    kv_heads: Sequence[tuple[int, int]] = ()
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        heads: MedusaHeads,
        backend: Backend,
        *,
        vocab_size: int,
        token_ids: np.ndarray | None = None,
    ) -> None:
        """heads: loaded. vocab_size: V, the tokenizer's. token_ids (K,) int64: the tokens that
        their logits are for; None for all.
        """
        self._heads = heads
        self._backend = backend
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._host_rows = HostRows(backend)
        self._demand = Demand()
        self._states = backend.compile(heads.states)
        self._shared_logits = backend.compile(self._logits_of_states)
        self._own_logits = backend.compile(self._logits_of_features)

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots
        self._features = np.zeros((len(slots.lengths), self._heads.size), np.float32)
        # Known tokens when the feature was that of the last computed one; -1: there is none.
        self._lengths = np.full(len(slots.lengths), -1)

    def begin(self, step: ScheduledStep) -> None:
        self._demand.begin(step)
        for binding in step.bindings:
            self._lengths[binding.slot] = -1

    def observe(self, step: ComputedStep) -> None:
        if not self._demand.exists:
            return
        slots, rows = [], []
        for sequence, kept in zip(step.step.sequences, step.kept(), strict=True):
            if sequence.samples and len(kept):
                slots.append(sequence.slot)
                rows.append(kept[-1])
        if slots:
            (hidden,) = self._host_rows.copy((step.hidden,), np.array(rows))
            if self._features.dtype != hidden.dtype:  # half precision, on GPUs
                self._features = self._features.astype(hidden.dtype)
            self._features[slots] = hidden
            self._lengths[slots] = self._slots.lengths[slots]

    def catch_up(self, tasks: Sequence[DraftTask]) -> None:
        self._demand.ask()  # after a pause, there are states again from this step on

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(tasks)
        slots = np.array([task.slot for task in tasks], np.int64)
        ready = np.flatnonzero(self._lengths[slots] == self._slots.lengths[slots]).tolist()
        if not ready:
            return drafts
        width = min(_WIDTH, max(tasks[index].request.length for index in ready))
        top_ids, top = self._guess(self._features[slots[ready]], width)
        for row, index in enumerate(ready):
            _, length, min_probability = tasks[index].request
            places = best_tree(top[row].tolist(), length, min_probability)
            drafts[index] = _draft(top_ids[row], places) if places else None
        return drafts

    def _guess(self, features: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens by each head and their log-probabilities, best first. features
        (R, D) -> (R, H, W) int64, (R, H, W) float32.
        """
        x, num_rows = self._backend.from_host(features), len(features)
        if self._heads.lm_heads:
            logits = list(self._own_logits(x))
        else:  # all heads' states at once, so that the head's weight is read once
            states = np.concatenate([self._backend.to_host(part) for part in self._states(x)])
            logits = [self._shared_logits(self._backend.from_host(states))]
        width = min(width, logits[0].shape[1])
        found = [
            log_probabilities(part, np.zeros(part.shape[0], np.int64), width)[2:] for part in logits
        ]
        ids, values = (
            np.concatenate(parts).reshape(-1, num_rows, width).swapaxes(0, 1)
            for parts in zip(*found, strict=True)
        )
        return ids if self._token_ids is None else self._token_ids[ids], values

    def _logits_of_features(self, features: Array) -> tuple[Array, ...]:
        return tuple(self._known(logits) for logits in self._heads.own_logits(features))

    def _logits_of_states(self, states: Array) -> Array:
        return self._known(self._heads.shared(states))

    def _known(self, logits: Array) -> Array:
        """Without the columns of padding."""
        padding = logits.shape[1] - self._vocab_size
        if self._token_ids is not None or padding <= 0:
            return logits
        return split_columns(logits, (self._vocab_size, padding))[0]


class Place(NamedTuple):
    """A node of a tree: head `depth`'s guess number `rank`, behind the node `parent` (-1: none)."""

    depth: int
    rank: int
    parent: int


def best_tree(
    log_probabilities: Sequence[Sequence[float]], length: int, min_probability: float
) -> list[Place]:
    """The `length` likeliest nodes of the tree of all guesses, none below `min_probability`.

    A node is reached if all guesses on its path are right, taken as independent: its probability is
    their product. This is how section 2.3.3 chooses a tree, with the heads' average accuracies on a
    calibration set in place of what they say here and now. Parents come before their children,
    since a child is never likelier. log_probabilities: by head and rank, falling.
    """
    nodes: list[Place] = []
    floor = math.log(min_probability) if min_probability > 0 else -math.inf
    order = count()
    # (-log-probability, order of arrival, log-probability of the path before, place)
    heap: list[tuple[float, int, float, Place]] = []

    def offer(place: Place, before: float) -> None:
        if place.depth < len(log_probabilities) and place.rank < len(log_probabilities[0]):
            reached = before + log_probabilities[place.depth][place.rank]
            if reached > -math.inf:  # broken logits say nothing
                heappush(heap, (-reached, next(order), before, place))

    offer(Place(0, 0, -1), 0.0)
    while heap and len(nodes) < length:
        negative, _, before, place = heappop(heap)
        if -negative < floor:
            break
        nodes.append(place)
        offer(Place(place.depth, place.rank + 1, place.parent), before)
        offer(Place(place.depth + 1, 0, len(nodes) - 1), -negative)
    return nodes


def _draft(top_ids: np.ndarray, places: Sequence[Place]) -> Draft:
    """top_ids (H, W)."""
    depths, ranks, parents = np.array(places).T
    is_chain = np.array_equal(parents, np.arange(len(parents)) - 1)
    return Draft(top_ids[depths, ranks], None if is_chain else parents)

"""Tensor-parallel ranks as threads of one process, each with its part of a model and its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch

from octavo.layers.share import Share
from octavo.models.cut_groups import column_unit
from octavo.models.engine_model import EngineModel
from octavo.ops.backend import Backend
from octavo.ops.native.backend import NativeBackend
from octavo.weights import Checkpoint, open_checkpoint
from support.backends import cpu_backend
from support.forward import Forward, load_model

T = TypeVar("T")

_SECONDS = 60  # that a rank waits for others, one of which has failed


@dataclass
class Meeting:
    """Where the threads of `size` ranks hand tensors to each other. num_exchanges: so far."""

    size: int
    num_exchanges: int = 0
    brought: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=_SECONDS)


@dataclass(frozen=True)
class ThreadGroup:
    """As `octavo.ops.torch.group.TorchGroup` is between processes."""

    rank: int
    size: int
    meeting: Meeting
    sums_itself: bool = False

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self.meeting
        meeting.brought[self.rank] = x
        meeting.barrier.wait()
        parts = [meeting.brought[rank].clone() for rank in range(self.size)]
        if meeting.barrier.wait() == 0:
            meeting.num_exchanges += 1
        return parts


class Ranks:
    """A model on `size` ranks. kv_dtype: of their caches; the others as of `load_model`."""

    def __init__(
        self,
        source: Path | Checkpoint,
        backend: str,
        size: int,
        *,
        kv_dtype: str = "float32",
        **weights: Any,
    ) -> None:
        self.size = size
        self.meeting = Meeting(size)
        self.backends: list[Backend] = []
        groups: list[Any]
        if backend == "torch":
            self.backends = [cpu_backend("torch")] * size
            groups = [ThreadGroup(rank, size, self.meeting) for rank in range(size)]
        else:
            self.backends = [NativeBackend(threads=1) for _ in range(size)]
            offers = [
                one.offer_group(rank, size, "127.0.0.1") for rank, one in enumerate(self.backends)
            ]
            groups = self.together(lambda rank: self.backends[rank].join_group(rank, size, offers))
        checkpoint = open_checkpoint(str(source)) if isinstance(source, Path) else source
        unit = column_unit(checkpoint)
        self.models: list[EngineModel] = [
            load_model(
                checkpoint,
                self.backends[rank],
                share=Share(rank, size, groups[rank], unit),
                **weights,
            )
            for rank in range(size)
        ]
        self.forwards = [
            Forward(model, on, kv_dtype=kv_dtype)
            for model, on in zip(self.models, self.backends, strict=True)
        ]

    def together(self, function: Callable[[int], T]) -> list[T]:
        """What each rank's thread returns, all running at once."""

        def run(rank: int) -> T:
            try:
                return function(rank)
            except BaseException:
                self.meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(run, rank) for rank in range(self.size)]
        return [future.result() for future in futures]

    def prompt(self, tokens: Sequence[int], *, chunk: int | None = None) -> np.ndarray:
        """Logits, of which every rank must have the same bits."""
        first, *others = self.together(lambda rank: self.forwards[rank].prompt(tokens, chunk=chunk))
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

"""What an executor and its workers say to each other. Plain data, also for other machines.

In this order: Setup to each worker, its Offer, all Offers to each, its WorkerPlan, Sizes to each,
Progress and at last Loaded from each. Then Run to all, and for each a StepOutput from the reporter,
which is rank 0 of the last stage. In place of an answer there may be an Ending: nothing follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.core.step import ScheduledStep, StepOutput


class Place(NamedTuple):
    """Which part of a model a worker computes. Ranks count through stage by stage."""

    rank: int = 0
    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    def __str__(self) -> str:
        names = [f"worker {self.rank}"]
        if self.tensor_size > 1:
            names.append(f"tensor rank {self.tensor_rank}")
        if self.num_stages > 1:
            names.append(f"stage {self.stage}")
        return names[0] if len(names) == 1 else f"{names[0]} ({', '.join(names[1:])})"

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


def places(tensor_size: int, num_stages: int) -> list[Place]:
    """Of all workers, in order of their ranks."""
    return [
        Place(stage * tensor_size + rank, rank, tensor_size, stage, num_stages)
        for stage in range(num_stages)
        for rank in range(tensor_size)
    ]


class Setup(NamedTuple):
    """settings: of `Config.to_flat`. key: by which workers of this start know each other.
    local_rank: among the num_local workers of its machine, all replicas counted. memory_share: of
    the machine's free memory, for this engine's workers there. host: address of
    the machine for the others. checkpoint: opened; None for a machine that opens it itself.
    """

    settings: dict[str, Any]
    vocab_size: int
    place: Place
    key: bytes
    local_rank: int
    num_local: int
    memory_share: float = 1.0
    host: str = "127.0.0.1"
    checkpoint: Any = None


class Offer(NamedTuple):
    """What others need of a worker to meet it. group: of `Backend.offer_group`. address: where it
    listens for stages. kernels: op to implementation.
    """

    group: Any
    address: tuple[str, int] | None
    kernels: dict[str, str]


class WorkerPlan(NamedTuple):
    """What a worker will take, before it reads any weights.

    weights: bytes by format. formats: of each weight. block_bytes: of a KV block in its layers.
    memory: which memory it takes; workers with equal ones share it. description: of device and
    backend. kernels: (backend, op, implementation). taps: layers whose outputs its speculation
    sees. layers: how many of the model's.
    """

    weights: Mapping[str, int]
    formats: tuple[str, ...]
    block_bytes: int
    free_memory_bytes: int
    memory: str
    max_position: int
    device: str
    backend: str
    description: str
    dtype_reason: str
    kv_dtype: str
    kv_reason: str
    kernels: tuple[tuple[str, str, str], ...]
    taps: tuple[int, ...]
    num_layers: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


class Sizes(NamedTuple):
    """What is decided for all workers together. max_model_len: in tokens. taps: layers whose
    outputs the last stage sees. calibrated_rows: steps of so many rows are timed.
    """

    num_blocks: int
    max_model_len: int
    taps: tuple[int, ...] = ()
    calibrated_rows: tuple[int, ...] = ()


class Progress(NamedTuple):
    """Bytes of weights loaded, of the worker's in all."""

    done: int
    total: int


class Loaded(NamedTuple):
    """The worker is ready. seconds_by_rows: (rows, seconds) of `Sizes.calibrated_rows`."""

    seconds_by_rows: tuple[tuple[int, float], ...] = ()


class Run(NamedTuple):
    """Compute a step. outcomes: of steps before it, that earlier stages have not seen."""

    step: ScheduledStep
    outcomes: tuple[StepOutput, ...] = ()


class Ending(NamedTuple):
    """The worker refuses, because of the settings or the model, and ends."""

    why: str

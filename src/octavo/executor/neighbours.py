"""How a worker meets the others: those that share its layers, and those before and behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from octavo.config import Config
from octavo.executor.messages import Offer, Place, Setup
from octavo.executor.worker import Neighbours, chosen_kernels
from octavo.ops.backend import Backend
from octavo.parallel.meeting import Meeting
from octavo.weights import Checkpoint

if TYPE_CHECKING:
    from octavo.runner.pipeline import Pipeline

_MEET_SECONDS = 60.0

Exchange = Callable[[Offer], list[Offer]]
"""Hand one's own offer over, and get those of all workers, by rank."""


def meet(
    setup: Setup, config: Config, checkpoint: Checkpoint, backend: Backend, exchange: Exchange
) -> tuple[Neighbours, Mapping[str, str]]:
    """Also the kernels that ranks of a group have in common: they compute the same numbers from the
    same numbers, so each must do it the same way. Raises ConfigError.
    """
    place, group = setup.place, None
    kernels: dict[str, str] = {}
    if place.tensor_rank == 0:
        kernels = chosen_kernels(config, checkpoint, backend)
    with ExitStack() as stack:
        meeting = None
        if place.num_stages > 1:
            meeting = stack.enter_context(Meeting(setup.host, 0, setup.key))
        own = None
        if place.tensor_size > 1:
            own = backend.offer_group(place.tensor_rank, place.tensor_size)
            own["address"] = setup.host
        address = None if meeting is None else meeting.address
        offers = exchange(Offer(own, address, kernels))
        first = place.rank - place.tensor_rank
        of_stage = offers[first : first + place.tensor_size]
        if place.tensor_size > 1:
            groups = [offer.group for offer in of_stage]
            group = backend.join_group(place.tensor_rank, place.tensor_size, groups)
        pipeline = None
        if meeting is not None:
            pipeline = _link(place, meeting, [offer.address for offer in offers], setup.key)
    return Neighbours(group, pipeline), of_stage[0].kernels


def _link(
    place: Place, meeting: Meeting, addresses: Sequence[tuple[str, int] | None], key: bytes
) -> Pipeline:
    raise NotImplementedError

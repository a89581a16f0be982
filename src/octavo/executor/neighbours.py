"""How a worker meets the others: those that share its layers, and those before and behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from octavo.config import Config
from octavo.core.errors import ConfigError, InvariantError
from octavo.executor.messages import Offer, Place, Setup
from octavo.executor.worker import Neighbours, chosen_kernels
from octavo.ops.backend import Backend
from octavo.parallel.links import Link
from octavo.parallel.meeting import Address, Meeting, join
from octavo.runner.linked_pipeline import LinkedPipeline
from octavo.runner.pipeline import Pipeline
from octavo.weights import Checkpoint

_MEET_SECONDS = 60.0
_ACTIVATIONS, _DRAFTS = "activations", "drafts"

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
            own = backend.offer_group(place.tensor_rank, place.tensor_size, setup.host)
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
    place: Place, meeting: Meeting, addresses: Sequence[Address | None], key: bytes
) -> Pipeline:
    """Join the next stage and, from the last one, all before it for drafts; and let those in who do
    the same here, at the same time. Raises ConfigError if one doesn't come.
    """

    def reach(stage: int, purpose: str) -> Link:
        address = addresses[stage * place.tensor_size + place.tensor_rank]
        if address is None:
            raise InvariantError(f"stage {stage} listens nowhere")
        return Link(join(address, key, purpose, timeout_s=_MEET_SECONDS))

    expected = ([_DRAFTS] if not place.is_last_stage else []) + (
        [_ACTIVATIONS] if place.stage else []
    )
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(_let_in, place, meeting, expected)
        if place.is_last_stage:
            following = None
            drafts = [reach(stage, _DRAFTS) for stage in range(place.stage)]
        else:
            following = reach(place.stage + 1, _ACTIVATIONS)
            drafts = []
        came = coming.result()
    return LinkedPipeline(came.get(_ACTIVATIONS), following, drafts or [came[_DRAFTS]])


def _let_in(place: Place, meeting: Meeting, expected: Sequence[str]) -> dict[str, Link]:
    """By purpose."""
    links: dict[str, Link] = {}
    while len(links) < len(expected):
        came = meeting.accept(_MEET_SECONDS)
        if came is None:
            raise ConfigError(
                f"{place} was not reached by the stages around it within {_MEET_SECONDS:g} s; can "
                "the machines reach each other at any port?"
            )
        connection, purpose = came
        links[purpose] = Link(connection)
    return links

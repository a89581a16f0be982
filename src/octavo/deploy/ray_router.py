"""Ray Serve's choice of a replica for a request: prefix affinity first, load second."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from octavo.deploy.prefixes import PrefixMemory

_BUSIER = 4
"""A replica that knows the prefix is passed over when it has more than a quarter of its places more
in use than another has."""


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """The replica that saw the longest beginning of the prompt, unless it is much busier than
    another one; else the less busy of two others. Requests bring their keys as the argument
    `prefix`. (The mixins are what Ray hands its arguments to.)
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._memory: PrefixMemory[ReplicaID] = PrefixMemory()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        others = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [others]
        # Else Ray would ask again at once, and again, while all are full.
        pending_request.routing_context.should_backoff = True
        known = self._memory.longest(pending_request.kwargs.get("prefix", ()), by_id)
        if known is None or self._is_much_busier(by_id[known], candidate_replicas):
            return [others]
        return [[by_id[known]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._memory.note(pending_request.kwargs.get("prefix", ()), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id)

    def _is_much_busier(self, replica: RunningReplica, all_replicas: list[RunningReplica]) -> bool:
        cache = self.replica_queue_len_cache
        lengths = [cache.get(one.replica_id) for one in all_replicas]
        mine = cache.get(replica.replica_id) or 0
        least = min((length for length in lengths if length is not None), default=0)
        return bool(mine - least > replica.max_ongoing_requests / _BUSIER)

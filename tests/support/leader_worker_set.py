"""What a LeaderWorkerSet may say, by its API: leaderworkerset.x-k8s.io, version 1.

The pod templates in it are Kubernetes' own kind, and are checked as that.
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_COUNT = {"type": "integer"}
_COUNT_OR_SHARE = {"anyOf": [_COUNT, {"type": "string"}]}
_ANYTHING: dict[str, Any] = {"type": "object"}

SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_one_of("leaderworkerset.x-k8s.io/v1"),
    kind=_one_of("LeaderWorkerSet"),
    metadata=_object(
        ("name",),
        name={"type": "string"},
        namespace={"type": "string"},
        labels=_ANYTHING,
        annotations=_ANYTHING,
    ),
    spec=_object(
        ("leaderWorkerTemplate",),
        replicas=_COUNT,
        startupPolicy=_one_of("LeaderCreated", "LeaderReady"),
        networkConfig=_object(
            ("subdomainPolicy",), subdomainPolicy=_one_of("Shared", "UniquePerReplica")
        ),
        rolloutStrategy=_object(
            ("type",),
            type=_one_of("RollingUpdate"),
            rollingUpdateConfiguration=_object(
                partition=_COUNT, maxUnavailable=_COUNT_OR_SHARE, maxSurge=_COUNT_OR_SHARE
            ),
        ),
        leaderWorkerTemplate=_object(
            ("workerTemplate",),
            leaderTemplate=_ANYTHING,
            workerTemplate=_ANYTHING,
            size=_COUNT,
            restartPolicy=_one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            subGroupPolicy=_object(
                subGroupPolicyType=_one_of("LeaderWorker", "LeaderExcluded"), subGroupSize=_COUNT
            ),
            volumeClaimTemplates={"type": "array", "items": _ANYTHING},
            persistentVolumeClaimRetentionPolicy=_object(
                whenDeleted=_one_of("Retain", "Delete"), whenScaled=_one_of("Retain", "Delete")
            ),
        ),
    ),
)

VARIABLES = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
"""What its controller adds to the environment of every container."""

"""An experiment without HTTP and without time: servers are stubs, plays are simulated."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from octavo.bench.ab.experiment import Tools, Wanted
from octavo.bench.launch import Arm, parse_arm
from octavo.bench.load.plan import LoadPoint, PointRun
from octavo.bench.load.target import Target
from octavo.bench.summary import summarize
from octavo.bench.workloads.request import PlannedRequest
from support import ab_blocks, stub_server


def stub_arm(name: str) -> Arm:
    """Its server says that it serves the model `name`."""
    command = [sys.executable, stub_server.__file__, "--model", name, "--port", "{port}"]
    return parse_arm(f"{name}={shlex.join(command)}")


@dataclass
class SimulatedTools:
    """speeds: seconds per token by arm. played: what was asked for, in order. alive: whether the
    server answered when its play began.
    """

    speeds: Mapping[str, float]
    forces_length: bool = True
    played: list[tuple[str, LoadPoint]] = field(default_factory=list)
    prepared_for: list[str] = field(default_factory=list)

    def tools(self) -> Tools:
        return Tools(
            probe=self._probe,
            play=self._play,
            prepare=self._prepare,
            summarize=summarize,
            tokenize=str.split,
        )

    async def _probe(self, url: str) -> Target:
        (card,) = httpx.get(f"{url}/v1/models", verify=False).json()["data"]
        fields = ("ignore_eos",) if self.forces_length else ()
        return Target(base_url=f"{url}/v1", model=card["id"], length_fields=fields)

    async def _play(self, target: Target, point: LoadPoint) -> PointRun:
        (card,) = httpx.get(f"{target.base_url}/models", verify=False).json()["data"]
        if card["id"] != target.model:
            raise AssertionError(f"{card['id']} answers instead of {target.model}")
        self.played.append((target.model, point))
        run = ab_blocks.play(
            point.requests,
            seed=len(self.played),
            token_s=self.speeds[target.model],
            texts={request.index: "x y z" for request in point.requests},
        )
        return PointRun(
            point=point,
            start_ns=run.start_ns,
            end_ns=run.end_ns,
            records=run.records,
            client=run.client,
            counters_before={"engine_steps_total": 0.0, "scheduled_sequences_total": 0.0},
            counters_after={"engine_steps_total": 50.0, "scheduled_sequences_total": 100.0},
        )

    def _prepare(self, targets: Sequence[Target]) -> Callable[[Wanted], Sequence[PlannedRequest]]:
        self.prepared_for = [target.model for target in targets]
        return lambda wanted: ab_blocks.requests(wanted.seed, wanted.count, wanted.rate)

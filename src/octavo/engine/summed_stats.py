"""Several engines' statistics as if they were one's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

from octavo.core.step import DraftTotals, EngineStats, plus_stages


class SummedStats:
    """The totals of all engines that there have been, so that they only grow, and the state of
    those that live. step_tokens is of the engine that reported last.

    num_blocks: of each engine's KV cache; kv_usage is of those that live.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self._num_blocks = num_blocks
        self._living: dict[int, EngineStats] = {
            engine: EngineStats() for engine in range(len(num_blocks))
        }
        self._past = EngineStats(num_engines=0)

    def reported(self, engine: int, stats: EngineStats) -> EngineStats:
        """The sum, now that an engine has told of itself."""
        self._living[engine] = stats
        return self._sum()._replace(step_tokens=stats.step_tokens)

    def died(self, engine: int) -> EngineStats:
        """The sum without the state of an engine; its totals stay."""
        gone = self._living.pop(engine)
        gone = gone._replace(num_running=0, num_waiting=0, num_kv_blocks=0, num_engines=0)
        self._past = _plus(self._past, gone)
        return self._sum()

    def restarted(self) -> None:
        """Another engine takes the place of one that has died."""
        self._past = self._past._replace(total_restarts=self._past.total_restarts + 1)

    def _sum(self) -> EngineStats:
        total = reduce(_plus, self._living.values(), self._past)
        capacity = sum(self._num_blocks[engine] for engine in self._living)
        used = sum(s.kv_usage * self._num_blocks[e] for e, s in self._living.items())
        return total._replace(kv_usage=used / capacity if capacity else 0.0, step_tokens=0)


def _plus(one: EngineStats, other: EngineStats) -> EngineStats:
    drafts = zip_longest(one.drafts, other.drafts, fillvalue=DraftTotals())
    pairs: zip[tuple[Any, Any]] = zip(
        one._replace(drafts=(), stages=()), other._replace(drafts=(), stages=()), strict=True
    )
    total = EngineStats._make(a + b for a, b in pairs)
    return total._replace(
        drafts=tuple(a.plus(b) for a, b in drafts), stages=plus_stages(one.stages, other.stages)
    )

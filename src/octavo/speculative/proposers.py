"""All configured proposers, behind the runner's one seam."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.clock import Clock, monotonic
from octavo.core.step import ScheduledSequence, ScheduledStep
from octavo.ops.batch import KVLayer
from octavo.runner.slots import Slots
from octavo.runner.speculation import ComputedStep, Draft, MethodSeconds, Verified
from octavo.sampling.sampler import SampledRows
from octavo.speculative.proposer import DraftTask, Proposer
from octavo.speculative.verify import verify


class Proposers:
    """A Speculation: hands each request for a draft to the proposer that it names. embeds_tokens:
    whether any looks tokens up in the target's embedding, so that it must be where they are.
    """

    def __init__(self, proposers: Sequence[Proposer], *, clock: Clock = monotonic) -> None:
        """proposers: at least one; a DraftRequest's method is the index of one."""
        self._proposers = tuple(proposers)
        self._clock = clock
        self._drafting = [0.0] * len(self._proposers)  # seconds
        self._catching_up = [0.0] * len(self._proposers)
        self.num_methods = len(self._proposers)
        self.kv_heads: Sequence[tuple[int, int]] = [
            heads for proposer in self._proposers for heads in proposer.kv_heads
        ]
        self.embeds_tokens = any(p.capabilities.embeds_tokens for p in self._proposers)
        self.taps = tuple(sorted({tap for proposer in self._proposers for tap in proposer.taps}))

    def attach(self, slots: Slots, kv_layers: tuple[KVLayer, ...]) -> None:
        self._slots = slots
        end = len(kv_layers) - len(self.kv_heads)
        of_model = kv_layers[:end]
        for proposer in self._proposers:
            start, end = end, end + len(proposer.kv_heads)
            proposer.attach(slots, of_model + kv_layers[start:end])

    def begin(self, step: ScheduledStep) -> None:
        self.take_seconds()  # those of a step that failed are nobody's
        for method, proposer in enumerate(self._proposers):
            began = self._clock()
            proposer.begin(step)
            self._drafting[method] += self._clock() - began

    def propose(self, sequences: Sequence[ScheduledSequence]) -> dict[int, Draft]:
        tasks: list[list[DraftTask]] = [[] for _ in self._proposers]
        indices: list[list[int]] = [[] for _ in self._proposers]
        for index, sequence in enumerate(sequences):
            if (request := sequence.draft) is not None:
                tasks[request.method].append(DraftTask(sequence.slot, request))
                indices[request.method].append(index)
        drafts: dict[int, Draft] = {}
        for method, proposer in enumerate(self._proposers):
            if not tasks[method]:
                continue
            began = self._clock()
            proposer.catch_up(tasks[method])
            caught_up = self._clock()
            proposed = proposer.propose(tasks[method])
            self._catching_up[method] += caught_up - began
            self._drafting[method] += self._clock() - caught_up
            found = zip(indices[method], proposed, strict=True)
            drafts |= {index: draft for index, draft in found if draft is not None}
        return drafts

    def verify(self, draft: Draft, sampled: SampledRows, first_row: int) -> Verified:
        return verify(draft, sampled, first_row)

    def observe(self, step: ComputedStep) -> None:
        for method, proposer in enumerate(self._proposers):
            seen = step
            if proposer.taps != self.taps:
                taps = tuple(step.taps[self.taps.index(tap)] for tap in proposer.taps)
                seen = step._replace(taps=taps)
            began = self._clock()
            proposer.observe(seen)
            self._drafting[method] += self._clock() - began

    def take_seconds(self) -> MethodSeconds:
        taken = MethodSeconds(tuple(self._drafting), tuple(self._catching_up))
        self._drafting = [0.0] * self.num_methods
        self._catching_up = [0.0] * self.num_methods
        return taken

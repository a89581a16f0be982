"""Whether anybody still asks a method for drafts."""

from __future__ import annotations

from octavo.core.step import ScheduledStep

_MOST_UNASKED = 256
"""Steps that could have had a draft, after which there is no demand if none was asked for. Where
drafts could pay at all, the scheduler asks more often, if only to learn whether they do: that costs
about a step, for which it lets half a hundredth of the time be used.
"""


class Demand:
    """A method that is not asked for drafts, since the server is too busy for any, needn't take
    note of what the target computes; it would only make the server slower.

    A request brings the demand back, be there a draft for it or not, and so does a sequence that
    starts with nothing beside it: then the server is not busy, and there would be no draft for any
    of its tokens if its first ones were not seen.
    """

    def __init__(self) -> None:
        self._num_unasked = 0  # steps since anybody asked

    def begin(self, step: ScheduledStep) -> None:
        if len(step.sequences) == 1 and step.bindings:
            self._num_unasked = 0
        elif any(of.samples and of.num_tokens == 1 for of in step.sequences):
            self._num_unasked += 1

    def ask(self) -> None:
        """The method is asked for drafts in this step."""
        self._num_unasked = 0

    @property
    def exists(self) -> bool:
        return self._num_unasked <= _MOST_UNASKED

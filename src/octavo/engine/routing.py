"""Which of several engines with the same model gets a request.

The one that is done with it soonest: what an engine has to do, and what of the prompt it would have
to read, are counted in the same unit, tokens. So a known prefix is worth exactly the tokens that it
spares. An engine that knows one is chosen for as long as it has at most that much more to do than
any other: up to there, waiting for it costs less than reading the prompt a second time elsewhere,
and as many others then share what both have read. There is no threshold to set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from octavo.core.request import Request
from octavo.kvcache.prefix_index import BlockKey, block_key, root_key

ANSWER_TOKENS = 128
"""What a sequence counts as until it ends, unless it may not have as many tokens. Answers' lengths
are hardly known before, nor, being about exponentially distributed, after some of the tokens.
"""

MAX_KEYS = 1024
"""Blocks of a prompt that are looked at. Whoever shares 16 thousand tokens shares the choice; more
would hold the event loop up by milliseconds.
"""


class Route:
    """Where a request has gone, and what it counts there."""

    __slots__ = ("engine", "per_sequence", "sequences", "unread")

    def __init__(self, engine: int, unread: int, sequences: int, per_sequence: int) -> None:
        self.engine = engine
        self.unread = unread
        self.sequences = sequences
        self.per_sequence = per_sequence

    @property
    def tokens(self) -> int:
        return self.unread + self.sequences * self.per_sequence


class Router:
    """Knows of each engine what it has to do and which prefixes it has read last.

    block_size: tokens of a block, the unit of the engines' own prefix caches. max_keys: blocks that
    are remembered of each engine, as many as its cache has; 0 where prefixes are not cached.
    """

    def __init__(self, block_size: int, max_keys: Sequence[int]) -> None:
        self.loads = [0] * len(max_keys)
        """Tokens that each has to do."""
        self._block_size = block_size
        self._max_keys = max_keys
        self._known: list[OrderedDict[BlockKey, None]] = [OrderedDict() for _ in max_keys]
        self._last_used = [0] * len(max_keys)
        self._num_placed = 0

    def place(self, request: Request, engines: Collection[int]) -> Route:
        """Choose one of `engines`, of which there is at least one. Among equals, the one that has
        been chosen least recently.
        """
        keys = self._keys(request) if any(self._max_keys) else []
        num_prompt = request.num_prompt_tokens
        unread = {
            engine: num_prompt - min(self._num_known(engine, keys), num_prompt - 1)
            for engine in engines
        }
        best = min(
            engines,
            key=lambda e: (self.loads[e] + unread[e], unread[e], self._last_used[e]),
        )
        self._num_placed += 1
        self._last_used[best] = self._num_placed
        self._learn(best, keys)
        per_sequence = min(request.max_tokens, ANSWER_TOKENS)
        route = Route(best, unread[best], request.sampling.n, per_sequence)
        self.loads[best] += route.tokens
        return route

    def read(self, route: Route) -> None:
        """The prompt has been read."""
        self.loads[route.engine] -= route.unread
        route.unread = 0

    def ended(self, route: Route) -> None:
        """One of its sequences has ended."""
        self.loads[route.engine] -= route.per_sequence
        route.sequences -= 1

    def taken_back(self, route: Route) -> None:
        """The request is not there any more."""
        self.loads[route.engine] -= route.tokens
        route.unread = route.sequences = 0

    def forget(self, engine: int) -> None:
        """It knows no prefixes now."""
        self._known[engine].clear()

    def _keys(self, request: Request) -> list[BlockKey]:
        """Of the prompt's full blocks, as the engines name them."""
        tokens, size = request.prompt_token_ids, self._block_size
        keys: list[BlockKey] = []
        key = root_key(request.cache_salt)
        for end in range(size, min(len(tokens), MAX_KEYS * size) + 1, size):
            key = block_key(key, tokens[end - size : end])
            keys.append(key)
        return keys

    def _num_known(self, engine: int, keys: Sequence[BlockKey]) -> int:
        """Tokens that the engine has read before."""
        known = self._known[engine]
        count = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        return count * self._block_size

    def _learn(self, engine: int, keys: Sequence[BlockKey]) -> None:
        known = self._known[engine]
        for key in reversed(keys):  # beginnings are forgotten last: what follows hangs on them
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_keys[engine]:
            known.popitem(last=False)

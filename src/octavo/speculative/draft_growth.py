"""Drafts while they grow, token after token, from what a model or a head says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.runner.speculation import Draft


class Chain:
    """Tokens in a row; those that were drawn come with the distributions that they are from.

    depth: how many there are. It ends before a token that is less likely than `min_probability` to
    be reached and accepted; how likely, is known without the token itself.
    """

    def __init__(self, length: int, min_probability: float) -> None:
        self._length = length
        self._floor = min_probability
        self._reached = 1.0
        self._token_ids: list[int] = []
        self._probabilities: list[np.ndarray] = []

    @property
    def depth(self) -> int:
        return len(self._token_ids)

    def grow(self, token: int, confidence: float, probabilities: np.ndarray | None) -> bool:
        """Whether it wants another. confidence: of the likeliest token. probabilities (V,): None if
        the token was chosen, not drawn.
        """
        self._reached *= confidence
        if self._reached < self._floor:
            return False
        self._token_ids.append(token)
        if probabilities is not None:
            self._probabilities.append(probabilities)
        return self.depth < self._length

    def draft(self) -> Draft | None:
        if not self._token_ids:
            return None
        drawn = np.stack(self._probabilities) if self._probabilities else None
        return Draft(np.array(self._token_ids, np.int64), probabilities=drawn)


class _Node(NamedTuple):
    """cost: minus the logarithm of the probability that the path to it is right. A chain of nodes
    of rank 0 goes through all depths, and every other node is beside one of them.
    """

    cost: float
    depth: int
    rank: int
    token: int


class Tree:
    """The likeliest nodes of a tree: a chain of likeliest tokens, and the next ones beside each.

    A node's probability is the product of those along its path, so what leads to a node is at least
    as likely: any number of likeliest nodes hang together. None is below `min_probability`.
    """

    def __init__(self, length: int, min_probability: float) -> None:
        self._length = length
        self._most = -math.log(min_probability) if min_probability > 0 else math.inf
        self._cost = 0.0  # of the chain's end
        self._nodes: list[_Node] = []
        self.depth = 0

    def grow(self, token_ids: Sequence[int], log_probabilities: Sequence[float]) -> bool:
        """The likeliest tokens behind the chain's end, best first. Whether nodes behind the first
        of them could be among the likeliest.
        """
        if not log_probabilities[0] > -math.inf:  # broken logits say nothing
            return False
        self._nodes += [
            _Node(self._cost - value, self.depth, rank, token)
            for rank, (token, value) in enumerate(zip(token_ids, log_probabilities, strict=True))
        ]
        self._cost -= log_probabilities[0]
        self.depth += 1
        if self.depth == self._length or self._cost > self._most:
            return False
        self._nodes.sort()
        del self._nodes[self._length :]
        return len(self._nodes) < self._length or self._cost < self._nodes[-1].cost

    def draft(self) -> Draft | None:
        nodes = [node for node in sorted(self._nodes)[: self._length] if node.cost <= self._most]
        if not nodes:
            return None
        of_chain = {node.depth: index for index, node in enumerate(nodes) if node.rank == 0}
        parents = np.array([of_chain.get(node.depth - 1, -1) for node in nodes])
        is_chain = bool((parents == np.arange(-1, len(nodes) - 1)).all())
        token_ids = np.array([node.token for node in nodes], np.int64)
        return Draft(token_ids, None if is_chain else parents)

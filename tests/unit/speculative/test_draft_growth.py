"""Drafts as they grow."""

from __future__ import annotations

import math

import numpy as np

from octavo.speculative.draft_growth import Chain, Tree

LOG = np.log([[0.5, 0.3, 0.1], [0.8, 0.1, 0.05], [0.9, 0.05, 0.01]]).tolist()
TOKENS = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


def grown(length: int, min_probability: float = 0.0) -> tuple[Tree, int]:
    """With all that it wants to know, and how many times that was."""
    tree, count = Tree(length, min_probability), 1
    while tree.grow(TOKENS[count - 1], LOG[count - 1]):
        count += 1
    return tree, count


def parts(tree: Tree) -> tuple[list[int], list[int] | None]:
    draft = tree.draft()
    assert draft is not None
    return draft.token_ids.tolist(), None if draft.parents is None else draft.parents.tolist()


def test_the_likeliest_nodes_make_the_tree() -> None:
    # 0.5, 0.4 and 0.36 along the chain, 0.3 and 0.1 beside its first, 0.05 beside its second
    assert parts(grown(1)[0]) == ([10], None)
    assert parts(grown(3)[0]) == ([10, 20, 30], None)
    tree = Tree(4, 0.0)
    for token_ids, values in zip(TOKENS, LOG, strict=True):
        assert tree.grow(token_ids, values)
    assert parts(tree) == ([10, 20, 30, 11], [-1, 0, 1, -1])


def test_it_asks_no_further_than_it_can_use() -> None:
    assert grown(1)[1] == 1
    flat = Tree(2, 0.0)
    assert not flat.grow([1, 2, 3], np.log([0.4, 0.4, 0.2]).tolist())  # behind 1: 0.4 at most
    assert parts(flat) == ([1, 2], [-1, -1])
    assert Tree(2, 0.0).grow([1, 2, 3], np.log([0.4, 0.3, 0.2]).tolist())


def test_unlikely_nodes_are_left_out() -> None:
    tree, count = grown(3, 0.45)
    assert (parts(tree), count) == (([10], None), 2)
    tree, count = grown(3, 0.55)
    assert (tree.draft(), count) == (None, 1)


def test_broken_logits_end_a_tree() -> None:
    tree = Tree(3, 0.0)
    assert tree.grow(TOKENS[0], LOG[0])
    assert not tree.grow(TOKENS[1], [math.nan] * 3)
    assert parts(tree) == ([10, 11, 12], [-1, -1, -1])


def test_a_chain_ends_before_what_is_unlikely() -> None:
    q = np.array([0.5, 0.5], np.float32)
    chain = Chain(3, 0.2)
    assert chain.grow(1, 0.5, q)
    assert chain.grow(0, 0.5, q)
    assert not chain.grow(1, 0.5, q)
    draft = chain.draft()
    assert draft is not None
    assert draft.token_ids.tolist() == [1, 0]
    assert draft.probabilities is not None
    assert draft.probabilities.shape == (2, 2)
    full = Chain(1, 0.0)
    assert not full.grow(1, 0.1, q)
    assert full.draft() is not None
    assert Chain(1, 0.5).draft() is None

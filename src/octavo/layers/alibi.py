"""Attention with linear biases."""

from __future__ import annotations


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Of each head: a geometric sequence that ends at 1/256 for numbers of heads that are a power
    of 2; for others that of the next lower one, then every other term of that of the next higher
    one. Source: arXiv 2108.12409, section 3, and its reference code.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    between = [2.0 ** (-4 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return (*slopes, *between)

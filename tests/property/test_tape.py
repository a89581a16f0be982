"""A tape gives what its ops give one by one, whatever is fused, however memory is shared, and for
any number of rows.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import ops
from octavo.ops.native.array import NativeArray
from octavo.ops.native.backend import NativeBackend

BACKEND = NativeBackend()
BACKEND.choose("float32", {})
SIZES = (4, 6, 16, 40)
RNG = np.random.default_rng(5)
WEIGHTS = {
    (i, o): BACKEND.from_host(RNG.normal(size=(o, i)).astype(np.float32) / np.float32(i))
    for i in SIZES
    for o in SIZES
}
NORMS = {size: BACKEND.from_host(RNG.normal(size=size).astype(np.float32)) for size in SIZES}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["linear", "norm", "add", "scale", "silu", "gate", "half", "add linear"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=25,
)


def build(x: NativeArray, steps: list[tuple[str, int, int]]) -> tuple[NativeArray, ...]:
    """Ops on results picked by number; every result that nothing reads is an output."""
    made: list[NativeArray] = [x]
    unread = {0}

    def pick(number: int) -> NativeArray:
        index = number % len(made)
        unread.discard(index)
        return made[index]

    for kind, one, two in steps:
        source = pick(one)
        size = source.columns
        if kind == "linear":
            result = ops.linear(source, WEIGHTS[size, SIZES[two % len(SIZES)]])
        elif kind == "norm":
            result = ops.rms_norm(source, NORMS[size], 1e-5)
        elif kind == "scale":
            result = ops.scale(source, 0.5 + two % 3)
        elif kind == "silu":
            result = ops.silu(source)
        elif kind == "gate" and size // 2 in SIZES:
            result = ops.silu_mul(source)
        elif kind == "half" and size // 2 in SIZES:
            result = ops.split_columns(source, (size // 2, size // 2))[two % 2]
        else:
            equal = [i for i, array in enumerate(made) if array.columns == size]
            other = pick(equal[two % len(equal)])
            if kind == "add linear":
                other = ops.linear(other, WEIGHTS[size, size])
            result = ops.add(source, other) if one % 2 else ops.add(other, source)
        unread.add(len(made))
        made.append(result)
    return tuple(made[index] for index in sorted(unread))


@given(STEPS, st.lists(st.integers(1, 70), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_tape_equals_its_ops(steps: list[tuple[str, int, int]], counts: list[int]) -> None:
    replayed = BACKEND.compile(lambda x: build(x, steps))
    for count in counts:
        x = BACKEND.from_host(RNG.normal(size=(count, 40)).astype(np.float32))
        expected = [BACKEND.to_host(array) for array in build(x, steps)]
        results = [BACKEND.to_host(array) for array in replayed(x)]
        for result, one_by_one in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, one_by_one)

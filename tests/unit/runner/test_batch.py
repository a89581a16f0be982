from __future__ import annotations

import numpy as np
import pytest

from octavo.core.errors import InvariantError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledSequence, SlotBinding
from octavo.runner.batch import build_batch
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft

BLOCK_SIZE = 4


def binding(slot: int, token_ids: tuple[int, ...]) -> SlotBinding:
    return SlotBinding(slot, token_ids, len(token_ids), SamplingParams(), 1, frozenset(), ())


def scheduled(slot: int, start: int, num_tokens: int, samples: bool) -> ScheduledSequence:
    return ScheduledSequence(slot, start, num_tokens, (), samples)


@pytest.fixture
def slots() -> Slots:
    slots = Slots(max_num_seqs=4, max_model_len=18, block_size=BLOCK_SIZE)
    slots.bind(binding(2, tuple(range(100, 110))))
    slots.append_blocks(2, (7, 3, 9))
    slots.bind(binding(0, (50, 51, 52)))
    slots.append_blocks(0, (5,))
    return slots


def test_layout_of_a_mixed_batch(slots: Slots) -> None:
    batch = build_batch(slots, [scheduled(2, 3, 6, False), scheduled(0, 2, 1, True)], BLOCK_SIZE)
    host = batch.host
    assert host.token_ids.tolist() == [103, 104, 105, 106, 107, 108, 52]
    assert host.positions.tolist() == [3, 4, 5, 6, 7, 8, 2]
    blocks_and_offsets = [(7, 3), (3, 0), (3, 1), (3, 2), (3, 3), (9, 0), (5, 2)]
    assert host.kv_slots.tolist() == [b * BLOCK_SIZE + o for b, o in blocks_and_offsets]
    assert host.query_starts.tolist() == [0, 6, 7]
    assert host.context_lens.tolist() == [9, 3]
    assert host.block_tables.tolist() == [[7, 3, 9], [5, 0, 0]]
    assert batch.shape.sampling.tolist() == [1]
    assert batch.shape.row_starts.tolist() == [0]
    assert batch.shape.row_slots.tolist() == [0]
    assert batch.shape.rows.tolist() == [6]
    assert host.parents is None
    assert batch.shape.slots.tolist() == [2, 0]
    assert batch.starts.tolist() == [3, 2]
    for name in ("token_ids", "positions", "kv_slots"):
        assert getattr(host, name).dtype == np.int64
    for name in ("query_starts", "context_lens", "block_tables"):
        assert getattr(host, name).dtype == np.int32


def test_drafts_are_rows_behind_their_sequence(slots: Slots) -> None:
    slots.append_blocks(0, (6,))
    drafts = {0: Draft(np.array([91, 92, 93])), 2: Draft(np.array([94]))}
    sequences = [scheduled(0, 2, 1, True), scheduled(1, 0, 2, False), scheduled(2, 9, 1, True)]
    slots.bind(binding(1, (60, 61, 62)))
    slots.append_blocks(1, (8,))
    batch = build_batch(slots, sequences, BLOCK_SIZE, drafts)
    host, shape = batch.host, batch.shape
    assert host.token_ids.tolist() == [52, 91, 92, 93, 60, 61, 109, 94]
    assert host.positions.tolist() == [2, 3, 4, 5, 0, 1, 9, 10]
    places = [(5, 2), (5, 3), (6, 0), (6, 1), (8, 0), (8, 1), (9, 1), (9, 2)]
    assert host.kv_slots.tolist() == [b * BLOCK_SIZE + o for b, o in places]
    assert host.context_lens.tolist() == [6, 2, 11]
    assert host.query_starts.tolist() == [0, 4, 6, 8]
    assert shape.sampling.tolist() == [0, 2]
    assert shape.row_starts.tolist() == [0, 4]
    assert shape.rows.tolist() == [0, 1, 2, 3, 6, 7]
    assert shape.row_slots.tolist() == [0, 0, 0, 0, 2, 2]
    assert host.parents is None
    assert slots.lengths[[0, 2]].tolist() == [3, 10], "guesses are not known tokens"


def test_a_tree_has_the_positions_of_the_text(slots: Slots) -> None:
    slots.append_blocks(0, (6,))
    #   52 ┬ 91 ┬ 93
    #      │    └ 94
    #      └ 92 ─ 95
    tree = Draft(np.array([91, 92, 93, 94, 95]), np.array([-1, -1, 0, 0, 1]))
    sequences = [scheduled(2, 9, 1, True), scheduled(0, 2, 1, True)]
    host = build_batch(slots, sequences, BLOCK_SIZE, {1: tree}).host
    assert host.token_ids.tolist() == [109, 52, 91, 92, 93, 94, 95]
    assert host.positions.tolist() == [9, 2, 3, 3, 4, 4, 4]
    assert host.kv_slots.tolist()[1:] == [22, 23, 24, 25, 26, 27]
    assert host.parents is not None
    assert host.parents.dtype == np.int32
    assert host.parents.tolist()[2:] == [1, 1, 2, 2, 3]


def test_a_draft_needs_blocks(slots: Slots) -> None:
    draft = Draft(np.array([91, 92]))
    with pytest.raises(InvariantError, match="outside its blocks"):
        build_batch(slots, [scheduled(0, 2, 1, True)], BLOCK_SIZE, {0: draft})


def test_an_appended_token_is_the_next_steps_input(slots: Slots) -> None:
    slots.append_tokens(np.array([0, 2]), np.array([77, 78]))
    batch = build_batch(slots, [scheduled(0, 3, 1, True)], BLOCK_SIZE)
    assert batch.host.token_ids.tolist() == [77]
    assert slots.lengths[[0, 2]].tolist() == [4, 11]


def test_rebinding_forgets_tokens_and_blocks(slots: Slots) -> None:
    slots.bind(binding(2, (1, 2)))
    assert slots.block_tables[2].tolist() == [0] * 5
    slots.append_blocks(2, (4,))
    host = build_batch(slots, [scheduled(2, 0, 2, True)], BLOCK_SIZE).host
    assert host.token_ids.tolist() == [1, 2]
    assert host.block_tables.tolist() == [[4]]


def test_a_replaced_block_is_used(slots: Slots) -> None:
    slots.replace_block(2, 1, 8)
    host = build_batch(slots, [scheduled(2, 9, 1, True)], BLOCK_SIZE).host
    assert host.block_tables.tolist() == [[7, 8, 9]]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (scheduled(0, 2, 0, False), "slot 0 has no token to compute"),
        (scheduled(0, 2, 2, False), "not known"),
        (scheduled(1, 0, 1, False), "not known"),
        (scheduled(2, 0, 9, True), "to sample before its last known token"),
    ],
)
def test_impossible_schedules_are_named(
    slots: Slots, sequence: ScheduledSequence, message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        build_batch(slots, [sequence], BLOCK_SIZE)


def test_a_missing_block_is_named(slots: Slots) -> None:
    for token in (60, 61):
        slots.append_tokens(np.array([0]), np.array([token]))
    with pytest.raises(InvariantError, match=r"slot 0 has tokens outside its blocks: .* 1 blocks"):
        build_batch(slots, [scheduled(2, 9, 1, True), scheduled(0, 3, 2, True)], BLOCK_SIZE)


def test_slots_refuse_what_does_not_fit(slots: Slots) -> None:
    with pytest.raises(InvariantError, match="19 tokens, but max_model_len is 18"):
        slots.bind(binding(1, tuple(range(19))))
    with pytest.raises(InvariantError, match="slot 2: 6 blocks"):
        slots.append_blocks(2, (1, 2, 4))
    with pytest.raises(InvariantError, match="no block 1 to replace"):
        slots.replace_block(0, 1, 2)

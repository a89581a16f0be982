"""What a runner keeps of sequences from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.core.step import ScheduledStep
from octavo.ops import BatchContext, copy_blocks, move_kv
from octavo.ops.backend import Backend, KVShape
from octavo.ops.batch import HostBatch
from octavo.runner.batch import StepBatch, build_batch
from octavo.runner.slots import Slots
from octavo.runner.speculation import Draft


class RunnerState:
    """Slots, and keys and values in blocks. Every stage of a pipeline has the same slots, and the
    caches of its own layers.

    layers: of the model, or of the stage. further_layers: of what guesses; their blocks are the
    same. kv_factors: as in `Backend.allocate_kv`, of `layers` alone. Raises ConfigError if there is
    no memory for the KV cache.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[KVShape],
        further_layers: Sequence[KVShape] = (),
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat,
        kv_factors: Sequence[tuple[float, float]] | None,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._backend = backend
        self._block_size = block_size
        self._num_own_layers = len(layers)
        if kv_factors is not None:  # what guesses has none
            kv_factors = [*kv_factors, *[(1.0, 1.0)] * len(further_layers)]
        shapes = [*layers, *further_layers]
        self.kv_layers = backend.allocate_kv(num_blocks, block_size, shapes, kv_format, kv_factors)
        self.slots = Slots(max_num_seqs, max_model_len, block_size)

    def apply(self, step: ScheduledStep) -> None:
        """What comes before anything is computed: bindings, new blocks, copies of blocks."""
        for binding in step.bindings:
            self.slots.bind(binding)
        for sequence in step.sequences:
            if sequence.new_block_ids:
                self.slots.append_blocks(sequence.slot, sequence.new_block_ids)
        if step.block_copies:
            pairs = [(copy.source, copy.target) for copy in step.block_copies]
            for layer in self.kv_layers:
                copy_blocks(layer, pairs)
            for copy in step.block_copies:
                self.slots.replace_block(copy.slot, copy.index, copy.target)

    def batch(self, step: ScheduledStep, drafts: Mapping[int, Draft]) -> StepBatch:
        return build_batch(self.slots, step.sequences, self._block_size, drafts)

    def context(self, host: HostBatch) -> BatchContext:
        return self._backend.batch_context(host, self.kv_layers)

    def keep_paths(self, kv_slots: np.ndarray, paths: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Let what was accepted of trees be chains in the cache. kv_slots: of a step's batch.
        paths: the row of a tree's first guess, and which of its guesses were accepted.
        """
        moves = [
            (row + guess, row + place)
            for row, accepted in paths
            for place, guess in enumerate(accepted)
            if guess != place
        ]
        if moves:
            sources, targets = np.array(moves).T
            for layer in self.kv_layers[: self._num_own_layers]:
                move_kv(layer, kv_slots[sources], kv_slots[targets])


def first_guess(batch: StepBatch, index: int, draft: Draft) -> int:
    """The row of a sequence's first guess: its guesses are the last of its rows."""
    return int(batch.shape.query_starts[index + 1]) - len(draft.token_ids)

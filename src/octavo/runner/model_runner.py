"""Runs steps: slots → batch → model → logits → sampler."""

from __future__ import annotations

import numpy as np

from octavo.core.model_spec import KVFormat
from octavo.core.step import ScheduledStep, SequenceOutput, StepOutput, TokenLogprobs
from octavo.models.causal_lm import CausalLM
from octavo.ops import Array, BatchContext, copy_blocks, non_finite_rows, split_columns
from octavo.ops.backend import Backend
from octavo.runner.batch import StepBatch, build_batch
from octavo.runner.slots import Slots
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.sampler import Sampler, non_finite_error

# Bounds the logits of a long prompt: 256 rows of a vocabulary of 262144 are 256 MiB.
_PROMPT_LOGPROB_ROWS = 256


class ModelRunner:
    """Owns a model's KV cache and slots, and executes scheduled steps one after another."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """vocab_size: of the tokenizer. Logits of a model may be wider by padding, which is cut off
        before anything looks at them. Raises ConfigError if there is no memory for the KV cache.
        """
        self.num_blocks = num_blocks
        self._forward = backend.compile(model.forward)
        self._forward_and_head = backend.compile(self._hidden_and_logits)
        self._head = backend.compile(self._logits_of_vocabulary)
        self._model = model
        self._vocab_size = vocab_size
        self._backend = backend
        self._block_size = block_size
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in model.spec.layers]
        self._kv_layers = backend.allocate_kv(num_blocks, block_size, heads, kv_format)
        self._slots = Slots(max_num_seqs, max_model_len, block_size)
        self._sampler = Sampler(backend, max_num_seqs=max_num_seqs, vocab_size=vocab_size)

    def execute(self, step: ScheduledStep) -> StepOutput:
        """Compute one step. A sampled token becomes the slot's next known token, so the following
        step can be scheduled before this one's output is seen.
        """
        self._apply_changes(step)
        if not step.sequences:
            return StepOutput(step.step_id, [])
        batch = build_batch(self._slots, step.sequences, self._block_size)
        ctx = self._backend.batch_context(batch.host, self._kv_layers)
        outputs = [SequenceOutput(sequence.slot, ()) for sequence in step.sequences]
        if len(batch.shape.sampling):
            rows = self._backend.from_host(batch.shape.sampling_rows)
            hidden, logits = self._forward_and_head(ctx, rows)
            self._sample(logits, batch, outputs)
        else:
            hidden = self._forward(ctx)
        for index, sequence in enumerate(step.sequences):
            if self._slots.prompt_logprobs[sequence.slot] is not None:
                outputs[index] = self._with_prompt_logprobs(outputs[index], hidden, batch, index)
        return StepOutput(step.step_id, outputs)

    def _apply_changes(self, step: ScheduledStep) -> None:
        for binding in step.bindings:
            self._slots.bind(binding)
            self._sampler.bind(binding)
        for sequence in step.sequences:
            if sequence.new_block_ids:
                self._slots.append_blocks(sequence.slot, sequence.new_block_ids)
        if step.block_copies:
            pairs = [(copy.source, copy.target) for copy in step.block_copies]
            for layer in self._kv_layers:
                copy_blocks(layer, pairs)
            for copy in step.block_copies:
                self._slots.replace_block(copy.slot, copy.index, copy.target)

    def _sample(self, logits: Array, batch: StepBatch, outputs: list[SequenceOutput]) -> None:
        """Sample the sequences that do, from a row of logits each, and put what came out into
        `outputs`.
        """
        slots = batch.shape.sampling_slots
        sampled = self._sampler.sample(logits, slots, self._slots.lengths[slots])
        self._slots.append_tokens(slots, sampled.token_ids)
        token_ids = sampled.token_ids.tolist()
        for row, index in enumerate(batch.shape.sampling.tolist()):
            slot = outputs[index].slot
            if row in sampled.errors:
                outputs[index] = SequenceOutput(
                    slot, (), error=sampled.errors[row], is_refusal=row in sampled.refused
                )
            else:
                logprobs = (sampled.logprobs[row],) if row in sampled.logprobs else None
                outputs[index] = SequenceOutput(slot, (token_ids[row],), logprobs)

    def _with_prompt_logprobs(
        self, output: SequenceOutput, hidden: Array, batch: StepBatch, index: int
    ) -> SequenceOutput:
        """Add the log-probabilities of the prompt tokens that the sequence's chunk predicts."""
        slot = output.slot
        num_top = self._slots.prompt_logprobs[slot]
        start = int(batch.starts[index])
        end = min(int(batch.host.context_lens[index]), int(self._slots.num_prompt_tokens[slot]) - 1)
        if num_top is None or end <= start or output.error is not None:
            return output
        first_row = int(batch.host.query_starts[index])
        records: list[TokenLogprobs] = []
        # Position p's logits predict token p + 1.
        for position in range(start, end, _PROMPT_LOGPROB_ROWS):
            stop = min(position + _PROMPT_LOGPROB_ROWS, end)
            rows = np.arange(position, stop) - start + first_row
            logits = self._logits(hidden, rows)
            broken = np.flatnonzero(non_finite_rows(logits))
            if len(broken):
                error = non_finite_error(slot, position + int(broken[0]) + 1)
                return SequenceOutput(slot, (), error=error)
            tokens = self._slots.token_ids[slot, position + 1 : stop + 1]
            records += token_logprobs(logits, tokens, num_top)
        return output._replace(prompt_logprobs=tuple(records))

    def _logits(self, hidden: Array, rows: np.ndarray) -> Array:
        """Logits of the hidden states' `rows` (R,) int64 -> (R, V), V the tokenizer's."""
        return self._head(hidden, self._backend.from_host(rows))

    def _hidden_and_logits(self, ctx: BatchContext, rows: Array) -> tuple[Array, Array]:
        """A whole step as one function: one replay, where forwards are recorded."""
        hidden = self._model.forward(ctx)
        return hidden, self._logits_of_vocabulary(hidden, rows)

    def _logits_of_vocabulary(self, hidden: Array, rows: Array) -> Array:
        logits = self._model.logits(hidden, rows)
        padding = logits.shape[1] - self._vocab_size
        return split_columns(logits, (self._vocab_size, padding))[0] if padding else logits

"""transformers' `generate` as a server would call it: a batch of prompts at a time.

The batch is static. Shorter prompts are padded on their left, and a sequence that has ended keeps
its row until the longest one ends: what continuous batching does away with. Tokens are handed out
as they come and each sequence ends at its own length, which is kinder to the baseline than waiting
for the whole batch would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octavo import assembly
from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.core.request import FinishReason
from octavo.text.generation_config import eos_token_ids
from octavo.text.tokenizer import Tokenizer
from octavo.weights import Checkpoint

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
"""The types that it computes in."""


@dataclass(eq=False, slots=True, kw_only=True)
class Row:
    """A sequence of a batch. max_tokens, min_tokens: of output; the model's end tokens can't come
    before min_tokens. ignores_eos: they end nothing. on_token: for the server's use, not called
    here. num_tokens: generated so far. is_done: it has ended, or nobody waits for it any more.
    """

    prompt: Sequence[int]
    max_tokens: int
    on_token: Callable[[NewToken], None]
    min_tokens: int = 0
    ignores_eos: bool = False
    num_tokens: int = 0
    is_done: bool = False


class NewToken(NamedTuple):
    row: Row
    token_id: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class BatchCounts:
    """What the baseline did, in all. These have the meaning of Octavo's counters of the same names
    and are summed over steps, which are forwards: taken_slots, rows that were computed;
    scheduled_sequences, of these the ones that still generated; kv_capacity_tokens, positions in
    the cache; kv_tokens, of these the ones with a token of a sequence that still generates.

    padding_tokens: prompt positions that were computed for nothing. generate_seconds: inside of
    `generate`, of which handing_out_seconds went to handing tokens to the server.
    """

    batches: int = 0
    engine_steps: int = 0
    taken_slots: int = 0
    scheduled_sequences: int = 0
    kv_tokens: int = 0
    kv_capacity_tokens: int = 0
    prompt_tokens: int = 0
    padding_tokens: int = 0
    generation_tokens: int = 0
    generate_seconds: float = 0.0
    handing_out_seconds: float = 0.0


class HuggingFaceModel:
    """A causal language model of transformers with the weights that Octavo would serve.

    kv_bytes_per_token: of its cache, which holds keys and values in `dtype`.
    """

    def __init__(self, model: str, *, dtype: str = "float32", threads: int | None = None) -> None:
        """model: what `octavo serve` takes. Raises ConfigError."""
        try:
            import torch
        except ImportError as error:
            raise _missing(error) from None
        if threads is not None:
            torch.set_num_threads(threads)
        checkpoint = assembly.open_model(ModelConfig(model=model))
        text = assembly.load_text(ModelConfig(model=model), checkpoint)
        self.name = checkpoint.name
        self.tokenizer: Tokenizer = text.tokenizer
        self.vocab_size = assembly.vocab_size(checkpoint, text)
        self.eos_token_ids = eos_token_ids(checkpoint, text.tokenizer)
        spec = assembly.unloaded_model(checkpoint).spec
        self.max_model_len = spec.max_position
        self.kv_bytes_per_token = sum(
            2 * heads * size * VALUE_BYTES[dtype] for heads, size in spec.kv_heads
        )
        self._model = _load(checkpoint, dtype)

    def generate(
        self,
        rows: Sequence[Row],
        on_tokens: Callable[[list[NewToken]], None],
        counts: BatchCounts,
    ) -> None:
        """Continue all prompts greedily until each has its tokens, or is done.

        on_tokens: called after each step with the tokens of rows that still generate.
        """
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        width = max(len(row.prompt) for row in rows)
        input_ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[i, width - len(row.prompt) :] = 1
        counts.batches += 1
        num_prompt_tokens = sum(len(row.prompt) for row in rows)
        counts.prompt_tokens += num_prompt_tokens
        counts.padding_tokens += len(rows) * width - num_prompt_tokens

        def edit_logits(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """Ids beyond the tokenizer's never come, ends of text not before min_tokens."""
            logits[:, self.vocab_size :] = -torch.inf
            for i, row in enumerate(rows):
                if row.num_tokens < row.min_tokens and not row.ignores_eos:
                    logits[i, list(self.eos_token_ids)] = -torch.inf
            return logits

        def hand_out(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Called after each step: which rows are done."""
            begin = time.perf_counter()
            new = self._new_tokens(rows, ids[:, -1].tolist())
            counts.engine_steps += 1
            counts.taken_slots += len(rows)
            counts.scheduled_sequences += len(new)
            counts.kv_tokens += sum(len(t.row.prompt) + t.row.num_tokens - 1 for t in new)
            counts.kv_capacity_tokens += len(rows) * (ids.shape[1] - 1)
            counts.generation_tokens += len(new)
            on_tokens(new)
            counts.handing_out_seconds += time.perf_counter() - begin
            return torch.tensor([row.is_done for row in rows])

        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(row.max_tokens for row in rows),
                logits_processor=LogitsProcessorList([edit_logits]),
                stopping_criteria=StoppingCriteriaList([hand_out]),
            )
        counts.generate_seconds += time.perf_counter() - begin

    def _new_tokens(self, rows: Sequence[Row], token_ids: Sequence[int]) -> list[NewToken]:
        new = []
        for row, token_id in zip(rows, token_ids, strict=True):
            if row.is_done:
                continue
            row.num_tokens += 1
            reason = None
            if token_id in self.eos_token_ids and not row.ignores_eos:
                reason = FinishReason.STOP
            elif row.num_tokens == row.max_tokens:
                reason = FinishReason.LENGTH
            row.is_done = reason is not None
            new.append(NewToken(row, token_id, reason))
        return new


def _load(checkpoint: Checkpoint, dtype: str) -> Any:
    """transformers' model. Weights that are quantized come as the float32 values that they stand
    for.
    """
    import torch

    try:
        import transformers
    except ImportError as error:
        raise _missing(error) from None
    library: Any = transformers  # some of it has no types
    library.logging.set_verbosity_error()
    options = {"dtype": getattr(torch, dtype)}
    if checkpoint.path.is_dir():
        model = library.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, use_safetensors=True, **options
        )
    else:
        config = library.AutoConfig.for_model(**checkpoint.config)
        model = library.AutoModelForCausalLM.from_config(config, **options)
        weights = {
            name: torch.from_numpy(checkpoint.read(name).astype(np.float32, copy=False))
            for name in checkpoint.tensors
        }
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:  # which is tied
            raise ConfigError(
                f"transformers has other weights for {checkpoint.name}: it lacks {missing[:3]} "
                f"and does not know {unexpected[:3]}; compare on another model"
            )
    # What ends a sequence, and what may not come, is decided here, row by row.
    model.generation_config = library.GenerationConfig(pad_token_id=0)
    return model.eval()


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"hf-naive and hf-static need transformers and torch ({error}); "
        "pip install 'octavo[baselines]'"
    )

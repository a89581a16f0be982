"""The default model writes what transformers writes from the same dequantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.forward import Forward, load_model
from support.oracle import oracle_logits

if TYPE_CHECKING:
    from octavo.weights import Checkpoint

NUM_TOKENS = 32

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of motion are",
    "Water boils at",
    "Q: What is the largest planet?\nA:",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\n",
    "In the beginning",
    "The difference between a virus and a bacterium is that",
    "Ingredients: flour, butter,",
    "To be, or not to be,",
    "import numpy as np\n\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Il était une fois",
    "The printer folds the sheet three times, and the sheet becomes eight leaves, and the leaves"
    " become sixteen pages. The reader turns the pages one after the other; the writer",
    "a",
]


def transformers_model(checkpoint: Checkpoint) -> Any:
    """A LlamaForCausalLM filled with the arrays that Octavo reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    model.to_empty(device="cpu")
    state = {name: torch.tensor(checkpoint.read(name)) for name in checkpoint.tensors}
    model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def oracle_choices(model: Any, prompt: list[int], continuation: list[int]) -> list[int]:
    """What transformers finds likeliest after the prompt and after each further token.

    Equal to `continuation` exactly if that is its own greedy text: each choice is made after the
    same tokens. Takes one forward pass where generating takes NUM_TOKENS.
    """
    logits = oracle_logits(model, prompt + continuation[:-1])
    choices: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return choices


def greedy(forward: Forward, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one batch: prefill together, then decode together."""
    sequences = [forward.sequence(prompt, room=NUM_TOKENS) for prompt in prompts]
    for _ in range(NUM_TOKENS):
        work = [(s, len(s.tokens) - s.num_computed) for s in sequences]
        for sequence, logits in zip(sequences, forward.step(work), strict=True):
            sequence.tokens.append(int(logits[-1].argmax()))
    return [s.tokens[-NUM_TOKENS:] for s in sequences]


@pytest.mark.real
def test_greedy_text_equals_transformers(default_checkpoint: Checkpoint) -> None:
    from octavo.text.tokenizer import Tokenizer

    assets = default_checkpoint.text_assets()
    tokenizer = Tokenizer.from_assets(assets, default_checkpoint.config.get("vocab_size"))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts) == 20
    ours = greedy(Forward(load_model(default_checkpoint)), prompts)
    oracle = transformers_model(default_checkpoint)
    for prompt, tokens in zip(prompts, ours, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert tokens == oracle_choices(oracle, prompt, tokens)

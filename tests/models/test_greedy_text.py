"""Every family writes through the whole engine what transformers writes: the likeliest tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from support.checkpoints import EXPERT_FAMILIES, FAMILIES, VOCAB_SIZE, make_checkpoint
from support.oracle import load_oracle, oracle_logits

NUM_TOKENS = 16
# Shorter and longer than a block, and than the windows of families that have one.
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist() for length in (3, 21, 60)
]


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path)
    oracle = load_oracle(folder)
    llm = LLM(str(folder), backend="native", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    llm.shutdown()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(oracle_logits(oracle, tokens)[-1].argmax()))
        assert output.outputs[0].token_ids == tokens[len(prompt) :]

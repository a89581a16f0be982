"""The server that is measured, and what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Api = Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """base_url: with /v1, without a slash at the end. model: the name that requests carry. engine:
    octavo, vllm, sglang, tgi, llama.cpp, tensorrt-llm, or unknown. takes_token_ids: prompts may be
    lists of ids. forces_length: exact output lengths can be asked for. gives_usage: the last chunk
    counts tokens.
    """

    base_url: str
    model: str
    api: Api = "completions"
    engine: str = "unknown"
    headers: dict[str, str] = field(default_factory=dict)
    takes_token_ids: bool = True
    forces_length: bool = True
    gives_usage: bool = True
    max_model_len: int | None = None

"""The server that is measured, and what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """base_url: with /v1, without a slash at the end. model: the name that requests carry. engine:
    octavo, vllm, sglang, tgi, llama.cpp, tensorrt-llm, or unknown. headers: of each request, also
    the key. sampling: fields that each request's body carries. takes_token_ids: prompts may be
    lists of ids. length_fields: those of ignore_eos and min_tokens that the server takes, to ask
    for exact output lengths. gives_usage: the last chunk counts tokens, if asked to.
    tokens_per_chunk: of the stream that was tried.
    """

    base_url: str
    model: str
    api: Api = "completions"
    engine: str = "unknown"
    version: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    takes_token_ids: bool = True
    length_fields: tuple[str, ...] = ("ignore_eos", "min_tokens")
    gives_usage: bool = True
    max_model_len: int | None = None
    tokens_per_chunk: float | None = None

    @property
    def forces_length(self) -> bool:
        """Whether exact output lengths can be asked for."""
        return bool(self.length_fields)

    @property
    def path(self) -> str:
        """Of base_url, below the host."""
        return "/" + self.base_url.split("://", 1)[1].partition("/")[2]

    @property
    def root(self) -> str:
        """Where what is not under /v1 is, such as /metrics; empty unless behind a proxy's path."""
        return self.path.removesuffix("/v1")

"""Octavo: an LLM serving engine.

The offline API is here (`LLM`, `SamplingParams`, `RequestOutput`), loaded on first use so that
`import octavo` stays cheap; `octavo serve` starts the HTTP server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams
    from octavo.llm import LLM, CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "octavo.llm",
    "CompletionOutput": "octavo.llm",
    "Logprob": "octavo.llm",
    "RequestOutput": "octavo.llm",
    "SamplingParams": "octavo.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")

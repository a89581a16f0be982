"""What the baselines take of OpenAI's completions: what measuring needs, and nothing silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.bench.ab.hf_models import HuggingFaceModel
from octavo.core.errors import RequestError
from octavo.knob import nearest

_FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "temperature",
    "stream",
    "stream_options",
    "seed",  # changes nothing: the likeliest token is always taken
)


def read_request(body: bytes, model: HuggingFaceModel) -> dict[str, Any]:
    """The request's fields with defaults, the prompt as token ids. Raises RequestError."""
    fields = json_object(body)
    for name in fields:
        if name not in _FIELDS:
            raise RequestError(
                f"this baseline does not have the field {name!r}{nearest(name, list(_FIELDS))}; "
                "leave it out",
                param=name,
            )
    if fields.get("temperature") not in (None, 0):
        raise RequestError(
            f"temperature must be 0, got {fields['temperature']}: this baseline always takes the "
            "likeliest token",
            param="temperature",
        )
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        prompt = model.tokenizer.encode(prompt)
    ids = range(model.vocab_size)
    if not (
        isinstance(prompt, list) and prompt and all(type(i) is int and i in ids for i in prompt)
    ):
        raise RequestError(
            f"prompt must be a text or a list of token ids from 0 to {model.vocab_size - 1}",
            param="prompt",
        )
    max_tokens = _count(fields, "max_tokens", 16, low=1)
    if len(prompt) + max_tokens > model.max_model_len:
        raise RequestError(
            f"{len(prompt)} prompt tokens and {max_tokens} output tokens are more than the "
            f"{model.max_model_len} of the context; lower max_tokens",
            param="max_tokens",
        )
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": _count(fields, "min_tokens", 0, low=0),
        "ignore_eos": bool(fields.get("ignore_eos")),
        "stream": bool(fields.get("stream")),
        "stream_options": fields.get("stream_options") or {},
    }


def json_object(body: bytes) -> dict[str, Any]:
    """Raises RequestError."""
    try:
        value = json.loads(body)
    except ValueError:
        raise RequestError("the body must be JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _count(fields: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    value = default if fields.get(name) is None else fields[name]
    if type(value) is not int or value < low:
        raise RequestError(f"{name} must be a whole number from {low}, got {value!r}", param=name)
    return value

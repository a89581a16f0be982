"""`octavo generate`: continue one text with a model in this process."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.cli.sampling import Sampling
from octavo.config import Config, knobs

if TYPE_CHECKING:
    from octavo.llm import LLM

DEFAULT_MAX_TOKENS = 256


def generate(config: Config, prompt: str, sampling: Sampling, *, as_json: bool) -> None:
    """Print the continuation as it comes, or one JSON object at its end."""
    with loaded(config) as llm:
        defaults = replace(llm.get_default_sampling_params(), max_tokens=DEFAULT_MAX_TOKENS)
        pieces = llm.stream(prompt, sampling_params=replace(defaults, **sampling))
        if not as_json:
            for piece in pieces:
                print(piece.text, end="", flush=True)
            print()
            return
        shown = list(pieces)
        report = {
            "model": config.model.model,
            "prompt": prompt,
            "text": "".join(piece.text for piece in shown),
            "num_tokens": sum(piece.num_tokens for piece in shown),
            "finish_reason": shown[-1].finish_reason,
        }
        print(json.dumps(report, ensure_ascii=False))


@contextlib.contextmanager
def loaded(config: Config) -> Iterator[LLM]:
    """The model in this process, for as long as the block runs."""
    from octavo.llm import LLM

    values = config.to_flat()
    gc.disable()  # as `octavo serve` does
    try:
        llm = LLM(**{knob.name: values[knob.name] for knob in knobs() if knob.section != "server"})
    finally:
        gc.enable()
    try:
        yield llm
    finally:
        llm.shutdown()

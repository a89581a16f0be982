"""Engines to measure: a model in this process, as the user configured it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.assembly import EngineFacts
from octavo.config import Config, knobs
from octavo.llm import LLM


@contextmanager
def loaded(config: Config, **changes: Any) -> Iterator[LLM]:
    """The model, for as long as the block runs. changes: knobs that differ from `config`."""
    values = config.to_flat() | changes
    llm = LLM(**{knob.name: values[knob.name] for knob in knobs() if knob.section != "server"})
    try:
        yield llm
    finally:
        llm.shutdown()


def described(model: str, facts: EngineFacts) -> dict[str, str]:
    """What a figure belongs to: the model, the machine, the kernels, and what was decided."""
    decisions = {d.what: f"{d.value} ({d.reason})" for d in facts.decisions}
    by_name: dict[str, list[str]] = {}
    for op, name in sorted(facts.kernels.items()):
        by_name.setdefault(name, []).append(op)
    kernels = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in sorted(by_name.items()))
    return {"model": model, **decisions, "kernels": kernels, "fingerprint": facts.fingerprint}

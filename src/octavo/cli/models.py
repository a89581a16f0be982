"""`octavo models`: the families that can be built, and how each was verified."""

from __future__ import annotations

import json

from octavo.models.registry import families
from octavo.weights.gguf_architectures import GGUF_ARCHITECTURES

_BELOW = """
Tests compare the logits of tiny random checkpoints in float32, on both backends, within 2e-4.

Other decoders run as transformers' modules, with Octavo's attention and cache, on the torch backend
(pip install 'octavo[transformers]'). What can't be run so is refused at start, by name."""


def models(*, as_json: bool) -> None:
    """Print a line for each family."""
    gguf = {
        model_type: name
        for name, one in reversed(GGUF_ARCHITECTURES.items())
        for model_type in (one.model_type, *one.others)
    }
    rows: list[dict[str, str | None]] = [
        {
            "models": family.models,
            "architecture": family.architecture,
            "model_type": family.model_type,
            "gguf": gguf.get(family.model_type),
            "verified": f"logits of {family.oracle}",
        }
        for family in families()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    titles: dict[str, str | None] = {
        "models": "models",
        "architecture": "architecture",
        "gguf": "GGUF",
    }
    widths = {key: max(len(row[key] or "-") for row in rows) for key in titles}
    for row in [{**titles, "verified": "verified by"}, *rows]:
        cells = [f"{row[key] or '-':{width}}" for key, width in widths.items()]
        print("  ".join([*cells, row["verified"] or ""]))
    print(_BELOW)

"""What the planner knows that is no arithmetic: rules, engines, knobs."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def read_yaml(name: str) -> Any:
    """A file of this folder."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))

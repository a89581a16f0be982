"""What tests have a child process run: it imports this module, as it could not import a test's."""

from __future__ import annotations

import sys
from typing import Any

from octavo.engine.loop import EngineLoop
from support.engines import build_loop


def build_with_facts(make_facts: Any) -> tuple[EngineLoop, Any]:
    loop, _ = build_loop()
    return loop, make_facts()


def modules() -> list[str]:
    return list(sys.modules)


def warm_up() -> None:
    sys.modules["warmed up"] = sys

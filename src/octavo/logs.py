"""Where log records go."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: str) -> None:
    """Send Octavo's log records from `level` on, and warnings of its libraries, to stderr."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("octavo").setLevel(level.upper())

"""What each instruction set takes for each op on this machine: the choice is by measurement.

Measured once for a processor and a build, in 0.3 s, and kept in the cache folder: a start reads it
in 0.2 ms, and starts agree on their choices. The width of registers doesn't tell: some processors
slow down under wide ones, some split them in two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import octavo
from octavo import machine
from octavo.ops.native import _native
from octavo.ops.native.ops import ISAS, TESTED
from octavo.ops.op import OPS

logger = logging.getLogger("octavo")


@functools.cache
def op_seconds() -> Mapping[str, Mapping[str, float]]:
    """By op and instruction set, of those that run here and that tests have run; empty if there
    are no two. Always the same within a process.
    """
    isas = [name for name, problem in ISAS.items() if not problem and TESTED[name]]
    if len(isas) < 2:
        return {}
    path = _path(isas)
    known = None if path is None else _read(path, isas)
    if known is not None:
        return known
    from octavo.ops.native.kernel_cases import measure  # only now: most starts don't need it

    start = time.perf_counter()
    seconds = measure(isas)
    logger.info("measured the kernels' speed in %.0f ms", 1e3 * (time.perf_counter() - start))
    if path is not None:
        _write(path, seconds)
    return seconds


def ops_with_kernels() -> list[str]:
    """Ops that instruction sets compute each in its own way."""
    return [
        op.name
        for op in OPS.values()
        if len({one.name for one in op.implementations if one.backend == "native"}) > 1
    ]


# --- what is kept ------------------------------------------------------------------------------


def _path(isas: Sequence[str]) -> Path | None:
    """Where the times of this processor and this build are kept; None for nowhere."""
    try:
        folder = machine.cache_root() / "kernels"
    except RuntimeError as error:  # a user without a home
        logger.info("the kernels' speed is not kept (%s): set OCTAVO_CACHE_ROOT", error)
        return None
    build = os.stat(_native.__file__)
    facts = [octavo.__version__, build.st_size, build.st_mtime_ns, machine.processor(), isas]
    return folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"


def _read(path: Path, isas: Sequence[str]) -> dict[str, dict[str, float]] | None:
    """None for a file that isn't there or isn't whole."""
    try:
        seconds = json.loads(path.read_bytes())
        known = {op: {isa: float(seconds[op][isa]) for isa in isas} for op in ops_with_kernels()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return known if all(0 < s < math.inf for one in known.values() for s in one.values()) else None


def _write(path: Path, seconds: Mapping[str, Mapping[str, float]]) -> None:
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(seconds), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        logger.info("the kernels' speed can't be kept in %s (%s)", path.parent, error.strerror)
        with contextlib.suppress(OSError):
            unfinished.unlink()

"""Time, injected: the engine never asks the machine for it, so that a simulator can move it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since an arbitrary origin, never falling."""

# CLOCK_MONOTONIC is one clock for all processes of a machine: the API process and the engine
# process may subtract each other's readings.
monotonic: Clock = time.monotonic

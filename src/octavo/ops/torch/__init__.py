"""The torch backend; nothing outside this package imports torch."""

from __future__ import annotations

import os

# Before torch loads its OpenMP library. Worker threads that spin while they wait starve on cores
# that anything else uses too (the API process, a client): 16 sequences a step, 2 cores, another
# busy process: 376 ms a step spinning, 87 ms sleeping; on idle cores 78 ms and about 85.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

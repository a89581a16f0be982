"""These tests are collected only where there is an NVIDIA GPU."""

from __future__ import annotations

import shutil

collect_ignore_glob = [] if shutil.which("nvidia-smi") else ["test_*.py"]

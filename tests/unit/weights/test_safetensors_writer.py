from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

from octavo.weights.safetensors_file import SafetensorsFile
from octavo.weights.safetensors_writer import write_safetensors


def test_the_library_and_octavo_read_what_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "bytes": np.arange(3, dtype=np.uint8),
        "half": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "ids": np.arange(7, dtype=np.int64),
        "transposed": rng.standard_normal((2, 3)).astype(np.float32).T,
        "empty": np.zeros((0, 4), np.float16),
    }
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    ours = SafetensorsFile(path)
    with safe_open(path, "numpy") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert sorted(theirs.keys()) == sorted(tensors)
        for name, array in tensors.items():
            np.testing.assert_array_equal(ours.read(name), array)
            if array.dtype != ml_dtypes.bfloat16:  # which numpy has not
                np.testing.assert_array_equal(theirs.get_tensor(name), array)

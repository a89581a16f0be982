"""A folder that is complete or isn't there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from octavo.compression.new_folder import new_folder


@pytest.mark.parametrize("was_there", [False, True])
def test_sigterm_leaves_the_folder_as_it_was(tmp_path: Path, was_there: bool) -> None:
    out = tmp_path / "out"
    if was_there:
        out.mkdir()

    def write() -> None:
        with new_folder(out):
            (out / "model.safetensors").write_text("a part")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        write()
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == ([out] if was_there else [])
    assert not was_there or not any(out.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

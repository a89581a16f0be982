"""Trained heads that come with Octavo, each in a folder TARGET-METHOD. `octavo draft train` made
them; their config.json says of what, and how often their guesses were accepted.
"""

from __future__ import annotations

from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.speculative.registry import Options, Target

_FOLDER = Path(__file__).parent


def head_name(options: Options, target: Target) -> str:
    """The folder or hub id of a head: what "model" says, else the one that comes with Octavo for
    this target. Raises ConfigError if there is neither.
    """
    if (given := options.text("model")) is not None:
        return given
    name = target.checkpoint.name
    folder = _FOLDER / f"{name}-{options.method}".lower()
    if folder.is_dir():
        return str(folder)
    raise ConfigError(
        f"--speculative-config: no head of method {options.method} comes with Octavo for {name}; "
        f'name one as "model", a folder or hub id, or train one (octavo draft train --help)'
    )

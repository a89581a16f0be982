"""The page of all settings: `python -m octavo.cli.docs > docs/configuration.md`."""

from __future__ import annotations

from itertools import groupby

from octavo.cli.settings import default_text, value_name
from octavo.config import Config, knobs
from octavo.knob import Knob

_INTRODUCTION = """\
# Configuration

<!-- Made from src/octavo/config.py by `make docs`; edit there. -->

Each setting is a flag of `octavo serve` (`--max-num-seqs 64`), an environment variable
(`OCTAVO_MAX_NUM_SEQS=64`), a line of a YAML file that `--config` names (`max-num-seqs: 64`) and a
keyword of `LLM(max_num_seqs=64)`. A flag wins over the environment, the environment over the file,
the file over the default. Dashes and underscores are the same. An unknown flag, or an unknown line
of the file, is an error that names the nearest setting, or what there is instead of a setting of
vLLM or llama.cpp. A key that the file has twice is an error, too. The settings of the HTTP server
are for `octavo serve` alone.

Switches are `--access-log` or `--no-access-log`, and `true` or `false` elsewhere. Numbers may end
in `k`, `m`, `g`, `t` (powers of 1000) or `K`, `M`, `G`, `T` (powers of 1024). Lists are separated
by commas, or the flag is repeated. A variable that is empty counts as unset.

Two variables are no settings. `OCTAVO_CONFIG` names the file where `--config` doesn't.
`OCTAVO_CACHE_ROOT` is the folder that keeps the default model, in `models/`, and the native
backend's packed weights, in `weights/` (up to 20 GiB, remade if removed); it is `octavo` in
`XDG_CACHE_HOME`, or `~/.cache/octavo`, unless set. pip fetches that model, so that pip's own
variables (`PIP_INDEX_URL`, `PIP_FIND_LINKS`, `PIP_PROXY`, ...) and its configuration hold for it.
"""


def configuration_page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    for section, specs in groupby(knobs(), key=lambda spec: spec.section):
        title = type(getattr(Config(), section)).__doc__ or section
        parts.append(f"## {title.strip().rstrip('.')}\n")
        parts.append("| flag | value | default | meaning |\n|---|---|---|---|")
        parts.extend(_row(spec) for spec in specs)
        parts.append("")
    return "\n".join(parts)


def _row(spec: Knob) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (spec.flag, *(f"--{a}" for a in spec.aliases)))
    value = "switch" if spec.kind is bool else f"{_cell(value_name(spec))}{_range(spec)}"
    default = default_text(spec)
    shown_default = f"`{_cell(default)}`" if default else ""
    return f"| {flags} | {value} | {shown_default} | {_cell(spec.doc)} |"


def _range(spec: Knob) -> str:
    if spec.low is not None and spec.high is not None:
        return f" ({spec.low:g} to {spec.high:g})"
    return "" if spec.low is None else f" (at least {spec.low:g})"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(configuration_page(), end="")

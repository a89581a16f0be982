"""From flags, environment and a YAML file to one `Config`.

The command line's flags are not written down anywhere: `takes_knobs` derives them from `config.py`.
A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from octavo.knob import Knob, instead_of

ENV_PREFIX = "OCTAVO_"
# Read by the command line (`--config`) and by the download of the default model.
OTHER_VARIABLES = frozenset({"OCTAVO_CONFIG", "OCTAVO_CACHE_ROOT"})
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", list: "TEXT,...", dict: "JSON"}

Flags = dict[str, Any]
"""What was given on the command line: knob name to raw value, and `config`, the file's path."""


def load_config(
    flags: Mapping[str, Any],
    *,
    model: str | None = None,
    environ: Mapping[str, str] = os.environ,
    warn: Callable[[str], None] = lambda message: None,
) -> Config:
    """All four sources merged and checked. model: the positional argument, if it was given.

    warn: called with a line about variables that look like settings and are none. Raises
    ConfigError that names the setting and, unless it was a flag, where it came from.
    """
    flags = dict(flags)
    file = flags.pop("config", None)
    if model is not None:
        if flags.get("model") not in (None, model):
            raise ConfigError(
                f"two models are given, {model!r} and --model {flags['model']!r}; leave one out"
            )
        flags["model"] = model
    values: dict[str, Any] = {}
    if file is not None:
        from octavo.cli.config_file import read_config_file

        values |= _checked(read_config_file(Path(file)).items(), source=f" (in {file})")
    values |= _checked(_from_environment(environ, warn), source=" (from the environment)")
    texts = ((k, ",".join(v) if isinstance(v, list) else v) for k, v in flags.items())
    values |= _checked(texts, source="")
    return Config.from_flat(values)


def _from_environment(
    environ: Mapping[str, str], warn: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    unknown = []
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        spec = _by_spelling().get(variable.removeprefix(ENV_PREFIX).lower())
        if spec is None:
            unknown.append(variable)
        elif text:
            yield spec.name, text
        elif spec.secret:
            # Empty means unset for the others; here that would quietly open the server.
            raise ConfigError(f"{variable} is empty; give it a value or unset it")
    if unknown:
        # Not an error: Kubernetes sets such names for a service that is called octavo.
        warn(f"not settings of Octavo, ignored: {', '.join(sorted(unknown))}")


def _checked(values: Iterable[tuple[str, Any]], source: str) -> dict[str, Any]:
    """Values of one source under their knobs' names. A text for a list is split at commas."""
    known = _by_spelling()
    checked: dict[str, Any] = {}
    for spelling, value in values:
        spec = known.get(spelling.replace("-", "_"))
        if spec is None:
            flags = [k.replace("_", "-") for k in known]
            there_is = instead_of(spelling.replace("_", "-"), flags)
            raise ConfigError(f"unknown setting {spelling!r}{source}{there_is}")
        if spec.name in checked:
            raise ConfigError(f"{spec.flag} is given twice{source}")
        if spec.kind is list and isinstance(value, str):
            value = value.split(",")
        try:
            checked[spec.name] = spec.check(value)
        except ConfigError as error:
            raise ConfigError(f"{error}{source}") from None
        if spec.kind is list and "" in checked[spec.name]:
            raise ConfigError(f"{spec.flag} has an empty item{source}. {spec.doc}")
    return checked


def _by_spelling() -> dict[str, Knob]:
    """Knobs by name and by alias, with underscores."""
    return {
        spelling.replace("-", "_"): spec
        for spec in knobs()
        for spelling in (spec.name, *spec.aliases)
    }


def takes_knobs(
    *sections: str, without: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb one flag per knob of these sections, and `--config`; its parameter `flags` gets
    what was given. A parameter of the verb that has a knob's name takes the place of that flag.

    without: names of knobs that do nothing there; environment and file may still set them.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        taken = {*inspect.signature(verb).parameters, *without}
        options = [
            option
            for section in sections
            for option in _options(section)
            if option.name not in taken
        ]
        return collect_options(verb, [_config_option(), *options], into="flags")

    return decorate


def collect_options(
    verb: Callable[..., None], options: list[inspect.Parameter], *, into: str
) -> Callable[..., None]:
    """The verb with its parameter `into` replaced by `options`, as typer sees it; when called, the
    verb gets a dictionary of those that were given.
    """
    hints = get_type_hints(verb, include_extras=True)
    own = [
        p.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in inspect.signature(verb).parameters.items()
        if name != into
    ]

    def command(**values: Any) -> None:
        given = {p.name: values.pop(p.name) for p in options}
        values[into] = {name: value for name, value in given.items() if value not in (None, [])}
        verb(**values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in own + options}
    return command


@cache
def _options(section: str) -> tuple[inspect.Parameter, ...]:
    return tuple(_option(spec) for spec in knobs() if spec.section == section)


def _option(spec: Knob) -> inspect.Parameter:
    """The flag of a knob. It takes text whatever the kind: `Knob.check` reads all sources alike."""
    names = (spec.flag, *(f"--{alias}" for alias in spec.aliases))
    kind: Any = str
    if spec.kind is bool:
        kind, names = bool, tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
    elif spec.kind is list:
        kind = list[str]
    option = typer.Option(
        *names,
        metavar=None if spec.kind is bool else value_name(spec),
        help=f"{spec.doc} {_details(spec)}",
        show_default=False,
        rich_help_panel=spec.section.capitalize(),
    )
    return optional(spec.name, kind, option)


def _config_option() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        metavar="FILE",
        envvar="OCTAVO_CONFIG",
        show_envvar=True,
        help="YAML file of settings: flag names without `--`.",
    )
    return optional("config", str, option)


def optional(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """A parameter that is None unless the option is given."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def value_name(spec: Knob) -> str:
    """What stands for the value in help: its choices, its unit or its kind."""
    return "|".join(spec.choices) or spec.unit.upper() or _METAVARS[spec.kind]


def default_text(spec: Knob) -> str:
    """The default as a user would write it; empty where there is none."""
    if spec.default in (None, "", [], {}):
        return ""
    return str(spec.default).lower() if spec.kind is bool else str(spec.default)


def _details(spec: Knob) -> str:
    default = default_text(spec)
    return f"[default: {default}; env: {spec.env}]" if default else f"[env: {spec.env}]"

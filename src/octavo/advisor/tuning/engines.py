"""Engines whose knobs can be tuned: Octavo, and others by a template of their flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import yaml

from octavo.advisor.tuning.space import DEFAULT, Dimension, Space
from octavo.bench.ab.knobs import value_flags
from octavo.bench.launch import Arm, parse_arm
from octavo.config import knobs
from octavo.core.errors import ConfigError
from octavo.knob import instead_of

LIVE = ("max_num_seqs", "max_num_batched_tokens")
"""Octavo's knobs that a running server takes: see server/limits.py."""

_ALIASES = {"trtllm": "tensorrt-llm"}
"""Other names of templates."""

FLAGS, MODEL, PORT = "{flags}", "{model}", "{port}"
_OFF = "off"
_ADJUST_S = 30.0


@dataclass(frozen=True)
class OctavoEngine:
    """`octavo serve` with flags. flags: what the user set, by knob, as a command line has it; under
    "config" the path of a file. recording: where the first server that is started writes its steps.
    api_key: that this file lets clients in with.
    """

    model: str | None
    flags: Mapping[str, Any] = field(default_factory=dict)
    name: str = "octavo"
    recording: Path | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def live_knobs(self) -> tuple[str, ...]:
        return LIVE

    def arm(self, changes: Mapping[str, Any]) -> Arm:
        words = ["octavo", *([self.model] if self.model else [])]
        known = {knob.name: knob for knob in knobs()}
        for name, value in self.flags.items():
            text = ",".join(value) if isinstance(value, list) else str(value)
            words += ["--config", text] if name == "config" else value_flags(known[name], text)
        for name, value in changes.items():
            words += value_flags(known[name], str(value))
        if self.recording is not None and not self.recording.exists():
            words += ["--record-steps", str(self.recording)]
        return parse_arm(shlex.join(words))

    def adjustable_arm(self, changes: Mapping[str, Any]) -> Arm:
        return self.arm(changes).with_flags("--enable-live-limits", name=self.name)

    def adjust(self, url: str, changes: Mapping[str, Any]) -> bool:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            reply = httpx.post(
                f"{url}/limits",
                json=dict(changes),
                headers=key,
                timeout=_ADJUST_S,
                trust_env=False,
            )
        except httpx.HTTPError:  # it has died since the last play: a new one is started
            return False
        return reply.is_success

    def recording_to(self, path: Path) -> OctavoEngine:
        return replace(self, recording=path)


@dataclass(frozen=True)
class TemplateEngine:
    """Another engine. command: with {port}, and {flags} where they go (else at the end). url,
    restart: in its place, of a server elsewhere, and the command with {flags} that starts it again.
    choices: of each knob, the flags of each value by its name. has_config: a YAML file of flags can
    be given to it with --config.
    """

    name: str
    command: str = ""
    url: str = ""
    restart: str = ""
    choices: Mapping[str, Mapping[Any, tuple[str, ...]]] = field(default_factory=dict)
    has_config: bool = False

    @property
    def api_key(self) -> None:
        """Keys are in the command, and not known."""
        return None

    @property
    def live_knobs(self) -> tuple[str, ...]:
        return ()

    @property
    def space(self) -> Space:
        """Each knob's default is to leave its flag out: the engine's own."""
        return Space(
            tuple(
                Dimension(name, (DEFAULT, *values), is_ordered=_are_numbers(values))
                for name, values in self.choices.items()
            )
        )

    def arm(self, changes: Mapping[str, Any]) -> Arm:
        if self.url:
            restart = tuple(_filled(self.restart, self.flags(changes)))
            return Arm(self.name, self.url, url=self.url, restart=restart)
        return parse_arm(f"{self.name}={shlex.join(_filled(self.command, self.flags(changes)))}")

    def adjustable_arm(self, changes: Mapping[str, Any]) -> Arm:
        return self.arm(changes)

    def adjust(self, url: str, changes: Mapping[str, Any]) -> bool:
        """Nothing is known of how."""
        return False

    def flags(self, changes: Mapping[str, Any]) -> list[str]:
        return [word for name, value in changes.items() for word in self.choices[name][value]]


def engine_named(target: str, *, model: str | None, asked: Sequence[str]) -> TemplateEngine:
    """From --target: the name of a template that comes with Octavo, a template's .yaml file, or a
    command with {port} in it. asked: --knob's NAME or NAME=VALUE,VALUE: those of the template with
    these values, or flags that it doesn't know.

    Raises ConfigError, for the address of a server as well: a template says how to restart it.
    """
    if target.startswith(("http://", "https://")):
        raise ConfigError(
            f"--target {target}: the server must be started again for each setting. Write a YAML "
            "file with `url:`, `restart:` (a command with {flags} in it) and `knobs:`, and give "
            "that as --target"
        )
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--target {target} can't be read: {error}") from None
        template = _template(path.stem, content, source=target)
    elif (name := _ALIASES.get(target, target)) in _templates():
        template = _templates()[name]
    elif PORT in target:
        try:
            program = Path(shlex.split(target)[0]).name
        except ValueError as error:
            raise ConfigError(f"--target {target!r}: {error}; check its quotes") from None
        known = _templates().get(program)
        choices = known.choices if known is not None else {}
        template = TemplateEngine(program, command=target, choices=choices)
    else:
        raise ConfigError(
            f"--target {target!r} is neither a template ({', '.join(_templates())}), nor a .yaml "
            "file, nor a command with {port} in it"
        )
    return _asked_for(_with_model(template, model), asked)


def template_names() -> tuple[str, ...]:
    return tuple(_templates())


@cache
def _templates() -> dict[str, TemplateEngine]:
    text = files(__package__).joinpath("engines.yaml").read_text(encoding="utf-8")
    return {
        name: _template(name, content, source="engines.yaml")
        for name, content in yaml.safe_load(text).items()
    }


def _template(name: str, content: Any, *, source: str) -> TemplateEngine:
    """Raises ConfigError."""
    known = {"command", "url", "restart", "knobs", "has_config", "source", "checked"}
    if not isinstance(content, dict) or not isinstance(content.get("knobs"), dict):
        raise ConfigError(f"{source} must be a mapping with `knobs:`, by name")
    for key in content:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}{instead_of(str(key), list(known))}")
    has_command, has_url = "command" in content, {"url", "restart"} <= content.keys()
    if has_command == has_url:
        raise ConfigError(
            f"{source} needs either `command:`, with {{port}} in it, or `url:` and `restart:`"
        )
    return TemplateEngine(
        name,
        command=str(content.get("command", "")),
        url=str(content.get("url", "")).rstrip("/"),
        restart=str(content.get("restart", "")),
        choices={
            str(flag): _choices(str(flag), values, source)
            for flag, values in content["knobs"].items()
        },
        has_config=bool(content.get("has_config", False)),
    )


def _choices(flag: str, values: Any, source: str) -> dict[Any, tuple[str, ...]]:
    """Of a list, each value follows the flag; of a mapping, each name has its own flags."""
    if isinstance(values, list):
        return {value: (_dashed(flag), str(value)) for value in values}
    if isinstance(values, dict):
        return {
            _OFF if name is False else name: tuple(shlex.split(str(text)))
            for name, text in values.items()
        }
    raise ConfigError(f"{source}: knob {flag} needs a list of values, or their flags by name")


def _dashed(flag: str) -> str:
    return flag if flag.startswith("-") else f"--{flag}"


def _with_model(template: TemplateEngine, model: str | None) -> TemplateEngine:
    if MODEL not in template.command:
        return template
    if model is None:
        raise ConfigError(f"--target {template.name} needs a MODEL: give one in front")
    return replace(template, command=template.command.replace(MODEL, shlex.quote(model)))


def _asked_for(template: TemplateEngine, asked: Sequence[str]) -> TemplateEngine:
    choices: dict[str, Mapping[Any, tuple[str, ...]]] = {}
    for text in asked:
        name, separator, values = text.partition("=")
        known = {key: key for key in template.choices} | {
            key.lstrip("-").replace("-", "_"): key for key in template.choices
        }
        key = known.get(name.strip().lstrip("-").replace("-", "_"), name.strip())
        if name == "default" and not separator:
            choices |= template.choices
        elif separator:
            choices[key] = _choices(key, [_plain(v) for v in values.split(",")], "--knob")
        elif key in template.choices:
            choices[key] = template.choices[key]
        else:
            raise ConfigError(
                f"--knob {name} needs values, as in {name}=VALUE,VALUE: the template of "
                f"{template.name} has none for it"
            )
    choices = choices or dict(template.choices)
    if not choices:
        raise ConfigError(
            f"nothing is known of the knobs of {template.name!r}: name some with --knob "
            "FLAG=VALUE,VALUE"
        )
    return replace(template, choices=choices)


def _plain(text: str) -> Any:
    """A number where it is one."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _are_numbers(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _filled(command: str, flags: Sequence[str]) -> list[str]:
    words = shlex.split(command)
    if FLAGS not in words:
        return [*words, *flags]
    place = words.index(FLAGS)
    return [*words[:place], *flags, *words[place + 1 :]]

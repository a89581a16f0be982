"""What a Ray Serve application of Octavo is made of, and the file that says it.

The file is Ray Serve's own kind: `octavo deploy ray` runs it, and so do `serve deploy` and KubeRay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import yaml

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from octavo.knob import Knob

IMPORT_PATH = "octavo.deploy.ray_serve:application"
_HEADER = """\
# Written by `octavo deploy ray`, for Ray Serve. Keep it under version control; what is in it can be
# changed. `octavo deploy ray --file FILE` with other flags doesn't overwrite it.
# `serve deploy FILE` puts it onto a running cluster, on whose nodes Octavo must be installed.
# Secrets (OCTAVO_API_KEY, OCTAVO_HF_TOKEN, ...) are read from the environment of Ray's nodes.
"""
_ELSEWHERE = {
    "host": "Ray's proxies listen",
    "port": "Ray's proxies listen",
    "nnodes": "Ray knows the machines",
    "node_rank": "Ray knows the machines",
    "master_addr": "Ray knows the machines",
    "master_port": "Ray knows the machines",
    "data_parallel_size": "--max-replicas is how many there may be",
    "record_steps": "all replicas of a machine would write to one file",
}
"""Settings that a replica has no use for, and why."""
_END_SECONDS = 15
"""A replica's end, beyond the requests that run: see server/run.py."""


@dataclass(frozen=True, kw_only=True)
class RayApplication:
    """settings: Octavo's, of each replica, by the names that `--config` files have.

    requests_per_replica: that run or wait, beyond which replicas are added; also the KV caches'
    fill counts (`scaling.py`).
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    min_replicas: int = 1
    max_replicas: int = 1
    requests_per_replica: int = 128
    cpus_per_replica: float = 1
    gpus_per_replica: float = 0

    def __post_init__(self) -> None:
        for name in ("min_replicas", "max_replicas", "requests_per_replica"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ConfigError(f"{name} must be a whole number from 1, got {value!r}")
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}"
            )
        for name in ("cpus_per_replica", "gpus_per_replica"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a number from 0, got {value!r}")
        self.replica_config({})  # a mistake in the settings is told before anything is started

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> RayApplication:
        """Of the file's `args`. Raises ConfigError."""
        if unknown := args.keys() - {f.name for f in fields(cls)}:
            raise ConfigError(f"unknown args of the application: {', '.join(sorted(unknown))}")
        return cls(**args)

    def replica_config(self, environ: Mapping[str, str]) -> Config:
        """One replica's configuration; its secrets come from `environ`. Raises ConfigError."""
        values = {name.replace("-", "_"): value for name, value in self.settings.items()}
        for name, reason in _ELSEWHERE.items():
            if values.get(name, _default(name)) != _default(name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is not for replicas under Ray: {reason}")
        for spec in _secrets():
            if spec.name in values:
                raise ConfigError(
                    f"{spec.flag} is a secret and would be written into the file; set {spec.env} "
                    "where Ray's nodes run instead"
                )
            if text := environ.get(spec.env):
                values[spec.name] = text.split(",") if spec.kind is list else text
        return Config.from_flat(values)

    @property
    def max_ongoing_requests(self) -> int:
        """Of a replica: a quarter more than run at once, so that the next ones are there when some
        end. The rest waits at the gateway, from where a new replica can take it.
        """
        return math.ceil(self.replica_config({}).scheduler.max_num_seqs * 1.25)

    @property
    def drain_seconds(self) -> float:
        """That a replica may take to end."""
        return self.replica_config({}).server.shutdown_timeout + _END_SECONDS

    def to_yaml(self, *, name: str, host: str, port: int) -> str:
        """The file. Raises ConfigError."""
        if port == 0:
            raise ConfigError("--port 0: Ray's proxies need one that is the same on all nodes")
        content = {
            "proxy_location": "EveryNode",
            "http_options": {"host": host, "port": port},
            "applications": [
                {
                    "name": name,
                    "route_prefix": "/",
                    "import_path": IMPORT_PATH,
                    "args": {**asdict(self), "settings": dict(self.settings)},
                }
            ],
        }
        return _HEADER + yaml.safe_dump(content, sort_keys=False)


@dataclass(frozen=True)
class ServeFile:
    """What `octavo deploy ray` runs of a file."""

    name: str
    route_prefix: str
    http_options: Mapping[str, Any]
    proxy_location: str
    application: RayApplication


def read_serve_file(text: str, where: str) -> ServeFile:
    """Raises ConfigError for what isn't there, and for what only Ray's own tools understand."""
    try:
        content = yaml.safe_load(text)
        [one] = content["applications"]
        if one["import_path"] != IMPORT_PATH:
            raise ConfigError(f"{where} is not Octavo's: its import_path is {one['import_path']}")
        args = one.get("args", {})
        known = {"name", "route_prefix", "import_path", "args"}
        others = [*(one.keys() - known), *(content.keys() - _TOP_KEYS)]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"{where} is no file of Ray Serve with one application; --dry-run shows what one is "
            "like"
        ) from None
    if others:
        raise ConfigError(f"{where} has {', '.join(sorted(others))}: run it with `serve deploy`")
    return ServeFile(
        name=one.get("name", "octavo"),
        route_prefix=one.get("route_prefix", "/"),
        http_options=content.get("http_options", {}),
        proxy_location=content.get("proxy_location", "EveryNode"),
        application=RayApplication.from_args(args),
    )


_TOP_KEYS = {"proxy_location", "http_options", "applications"}


def settings_of(config: Config) -> dict[str, Any]:
    """What is to be written down of a configuration: what differs from the defaults, without
    secrets and without what Ray decides.
    """
    left_out = {"host", "port", *(spec.name for spec in _secrets())}
    values = config.to_flat()
    return {
        spec.name.replace("_", "-"): value
        for spec in knobs()
        if spec.name not in left_out
        and ((value := values[spec.name]) != spec.default or spec.name == "model")
    }


def _secrets() -> list[Knob]:
    return [spec for spec in knobs() if spec.secret]


def _default(name: str) -> Any:
    return next(spec.default for spec in knobs() if spec.name == name)

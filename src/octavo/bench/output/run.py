"""A run as run.json has it: what was measured, where, how, and what came out.

The schema (docs/run.schema.json, made by `make docs`) is derived from these classes; so is the
reading of the file.
"""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit, urlunsplit

import octavo
from octavo import machine
from octavo.bench.capacity import Capacity
from octavo.bench.curves import Ceiling, Finding, Knee, ScalabilityFit
from octavo.bench.load.plan import PointRun
from octavo.bench.load.target import Target
from octavo.bench.points import Check, CheckStatus, Point
from octavo.bench.window import steady_window
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

AnyFinding = Ceiling | Knee | ScalabilityFit | Capacity | Finding

SCHEMA_VERSION = 1
"""Goes up when a reader of an older version would misread the file. New fields don't count."""


@cache
def git_revision() -> str | None:
    """Of the checkout that Octavo runs from, "-dirty" if it differs from it; None outside one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    folder = Path(octavo.__file__).parent
    if folder.parents[0].name != "src":  # installed: a checkout around site-packages is another's
        return None
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Served:
    """The server that was measured: see Target. name: among the servers of one command, empty for
    an address. version: empty if it doesn't tell. settings: as far as it tells them. Headers are
    left out, and so are a user and password in the address: they may hold keys.
    """

    base_url: str
    model: str
    api: str
    engine: str
    name: str = ""
    version: str = ""
    max_model_len: int | None = None
    forces_length: bool = True
    gives_usage: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, target: Target, settings: Mapping[str, str] | None = None, *, name: str = ""
    ) -> Self:
        return cls(
            name=name,
            base_url=_without_password(target.base_url),
            model=target.model,
            api=target.api,
            engine=target.engine,
            version=target.version,
            max_model_len=target.max_model_len,
            forces_length=target.forces_length,
            gives_usage=target.gives_usage,
            sampling=target.sampling,
            settings={name: without_keys(value) for name, value in (settings or {}).items()},
        )


@dataclass(frozen=True, kw_only=True)
class ClientMachine:
    """Where the load generator ran, and what a container leaves it. memory_limit_bytes, cpu_quota:
    None for no limit.
    """

    processor: str
    usable_cpus: int
    cpu_quota: float | None
    memory_limit_bytes: int | None
    system: str
    python: str

    @classmethod
    def here(cls) -> Self:
        return cls(
            processor=machine.processor().get("model name", platform.machine()),
            usable_cpus=machine.usable_cpus(),
            cpu_quota=machine.cpu_quota(),
            memory_limit_bytes=machine.memory_limit_bytes(),
            system=platform.platform(),
            python=platform.python_version(),
        )


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo:
    """description: for people; up to a colon it is the name. sha256: of the workload's file: equal
    in runs that can be compared.
    """

    description: str
    sha256: str

    @property
    def name(self) -> str:
        return self.description.partition(": ")[0]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Of the times of requests. It showed monotonic_ns at unix_ns after the start of 1970."""

    monotonic_ns: int
    unix_ns: int
    resolution_ns: int
    name: str = "time.monotonic_ns"

    @classmethod
    def now(cls) -> Self:
        return cls(
            monotonic_ns=time.monotonic_ns(),
            unix_ns=time.time_ns(),
            resolution_ns=round(1e9 * time.get_clock_info("monotonic").resolution),
        )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run, by the clock: "probe", "self-test", "warm-up"; with its label and seed,
    "point", and within it "steady", which its rates are of.
    """

    name: str
    start_ns: int
    end_ns: int
    label: str | None = None
    seed: int | None = None

    @classmethod
    def of_point(cls, run: PointRun) -> tuple[Self, Self]:
        """The two of a load point that was played."""
        label, seed = run.point.label, run.point.seed
        window = steady_window(run)
        return (
            cls(name="point", start_ns=run.start_ns, end_ns=run.end_ns, label=label, seed=seed),
            cls(
                name="steady",
                start_ns=window.start_ns,
                end_ns=window.end_ns,
                label=label,
                seed=seed,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """run.json, but for `valid`. started_at: ISO 8601 with the offset from UTC. slo: as the user
    wrote it. notes: what a reader must know besides. checks: those of the whole run; each point has
    its own as well. points: in the order in which they were played. findings: of a sweep, X_max,
    N* and so on.
    """

    started_at: str
    command: str
    served: Served
    workload: WorkloadInfo
    seeds: tuple[int, ...]
    slo: str | None = None
    phases: tuple[Phase, ...] = ()
    checks: tuple[Check, ...] = ()
    points: tuple[Point, ...] = ()
    findings: tuple[AnyFinding, ...] = ()
    notes: tuple[str, ...] = ()
    client: ClientMachine = field(default_factory=ClientMachine.here)
    clock: Clock = field(default_factory=Clock.now)
    octavo_version: str = octavo.__version__
    git_revision: str | None = field(default_factory=git_revision)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", without_keys(self.command))

    @property
    def all_checks(self) -> tuple[Check, ...]:
        return self.checks + tuple(check for point in self.points for check in point.checks)

    @property
    def is_valid(self) -> bool:
        """No check failed, so that the figures may be quoted."""
        return none_failed(self.all_checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values, `valid` among them."""
        values: dict[str, Any] = _adapter().dump_python(self, mode="json")
        head = ("schema_version", "octavo_version", "git_revision", "started_at", "command")
        ordered = {name: values.pop(name) for name in head}
        return {**ordered, "valid": self.is_valid, **values}

    @classmethod
    def from_json(cls, values: Any) -> Run:
        """The inverse of `to_json`. Raises ConfigError for what isn't a run of this version."""
        from pydantic import ValidationError

        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"run.json has the schema version {version!r}, this Octavo reads {SCHEMA_VERSION}: "
                "read it with the version that wrote it"
            )
        try:
            return _adapter().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"run.json is damaged: {where}: {first['msg']}; {error.error_count()} in all"
            ) from None


def without_keys(command: str) -> str:
    """A command line as it may be kept and shown: what --api-key, --hf-token and --header give is
    left out.
    """
    command = re.sub(r"(--(?:api[-_]key|hf[-_]token)[= ])('[^']*'|[^\s'\"]+)", r"\1…", command)
    command = re.sub(r"(--header[= ])'([^'=]+=)[^']*'", r"\1'\2…'", command)
    return re.sub(r"(--header[= ])([^\s'\"=]+=)[^\s'\"]+", r"\1\2…", command)


def none_failed(checks: Iterable[Check]) -> bool:
    return all(check.status is not CheckStatus.FAIL for check in checks)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of run.json."""
    made = _adapter().json_schema(mode="serialization")
    made["properties"]["valid"] = {
        "description": "No check failed. Figures of a run that is not valid must not be quoted.",
        "type": "boolean",
    }
    made["required"] = [*made["required"], "valid"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "run.json of octavo bench",
    }


@cache
def _adapter() -> TypeAdapter[Run]:
    from pydantic import TypeAdapter

    return TypeAdapter(Run)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


if __name__ == "__main__":
    import json

    print(json.dumps(schema(), indent=2))

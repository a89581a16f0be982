"""Devices in numbers, from `hardware.toml`, where each number has its source."""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from octavo import machine
from octavo.core.errors import ConfigError

CPU = "cpu"
# 4-bit weights are widened to 16 bits where there is no 4-bit arithmetic.
_WIDER = {"fp4": "bfloat16", "fp8": "bfloat16", "int8": "bfloat16", "bfloat16": "float32"}
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What engines reach of a device's specification; each number with the deviation that others
    would be no surprise with. memory, compute, attention: shares, of bandwidth or FLOPs. link: of
    its speed in large all-reduces. reduce_seconds: of small ones. step_seconds, sequence_seconds:
    what the host adds to a step, and for each of its sequences.
    """

    memory: float
    compute: float
    attention: float
    link: float
    reduce_seconds: float
    step_seconds: float
    sequence_seconds: float
    spreads: Mapping[str, float]
    """By field: standard deviations of shares, and factors of seconds."""

    @classmethod
    def named(cls, name: str) -> Efficiency:
        """Of hardware.toml."""
        table: Mapping[str, tuple[float, float]] = _data()["efficiency"][name]
        means = {field: float(mean) for field, (mean, _) in table.items()}
        return cls(**means, spreads={field: float(spread) for field, (_, spread) in table.items()})

    def draw(self, rng: random.Random) -> Efficiency:
        """Another one that may be true: shares are normal, between 0.05 and 1; times lognormal."""
        drawn = {}
        for field, spread in self.spreads.items():
            middle = getattr(self, field)
            if field.endswith("_seconds"):
                drawn[field] = middle * math.exp(rng.gauss(0, math.log(spread)))
            else:
                drawn[field] = min(1.0, max(0.05, rng.gauss(middle, spread)))
        return Efficiency(**drawn, spreads=self.spreads)


@dataclass(frozen=True, slots=True)
class Link:
    """How a device reaches the others of its machine. bytes_per_second: of one device, in one
    direction. is_switched: all reach all others at this speed at once; else they share a bus.
    """

    kind: str
    bytes_per_second: float
    is_switched: bool


@dataclass(frozen=True, slots=True)
class Device:
    """name: as users write it. vendor: "nvidia", "amd" or "cpu". architecture: "hopper", ...
    memory_bytes: that software gets. read_bytes_per_second: of its memory. flops: of dense
    products, by dtype ("float32", "bfloat16", "fp8", "int8", "fp4"), those that it has; float16 is
    as bfloat16. sources: of these numbers, by field.
    """

    name: str
    vendor: str
    architecture: str
    memory_bytes: int
    read_bytes_per_second: float
    flops: Mapping[str, float]
    link: Link | None
    watts: float | None
    efficiency: Efficiency
    sources: Mapping[str, str]

    @property
    def is_cpu(self) -> bool:
        return self.vendor == CPU

    def peak_flops(self, dtype: str) -> float:
        """In the dtype, or in the next wider one that the device has."""
        while dtype not in self.flops:
            dtype = _WIDER[dtype]
        return self.flops[dtype]


@dataclass(frozen=True, slots=True)
class Hardware:
    """count: devices of one kind, in one machine."""

    device: Device
    count: int = 1

    def __str__(self) -> str:
        return self.device.name if self.count == 1 else f"{self.count}x {self.device.name}"


def parse_hardware(text: str) -> Hardware:
    """ "H100:4" (four), "L4" (one), or "cpu": this machine. Raises ConfigError."""
    name, colon, count = text.strip().partition(":")
    if "," in text:
        raise ConfigError(f"--hardware {text}: one kind of devices is meant here, as in H100:2")
    if colon and not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise ConfigError(
            f"--hardware {text}: behind the colon stands how many, 1 to 9999, as in {name}:2"
        )
    if _plain(name) == CPU:
        if colon:
            raise ConfigError(
                f"--hardware {text}: cpu is this machine with all CPUs that it may use; leave out "
                f"the :{count}"
            )
        return Hardware(this_cpu())
    device = _by_name().get(_plain(name))
    if device is None:
        known = ", ".join((*device_names(), CPU))
        raise ConfigError(f"--hardware {text}: no device {name!r} is known; use one of {known}")
    return Hardware(device, int(count) if colon else 1)


def device_names() -> tuple[str, ...]:
    """Of all that `parse_hardware` knows, besides the CPU."""
    return tuple(_data()["devices"])


def this_cpu() -> Device:
    """This machine as far as it tells. Its speeds are guesses, to be replaced by measured ones."""
    threads = machine.usable_cpus()
    prior = _data()["cpu"]
    speed = min(prior["read_gb_per_s"], prior["read_gb_per_s_per_thread"] * threads)
    return Device(
        name=CPU,
        vendor=CPU,
        architecture=machine.processor().get("model name", "unknown processor"),
        memory_bytes=machine.free_memory_bytes(),
        read_bytes_per_second=1e9 * speed,
        flops={dtype: threads * flops for dtype, flops in prior["flops_per_thread"].items()},
        link=None,
        watts=None,
        efficiency=Efficiency.named(CPU),
        sources={
            "memory_bytes": "free memory of this machine, within its control groups",
            "read_bytes_per_second": "prior",
            "flops": "prior",
        },
    )


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("hardware.toml").read_text("utf-8"))


@cache
def _by_name() -> dict[str, Device]:
    """By each name that users may give, in plain letters."""
    found = {}
    for name, table in _data()["devices"].items():
        device = _device(name, table)
        for alias in (name, *table["aliases"]):
            found[_plain(alias)] = device
    return found


def _device(name: str, table: Mapping[str, Any]) -> Device:
    names = _data()["sources"]
    fields = {
        "memory_bytes": "memory_mib",
        "read_bytes_per_second": "read_gb_per_s",
        "flops": "tflops",
        "link": "link_gb_per_s",
        "watts": "watts",
    }
    return Device(
        name=name,
        vendor=table["vendor"],
        architecture=table["architecture"],
        memory_bytes=table["memory_mib"] * _MIB,
        read_bytes_per_second=1e9 * table["read_gb_per_s"],
        flops={dtype: 1e12 * value for dtype, value in table["tflops"].items()},
        link=Link(table["link"], 1e9 * table["link_gb_per_s"], table["is_switched"]),
        watts=table["watts"],
        efficiency=Efficiency.named(table["efficiency"]),
        sources={
            field: names[table["sources"].get(key, table["source"])]
            for field, key in fields.items()
        },
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()

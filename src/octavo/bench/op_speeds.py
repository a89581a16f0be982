"""The speed of this machine's kernels in a few numbers, for `MeasuredCost`: what models that are
not here would cost on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path

import octavo
from octavo import machine
from octavo.bench.op_cache_cases import KV_FORMATS, record_attention
from octavo.bench.op_cases import WEIGHT_FORMATS, record_linear
from octavo.bench.op_row_cases import record_norm
from octavo.bench.statistics import percentile
from octavo.core.errors import ConfigError
from octavo.core.model_spec import AttentionSpec, KVFormat, ModelSpec
from octavo.ops.native import _native
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.weight_formats import Format
from octavo.simulator.measured import (
    Curve,
    MachineSpeeds,
    MeasuredCost,
    kernel_format,
    with_more,
)
from octavo.simulator.roofline import Deployment

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OUTPUTS, _INPUTS = 1024, 2048
_HEADS = AttentionSpec(16, 4, 64)
_SEQUENCES, _CONTEXT, _CHUNK = 4, 512, 256
_VALUES, _VALUE_ROWS = 4096, 16
_ROUNDS = 3
_LEAST_SECONDS = 1e-4
"""That a product is taken to need: a hundred of them are timed together."""
_DOUBT = 1.3
"""A product that took so many times as long as it does now was measured beside other work."""
_FORMATS = {str(one): one for one in WEIGHT_FORMATS}


def measured_cost(
    spec: ModelSpec, deployment: Deployment, *, threads: int | None = None
) -> MeasuredCost:
    """What a model's steps would cost here; see `machine_speeds`."""
    formats = {kernel_format(deployment.matrices), kernel_format(deployment.rest)}
    speeds = machine_speeds(formats, {deployment.kv.dtype}, threads=threads)
    return MeasuredCost(spec, speeds, deployment)


def machine_speeds(
    formats: Collection[str], kv_dtypes: Collection[str], *, threads: int | None = None
) -> MachineSpeeds:
    """Of what is asked for; what was not measured before takes about a second each, and is kept,
    until it is found to have been measured beside other work.

    formats: names of `kernel_format`. kv_dtypes: of a KVFormat. threads: None is all CPUs. Raises
    ConfigError for a dtype that the kernels don't have.
    """
    kv_parts = {part for name in kv_dtypes for part in name.split(",")}
    for what, asked, known_names in (
        ("weights", formats, tuple(_FORMATS)),
        ("a KV cache", kv_parts, KV_FORMATS),
    ):
        if unknown := [name for name in asked if name not in known_names]:
            raise ConfigError(f"no kernel has {what} in {unknown[0]}; use {', '.join(known_names)}")
    backend = NativeBackend(threads=threads)
    backend.choose("float32", {})
    path = _path(backend.runtime.pool.threads)
    known = None if path is None else MachineSpeeds.load(path)
    if known is not None and _are_too_slow(known, formats, backend):
        known = None
    new_formats = [one for one in formats if known is None or one not in known.linear]
    new_dtypes = [one for one in kv_dtypes if known is None or one not in known.decoding]
    if known is not None and not new_formats and not new_dtypes:
        return known
    measured = MachineSpeeds(
        threads=backend.runtime.pool.threads,
        linear={name: _linear(backend, _FORMATS[name]) for name in new_formats},
        decoding={name: _decoding(backend, KVFormat(name)) for name in new_dtypes},
        chunks={name: _chunks(backend, KVFormat(name)) for name in new_dtypes},
        value_seconds=_norm_seconds(backend, _VALUES, _VALUE_ROWS) / (_VALUES * _VALUE_ROWS),
        op_seconds=_norm_seconds(backend, 64, 1),
    )
    speeds = measured if known is None else with_more(known, measured)
    if path is not None:
        speeds.save(path)
    return speeds


def _are_too_slow(known: MachineSpeeds, formats: Collection[str], backend: NativeBackend) -> bool:
    """Whether one row is multiplied much faster now. If it is slower, the machine is busy now, and
    what is known is nearer to what it can do.
    """
    name = next((one for one in formats if one in known.linear), None)
    if name is None:
        return False
    rows, seconds = known.linear[name][0]
    return seconds > _DOUBT * _weight_seconds(backend, _FORMATS[name], rows)


def _linear(backend: NativeBackend, weight_format: Format) -> Curve:
    return tuple((rows, _weight_seconds(backend, weight_format, rows)) for rows in _ROWS)


def _weight_seconds(backend: NativeBackend, weight_format: Format, rows: int) -> float:
    """Of a weight of a matrix that comes from memory each time."""
    least = max(_LEAST_SECONDS, rows * _OUTPUTS * _INPUTS / 64e9)
    timer = record_linear(_OUTPUTS, _INPUTS, weight_format, rows, backend, least)
    return percentile([timer() for _ in range(_ROUNDS)], 0.5) / (_OUTPUTS * _INPUTS)


def _decoding(backend: NativeBackend, kv_format: KVFormat) -> float:
    """Seconds of a byte."""
    num_bytes = _SEQUENCES * _CONTEXT * _HEADS.kv_bytes_per_token(kv_format)
    timer = record_attention(
        _HEADS, kv_format, [1] * _SEQUENCES, _CONTEXT, backend, num_bytes / 20e9
    )
    return percentile([timer() for _ in range(_ROUNDS)], 0.5) / num_bytes


def _chunks(backend: NativeBackend, kv_format: KVFormat) -> float:
    """Seconds of a FLOP."""
    flops = _HEADS.flops_per_pair(is_decoding=False) * _CHUNK * (_CHUNK + 1) / 2
    timer = record_attention(_HEADS, kv_format, [_CHUNK], _CHUNK, backend, flops / 50e9)
    return percentile([timer() for _ in range(_ROUNDS)], 0.5) / flops


def _norm_seconds(backend: NativeBackend, size: int, rows: int) -> float:
    timer = record_norm(size, rows, backend, least=1e-9 * size * rows)
    return percentile([timer() for _ in range(_ROUNDS)], 0.5)


def _path(threads: int) -> Path | None:
    """Where the speeds of this processor and this build are kept; None for nowhere."""
    try:
        folder = machine.cache_root() / "speeds"
    except RuntimeError:  # a user without a home
        return None
    build = os.stat(_native.__file__)
    facts = [octavo.__version__, build.st_size, build.st_mtime_ns, machine.processor(), threads]
    return folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"

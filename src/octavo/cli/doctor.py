"""`octavo doctor`: what a bug report should say about a machine, without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
from typing import Any

import octavo
from octavo import machine
from octavo.cli.doctor_parallel import parallel_facts, topology_facts
from octavo.config import Config, knobs
from octavo.core.errors import OctavoError

_GIB = 2**30
_LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub")
_INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip

Report = dict[str, dict[str, Any]]


def doctor(
    *,
    as_json: bool,
    model: str | None = None,
    tensor: int | None = None,
    stages: int | None = None,
    token: str | None = None,
) -> None:
    """Print the report. model, tensor, stages, token: as of `parallel_facts`."""
    parallel = parallel_facts(model, tensor=tensor, stages=stages, token=token)
    report = collect() | {"parallel sizes": parallel}
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for section, facts in report.items():
        print(section)
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"  {name:{width}}  {', '.join(value) if isinstance(value, list) else value}")


def collect() -> Report:
    """Facts by section; sizes are texts with their unit."""
    return {
        "octavo": _versions(),
        "machine": _machine(),
        "limits": _limits(),
        "topology": topology_facts(),
        "compute": _compute(),
        "serving": _serving(),
        "default model": _rehearsal(),
    }


def _versions() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "octavo": octavo.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
    }
    for library in _LIBRARIES:
        try:
            facts[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            facts[library] = "not installed"
    return facts


def _machine() -> dict[str, Any]:
    processor = machine.processor()
    flags = (processor.get("flags") or processor.get("Features") or "").split()
    return {
        "cpu": processor.get("model name") or platform.processor() or platform.machine(),
        "instruction sets": [name for name in _INSTRUCTION_SETS if name in flags] or "unknown",
        "cores": os.cpu_count() or "unknown",
        "memory": _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def _limits() -> dict[str, Any]:
    """What this process may use of the machine."""
    quota, memory = machine.cpu_quota(), machine.memory_limit_bytes()
    return {
        "usable cores": machine.usable_cpus(),
        "cpu quota": "none" if quota is None else f"{quota:g} cores",
        "memory limit": "none" if memory is None else _size(memory),
    }


def _compute() -> dict[str, Any]:
    from octavo.ops.backend import load_backend

    facts: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        try:
            backend = load_backend(Config().backend.backend, device=device)
        except OctavoError as error:
            facts[device] = f"no: {error}"
        else:
            free = _size(backend.free_memory_bytes())
            facts[device] = f"{backend.describe()}, {free} free"
    return facts


def _serving() -> dict[str, Any]:
    folder = machine.cache_root()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    server = Config().server
    return {
        "cache folder": f"{folder} ({_size(shutil.disk_usage(existing).free)} free)",
        f"port {server.port}": "free" if _is_free(server.host, server.port) else "in use",
        "environment": _settings_in_environment() or "no settings",
    }


def _rehearsal() -> dict[str, Any]:
    """What `octavo serve` would decide; for that the model is loaded, and dropped again."""
    from octavo import assembly
    from octavo.weights import default_model

    path = machine.cache_root() / "models" / default_model.DEFAULT_MODEL.file_name
    if not path.exists():
        return {"file": "not in the cache; fetched at first use"}
    config = Config()
    try:
        checkpoint = assembly.open_model(config.model)
        vocab_size = assembly.vocab_size(checkpoint, assembly.load_text(config.model, checkpoint))
        loop, facts = assembly.build_engine(config, vocab_size, checkpoint=checkpoint)
    except OctavoError as error:
        return {"file": str(path), "error": str(error)}
    loop.close()
    return {"file": str(path)} | {d.what: f"{d.value}: {d.reason}" for d in facts.decisions}


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _settings_in_environment() -> list[str]:
    return [
        f"{spec.env}={'***' if spec.secret else os.environ[spec.env]}"
        for spec in knobs()
        if spec.env in os.environ
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"

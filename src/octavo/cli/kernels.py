"""`octavo kernels`: which kernels there are, what computes each op here, and why not something
else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from octavo.config import BackendConfig
from octavo.ops.backend import load_backend
from octavo.ops.op import Choice


def kernels(config: BackendConfig, *, as_json: bool) -> None:
    """Print one backend's instruction sets (native only), and its choices for the dtype that
    bfloat16 checkpoints get here. Raises ConfigError if one that was asked for can't run.
    """
    backend = load_backend(config.backend, device=config.device)
    dtype, _ = backend.resolve_dtype("auto", "bfloat16")
    choices = _different(backend.choose(dtype, config.kernels))
    instruction_sets = _instruction_sets() if backend.name == "native" else []
    if as_json:
        report = {
            "backend": backend.name,
            "machine": backend.describe(),
            "dtype": dtype,
            "instruction_sets": instruction_sets,
            "ops": [
                {
                    "op": choice.op,
                    "implementation": choice.implementation.name,
                    "reason": choice.reason,
                    "rejected": [
                        {"implementation": name, "reason": reason}
                        for name, reason in choice.rejected
                    ],
                }
                for choice in choices
            ],
        }
        print(json.dumps(report, indent=2))
        return
    print(f"backend {backend.name} on {backend.describe()}, in {dtype}\n")
    if instruction_sets:
        print("instruction sets that were built, the most general first:")
        width = max(len(entry["name"]) for entry in instruction_sets)
        for entry in instruction_sets:
            runs = f"can't run here: {entry['problem']}" if entry["problem"] else "runs here"
            tested = f"tested {entry['tested']}" if entry["tested"] else "not tested"
            print(f"  {entry['name']:{width}}  {runs}; {tested}")
        print()
    op_width = max(len(choice.op) for choice in choices)
    name_width = max(len(choice.implementation.name) for choice in choices)
    for choice in choices:
        chosen = f"{choice.op:{op_width}}  {choice.implementation.name:{name_width}}"
        print(f"{chosen}  {choice.reason}")
        for name, reason in choice.rejected:
            print(f"{'':{op_width}}  not {name}: {reason}")


def _different(choices: Iterable[Choice]) -> list[Choice]:
    """By op. Where an op takes two types of arrays, which `--kernels` can't tell apart, equal
    choices are one.
    """
    by_content = {
        (one.op, one.implementation.name, one.reason, one.rejected): one for one in choices
    }
    return sorted(by_content.values(), key=lambda choice: choice.op)


def _instruction_sets() -> list[dict[str, str]]:
    """The native backend's. problem: why it can't run here, or "". tested: where, or ""."""
    from octavo.ops.native.ops import ISAS, TESTED

    return [
        {"name": name, "problem": problem, "tested": TESTED[name]} for name, problem in ISAS.items()
    ]

"""`octavo kernels`: what computes each op here, and why not something else."""

from __future__ import annotations

import json

from octavo.config import BackendConfig
from octavo.ops.backend import load_backend


def kernels(config: BackendConfig, *, as_json: bool) -> None:
    """Print one backend's choices for the dtype that bfloat16 checkpoints get here. Raises
    ConfigError if one that was asked for can't run.
    """
    backend = load_backend(config.backend, device=config.device)
    dtype, _ = backend.resolve_dtype("auto", "bfloat16")
    choices = sorted(backend.choose(dtype, config.kernels), key=lambda choice: choice.op)
    if as_json:
        report = {
            "backend": backend.name,
            "machine": backend.describe(),
            "dtype": dtype,
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
    op_width = max(len(choice.op) for choice in choices)
    name_width = max(len(choice.implementation.name) for choice in choices)
    for choice in choices:
        chosen = f"{choice.op:{op_width}}  {choice.implementation.name:{name_width}}"
        print(f"{chosen}  {choice.reason}")
        for name, reason in choice.rejected:
            print(f"{'':{op_width}}  not {name}: {reason}")

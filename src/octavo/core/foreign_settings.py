"""Settings that users of vLLM and llama.cpp type and Octavo lacks, and what to do about each."""

from __future__ import annotations

# By what is said, then the names, without dashes in front; short ones are one-dash flags.
_BY_REMARK = {
    "not built yet; --tensor-parallel-size divides each expert": "enable-expert-parallel",
    "use --tensor-parallel-size; each process has an equal share": "tensor-split ts",
    "not built yet": (
        "async-scheduling cpu-offload-gb kv-offloading-size enable-lora max-loras max-lora-rank "
        "lora-modules lora "
        "enable-auto-tool-choice tool-call-parser reasoning-parser structured-outputs-config"
    ),
    "not built yet; a proxy in front can do TLS": "ssl-keyfile ssl-certfile",
    "use --batching": "cont-batching cb",
    "not needed: nothing is compiled or captured": (
        "enforce-eager compilation-config cc optimization-level"
    ),
    "not needed: Octavo runs its own model code, never a model's": "trust-remote-code",
    "not needed: the format is known from the files": "load-format",
    "not needed: requests are not logged": "disable-log-requests",
    "not needed: preempted requests are computed again, not swapped": "swap-space",
    "use --speculative-config": "sc spec-method spec-model spec-tokens model-draft md draft-max",
    "use --access-log, a line for each HTTP request": "enable-log-requests",
    "use --log-stats-interval 0": "disable-log-stats",
    "use --kv-cache-dtype, for keys and values alike": "cache-type-k ctk cache-type-v ctv",
    "use --kv-cache-memory-bytes": "num-gpu-blocks-override",
    "use --max-model-len": "ctx-size c",
    "use --device; a model is on one device as a whole": "n-gpu-layers gpu-layers ngl",
    "use --max-num-seqs": "parallel np",
    "use --max-num-batched-tokens": "batch-size b ubatch-size ub",
    "use --served-model-name": "alias a",
    "use --model": "m",
    "use --quantization": "q",
    "use --threads": "t",
}

REMARKS = {name: remark for remark, names in _BY_REMARK.items() for name in names.split()}


def remark_on(name: str) -> str | None:
    """What is said to this setting: a flag, with or without its dashes, or a keyword."""
    return REMARKS.get(name.lstrip("-").replace("_", "-").removeprefix("no-"))

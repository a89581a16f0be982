"""Claims that papers and blogs made known, at the scale of this machine, each with its interval.

    python benchmarks/claims.py [NAME ...] [--pairs 4] [--out DIR]

Each is one `octavo ab`, whose command is shown; its folder has all figures and pictures. Ratios
above 1 say that the second is better.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKLOADS = os.path.relpath(Path(__file__).parent / "workloads")
Result = Mapping[str, Any]
"""What ab.json holds."""


@dataclass(frozen=True)
class Claim:
    """published: what others found, and where. arguments: of `octavo ab`. findings: lines about
    what it found here.
    """

    published: str
    arguments: str
    findings: Callable[[Result], Iterator[str]]


def ladder(result: Result) -> Iterator[str]:
    found = result["waterfall"]
    yield f"naive loop to Octavo: {times(found['total'])}, from {found['first_rate']:.1f} tokens/s"
    for step in found["steps"]:
        yield f"  {step['change']}: {times(step['factor'])}, {step['output_rate']:.0f} tokens/s"


def batching(result: Result) -> Iterator[str]:
    yield from effects(result, "output_rate", "e2e")
    yield from mechanisms(result, "mean_batch", "slot_efficiency", "steps")


def memory(result: Result) -> Iterator[str]:
    for arm in result["arms"]:
        waste = 1 - arm["mechanisms"]["kv_fill"]
        yield f"{arm['name']}: {waste:.1%} of the KV memory that sequences hold is empty"
    yield from effects(result, "output_rate", "e2e")
    yield from mechanisms(result, "mean_batch")


def prefixes(result: Result) -> Iterator[str]:
    yield from effects(result, "output_rate", "ttft", "e2e")
    yield from mechanisms(result, "prefix_hit_rate")


def stalls(result: Result) -> Iterator[str]:
    for arm in result["arms"]:
        itl, stall = (arm["metrics"][name] for name in ("itl", "max_stall"))
        p99 = "n/a" if itl["p99"] is None else f"{interval(itl['p99'])} ms"
        longest = f"a request's longest stall {interval(stall['p50'])} ms (median)"
        yield f"{arm['name']}: ITL p99 {p99}, {longest}"
    yield from effects(result, "max_stall", "ttft", "e2e")


CLAIMS = {
    "naive": Claim(
        "23x: continuous batching and paged memory against static batches, OPT-13B on an A100 "
        "(Anyscale, 2023); vLLM 24x against transformers (vLLM blog, 2023)",
        f"--waterfall --offline --workload {WORKLOADS}/capped-exponential.yaml --num-requests 64",
        ladder,
    ),
    "continuous": Claim(
        "36.9x: iteration-level against request-level batches at equal latency, GPT-3 175B (Orca, "
        "OSDI 2022); about 2x of Anyscale's 23x",
        "--a 'octavo --max-num-seqs 16 --no-enable-prefix-caching' "
        f"--knob batching=static,continuous --offline --workload {WORKLOADS}/decoding.yaml "
        "--num-requests 96",
        batching,
    ),
    "paging": Claim(
        "60 to 80 % of KV memory wasted by reservation, under 4 % by paging; 2 to 4 times the "
        "throughput (vLLM, SOSP 2023)",
        "--a 'octavo --kv-cache-memory-bytes 96M --max-model-len 2048 --no-enable-prefix-caching' "
        "--knob kv_policy=reserve-max,paged --offline --workload chat --num-requests 64",
        memory,
    ),
    "prefix": Claim(
        "1.67x and 3.58x throughput with a shared prefix of one and of five examples, LLaMA-13B "
        "(vLLM, SOSP 2023)",
        "--a octavo --knob enable_prefix_caching=off,on --concurrency 8 --workload shared-prefix "
        "--num-requests 96",
        prefixes,
    ),
    "chunked": Claim(
        "2.6x the load at the same p99 time between tokens, Mistral-7B on an A100 (Sarathi-Serve, "
        "OSDI 2024)",
        "--a 'octavo --max-model-len 2048 --no-enable-prefix-caching' "
        "--knob enable_chunked_prefill=off,on --concurrency 6 "
        f"--workload {WORKLOADS}/interrupted.yaml --num-requests 80",
        stalls,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}")
    parser.add_argument("--pairs", type=int, default=4, help="rounds of each")
    parser.add_argument("--out", type=Path, help="where the folders go")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CLAIMS):
        parser.error(f"there is no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    out = args.out or Path(tempfile.mkdtemp(prefix="octavo-claims-"))
    for name in args.names or CLAIMS:
        show(name, CLAIMS[name], out / name, args.pairs)


def show(name: str, claim: Claim, folder: Path, pairs: int) -> None:
    arguments = [*shlex.split(claim.arguments), "--pairs", str(pairs), "--out", str(folder)]
    print(f"{name}: {claim.published}\n  octavo ab {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "octavo", "ab", *arguments]
    status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if status not in (0, 2):
        raise SystemExit(f"{name}: octavo ab ended with {status}")
    result = json.loads((folder / "ab.json").read_text(encoding="utf-8"))
    for line in claim.findings(result):
        print(f"  {line}")
    for sentence in result["invalid"]:
        print(f"  NOT VALID: {sentence}")
    print(flush=True)


def effects(result: Result, *metrics: str) -> Iterator[str]:
    """Over all requests, of each comparison."""
    for comparison in result["comparisons"]:
        against = f"{comparison['candidate']} against {comparison['baseline']}"
        for effect in comparison["effects"]:
            if effect["metric"] in metrics:
                found = f"{times(effect['speedup'])}, {effect['verdict']}"
                yield f"{against}, {effect['metric']}: {found}"
        if (match := comparison["match"]) is not None:
            yield f"{against}: {match['num_equal']} of {match['num_compared']} outputs are equal"


def mechanisms(result: Result, *names: str) -> Iterator[str]:
    for arm in result["arms"]:
        figures = ", ".join(
            f"{name} {arm['mechanisms'][name]:.3g}" for name in names if name in arm["mechanisms"]
        )
        yield f"{arm['name']}: {figures}"


def times(estimate: Mapping[str, Any]) -> str:
    return f"{interval(estimate)} times"


def interval(estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None or estimate["high"] is None:
        return f"{estimate['value']:.3g}"
    return f"{estimate['value']:.3g} [{estimate['low']:.3g}, {estimate['high']:.3g}]"


if __name__ == "__main__":
    main()

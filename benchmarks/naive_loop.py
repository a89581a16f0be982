"""64 mixed requests against the loop that people write first: transformers' `generate`, one request
after another.

    python benchmarks/naive_loop.py [--sample 6] [--formats stored,int8,bfloat16]

Prompts of 16 to 512 tokens, 16 to 256 tokens of output each, the same weights. transformers
computes in float32 and bfloat16, and the better of the two counts. The loop is as fast for a few
requests as for many, so it plays a sample, spread over the lengths; Octavo plays all 64 at once.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from octavo.bench.ab.hf_models import BatchCounts, HuggingFaceModel, Row
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM

FORMATS: dict[str, dict[str, Any]] = {
    "stored": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
}
Request = tuple[list[int], int]
"""Token ids, and how many to generate."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=6, help="requests that the loop plays")
    parser.add_argument(
        "--formats", default="stored,int8,bfloat16", help=f"of {', '.join(FORMATS)}"
    )
    args = parser.parse_args()
    requests = mixed_requests(64)
    by_length = sorted(requests, key=lambda request: len(request[0]) + request[1])
    step = len(by_length) / args.sample
    sample = [by_length[int((i + 0.5) * step)] for i in range(args.sample)]
    loop = {dtype: loop_speed(sample, dtype) for dtype in ("float32", "bfloat16")}
    best = max(loop.values())
    print(json.dumps({"transformers_tokens_per_s": {k: round(v, 1) for k, v in loop.items()}}))
    for name in args.formats.split(","):
        speed = octavo_speed(requests, FORMATS[name])
        result = {"octavo": name, "tokens_per_s": round(speed, 1), "ratio": round(speed / best, 1)}
        print(json.dumps(result), flush=True)


def mixed_requests(count: int) -> list[Request]:
    rng = random.Random(1234)
    return [
        ([rng.randrange(100, 49_000) for _ in range(rng.randint(16, 512))], rng.randint(16, 256))
        for _ in range(count)
    ]


def loop_speed(requests: list[Request], dtype: str) -> float:
    """Output tokens per second."""
    model = HuggingFaceModel("default", dtype=dtype)
    play(model, requests[0][0], 4)  # warm up
    start = time.perf_counter()
    for ids, count in requests:
        play(model, ids, count)
    return sum(count for _, count in requests) / (time.perf_counter() - start)


def play(model: HuggingFaceModel, ids: list[int], count: int) -> None:
    row = Row(prompt=ids, max_tokens=count, ignores_eos=True, on_token=lambda token: None)
    model.generate([row], lambda tokens: None, BatchCounts())
    if row.num_tokens != count:
        raise SystemExit("transformers did not generate the tokens that were asked for")


def octavo_speed(requests: list[Request], flags: dict[str, Any]) -> float:
    """Output tokens per second."""
    llm = LLM("default", enable_prefix_caching=False, **flags)
    try:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
            for _, count in requests
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        llm.generate(prompts[:4], params[:4], use_tqdm=False)  # warm up
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    finally:
        llm.shutdown()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if tokens != sum(count for _, count in requests):
        raise SystemExit("Octavo did not generate the tokens that were asked for")
    return tokens / seconds


if __name__ == "__main__":
    main()

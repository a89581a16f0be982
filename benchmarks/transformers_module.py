"""What it costs to run a model as transformers' module: the same weights and texts by Octavo's own
family and by the module, both on the torch backend, and by the native one, in turns.

    python benchmarks/transformers_module.py [MODEL] [--dtype float32] [--rounds 5]

MODEL: of a family that Octavo has; the default is the default model. Prints the processor time of
each, on one thread, so that whatever else runs there matters little (medians; the first round does
not count), and the ratios to the own family on the torch backend: of a step that decodes 1
sequence, of one that decodes 16, and of a prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import process_time

import octavo.models.registry
from octavo import LLM, SamplingParams
from octavo.models.through_transformers.model import build

ENGINES = ("transformers' module", "torch", "native")
PROMPT_TOKENS, CONTEXT, STEPS = 128, 8, 6


def load(engine: str, model: str, dtype: str) -> LLM:
    """With the model of `engine`, whatever family there is."""
    own = octavo.models.registry.engine_model
    backend = "native" if engine == "native" else "torch"
    if engine == ENGINES[0]:
        octavo.models.registry.engine_model = build
    try:
        return LLM(
            model,
            backend=backend,
            device="cpu",
            dtype=dtype,
            threads=1,
            max_model_len=PROMPT_TOKENS + STEPS,
            enable_prefix_caching=False,
        )
    finally:
        octavo.models.registry.engine_model = own


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = process_time()
    llm.generate(prompts, params)
    return process_time() - began


def decoding(count: int) -> Callable[[LLM], float]:
    """Seconds of a step that decodes `count` sequences."""

    def measure(llm: LLM) -> float:
        prompts = [[7 + i] * CONTEXT for i in range(count)]
        first = seconds(llm, prompts, 1)
        return (seconds(llm, prompts, 1 + STEPS) - first) / STEPS

    return measure


def prefill(llm: LLM) -> float:
    """Seconds of a prompt's only step."""
    return seconds(llm, [list(range(100, 100 + PROMPT_TOKENS))], 1)


MEASURES: dict[str, Callable[[LLM], float]] = {
    "decode 1": decoding(1),
    "decode 16": decoding(16),
    f"prompt of {PROMPT_TOKENS}": prefill,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    engines = {engine: load(engine, asked.model, asked.dtype) for engine in ENGINES}
    times = defaultdict[tuple[str, str], list[float]](list)
    for _ in range(1 + asked.rounds):
        for what, measure in MEASURES.items():
            for engine, llm in engines.items():
                times[what, engine].append(measure(llm))
                print(f"{engine}, {what}: {1e3 * times[what, engine][-1]:.1f} ms", file=sys.stderr)
    typical = {case: median(found[1:]) for case, found in times.items()}
    for what in MEASURES:
        base = typical[what, "torch"]
        cells = [
            f"{engine} {1e3 * typical[what, engine]:7.1f} ms ({typical[what, engine] / base:.2f})"
            for engine in ENGINES
        ]
        print(f"{what:14}  " + "   ".join(cells))


if __name__ == "__main__":
    main()

"""What each format of weights and KV cache costs in quality, against float32 on the same weights.

    python benchmarks/quality.py [--model default] [--windows 32] [--json] [--save-reference FILE]

The text is pydoc_data.topics, which comes with every Python, in windows of 512 tokens. The model
sees each window alone; what it says of the second half counts, 255 positions a window, as in
llama.cpp's llama-perplexity. A window is one step of the native backend, whose rows have the same
bits in every other batch, so the figures are those of decoding too. Greedy texts come from whole
engines.

--save-reference writes the float32 distribution for `llama-perplexity --kl-divergence`, which
compares llama.cpp's arithmetic with it: same tokens, same positions.
"""

from __future__ import annotations

import argparse
import json
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

from octavo import assembly
from octavo.config import Config
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.quality.bare_model import BareModel
from octavo.quality.distance import Distance, common_prefix, log_softmax, standard_error
from octavo.weights import open_checkpoint

WINDOW, FIRST = 512, 256
"""Tokens of a window, and the first position whose prediction counts: a window has
WINDOW - 1 - FIRST of them, since nothing follows its last token.
"""
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 64


@dataclass(frozen=True)
class Format:
    """Values of --dtype ("auto" keeps weights as stored), --quantization and --kv-cache-dtype."""

    dtype: str
    quantization: str | None = None
    kv_dtype: str = "float32"

    def __str__(self) -> str:
        stored = "stored" if self.dtype == "auto" else self.dtype
        return f"{self.quantization or stored}, KV {self.kv_dtype}"


REFERENCE = Format("float32")
FORMATS = (
    REFERENCE,
    Format("bfloat16"),
    Format("float16"),
    Format("auto"),
    Format("auto", "int8"),
    Format("auto", "int4"),
    Format("auto", None, "bfloat16"),
    Format("auto", None, "int8"),
    Format("auto", None, "fp8"),
    Format("auto", None, "int8,int4"),
    Format("auto", None, "int4"),
    Format("auto", "int8", "bfloat16"),
    Format("auto", "int8", "int8"),
)


# --- what the model says ------------------------------------------------------------------------


def load(model: str, format: Format, threads: int | None) -> BareModel:
    config = Config.from_flat(
        {
            "model": model,
            "backend": "native",
            "threads": threads,
            "dtype": format.dtype,
            "quantization": format.quantization,
            "kv_cache_dtype": format.kv_dtype,
        }
    )
    return BareModel(open_checkpoint(model), config, WINDOW)


def logits_of(loaded: BareModel, window: np.ndarray) -> np.ndarray:
    """Of the positions that count: window (WINDOW,) -> (WINDOW - 1 - FIRST, V) float32."""
    return np.concatenate([logits for _, logits in loaded.logits(window, FIRST)])


def greedy_texts(
    model: str, format: Format, threads: int | None, prompts: Sequence[list[int]]
) -> list[list[int]]:
    """NEW_TOKENS token ids for each prompt."""
    llm = LLM(
        model,
        backend="native",
        threads=threads,
        dtype=format.dtype,
        quantization=format.quantization,
        kv_cache_dtype=format.kv_dtype,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One format. Errors are standard errors of the means; divergences in nats, changes and
    agreement in percent. greedy_tokens: mean of what is equal before the first difference.
    """

    format: str
    weight_bytes: int
    bits_per_weight: float
    kv_bytes_per_token: float
    perplexity: float
    perplexity_change: float
    perplexity_change_error: float
    divergence: float
    divergence_error: float
    worst_divergence: float
    top1_agreement: float
    greedy_tokens: float


def measure(
    model: str, format: Format, threads: int | None, sample: Sample, reference: Reference
) -> Row:
    """What `format` says of the sample, beside what the reference says."""
    loaded = load(model, format, threads)
    distance = Distance.joined(
        [
            Distance.between(logits, logits_of(loaded, window), window[FIRST + 1 :])
            for window, logits in zip(sample.windows, reference.logits, strict=True)
        ]
    )
    texts = greedy_texts(model, format, threads, sample.prompts)
    equal = [common_prefix(a, b) for a, b in zip(reference.texts, texts, strict=True)]
    change, change_error = distance.perplexity_change
    return Row(
        format=str(format),
        weight_bytes=loaded.weight_bytes,
        bits_per_weight=8 * loaded.weight_bytes / loaded.num_parameters,
        kv_bytes_per_token=loaded.kv_bytes,
        perplexity=distance.perplexity,
        perplexity_change=change,
        perplexity_change_error=change_error,
        divergence=float(distance.divergence.mean()),
        divergence_error=standard_error(distance.divergence),
        worst_divergence=float(distance.divergence.max()),
        top1_agreement=100 * float(distance.agrees.mean()),
        greedy_tokens=float(np.mean(equal)),
    )


@dataclass(frozen=True)
class Sample:
    """windows (W, WINDOW) int64, one after another in the text; prompts: what follows them."""

    windows: np.ndarray
    prompts: list[list[int]]

    @classmethod
    def of(cls, tokens: Sequence[int], num_windows: int) -> Sample:
        begin = num_windows * WINDOW
        end = begin + NUM_PROMPTS * PROMPT_TOKENS
        if len(tokens) < end:
            raise SystemExit(f"the text has {len(tokens)} tokens of {end}; lower --windows")
        return cls(
            np.array(tokens[:begin], np.int64).reshape(num_windows, WINDOW),
            np.reshape(tokens[begin:end], (NUM_PROMPTS, PROMPT_TOKENS)).tolist(),
        )


@dataclass(frozen=True)
class Reference:
    """logits: (W, WINDOW - 1 - FIRST, V) float32, of each window. texts: greedy."""

    logits: np.ndarray
    texts: list[list[int]]


def logits_on_disk(loaded: BareModel, windows: np.ndarray, file: BinaryIO) -> np.ndarray:
    """Of all windows, mapped from `file`: 50 MB a window of the default model, which memory need
    not hold.
    """
    first = logits_of(loaded, windows[0])
    logits = np.memmap(file, np.float32, "w+", shape=(len(windows), *first.shape))
    logits[0] = first
    for index, window in enumerate(windows[1:], start=1):
        logits[index] = logits_of(loaded, window)
    return logits


def save_reference(path: Path, windows: np.ndarray, logits: np.ndarray) -> None:
    """Write what `llama-perplexity --kl-divergence-base` reads: its log-probabilities are integers
    of 16 bits, in steps of 1/4096 nat from 16 nats below the largest.
    """
    with path.open("wb") as file:
        file.write(b"_logits_")
        file.write(struct.pack("<3i", WINDOW, logits.shape[2], len(windows)))
        file.write(windows.astype("<i4").tobytes())
        for window_logits in logits:
            for row in window_logits:
                file.write(packed_row(row))


def packed_row(logits: np.ndarray) -> bytes:
    """(V,) -> step and lowest log-probability in float32, then a number for each token; rows have
    an even length.
    """
    log_probs = log_softmax(logits[None])[0]
    lowest = max(log_probs.min(), log_probs.max() - 16)
    step = (log_probs.max() - lowest) / 65535
    numbers = np.rint(np.maximum(log_probs - lowest, 0) / step).astype("<u2")
    padding = np.zeros(len(numbers) % 2, "<u2")
    return struct.pack("<2f", step, lowest) + numbers.tobytes() + padding.tobytes()


COLUMNS = (
    ("bits/weight", "{0.bits_per_weight:.2f}"),
    ("KV bytes/token", "{0.kv_bytes_per_token:.0f}"),
    ("perplexity", "{0.perplexity:.3f}"),
    ("change %", "{0.perplexity_change:+.2f} ± {0.perplexity_change_error:.2f}"),
    ("KL", "{0.divergence:.5f} ± {0.divergence_error:.5f}"),
    ("worst KL", "{0.worst_divergence:.3f}"),
    ("top-1 %", "{0.top1_agreement:.1f}"),
    ("greedy tokens", "{0.greedy_tokens:.1f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="all figures, one object a line")
    parser.add_argument("--save-reference", type=Path, metavar="FILE", help="and measure nothing")
    args = parser.parse_args()

    config = Config.from_flat({"model": args.model})
    text = assembly.load_text(config.model, open_checkpoint(args.model))
    sample = Sample.of(text.tokenizer.encode("\n".join(topics.topics.values())), args.windows)
    loaded = load(args.model, REFERENCE, args.threads)
    with TemporaryFile() as file:
        logits = logits_on_disk(loaded, sample.windows, file)
        if args.save_reference is not None:
            save_reference(args.save_reference, sample.windows, logits)
            return
        about = (
            f"{args.model}; {len(sample.windows)} windows of {WINDOW} tokens, "
            f"{len(sample.windows) * (WINDOW - 1 - FIRST)} positions; text of Python "
            f"{platform.python_version()}; {loaded.machine}"
        )
        del loaded
        texts = greedy_texts(args.model, REFERENCE, args.threads, sample.prompts)
        show(args, about, sample, Reference(logits, texts))


def show(args: argparse.Namespace, about: str, sample: Sample, reference: Reference) -> None:
    """Measure and print one format after another."""
    print(about, file=sys.stderr if args.json else sys.stdout)
    if not args.json:
        print(f"{'weights, KV cache':24}", *(f"{name:>18}" for name, _ in COLUMNS))
    for format in FORMATS:
        row = measure(args.model, format, args.threads, sample, reference)
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            cells = (f"{template.format(row):>18}" for _, template in COLUMNS)
            print(f"{row.format:24}", *cells, flush=True)


if __name__ == "__main__":
    main()

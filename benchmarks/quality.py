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
import math
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
from octavo.core.model_spec import KVFormat
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.models.loader import load_weights, make_rope_tables, plan_weights
from octavo.models.registry import build_model
from octavo.ops.backend import load_backend
from octavo.ops.batch import HostBatch
from octavo.weights import open_checkpoint

WINDOW, FIRST = 512, 256
"""Tokens of a window, and the first position whose prediction counts: a window has
WINDOW - 1 - FIRST of them, since nothing follows its last token.
"""
BLOCK_SIZE = 16
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 64
CHUNK_ROWS = 16  # of float64 logits at a time, which stay in cache


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
    Format("auto", "int8", "bfloat16"),
    Format("auto", "int8", "int8"),
)


# --- what the model says ------------------------------------------------------------------------


class Loaded:
    """A model in one format, with a KV cache for one window.

    weight_bytes: as computed with. kv_bytes: of a token, padding included.
    """

    def __init__(self, model: str, format: Format, threads: int | None) -> None:
        checkpoint = open_checkpoint(model)
        causal_lm = build_model(checkpoint.config)
        self._backend = backend = load_backend("native", threads=threads)
        dtype, _ = backend.resolve_dtype(format.dtype, "")
        backend.choose(dtype, {})
        plan = plan_weights(causal_lm, checkpoint, backend, dtype, format.quantization)
        load_weights(causal_lm, plan)
        make_rope_tables(causal_lm, backend, WINDOW)
        heads = causal_lm.spec.kv_heads
        kv_format = KVFormat(format.kv_dtype)
        self._kv_layers = backend.allocate_kv(WINDOW // BLOCK_SIZE, BLOCK_SIZE, heads, kv_format)
        self._forward = backend.compile(causal_lm.forward)
        self._logits = backend.compile(causal_lm.logits)
        self.machine = backend.describe()
        self.num_parameters = causal_lm.spec.num_parameters
        self.weight_bytes = sum(plan.num_bytes)
        self.kv_bytes = backend.kv_block_bytes(BLOCK_SIZE, heads, kv_format) / BLOCK_SIZE

    def logits(self, window: np.ndarray) -> np.ndarray:
        """Of the positions that count: window (WINDOW,) -> (WINDOW - 1 - FIRST, V) float32."""
        positions = np.arange(WINDOW, dtype=np.int64)
        batch = HostBatch(
            token_ids=window.astype(np.int64),
            positions=positions,
            kv_slots=positions,
            query_starts=np.array([0, WINDOW], np.int32),
            context_lens=np.array([WINDOW], np.int32),
            block_tables=np.arange(WINDOW // BLOCK_SIZE, dtype=np.int32)[None],
        )
        hidden = self._forward(self._backend.batch_context(batch, self._kv_layers))
        rows = self._backend.from_host(positions[FIRST:-1])
        return self._backend.to_host(self._logits(hidden, rows))


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


# --- how far two models are apart -----------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """Of each position, float64 (N,) unless said otherwise.

    surprise, reference_surprise: -log p of the token that follows. divergence: KL(reference ||
    format) over the whole vocabulary, in nats. agrees: whether the likeliest token is the same,
    bool.
    """

    surprise: np.ndarray
    reference_surprise: np.ndarray
    divergence: np.ndarray
    agrees: np.ndarray

    @classmethod
    def between(cls, reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> Distance:
        """reference, logits (N, V); targets (N,): the tokens that follow."""
        parts = []
        for begin in range(0, len(targets), CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            p, q = log_softmax(reference[rows]), log_softmax(logits[rows])
            at = np.arange(len(p)), targets[rows]
            divergence = np.sum(np.exp(p) * (p - q), axis=1)
            parts.append(cls(-q[at], -p[at], divergence, p.argmax(axis=1) == q.argmax(axis=1)))
        return cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence[Distance]) -> Distance:
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            )
        )

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise.mean())

    @property
    def perplexity_change(self) -> tuple[float, float]:
        """Relative to the reference, in percent, with its standard error: far smaller than the
        perplexities' own, because both models see the same text.
        """
        difference = self.surprise - self.reference_surprise
        return 100 * math.expm1(difference.mean()), 100 * standard_error(difference)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(N, V) -> (N, V) float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def standard_error(values: np.ndarray) -> float:
    """Of the mean of values (N,)."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = enumerate(zip(a, b, strict=True))
    return next((index for index, (x, y) in pairs if x != y), len(a))


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
    loaded = Loaded(model, format, threads)
    distance = Distance.joined(
        [
            Distance.between(logits, loaded.logits(window), window[FIRST + 1 :])
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


def logits_on_disk(loaded: Loaded, windows: np.ndarray, file: BinaryIO) -> np.ndarray:
    """Of all windows, mapped from `file`: 50 MB a window of the default model, which memory need
    not hold.
    """
    first = loaded.logits(windows[0])
    logits = np.memmap(file, np.float32, "w+", shape=(len(windows), *first.shape))
    logits[0] = first
    for index, window in enumerate(windows[1:], start=1):
        logits[index] = loaded.logits(window)
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
    loaded = Loaded(args.model, REFERENCE, args.threads)
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

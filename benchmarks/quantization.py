"""What quantized weights and caches cost, and what they gain: the tables of docs/quantization.md.

    python benchmarks/quantization.py [--model default] [--off-grid] [--windows 32]

Perplexity, divergence and agreement are against float32 weights with a float32 cache, over windows
of pydoc_data.topics, which comes with every Python. Formats that are written to a folder, by
`octavo quantize`, are rounded to the nearest (rtn) and calibrated (gptq) with what the model itself
writes. Speed is that of the engine with its usual cache, each format after the other. Caches are
judged over longer windows, beside float32 weights.

--off-grid judges the same model with weights in full precision. The default model's lie on a grid
of 4 bits, which its file has; here norms are multiplied into the matrices behind them, and channels
between two matrices by random factors that cancel. The function stays what it was, and its weights
lie on no grid.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from octavo import assembly
from octavo.bench.offline import measure_latency
from octavo.cli.evaluate import bos_of, read_text
from octavo.cli.main import main as octavo
from octavo.config import Config
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.quality.bare_model import BareModel
from octavo.quality.distance import Distance, common_prefix, standard_error
from octavo.quality.evaluation import Windows
from octavo.text.export import write_text_files
from octavo.weights import open_checkpoint
from octavo.weights.safetensors_writer import ShardedWriter

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 64
BATCHES = (1, 16)


class Variant(NamedTuple):
    """flags: of weights as they are loaded. written: format and method of `octavo quantize`."""

    name: str
    flags: dict[str, Any]
    written: tuple[str, str] | None = None


EXACT = Variant("float32", {"dtype": "float32"})
LOADED = (
    EXACT,
    Variant("bfloat16", {"dtype": "bfloat16"}),
    Variant("as stored", {}),
    Variant("int8", {"quantization": "int8"}),
    Variant("int8-channel", {"quantization": "int8-channel"}),
    Variant("fp8", {"quantization": "fp8"}),
    Variant("int4", {"quantization": "int4"}),
    Variant("int4-g128", {"quantization": "int4-g128"}),
)
WRITTEN = tuple(
    Variant(f"{form}, {method}", {}, (form, method))
    for form in ("int8-channel", "int4", "int4-g64", "int4-sym-g128")
    for method in ("rtn", "gptq")
)
CACHES = ("bfloat16", "int8", "fp8", "int8,int4", "int4")


@dataclass(frozen=True)
class Quality:
    """Errors are standard errors; changes and agreement in percent, divergences in nats."""

    perplexity: float
    change: float
    change_error: float
    kl: float
    kl_error: float
    worst_kl: float
    top1: float

    @classmethod
    def of(cls, apart: Distance) -> Quality:
        change, change_error = apart.perplexity_change
        return cls(
            perplexity=apart.perplexity,
            change=change,
            change_error=change_error,
            kl=float(apart.divergence.mean()),
            kl_error=standard_error(apart.divergence),
            worst_kl=float(apart.divergence.max()),
            top1=100 * float(apart.agrees.mean()),
        )


@dataclass(frozen=True)
class WeightRow:
    """prefill, decode: tokens/s, by sequences at once; empty if no speed is measured."""

    name: str
    num_bytes: int
    bits: float
    quality: Quality
    prefill: dict[int, float]
    decode: dict[int, float]


@dataclass(frozen=True)
class CacheRow:
    """tokens_per_gib: that a cache of 1 GiB holds. greedy: tokens before the first that differs, of
    NEW_TOKENS, mean of NUM_PROMPTS texts.
    """

    dtype: str
    token_bytes: float
    tokens_per_gib: float
    quality: Quality
    greedy: float


class Setup(NamedTuple):
    """What all formats share. length: of prompts whose prefill is timed. iterations: of each timed
    batch; 0 times nothing.
    """

    model: str
    threads: int | None
    windows: Windows
    long_windows: Windows
    prompts: list[list[int]]
    length: int
    iterations: int

    def config(self, model: str, flags: dict[str, Any], kv_dtype: str = "float32") -> Config:
        common = {"model": model, "threads": self.threads, "backend": "native"}
        return Config.from_flat({**common, "kv_cache_dtype": kv_dtype, **flags})


# --- quality ------------------------------------------------------------------------------------


class Reference:
    """The exact model's logits over windows, on disk."""

    def __init__(self, setup: Setup, windows: Windows, file: Path) -> None:
        self._windows = windows
        exact = _bare(setup, setup.model, EXACT.flags, windows)
        self.machine = exact.machine
        logits = _logits(exact, windows, windows.tokens[0])
        shape = (len(windows.tokens), *logits.shape)
        self._logits = np.memmap(file, np.float32, "w+", shape=shape)
        for index, window in enumerate(windows.tokens):
            self._logits[index] = _logits(exact, windows, window)

    def distance(self, model: BareModel) -> Distance:
        windows = self._windows
        return Distance.joined(
            [
                Distance.between(
                    expected, _logits(model, windows, window), window[windows.first + 1 :]
                )
                for window, expected in zip(windows.tokens, self._logits, strict=True)
            ]
        )


def _logits(model: BareModel, windows: Windows, window: np.ndarray) -> np.ndarray:
    return np.concatenate([logits for _, logits in model.logits(window, windows.first)])


def _bare(
    setup: Setup, model: str, flags: dict[str, Any], windows: Windows, kv_dtype: str = "float32"
) -> BareModel:
    config = setup.config(model, flags, kv_dtype)
    return BareModel(open_checkpoint(model), config, windows.tokens.shape[1])


# --- weights ------------------------------------------------------------------------------------


def weight_row(setup: Setup, variant: Variant, model: str, reference: Reference) -> WeightRow:
    loaded = _bare(setup, model, variant.flags, setup.windows)
    quality = Quality.of(reference.distance(loaded))
    num_bytes, bits = loaded.weight_bytes, 8 * loaded.weight_bytes / loaded.num_parameters
    del loaded
    prefill, decode = {}, {}
    for batch in BATCHES if setup.iterations else ():
        seconds = _latency(setup, model, variant, batch, setup.length, 1)
        prefill[batch] = batch * setup.length / seconds
        first = _latency(setup, model, variant, batch, 16, 1)
        last = _latency(setup, model, variant, batch, 16, NEW_TOKENS)
        decode[batch] = batch * (NEW_TOKENS - 1) / (last - first)
    return WeightRow(variant.name, num_bytes, bits, quality, prefill, decode)


def _latency(
    setup: Setup, model: str, variant: Variant, batch: int, input_len: int, output_len: int
) -> float:
    """Median seconds of a batch, with the cache that the engine would choose."""
    config = setup.config(model, variant.flags, "auto")
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        report = measure_latency(
            config,
            input_len=input_len,
            output_len=output_len,
            batch_size=batch,
            num_iters=setup.iterations,
            num_iters_warmup=1,
            temperature=0,
        )
    return float(np.median(report.latencies_s))


def written(
    setup: Setup, variant: Variant, folder: Path, calibration_tokens: int, dtype: str
) -> str:
    """The folder of a format that `octavo quantize` makes."""
    if variant.written is None:
        return setup.model
    form, method = variant.written
    out = folder / f"{form}-{method}"
    command = ["quantize", setup.model, "--format", form, "--method", method, "-o", str(out)]
    command += ["--windows", "0", "--calibration-tokens", str(calibration_tokens)]
    command += ["--dtype", dtype, "--json"]
    if setup.threads is not None:
        command += ["--threads", str(setup.threads)]
    with contextlib.redirect_stdout(io.StringIO()):
        if status := octavo(command):
            raise SystemExit(status)
    return str(out)


# --- caches -------------------------------------------------------------------------------------


def cache_row(
    setup: Setup, dtype: str, reference: Reference, texts: Sequence[list[int]]
) -> CacheRow:
    model = _bare(setup, setup.model, EXACT.flags, setup.long_windows, dtype)
    quality = Quality.of(reference.distance(model))
    equal = [common_prefix(a, b) for a, b in zip(texts, greedy_texts(setup, dtype), strict=True)]
    token_bytes = model.kv_bytes
    return CacheRow(dtype, token_bytes, 2**30 / token_bytes, quality, float(np.mean(equal)))


def greedy_texts(setup: Setup, kv_dtype: str) -> list[list[int]]:
    llm = LLM(
        setup.model,
        backend="native",
        threads=setup.threads,
        dtype="float32",
        kv_cache_dtype=kv_dtype,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate(setup.prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


# --- a model on no grid -------------------------------------------------------------------------


def write_off_grid(model: str, folder: Path, seed: int = 0) -> str:
    """A model of Llama's structure with the same function in exact arithmetic and other weights, in
    float32.
    """
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rng = np.random.default_rng(seed)
    weights = {name: np.array(checkpoint.read(name), np.float32) for name in checkpoint.tensors}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            factors = weights[f"{layer}.{norm}.weight"]
            for reader in readers:
                weights[f"{layer}.{reader}.weight"] *= factors
            weights[f"{layer}.{norm}.weight"] = np.ones_like(factors)
        value, output = (weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "vo")
        scales = np.exp(rng.uniform(-0.3, 0.3, len(value))).astype(np.float32)
        value *= scales[:, None]
        of_heads = scales.reshape(kv_heads, -1).repeat(heads // kv_heads, axis=0)
        output /= of_heads.reshape(-1)
        up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("up", "down"))
        scales = np.exp(rng.uniform(-0.3, 0.3, len(up))).astype(np.float32)
        up *= scales[:, None]
        down /= scales
    writer = ShardedWriter(folder)
    writer.add(weights)
    writer.finish()
    write_text_files(checkpoint, folder)
    text = json.dumps({**config, "torch_dtype": "float32"}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return str(folder)


# --- tables -------------------------------------------------------------------------------------


def _quality_cells(quality: Quality) -> list[str]:
    return [
        f"{quality.perplexity:.3f}",
        f"{quality.change:+.2f} ± {quality.change_error:.2f} %",
        f"{quality.kl:.5f} ± {quality.kl_error:.5f}",
        f"{quality.worst_kl:.3f}",
        f"{quality.top1:.1f} %",
    ]


_QUALITY = ("perplexity", "change", "KL", "worst KL", "top-1")


def weight_table(rows: Sequence[WeightRow]) -> Iterator[str]:
    speeds = ("prefill 1, 16", "decode 1, 16") if rows[0].decode else ()
    yield from _table(
        ("weights", "MB", "bits", *_QUALITY, *speeds),
        [
            [
                row.name,
                f"{row.num_bytes / 1e6:.0f}",
                f"{row.bits:.2f}",
                *_quality_cells(row.quality),
                *(
                    ", ".join(f"{by_batch[batch]:,.0f}" for batch in BATCHES)
                    for by_batch in (row.prefill, row.decode)
                    if by_batch
                ),
            ]
            for row in rows
        ],
    )


def cache_table(rows: Sequence[CacheRow]) -> Iterator[str]:
    yield from _table(
        ("KV cache", "bytes a token", "tokens in 1 GiB", *_QUALITY, "greedy"),
        [
            [
                row.dtype,
                f"{row.token_bytes:,.0f}",
                f"{row.tokens_per_gib:,.0f}",
                *_quality_cells(row.quality),
                f"{row.greedy:.0f}",
            ]
            for row in rows
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def gains(rows: Sequence[WeightRow]) -> Iterator[str]:
    """What calibration saves of the divergence of rounding."""
    by_name = {row.name: row.quality.kl for row in rows}
    for name, kl in by_name.items():
        form, _, method = name.partition(", ")
        if method == "gptq" and (nearest := by_name.get(f"{form}, rtn")):
            yield f"{form}: calibration lowers KL by {100 * (1 - kl / nearest):.0f} %"


# --- the run ------------------------------------------------------------------------------------


def prepared(args: argparse.Namespace, model: str) -> Setup:
    checkpoint = open_checkpoint(model)
    config = Config.from_flat({"model": model})
    tokenizer = assembly.load_text(config.model, checkpoint).tokenizer
    tokens = tokenizer.encode(read_text(args.text), add_special_tokens=False)
    bos = bos_of(tokenizer)
    prompts = tokens[-NUM_PROMPTS * PROMPT_TOKENS :]
    return Setup(
        model=model,
        threads=args.threads,
        windows=Windows.of(tokens, args.context, args.windows, bos),
        long_windows=Windows.of(tokens, args.long_context, args.long_windows, bos),
        prompts=np.reshape(prompts, (NUM_PROMPTS, PROMPT_TOKENS)).tolist(),
        length=args.context - 16,
        iterations=args.iterations,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--off-grid", action="store_true")
    parser.add_argument("--text", type=Path, help="instead of Python's help topics")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--long-context", type=int, default=2048)
    parser.add_argument("--long-windows", type=int, default=8)
    parser.add_argument("--calibration-tokens", type=int, default=65_536)
    parser.add_argument(
        "--iterations", type=int, default=3, help="of each timed batch; 0: no speeds"
    )
    parser.add_argument("--only", default="", help="variants whose names have one of A,B,...")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--picture", type=Path, help="where the picture goes, .svg or .png")
    parser.add_argument("--json", type=Path, help="where all figures go")
    args = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="quantization-") as name:
        run(args, Path(name))


def run(args: argparse.Namespace, folder: Path) -> None:
    model = args.model
    if args.off_grid:
        model = write_off_grid(model, folder / "off-grid")
    setup = prepared(args, model)
    reference = Reference(setup, setup.windows, folder / "logits")
    stored = str(open_checkpoint(model).config.get("torch_dtype") or "")
    dtype = "bfloat16" if stored in ("", "float32") else "auto"
    wanted = [part for part in args.only.split(",") if part]
    weights: list[WeightRow] = []
    for variant in (*LOADED, *WRITTEN):
        if wanted and not any(part in variant.name for part in wanted):
            continue
        path = written(setup, variant, folder, args.calibration_tokens, dtype)
        weights.append(weight_row(setup, variant, path, reference))
        print(f"{variant.name}: KL {weights[-1].quality.kl:.5f}", file=sys.stderr, flush=True)
    (folder / "logits").unlink()
    long_reference = Reference(setup, setup.long_windows, folder / "long-logits")
    texts = greedy_texts(setup, "float32")
    caches = [cache_row(setup, dtype, long_reference, texts) for dtype in CACHES]
    for heading, lines in (
        (f"Weights, {setup.windows.num_positions:,} positions", weight_table(weights)),
        ("Calibration", gains(weights)),
        (f"Caches, {setup.long_windows.num_positions:,} positions", cache_table(caches)),
    ):
        print(f"## {heading}\n", *lines, "", sep="\n")
    print(f"{args.model}{', off the grid' if args.off_grid else ''}; {reference.machine}")
    if args.json is not None:
        figures = {
            "machine": reference.machine,
            "settings": {key: str(value) for key, value in vars(args).items()},
            "weights": [asdict(row) for row in weights],
            "caches": [asdict(row) for row in caches],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.picture is not None:
        from quantization_plot import draw

        draw(
            args.picture,
            [(row.name, row.bits, row.quality.kl, row.decode.get(1)) for row in weights],
            [(row.dtype, row.token_bytes, row.quality.kl) for row in caches],
            open_checkpoint(args.model).name + (", on no grid" if args.off_grid else ""),
        )


if __name__ == "__main__":
    main()

"""`octavo eval`: what a model makes of a text, and how far it is from another one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import FOR_SERVERS, JsonOption, ModelArgument, configuration
from octavo.cli.help import Verb
from octavo.cli.settings import Flags, takes_knobs
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.config import Config
    from octavo.quality.bare_model import BareModel
    from octavo.quality.evaluation import Windows
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights import Checkpoint

eval_app = typer.Typer(
    help="Measure quality: perplexity, and divergence from another model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NO_ENGINE = (
    *FOR_SERVERS,
    "max_model_len",
    "generation_config",
    "override_generation_config",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "kv_policy",
    "simulate",
)
"""Settings of engines, which there is none of."""

TextOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text that is predicted (default: the help topics that come with Python).",
    ),
]
ContextOption = Annotated[
    int,
    typer.Option(
        metavar="INT",
        help="Tokens of a window, which the model sees alone; what it says of the second half "
        "counts.",
        min=8,
    ),
]
WindowsOption = Annotated[
    int, typer.Option(metavar="INT", help="Windows, one after another in the text.", min=1)
]


@eval_app.command(cls=Verb)
@takes_knobs("model", "cache", "backend", without=(*NO_ENGINE, "chat_template", "seed"))
def perplexity(
    flags: Flags,
    model_argument: ModelArgument = None,
    text: TextOption = None,
    context: ContextOption = 512,
    windows: WindowsOption = 16,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's perplexity on a text.

    The flags of weights and cache, such as --quantization and --kv-cache-dtype, say what is
    measured: it is computed by the kernels that would serve it.
    """
    from octavo import assembly
    from octavo.quality import evaluation
    from octavo.quality.bare_model import BareModel

    config = configuration(flags, model_argument)
    checkpoint = assembly.open_model(config.model)
    chosen = windows_of(config, checkpoint, text, context, windows)
    model = BareModel(checkpoint, config, context)
    with progress("windows") as show:
        found = evaluation.perplexity(model, chosen, show)
    if as_json:
        figures = {"perplexity": found.value, "perplexity_error_percent": found.error}
        print(json.dumps(_about(model, chosen) | figures))
        return
    print(f"{checkpoint.name}: {_in_words(model)}")
    print(f"perplexity {found.value:.3f} ± {found.error:.1f} %, {_of_text(chosen)}")


@eval_app.command(cls=Verb)
@takes_knobs("model", "cache", "backend", without=(*NO_ENGINE, "chat_template", "seed"))
def kl(
    flags: Flags,
    model_argument: ModelArgument = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What is compared with, in float32 with a float32 cache (default: the model "
            "itself).",
        ),
    ] = None,
    text: TextOption = None,
    context: ContextOption = 512,
    windows: WindowsOption = 16,
    as_json: JsonOption = False,
) -> None:
    """Measure how far a model's predictions are from a reference's.

    Shown are the Kullback-Leibler divergence from the reference's distribution of the next token,
    over the whole vocabulary, how often both find the same token the likeliest, and both
    perplexities.
    """
    from octavo import assembly

    config = configuration(flags, model_argument)
    checkpoint = assembly.open_model(config.model)
    chosen = windows_of(config, checkpoint, text, context, windows)
    figures = compared(config, checkpoint, reference, chosen, show_progress=True)
    if as_json:
        print(json.dumps(figures))
        return
    print(f"{checkpoint.name}: {figures['in_words']}")
    print(f"compared with {reference or 'itself'} in float32:")
    show_figures(figures, chosen)


def compared(
    config: Config,
    checkpoint: Checkpoint,
    reference: str | None,
    chosen: Windows,
    *,
    show_progress: bool,
) -> dict[str, Any]:
    """All figures of a comparison, for people and programs. reference: None is the checkpoint."""
    from octavo import assembly
    from octavo.quality import evaluation
    from octavo.quality.bare_model import BareModel
    from octavo.quality.distance import standard_error

    exact = replace(
        config,
        model=replace(
            config.model, model=reference or config.model.model, dtype="float32", quantization=None
        ),
        cache=replace(config.cache, kv_cache_dtype="float32"),
    )
    original = checkpoint if reference is None else assembly.open_model(exact.model)
    context = chosen.tokens.shape[1]
    of_reference = BareModel(original, exact, context)
    model = BareModel(checkpoint, config, context)
    with progress("windows", shown=show_progress) as show:
        apart = evaluation.distance(of_reference, model, chosen, show)
    change, change_error = apart.perplexity_change
    return {
        **_about(model, chosen),
        "in_words": _in_words(model),
        "reference_bytes": of_reference.weight_bytes,
        "perplexity": apart.perplexity,
        "reference_perplexity": apart.reference_perplexity,
        "perplexity_change_percent": change,
        "perplexity_change_error_percent": change_error,
        "kl": float(apart.divergence.mean()),
        "kl_error": standard_error(apart.divergence),
        "worst_kl": float(apart.divergence.max()),
        "top1_agreement_percent": 100 * float(apart.agrees.mean()),
    }


def show_figures(figures: dict[str, Any], chosen: Windows) -> None:
    print(
        f"  perplexity          {figures['perplexity']:.3f}, "
        f"{figures['perplexity_change_percent']:+.2f} ± "
        f"{figures['perplexity_change_error_percent']:.2f} % of the reference's "
        f"{figures['reference_perplexity']:.3f}"
    )
    print(
        f"  KL divergence       {figures['kl']:.5f} ± {figures['kl_error']:.5f} nats, "
        f"{figures['worst_kl']:.3f} at worst"
    )
    print(f"  the same top token  {figures['top1_agreement_percent']:.1f} %")
    print(f"  {_of_text(chosen)}")


def windows_of(
    config: Config, checkpoint: Checkpoint, text: Path | None, context: int, count: int
) -> Windows:
    """Parts of a text as the model's tokens. Raises ConfigError for a text that is too short, or
    contexts that the model doesn't have.
    """
    from octavo import assembly
    from octavo.quality.evaluation import Windows

    longest = assembly.max_position(checkpoint)
    if context > longest:
        raise ConfigError(
            f"--context {context} is more than the {longest} tokens of the model; give a smaller "
            "one"
        )
    tokenizer = assembly.load_text(config.model, checkpoint).tokenizer
    tokens = tokenizer.encode(read_text(text), add_special_tokens=False)
    return Windows.of(tokens, context, count, bos_of(tokenizer))


def read_text(path: Path | None) -> str:
    """Of a file, or what comes with Python. Raises ConfigError."""
    if path is None:
        from pydoc_data import topics

        return "\n".join(topics.topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the text {path} can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text {path} is not in UTF-8 ({error}); convert it") from error


def bos_of(tokenizer: Tokenizer) -> int | None:
    """What the tokenizer puts before every text, if anything."""
    (first, *_) = (*tokenizer.encode(""), None)
    return first


@contextmanager
def progress(unit: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, if that is where stderr goes; else nothing."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(unit, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _about(model: BareModel, chosen: Windows) -> dict[str, Any]:
    return {
        "weight_bytes": model.weight_bytes,
        "bits_per_weight": 8 * model.weight_bytes / model.num_parameters,
        "formats": sorted(set(model.formats)),
        "kv_cache_dtype": model.kv_dtype,
        "kv_bytes_per_token": model.kv_bytes,
        "context": chosen.tokens.shape[1],
        "positions": chosen.num_positions,
        "machine": model.machine,
    }


def _in_words(model: BareModel) -> str:
    bits = 8 * model.weight_bytes / model.num_parameters
    return (
        f"{model.weight_bytes / 1e6:,.0f} MB of weights ({bits:.2f} bits each; "
        f"{', '.join(dict.fromkeys(model.formats))}), KV cache in {model.kv_dtype} "
        f"({model.kv_bytes:,.0f} bytes a token)"
    )


def _of_text(chosen: Windows) -> str:
    count, context = chosen.tokens.shape
    return f"{chosen.num_positions:,} positions of {count} windows of {context} tokens"

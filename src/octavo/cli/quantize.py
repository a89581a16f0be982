"""`octavo quantize`: a checkpoint with fewer bits, for Octavo and vLLM, and what it lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.arguments import JsonOption, ModelArgument, configuration
from octavo.cli.evaluate import (
    NO_ENGINE,
    bos_of,
    compared,
    progress,
    read_text,
    show_figures,
    windows_of,
)
from octavo.cli.settings import Flags, takes_knobs
from octavo.core.dtypes import INTEGER_QUANTIZATIONS
from octavo.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from octavo.bench.output.error_plots import MatrixErrorPoint
    from octavo.compression.model import MatrixErrors, Written
    from octavo.config import Config
    from octavo.weights import Checkpoint

_METHODS = ("gptq", "rtn")
_OWN = "own"
_SEQUENCE_TOKENS = 512
_NUMBER = re.compile(r"\.(\d+)\.")
"""In a matrix's name: of its block, then of an expert."""


@takes_knobs("model", "backend", without=(*NO_ENGINE, "quantization"))
def quantize(
    flags: Flags,
    model_argument: ModelArgument = None,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where the new checkpoint goes.")
    ],
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help=f"{', '.join(INTEGER_QUANTIZATIONS)}."),
    ] = "int4",
    method: Annotated[
        str,
        typer.Option(
            metavar="gptq|rtn",
            help="gptq: weights make up for each other's rounding, by what the model computes over "
            "a calibration text. rtn: each is rounded to the nearest.",
        ),
    ] = "gptq",
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|own",
            help="Text that gptq calibrates with; own: what the model itself writes.",
        ),
    ] = _OWN,
    calibration_tokens: Annotated[
        int, typer.Option(metavar="INT", help="Tokens of it that are used.", min=_SEQUENCE_TOKENS)
    ] = 65_536,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text that the result is measured on (default: the help topics that come with "
            "Python).",
        ),
    ] = None,
    windows: Annotated[
        int,
        typer.Option(
            metavar="INT",
            help="Windows of it, of 512 tokens or all that the model has; 0 measures nothing.",
            min=0,
        ),
    ] = 16,
    as_json: JsonOption = False,
) -> None:
    """Write a quantized copy of a model, and say what it lost.

    The matrices of the layers are quantized, embedding and head are not. The folder is in
    compressed-tensors' format, which vLLM reads too. Shown are its size, the errors of its
    matrices, and perplexity, divergence and agreement against the original in float32;
    quantization.json in the folder has all of it, for each matrix.
    """
    if form not in INTEGER_QUANTIZATIONS:
        raise ConfigError(
            f"--format {form!r} is unknown; use one of {', '.join(INTEGER_QUANTIZATIONS)}"
        )
    if method not in _METHODS:
        raise ConfigError(f"--method {method!r} is unknown; use gptq or rtn")
    if method == "rtn" and calibration != _OWN:
        raise ConfigError(f"--calibration {calibration} is for --method gptq; leave one out")
    from octavo import assembly
    from octavo.compression.model import check_fits
    from octavo.compression.new_folder import check_is_free

    check_is_free(out)
    config = configuration(flags, model_argument)
    checkpoint = assembly.open_model(config.model)
    model = assembly.unloaded_model(checkpoint)
    check_fits(model, checkpoint, form)
    length = min(_SEQUENCE_TOKENS, model.spec.max_position)
    chosen = windows_of(config, checkpoint, text, length, windows) if windows else None
    sequences = None
    if method == "gptq":
        sequences = _calibration(config, checkpoint, calibration, calibration_tokens, length)
    written = _write(config, checkpoint, form, out, sequences)
    figures: dict[str, Any] = {}
    if chosen is not None:
        new = replace(config, model=replace(config.model, model=str(out), dtype="auto"))
        new = replace(new, cache=replace(new.cache, kv_cache_dtype="float32"))
        figures = compared(
            new, assembly.open_model(new.model), config.model.model, chosen, show_progress=True
        )
    report = {
        "model": checkpoint.name,
        "format": form,
        "method": method,
        "calibration_tokens": 0 if sequences is None else sum(map(len, sequences)),
        "bytes": written.num_bytes,
        "original_bytes": _stored_bytes(checkpoint),
        "kept": written.kept,
        "quality": figures,
        "matrices": [asdict(one) for one in written.matrices],
    }
    (out / "quantization.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    picture = _draw(out / "quantization.png", checkpoint.name, form, written.matrices)
    if as_json:
        print(json.dumps(report))
        return
    _show(report, written, out, picture)
    if chosen is not None:
        show_figures(figures, chosen)


def _calibration(
    config: Config, checkpoint: Checkpoint, source: str, num_tokens: int, length: int
) -> list[np.ndarray]:
    """Token ids of sequences, of up to `length`, that the model is calibrated with. Raises
    ConfigError.
    """
    import numpy as np

    from octavo import assembly

    text = assembly.load_text(config.model, checkpoint)
    if source == _OWN:
        return _own_words(config, num_tokens, length, chats=text.chat_template.exists)
    tokenizer = text.tokenizer
    tokens = tokenizer.encode(read_text(Path(source)), add_special_tokens=False)[:num_tokens]
    if len(tokens) < length:
        raise ConfigError(
            f"the calibration text {source} has {len(tokens)} tokens, of at least {length}; give a "
            "longer one, some hundred times as long if you can"
        )
    bos = bos_of(tokenizer)
    sequences = np.array(tokens[: len(tokens) // length * length], np.int64).reshape(-1, length)
    if bos is not None:
        sequences[:, 0] = bos
    return list(sequences)


def _own_words(config: Config, num_tokens: int, length: int, *, chats: bool) -> list[np.ndarray]:
    """What the model answers to many kinds of questions, at a temperature of 1, each with its
    question: the text that it will be used for. chats: it has a chat template; otherwise it goes on
    where the question ends. Raises ConfigError if it can't be asked.
    """
    import itertools
    import random

    import numpy as np

    from octavo.cli.generate import loaded
    from octavo.core.sampling_params import SamplingParams
    from octavo.speculative.training.prompts import built_in_conversations

    seed = config.model.seed or 0
    asked = built_in_conversations(random.Random(seed))
    found: list[np.ndarray] = []
    count = 0
    seeds = itertools.count(seed)
    with loaded(config) as llm, progress("calibration tokens") as show:
        while count < num_tokens:
            show(count, num_tokens)
            round_ = list(itertools.islice(asked, 64))
            if not round_:
                break
            sampling = [
                SamplingParams(temperature=1.0, max_tokens=length // 2, seed=next(seeds))
                for _ in round_
            ]
            try:
                if chats:
                    outputs = llm.chat(round_, sampling, use_tqdm=False)
                else:
                    prompts = [str(messages[0]["content"]) for messages in round_]
                    outputs = llm.generate(prompts, sampling, use_tqdm=False)
            except RequestError as error:  # a short context, or a template that refuses
                raise ConfigError(
                    f"--calibration own: the model can't be asked for its own words ({error}) "
                    "Give a text with --calibration FILE"
                ) from error
            for output in outputs:
                tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:length]
                found.append(np.array(tokens, np.int64))
                count += len(tokens)
    return found


def _write(
    config: Config,
    checkpoint: Checkpoint,
    form: str,
    out: Path,
    sequences: Sequence[np.ndarray] | None,
) -> Written:
    from octavo import assembly
    from octavo.compression.calibration import Calibration
    from octavo.compression.model import dtype_of_scales
    from octavo.compression.model import quantize as write_quantized
    from octavo.compression.new_folder import new_folder
    from octavo.ops.backend import load_backend
    from octavo.text.export import write_text_files

    model = assembly.unloaded_model(checkpoint)
    calibration = None
    if sequences is not None:
        chosen = config.backend
        backend = load_backend(chosen.backend, device=chosen.device, threads=chosen.threads)
        calibration = Calibration(model, checkpoint, backend, sequences)
    with new_folder(out), progress("blocks") as show:
        write_text_files(checkpoint, out)
        return write_quantized(
            model,
            checkpoint,
            form,
            out,
            dtype=dtype_of_scales(checkpoint, config.model.dtype),
            calibration=calibration,
            progress=show,
        )


def _stored_bytes(checkpoint: Checkpoint) -> int:
    folder = checkpoint.path
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _show(report: dict[str, Any], written: Written, out: Path, picture: str | None) -> None:
    print(
        f"{out}: {report['bytes'] / 1e6:,.0f} MB, {report['format']} by {report['method']}, of "
        f"{report['model']} with {report['original_bytes'] / 1e6:,.0f} MB"
    )
    if written.kept:
        print(
            "  kept as they were, as rows are no multiple of 32 weights, or stored as columns, or "
            f"of several matrices: {_counted(written.kept)}"
        )
    unseen = [one.name for one in written.matrices if one.outputs is None]
    if unseen and report["method"] == "gptq":
        print(
            "  rounded to the nearest, as experts with biases or weighed inputs are not "
            f"calibrated: {_counted(unseen)}"
        )
    print("  errors of matrices, mean of all layers and the worst, relative to what is right:")
    for kind, errors in by_kind(written.matrices).items():
        print(f"    {kind:12} {_error_cells(errors)}")
    if picture is not None:
        print(f"  {picture}")


def by_kind(matrices: Sequence[MatrixErrors]) -> dict[str, list[MatrixErrors]]:
    """By the last part of their names, which is the same in all layers."""
    found: dict[str, list[MatrixErrors]] = {}
    for one in matrices:
        found.setdefault(_kind(one.name), []).append(one)
    return found


def _counted(names: Sequence[str]) -> str:
    kinds = Counter(map(_kind, names))
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _error_cells(errors: Sequence[MatrixErrors]) -> str:
    weights = [one.weights for one in errors]
    cells = f"weights {_percent(weights)}"
    outputs = [one.outputs for one in errors if one.outputs is not None]
    nearest = [one.nearest for one in errors if one.nearest is not None]
    if outputs:
        cells += f", outputs {_percent(outputs)}, and {_percent(nearest)} if rounded to the nearest"
    return cells


def _percent(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.2f} % ({100 * max(values):.2f} %)"


def points_of_blocks(errors: Sequence[MatrixErrors]) -> list[MatrixErrorPoint]:
    """One of each block, the mean of its experts."""
    from octavo.bench.output.error_plots import MatrixErrorPoint

    blocks: dict[str, list[MatrixErrors]] = {}
    for one in errors:
        blocks.setdefault(_NUMBER.findall(one.name)[0], []).append(one)
    points = []
    for of_block in blocks.values():
        written = [one.weights if one.outputs is None else one.outputs for one in of_block]
        nearest = [one.nearest for one in of_block if one.nearest is not None]
        points.append(MatrixErrorPoint(mean(written), mean(nearest) if nearest else None))
    return points


def _draw(path: Path, model: str, form: str, matrices: Sequence[MatrixErrors]) -> str | None:
    """A picture of the errors, if it can be drawn; what to say of it."""
    from octavo.bench.output.plots import NO_PICTURES, can_draw

    if not can_draw():
        return NO_PICTURES
    from octavo.bench.output.error_plots import matrix_errors
    from octavo.bench.output.plots import png_of
    from octavo.bench.output.style import styled

    kinds = {kind: points_of_blocks(errors) for kind, errors in by_kind(matrices).items()}
    is_calibrated = any(one.outputs is not None for one in matrices)
    what = "of outputs, relative to the right ones" if is_calibrated else "of weights, relative"
    with styled():
        path.write_bytes(png_of(matrix_errors(f"{model} in {form}", what, kinds)))
    return f"drawn in {path}"

"""`octavo draft`: heads that draft for a model, made from what the model itself says."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from octavo.cli.arguments import FOR_SERVERS, JsonOption, ModelArgument, configuration
from octavo.cli.help import Verb
from octavo.cli.settings import Flags, takes_knobs
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from octavo.config import Config
    from octavo.speculative.training.pipeline import Result
    from octavo.speculative.training.prompts import Conversation
    from octavo.speculative.training.responses import Answer, Question
    from octavo.text.chat_template import ChatTemplate

draft_app = typer.Typer(
    help="Make draft heads for speculative decoding.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MARK = "the user's turn"
_ASKING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 100}
_PERIOD_S = 10.0
"""Between two lines of progress where there is no terminal."""


@draft_app.command(cls=Verb)
@takes_knobs("model", "cache", "scheduler", "backend", without=FOR_SERVERS)
def train(
    flags: Flags,
    method: Annotated[
        str,
        typer.Option(
            metavar="eagle|medusa",
            help="eagle: one layer that is run again for each token. medusa: a small head for each "
            "token ahead, all at once.",
        ),
    ],
    model_argument: ModelArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the head goes, with what is needed to go on if this is stopped (default: "
            "METHOD-NAME, of the model).",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where answers and hidden states go, for other heads to use too (default: data, "
            "in --out).",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt a line, or JSON lines with "prompt" or "messages" (default: a list '
            "of many kinds that comes with Octavo).",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="INT", help="Tokens of answers to learn from.", min=1)
    ] = 200_000,
    answer_tokens: Annotated[
        int, typer.Option(metavar="INT", help="Tokens of one answer at most.", min=8)
    ] = 320,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Training ends after this time, if --epochs haven't ended it before; earlier runs "
            "of the same training count.",
            min=0.01,
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(metavar="INT", help="Times that all answers are learned from.", min=1)
    ] = 4,
    draft_vocab_size: Annotated[
        int,
        typer.Option(metavar="INT", help="So many of the commonest tokens can be drafted.", min=1),
    ] = 6144,
    mlp_size: Annotated[
        int | None,
        typer.Option(
            metavar="INT", help="Inner size of an EAGLE head's MLP (default: the model's).", min=1
        ),
    ] = None,
    num_heads: Annotated[int, typer.Option(metavar="INT", help="Medusa heads.", min=1, max=16)] = 4,
    as_json: JsonOption = False,
) -> None:
    """Train a draft head for a model.

    The model answers prompts, its hidden states over the answers are computed, and the head learns
    to foresee them: it needs no data but the model's own. Then the share of its tokens that the
    model accepts is measured at each position, on prompts that it did not learn from. The same
    command goes on where an earlier run was stopped. Needs octavo[torch].
    """
    try:
        from octavo.speculative.training import pipeline
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("octavo draft train needs torch: pip install 'octavo[torch]'") from None
    from octavo import assembly

    config = configuration(flags, model_argument)
    checkpoint = assembly.open_model(config.model)
    text = assembly.load_text(config.model, checkpoint)
    request = pipeline.Request(
        method=method,
        vocab_size=text.tokenizer.vocab_size,
        out=out or Path(f"{method}-{checkpoint.name.rpartition('/')[2]}"),
        data=data,
        prompts=prompts,
        num_tokens=tokens,
        answer_tokens=answer_tokens,
        minutes=minutes,
        epochs=epochs,
        draft_vocab_size=draft_vocab_size,
        inner_size=mlp_size,
        num_heads=num_heads,
        seed=config.model.seed or 0,
    )
    with _Parts(sys.stderr) as parts:
        result = pipeline.train(
            request, checkpoint, config, lambda: _answering(config, text.chat_template), parts
        )
    _show(method, result, as_json=as_json)


@contextlib.contextmanager
def _answering(config: Config, template: ChatTemplate) -> Iterator[Answer]:
    """The model in an engine, which answers many questions at once."""
    from octavo.cli.generate import loaded
    from octavo.core.sampling_params import SamplingParams

    with loaded(config) as llm:
        before, _, _ = template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        users_turn = llm.get_tokenizer().encode(before)

        def conversations(questions: Sequence[Question]) -> list[Conversation]:
            """What is asked; where that is open, what the model writes in the user's place."""
            writing = [
                SamplingParams(seed=q.seed, min_tokens=4, **_ASKING)
                for q in questions
                if q.conversation is None
            ]
            outputs = iter(llm.generate([users_turn] * len(writing), writing, use_tqdm=False))
            return [
                q.conversation or [{"role": "user", "content": next(outputs).outputs[0].text}]
                for q in questions
            ]

        def answer(questions: Sequence[Question]) -> list[tuple[list[int], list[int]]]:
            outputs = llm.chat(
                conversations(questions),
                [question.sampling for question in questions],
                use_tqdm=False,
            )
            return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]

        yield answer


def _show(method: str, result: Result, *, as_json: bool) -> None:
    acceptance = result.acceptance
    if as_json:
        report: dict[str, Any] = {
            "method": method,
            "folder": str(result.folder),
            "file_bytes": result.file_bytes,
            **result.facts,
        }
        print(json.dumps(report))
        return
    print(f"{result.folder}: {result.file_bytes / 1e6:.1f} MB")
    print(
        f"Can draft {result.vocabulary_coverage:.1%} of the answers' tokens. Accepted on held-out "
        "prompts, greedily, where all before were:"
    )
    for position, (rate, count) in enumerate(
        zip(acceptance.rates, acceptance.drafted, strict=True), 1
    ):
        print(f"  position {position}: {rate:6.1%} of {count:,}")
    print(f"  expected of {len(acceptance.rates)}: {acceptance.expected_length:.2f} tokens")
    settings = {"method": method, "model": str(result.folder)}
    print(f"Use it: octavo serve --speculative-config '{json.dumps(settings)}'")


class _Parts:
    """How far the parts of the work are: bars on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: Progress | None = None

    def __enter__(self) -> _Parts:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[remark]}"),
                console=Console(file=self._stream),
            )
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def part(self, title: str, total: float) -> Callable[[float, str], None]:
        if self._bars is not None:
            return self._bar(self._bars, self._bars.add_task(title, total=total, remark=""))
        last = time.monotonic() - _PERIOD_S

        def show(done: float, remark: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _PERIOD_S or done >= total:
                last = time.monotonic()
                line = f"{title}: {min(1.0, done / total):.0%}, {remark}"
                print(line, file=self._stream, flush=True)

        return show

    @staticmethod
    def _bar(bars: Progress, task: TaskID) -> Callable[[float, str], None]:
        return lambda done, remark: bars.update(task, completed=done, remark=remark)

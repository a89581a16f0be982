"""The `octavo` command: its verbs, and how it ends when something is wrong."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import octavo
from octavo.cli.ab import ab
from octavo.cli.arguments import FOR_SERVERS, JsonOption, ModelArgument, configuration
from octavo.cli.bench import bench_app, profile, verify_determinism
from octavo.cli.deploy import deploy_app
from octavo.cli.draft import draft_app
from octavo.cli.evaluate import eval_app
from octavo.cli.help import Verb, VerbWithOthers
from octavo.cli.measure import report, sweep
from octavo.cli.measure import serve as bench_serve
from octavo.cli.plan import kv, plan
from octavo.cli.plan_options import TokenOption
from octavo.cli.quantize import quantize
from octavo.cli.sampling import Sampling, takes_sampling
from octavo.cli.settings import Flags, takes_knobs
from octavo.cli.simulate import simulate
from octavo.cli.tune import tune
from octavo.cli.verify_plan import verify as verify_plan
from octavo.core.errors import OctavoError
from octavo.core.foreign_settings import remark_on

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. 1: can't be done, 2: no such usage, 130: Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = typer.main.get_command(app).main(
            given or ["--help"], prog_name="octavo", standalone_mode=False
        )
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except typer.TyperException as error:
        message = _remark(error, given) or f"{error.format_message()}; see --help"
        print(f"error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def _remark(error: typer.TyperException, given: Sequence[str]) -> str | None:
    """What is said to an unknown flag that users of other engines know."""
    if not hasattr(error, "possibilities"):  # only of an unknown flag: typer hides that class
        return None
    flag: str = getattr(error, "option_name", "")
    if not flag.startswith("--"):  # `-tp 2` was read as `-t`
        flag = next(word for word in given if word.startswith(flag)).partition("=")[0]
    remark = remark_on(flag)
    return remark and f"{flag}: {remark}"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"octavo {octavo.__version__}")
        raise typer.Exit()


@app.callback()
def octavo_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Octavo serves large language models."""


@app.command(cls=Verb)
@takes_knobs("model", "cache", "scheduler", "speculation", "backend", "parallel", "server")
def serve(flags: Flags, model_argument: ModelArgument = None) -> None:
    """Serve a model over the OpenAI API."""
    # Until it serves it makes objects that stay: looking for garbage among them, again and again,
    # took 45 of 450 ms.
    gc.disable()
    try:
        from octavo.cli.serve import serve

        serve(configuration(flags, model_argument))
    finally:
        gc.enable()


@app.command(cls=Verb)
@takes_knobs(
    "model", "cache", "scheduler", "speculation", "backend", "parallel", without=FOR_SERVERS
)
@takes_sampling
def generate(
    flags: Flags,
    sampling: Sampling,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT", help="The text to continue; `-` reads it from stdin."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Continue a text without a server; the answer streams to stdout."""
    from octavo.cli.generate import generate

    *model, prompt = words
    if len(model) > 1:
        raise typer.BadParameter("more than MODEL and PROMPT are given; quote the prompt")
    generate(
        configuration(flags, model[0] if model else None),
        sys.stdin.read() if prompt == "-" else prompt,
        sampling,
        as_json=as_json,
    )


@app.command(cls=Verb)
@takes_knobs(
    "model", "cache", "scheduler", "speculation", "backend", "parallel", without=FOR_SERVERS
)
@takes_sampling
def chat(
    flags: Flags,
    sampling: Sampling,
    model_argument: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Talk to this server, e.g. http://localhost:8000/v1, instead."
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of that server (default: its first).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of that server.", envvar="OCTAVO_API_KEY")
    ] = None,
    quick: Annotated[
        str | None, typer.Option("--quick", "-q", metavar="TEXT", help="Ask this, then exit.")
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instructions to the model.")
    ] = None,
) -> None:
    """Chat with a model; shows each answer's speed."""
    from octavo.cli.chat import Conversation, LocalModel, RemoteModel

    model: LocalModel | RemoteModel
    if url is None:
        if model_name is not None:
            raise typer.BadParameter("--model-name is for --url; here the model is MODEL")
        model = LocalModel(configuration(flags, model_argument), sampling)
    else:
        if local := [f"--{name.replace('_', '-')}" for name in flags if name != "config"]:
            raise typer.BadParameter(f"{', '.join(local)}: not for --url, whose server decides it")
        if model_argument is not None:
            raise typer.BadParameter("with --url the model is --model-name, not MODEL")
        model = RemoteModel(url, model_name=model_name, api_key=api_key, sampling=sampling)
    with model:
        conversation = Conversation(model, system_prompt)
        conversation.ask(quick) if quick is not None else conversation.run()


@app.command(cls=Verb)
@takes_knobs("backend")
def kernels(flags: Flags, as_json: JsonOption = False) -> None:
    """Show which implementation of each op runs here, and why."""
    from octavo.cli.kernels import kernels

    kernels(configuration(flags).backend, as_json=as_json)


@app.command(cls=Verb)
def models(as_json: JsonOption = False) -> None:
    """List the model families that can be served, and how each was verified."""
    from octavo.cli.models import models

    models(as_json=as_json)


@app.command(cls=Verb)
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Whose parallel sizes are looked at: a hub id, a folder, a .gguf file or a "
            "config.json (default: the default model, if it is in the cache).",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            metavar="INT",
            min=1,
            help="Show what each rank has of this layout.",
        ),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option("--pipeline-parallel-size", "--pp", metavar="INT", min=1, help="As that."),
    ] = None,
    hf_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report what Octavo finds on this machine, and into which parts a model can be divided."""
    from octavo.cli.doctor import doctor

    doctor(
        as_json=as_json,
        model=model,
        tensor=tensor_parallel_size,
        stages=pipeline_parallel_size,
        token=hf_token,
    )


bench_app.command("serve", cls=Verb)(bench_serve)
bench_app.command(cls=Verb)(sweep)
bench_app.command(cls=Verb)(report)
plan_app = typer.Typer(cls=VerbWithOthers, rich_markup_mode=None)
plan_app.command(cls=Verb)(plan)
plan_app.command(cls=Verb)(kv)
plan_app.command("verify", cls=Verb)(verify_plan)
app.add_typer(bench_app, name="bench")
app.add_typer(deploy_app, name="deploy")
app.add_typer(draft_app, name="draft")
app.add_typer(eval_app, name="eval")
app.add_typer(plan_app, name="plan", help="Plan a deployment, or measure how right plans are.")
app.command(cls=Verb)(ab)
app.command(cls=Verb)(quantize)
app.command(cls=Verb)(simulate)
app.command(cls=Verb)(tune)
app.command(cls=Verb)(profile)
app.command(cls=Verb)(verify_determinism)


if __name__ == "__main__":
    sys.exit(main())

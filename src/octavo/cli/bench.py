"""The verbs that measure: `octavo bench ...`, `octavo profile`, `octavo verify-determinism`."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.arguments import (
    FOR_SERVERS,
    JsonOption,
    ModelArgument,
    configuration,
    whole_numbers,
)
from octavo.cli.help import Verb
from octavo.cli.settings import Flags, takes_knobs

bench_app = typer.Typer(
    help="Measure servers over HTTP; ops, latency and throughput without one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_ENGINE = ("model", "cache", "scheduler", "speculation", "backend", "parallel")

Temperature = Annotated[
    float, typer.Option(metavar="FLOAT", help="0 always takes the likeliest token.", min=0, max=2)
]


def _count(text: str, *flags: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*flags, metavar="INT", help=text, min=1)
    return option


@bench_app.command(cls=Verb)
@takes_knobs("backend", without=("backend", "device", "kernels"))
def ops(
    flags: Flags,
    model_argument: ModelArgument = None,
    op: Annotated[
        str, typer.Option("--op", metavar="OP,...", help="Only these, e.g. linear,paged_attention.")
    ] = "",
    rows: Annotated[
        str, typer.Option(metavar="INT,...", help="Rows (tokens, or sequences) of each call.")
    ] = "1,4,16,64,256",
    context: Annotated[int, _count("Cached tokens of a decoding sequence.")] = 512,
    rounds: Annotated[int, _count("Times that each is measured, in turn with the others.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Time native ops against the machine's limits.

    First the limits are measured: how fast memory is read, and how fast the threads multiply. Then
    each op runs in the shapes of the model, on every instruction set that there is here, and is
    shown with its share of the limits. Weights and KV caches come from memory, as in a step, and
    not from processor caches.
    """
    from octavo import assembly
    from octavo.bench.op_times import measure_ops
    from octavo.bench.report import show_ops

    config = configuration(flags, model_argument)
    num_rows = whole_numbers("--rows", rows)
    limits, times = measure_ops(
        assembly.unloaded_model(assembly.open_model(config.model)),
        threads=config.backend.threads,
        wanted=[name for name in op.split(",") if name],
        rows=num_rows,
        context=context,
        rounds=rounds,
    )
    show_ops(limits, times, as_json=as_json)


@bench_app.command(cls=Verb)
@takes_knobs(*_ENGINE, without=FOR_SERVERS)
def latency(
    flags: Flags,
    model_argument: ModelArgument = None,
    input_len: Annotated[int, _count("Tokens of each prompt.")] = 32,
    output_len: Annotated[int, _count("Tokens that each gets.")] = 128,
    batch_size: Annotated[int, _count("Prompts at once.")] = 8,
    num_iters: Annotated[int, _count("Batches that are measured.")] = 10,
    num_iters_warmup: Annotated[
        int, typer.Option(metavar="INT", help="Batches before them.", min=0)
    ] = 2,
    temperature: Temperature = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Time one batch of requests after another.

    Shown are the time of the whole batch, to the first token, and of each token after it. Prompts
    are random and never the same, so that no prefix cache helps; --seed chooses others. Outputs
    have their full length, whatever the tokens are.
    """
    from octavo.bench.offline import measure_latency
    from octavo.bench.report import show_latency

    report = measure_latency(
        configuration(flags, model_argument),
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        temperature=temperature,
    )
    show_latency(report, as_json=as_json)


@bench_app.command(cls=Verb)
@takes_knobs(*_ENGINE, without=FOR_SERVERS)
def throughput(
    flags: Flags,
    model_argument: ModelArgument = None,
    input_len: Annotated[int, _count("Tokens of a prompt.")] = 256,
    output_len: Annotated[int, _count("Tokens that it gets.")] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            help="Lengths vary by up to this share of --input-len and --output-len.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    num_prompts: Annotated[int, _count("Requests, all given at once.")] = 64,
    num_warmups: Annotated[
        int, typer.Option(metavar="INT", help="Requests before them.", min=0)
    ] = 4,
    temperature: Temperature = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Time many requests together.

    Shown are tokens per second at full load. All requests arrive at once, so that waiting counts
    and this says nothing about latency. Prompts are random and never the same, so that no prefix
    cache helps; --seed chooses others.
    """
    from octavo.bench.offline import measure_throughput
    from octavo.bench.report import show_throughput

    report = measure_throughput(
        configuration(flags, model_argument),
        input_len=input_len,
        output_len=output_len,
        range_ratio=random_range_ratio,
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        temperature=temperature,
    )
    show_throughput(report, as_json=as_json)


@bench_app.command(cls=Verb)
@takes_knobs(*_ENGINE, "server", without=("host", "port"))
def startup(
    flags: Flags,
    model_argument: ModelArgument = None,
    num_iters_cold: Annotated[
        int, typer.Option(metavar="INT", help="Starts that find nothing kept by others.", min=0)
    ] = 3,
    num_iters_warmup: Annotated[
        int, typer.Option(metavar="INT", help="Starts before the warm ones.", min=0)
    ] = 1,
    num_iters_warm: Annotated[
        int, typer.Option(metavar="INT", help="Starts that find what those kept.", min=0)
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Time `octavo serve` from its start to its first token.

    Shown is the time to the line that says where it listens, and to the first token of a request
    that is sent then. A cold start finds no packed weights, no measured kernels, and the model's
    files out of memory (on Linux, unless another process uses them); a warm one finds all of these.
    """
    from octavo.bench.report import show_startup
    from octavo.bench.startup import measure_startup

    if num_iters_cold + num_iters_warm == 0:
        raise typer.BadParameter("nothing is measured; raise --num-iters-cold or --num-iters-warm")
    report = measure_startup(
        configuration(flags, model_argument),
        num_iters_cold=num_iters_cold,
        num_iters_warmup=num_iters_warmup,
        num_iters_warm=num_iters_warm,
    )
    show_startup(report, as_json=as_json)


@takes_knobs(*_ENGINE, without=FOR_SERVERS)
def profile(
    flags: Flags,
    model_argument: ModelArgument = None,
    batch: Annotated[int, _count("Sequences of the decode step.")] = 1,
    context: Annotated[int, _count("Tokens that each of them has.")] = 256,
    prompt: Annotated[int, _count("Tokens of the prompt whose prefill is profiled.")] = 512,
    temperature: Temperature = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Show where a step's time goes.

    Real decode steps and prefills of the engine are cut into their parts: each matrix product by
    its shape, attention, the ops on rows, sampling, and the Python around them. Each is shown with
    its bytes and operations, and with its share of what this machine's limits, measured in the same
    run, would allow.
    """
    from octavo.bench import profile as profiling
    from octavo.bench.report import show_profile

    found = profiling.profile(
        configuration(flags, model_argument),
        batch=batch,
        context=context,
        prompt=prompt,
        temperature=temperature,
    )
    show_profile(found, as_json=as_json)


@takes_knobs(*_ENGINE, without=FOR_SERVERS)
def verify_determinism(
    flags: Flags,
    model_argument: ModelArgument = None,
    num_prompts: Annotated[
        int,
        _count(
            "Prompts; each is continued greedily and with a seed.", "--num-prompts", "--prompts"
        ),
    ] = 8,
    input_len: Annotated[int, _count("Tokens of the longest prompt.")] = 160,
    output_len: Annotated[int, _count("Tokens that each gets.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Show that results depend on the prompt alone.

    Prompts run alone, then in a crowd, in chunks, with prefix hits, after preemption, and with 1
    and 2 threads. All token ids and log-probabilities are compared bit by bit. The exit status is 1
    if one differs, or if a circumstance did not come about.
    """
    from octavo.bench.determinism import verify_determinism
    from octavo.bench.report import show_certificate

    certificate = verify_determinism(
        configuration(flags, model_argument),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
    )
    show_certificate(certificate, as_json=as_json)
    if not certificate.passed:
        raise typer.Exit(1)

"""`octavo deploy`: on clusters that others run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo import machine
from octavo.cli.arguments import ModelArgument, configuration
from octavo.cli.help import Verb
from octavo.cli.settings import Flags, takes_knobs
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import Config

deploy_app = typer.Typer(
    help="Deploy on a cluster: Ray Serve. For Kubernetes see docs/deploy.md.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MACHINES = ("nnodes", "node_rank", "master_addr", "master_port", "data_parallel_size")
_SECRETS = ("api_key", "hf_token", "cluster_key")


@deploy_app.command(cls=Verb)
@takes_knobs(
    "model", "cache", "scheduler", "speculation", "backend", "parallel", "server",
    without=(*_MACHINES, *_SECRETS, "record_steps"),
)  # fmt: skip
def ray(
    flags: Flags,
    model_argument: ModelArgument = None,
    min_replicas: Annotated[
        int,
        typer.Option(metavar="INT", help="Replicas that are always there.", min=1),
    ] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            help="Replicas that there may be when there is much to do (default: --min-replicas).",
            min=1,
        ),
    ] = None,
    requests_per_replica: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            help="Requests, running or waiting, beyond which a replica is added; one is also added "
            "when the KV caches are 80% full (default: --max-num-seqs).",
            min=1,
        ),
    ] = None,
    cpus_per_replica: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="CPUs that Ray sets aside for a replica (default: --threads for each process that "
            "computes; on a GPU 1; else all of this machine's, so that a node gets one replica).",
            min=0,
        ),
    ] = None,
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="GPUs of a replica (default: with --device cuda, one for each process that "
            "computes).",
            min=0,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster, or `auto` (default: RAY_ADDRESS, else one is started here).",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What Ray calls the application.")
    ] = "octavo",
    file: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The Ray Serve file that is written, to be kept under version control. One with "
            "other content is not overwritten.",
        ),
    ] = Path("octavo-ray.yaml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the file only.")] = False,
) -> None:
    """Write a Ray Serve application, and run it until Ctrl-C.

    Replicas are added when requests queue or KV caches fill, up to --max-replicas; one whose engine
    dies is replaced; a prompt goes to the replica that knows its beginning.
    """
    from octavo.deploy.ray_config import RayApplication, read_serve_file, settings_of

    config = configuration(flags, model_argument)
    cpus, gpus = _resources(config, cpus_per_replica)
    application = RayApplication(
        settings=settings_of(_with_threads(config, cpus)),
        min_replicas=min_replicas,
        max_replicas=min_replicas if max_replicas is None else max_replicas,
        requests_per_replica=requests_per_replica or config.scheduler.max_num_seqs,
        cpus_per_replica=cpus,
        gpus_per_replica=gpus if gpus_per_replica is None else gpus_per_replica,
    )
    text = application.to_yaml(name=name, host=config.server.host, port=config.server.port)
    _write(file, text)
    if dry_run:
        print(f"{file} written; `serve run {file}`, or this without --dry-run, runs it")
        return
    run = _runner()
    print(f"{file} written; Ray starts it", flush=True)
    run(
        read_serve_file(text, str(file)),
        address=address,
        on_ready=lambda url: print(f"serving at {url}/v1; Ctrl-C ends it", flush=True),
    )


def _resources(config: Config, cpus: float | None) -> tuple[float, float]:
    """CPUs and GPUs of a replica."""
    num_workers = config.parallel.num_workers
    if config.parallel.distributed_executor_backend == "ray":
        return (1 if cpus is None else cpus), 0  # the workers are placed by themselves
    if config.backend.device == "cuda":
        return (num_workers if cpus is None else cpus), num_workers
    if cpus is not None:
        return cpus, 0
    if config.backend.threads is not None:
        return config.backend.threads * num_workers, 0
    return machine.usable_cpus(), 0


def _with_threads(config: Config, cpus: float) -> Config:
    """As many threads as there are CPUs, where that is left open: Ray sets CPUs aside without
    keeping a process to them.
    """
    backend, parallel = config.backend, config.parallel
    is_placed = parallel.distributed_executor_backend == "ray"
    if backend.threads is not None or backend.device == "cuda" or is_placed:
        return config
    threads = max(1, int(cpus) // parallel.num_workers)
    return replace(config, backend=replace(backend, threads=threads))


def _write(file: Path, text: str) -> None:
    """A file that its user may have edited is left alone. Raises ConfigError."""
    try:
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{file} exists and says something else; remove it, name another --file, or run it "
                f"as it is: serve run {file}"
            )
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error.strerror}") from None


def _runner() -> Callable[..., None]:
    try:
        from octavo.deploy.ray_serve import run
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is not installed here ({error}): pip install 'octavo[ray]', or --dry-run "
            "to write the file only"
        ) from None
    return run

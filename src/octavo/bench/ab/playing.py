"""The tools of an experiment over HTTP: the load generator, a workload, and figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from octavo.bench.ab.experiment import Tools, Wanted
from octavo.bench.checks import Evidence
from octavo.bench.load.generator import play
from octavo.bench.load.plan import PointRun
from octavo.bench.load.probe import probe
from octavo.bench.load.target import Target
from octavo.bench.points import Point
from octavo.bench.summary import summarize
from octavo.bench.workloads.request import PlannedRequest
from octavo.bench.workloads.tokenizing import encoder_named, vocabulary_of
from octavo.bench.workloads.workload import Workload
from octavo.core.errors import ConfigError


def tools_for(
    workload: Workload,
    *,
    tokenizer: str | None = None,
    max_len: int | None = None,
    timeout_s: float = 3600.0,
    api_key: str | None = None,
) -> Tools:
    """tokenizer: of the model, by name or path; outputs are compared token by token with it. Else
    prompts are written with the server's own, and outputs compared by characters. max_len: of a
    prompt and its output, if less than the arms take. timeout_s: of a request, which in a slow arm
    may wait for all others. api_key: sent to all arms.
    """
    return Tools(
        probe=partial(probe, api_key=api_key),
        play=partial(play, keep_text=True, timeout_s=timeout_s),
        prepare=partial(_prepare, workload, tokenizer, max_len),
        summarize=_summarized,
        tokenize=encoder_named(tokenizer) if tokenizer else None,
    )


def _summarized(run: PointRun) -> Point:
    """With the gates' limits: offline, more than the server can do at once is what was meant."""
    is_offline = run.point.concurrency == len(run.point.requests)
    return summarize(run, None, Evidence(may_overload=is_offline))


def _prepare(
    workload: Workload, tokenizer: str | None, max_len: int | None, targets: Sequence[Target]
) -> Callable[[Wanted], Sequence[PlannedRequest]]:
    """Prompts that all arms take; the last one's server can be asked."""
    apis = {target.api for target in targets}
    if len(apis) > 1:
        raise ConfigError(
            f"the arms speak different APIs ({', '.join(sorted(apis))}), so they can't get the same"
            " prompts; compare arms of one API"
        )
    limits = [t.max_model_len for t in targets if t.max_model_len is not None]
    if max_len is not None:
        limits.append(max_len)
    vocabulary = vocabulary_of(targets[-1], tokenizer)
    now = time.time_ns()  # an arm that ran before knows the prompts of then

    def requests(wanted: Wanted) -> Sequence[PlannedRequest]:
        return workload.requests(
            seed=wanted.seed,
            count=wanted.count,
            vocabulary=vocabulary,
            api=targets[0].api,
            rate=wanted.rate,
            nonce=f"{now} {wanted.nonce}",
            max_model_len=min(limits, default=None),
            takes_token_ids=all(target.takes_token_ids for target in targets),
        )

    return requests

"""Whether a prompt's tokens and log-probabilities depend on anything but the prompt.

Each prompt is continued by itself first: computed whole, nothing cached. Then the same prompts run
under the circumstances that a server meets, and all that comes out is compared bit by bit. A
circumstance counts only if it really occurred: if prefixes were hit, if sequences were preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from octavo import machine
from octavo.bench.engines import described, loaded
from octavo.bench.progress import progress_bar
from octavo.bench.workloads.random_prompts import RandomPrompts, check_fits
from octavo.config import Config
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import EngineStats
from octavo.llm import LLM, RequestOutput

_NUM_TOP = 5
"""Likeliest tokens that are compared at every position, beside the one that was taken."""

_PREEMPTED = "after preemption"

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=_NUM_TOP)
_SEEDED = replace(_GREEDY, temperature=1.0, top_p=0.95, top_k=50, frequency_penalty=0.3)


class Job(NamedTuple):
    """A prompt and how it is continued."""

    prompt: list[int]
    params: SamplingParams


class Result(NamedTuple):
    """What came out. logprobs: by position, each reported token with its rank and the bits of its
    log-probability.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, int, str], ...], ...]

    @classmethod
    def of(cls, output: RequestOutput) -> Result:
        (completion,) = output.outputs
        logprobs = tuple(
            tuple((token, entry.rank, entry.logprob.hex()) for token, entry in position.items())
            for position in completion.logprobs or ()
        )
        return cls(tuple(completion.token_ids), logprobs)

    def difference_to(self, other: Result) -> str | None:
        """The first one, in words; None if every bit is the same."""
        for position, (mine, its) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if mine != its:
                return f"token {position} is {its} and not {mine}"
        if len(self.token_ids) != len(other.token_ids):
            return f"{len(other.token_ids)} tokens and not {len(self.token_ids)}"
        for position, (ours, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if ours != theirs:
                return f"the log-probabilities at token {position} differ"
        return None


class Circumstance(NamedTuple):
    """How all jobs are run together. changes: of the engine's settings. evidence: that it occurred,
    or nothing if it did not. num_passes: the last one counts.
    """

    name: str
    changes: dict[str, Any]
    evidence: Callable[[list[RequestOutput], EngineStats], str]
    num_passes: int = 1


@dataclass(frozen=True)
class Check:
    """A circumstance and what it showed. failure: the first difference, or that nothing was shown;
    None if all is equal.
    """

    name: str
    evidence: str
    num_sequences: int
    num_tokens: int
    num_logprobs: int
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class Certificate:
    """What was compared, and with what. skipped: circumstances that this machine can't have."""

    settings: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify_determinism(
    config: Config, *, num_prompts: int, input_len: int, output_len: int
) -> Certificate:
    """Run every circumstance. input_len: of the longest prompt. Raises ConfigError if a sequence
    does not fit into the context.
    """
    with loaded(config, enable_prefix_caching=False) as llm:
        check_fits(input_len, output_len, llm.facts.max_model_len)
        jobs = _jobs(llm, config, num_prompts, input_len, output_len)
        certificate = Certificate(described(llm.model_name, llm.facts))
        block_bytes = llm.facts.block_bytes
        with progress_bar("Alone", len(jobs)) as advance:
            expected: list[Result] = []
            for job in jobs:
                expected.append(Result.of(*_run(llm, [job])))
                advance()
    circumstances = _circumstances(config, jobs, block_bytes)
    with progress_bar("Circumstances", len(circumstances)) as advance:
        for circumstance in circumstances:
            if (circumstance.changes.get("threads") or 1) > machine.usable_cpus():
                certificate.skipped.append(f"{circumstance.name}: there is one CPU to use")
            else:
                certificate.checks.append(_check(config, circumstance, jobs, expected))
            advance()
    return certificate


def _jobs(llm: LLM, config: Config, num_prompts: int, input_len: int, output_len: int) -> list[Job]:
    """Each prompt twice, greedy and with a seed. Lengths go from one token to `input_len`; every
    second prompt begins as the longest does.
    """
    seed = config.model.seed or 0
    prompts = RandomPrompts(llm.vocab_size, seed)
    longest = prompts.take(input_len)
    greedy = replace(_GREEDY, max_tokens=output_len)
    jobs: list[Job] = []
    for index in range(num_prompts):
        length = max(1, input_len * (num_prompts - index) // num_prompts)
        own = prompts.take(length)
        shared = length // 2 if index % 2 == 0 else 0
        prompt = longest[:shared] + own[shared:]
        jobs.append(Job(prompt, greedy))
        jobs.append(Job(prompt, replace(_SEEDED, seed=seed + index, max_tokens=output_len)))
    return jobs


def _circumstances(config: Config, jobs: list[Job], block_bytes: int) -> list[Circumstance]:
    longest = max(len(job.prompt) for job in jobs)
    lengths = [len(job.prompt) + (job.params.max_tokens or 0) for job in jobs]
    block_size = config.cache.block_size
    # Exactly the blocks of the first prompts, and enough for any one sequence: as they grow, they
    # push each other out.
    least = -(-max(lengths) // block_size)
    num_blocks = 0
    for count, index in enumerate(_order(_PREEMPTED, len(jobs))):
        if count >= 2 and num_blocks >= least:
            break
        num_blocks += -(-len(jobs[index].prompt) // block_size)
    num_blocks = max(num_blocks, least)
    uncached = {"enable_prefix_caching": False}
    paged = {"kv_policy": "paged"}
    little_memory = paged | {
        "max_model_len": max(lengths),
        "kv_cache_memory_bytes": num_blocks * block_bytes,
    }
    return [
        Circumstance("in a crowd", uncached, _shared_steps),
        *(
            Circumstance(
                f"in chunks of {budget} tokens",
                uncached | {"max_num_batched_tokens": budget, "enable_chunked_prefill": True},
                partial(_chunks, longest, budget),
            )
            for budget in (block_size, longest // 2 + 1)
        ),
        Circumstance("with prefix hits", paged | {"enable_prefix_caching": True}, _hits, 2),
        Circumstance(_PREEMPTED, uncached | little_memory, _preemptions),
        Circumstance("with 1 thread", uncached | {"threads": 1}, _shared_steps),
        Circumstance("with 2 threads", uncached | {"threads": 2}, _shared_steps),
    ]


def _shared_steps(outputs: list[RequestOutput], stats: EngineStats) -> str:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if stats.total_steps >= num_tokens:
        return ""
    return f"{len(outputs)} sequences, {num_tokens} tokens in {stats.total_steps} steps"


def _chunks(longest: int, budget: int, outputs: list[RequestOutput], stats: EngineStats) -> str:
    if longest <= budget:
        return ""
    return f"prompts of up to {longest} tokens, {stats.total_steps} steps"


def _hits(outputs: list[RequestOutput], stats: EngineStats) -> str:
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return f"{num_cached} of {num_tokens} prompt tokens cached" if num_cached else ""


def _preemptions(outputs: list[RequestOutput], stats: EngineStats) -> str:
    return f"preempted {stats.total_preemptions} times" if stats.total_preemptions else ""


def _check(
    config: Config, circumstance: Circumstance, jobs: list[Job], expected: list[Result]
) -> Check:
    order = _order(circumstance.name, len(jobs))
    with loaded(config, **circumstance.changes) as llm:
        for _ in range(circumstance.num_passes):
            outputs = _run(llm, [jobs[index] for index in order])
        evidence = circumstance.evidence(outputs, llm.get_metrics())
    failure = None if evidence else "it did not occur: use more or longer prompts and outputs"
    found = [Result.of(output) for output in outputs]
    for index, result in zip(order, found, strict=True):
        difference = expected[index].difference_to(result)
        if difference is not None:
            kind = "greedy" if jobs[index].params.temperature == 0 else "seeded"
            failure = f"{kind} prompt of {len(jobs[index].prompt)} tokens: {difference}"
            break
    return Check(
        name=circumstance.name,
        evidence=evidence,
        num_sequences=len(found),
        num_tokens=sum(len(result.token_ids) for result in found),
        num_logprobs=sum(len(position) for result in found for position in result.logprobs),
        failure=failure,
    )


def _order(name: str, count: int) -> list[int]:
    """Of the jobs: neighbours differ from one circumstance to the next."""
    order = list(range(count))
    random.Random(name).shuffle(order)
    return order


def _run(llm: LLM, jobs: list[Job]) -> list[RequestOutput]:
    prompts = [job.prompt for job in jobs]
    return llm.generate(prompts, [job.params for job in jobs], use_tqdm=False)

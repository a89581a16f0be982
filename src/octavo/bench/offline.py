"""Latency of a batch, and throughput of many requests, with a model in this process."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.engines import described, loaded
from octavo.bench.metrics import tpot_seconds, ttft_seconds
from octavo.bench.progress import progress_bar
from octavo.bench.statistics import Spread, percentile
from octavo.bench.workloads.random_prompts import RandomPrompts, check_fits
from octavo.config import Config
from octavo.core.clock import monotonic
from octavo.core.errors import OctavoError
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM, RequestOutput

_WARM_UP_TOKENS = 4
"""Enough for a prefill, and for decode steps of every kind."""


@dataclass(frozen=True)
class LatencyReport:
    """latencies_s: of each iteration, from the prompts to the last token of the last of them.
    ttft_ms, tpot_ms: of all requests; tpot_ms is None for a single output token.
    """

    settings: dict[str, str]
    input_len: int
    output_len: int
    batch_size: int
    latencies_s: list[float]
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    num_cached_tokens: int

    @property
    def output_tokens_per_second(self) -> float:
        """Of the median iteration, its prefill included."""
        return self.batch_size * self.output_len / percentile(self.latencies_s, 0.5)


@dataclass(frozen=True)
class ThroughputReport:
    """elapsed_s: from the first request's arrival to the last one's end, its tail with few requests
    left included.
    """

    settings: dict[str, str]
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_steps: int
    elapsed_s: float

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.elapsed_s

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens together."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.elapsed_s


def measure_latency(
    config: Config,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int,
    temperature: float,
) -> LatencyReport:
    """Run one batch after another, each of prompts that are new. Raises ConfigError if they don't
    fit into the context.
    """
    params = _forced(output_len, temperature)
    with loaded(config) as llm:
        check_fits(input_len, output_len, llm.facts.max_model_len)
        prompts = _prompts_for(llm, config)
        latencies: list[float] = []
        outputs: list[RequestOutput] = []
        with progress_bar("Iterations", num_iters_warmup + num_iters) as advance:
            for iteration in range(-num_iters_warmup, num_iters):
                batch = [prompts.take(input_len) for _ in range(batch_size)]
                start = monotonic()
                found = llm.generate(batch, params, use_tqdm=False)
                seconds = monotonic() - start
                _check_lengths(found, [output_len] * batch_size)
                if iteration >= 0:
                    latencies.append(seconds)
                    outputs += found
                advance()
        times = [output.times for output in outputs if output.times is not None]
        return LatencyReport(
            settings=described(llm.model_name, llm.facts),
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            latencies_s=latencies,
            ttft_ms=Spread.of(_milliseconds(ttft_seconds(t)) for t in times),
            tpot_ms=Spread.of(_milliseconds(tpot_seconds(t, output_len)) for t in times),
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )


def measure_throughput(
    config: Config,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    num_prompts: int,
    num_warmups: int,
    temperature: float,
) -> ThroughputReport:
    """Give the engine all requests at once, and wait for the last. Raises ConfigError if one does
    not fit into the context.
    """
    with loaded(config) as llm:
        prompts = _prompts_for(llm, config)
        lengths = [
            (
                prompts.length_near(input_len, range_ratio),
                prompts.length_near(output_len, range_ratio),
            )
            for _ in range(num_prompts)
        ]
        for num_input, num_output in lengths:
            check_fits(num_input, num_output, llm.facts.max_model_len)
        batch = [prompts.take(num_input) for num_input, _ in lengths]
        params = [_forced(num_output, temperature) for _, num_output in lengths]
        if num_warmups > 0:
            fresh = [prompts.take(input_len) for _ in range(num_warmups)]
            warm_up_tokens = min(output_len, _WARM_UP_TOKENS)
            llm.generate(fresh, _forced(warm_up_tokens, temperature), use_tqdm=False)
        before = llm.get_metrics()
        start = monotonic()
        outputs = llm.generate(batch, params)
        elapsed = monotonic() - start
        after = llm.get_metrics()
        _check_lengths(outputs, [num_output for _, num_output in lengths])
        return ThroughputReport(
            settings=described(llm.model_name, llm.facts),
            num_requests=num_prompts,
            num_prompt_tokens=sum(map(len, batch)),
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
            num_output_tokens=sum(num_output for _, num_output in lengths),
            num_preemptions=after.total_preemptions - before.total_preemptions,
            num_steps=after.total_steps - before.total_steps,
            elapsed_s=elapsed,
        )


def _prompts_for(llm: LLM, config: Config) -> RandomPrompts:
    return RandomPrompts(llm.vocab_size, config.model.seed or 0)


def _forced(num_tokens: int, temperature: float) -> SamplingParams:
    """Exactly so many tokens, whatever they are."""
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)


def _check_lengths(outputs: list[RequestOutput], wanted: list[int]) -> None:
    """A figure that counts tokens must have got them."""
    for output, num_tokens in zip(outputs, wanted, strict=True):
        (completion,) = output.outputs
        if len(completion.token_ids) != num_tokens:
            raise OctavoError(
                f"a request of {num_tokens} tokens ended after {len(completion.token_ids)} "
                f"({completion.error or completion.finish_reason}); nothing was measured"
            )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds

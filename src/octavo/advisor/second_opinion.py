"""The question of a plan as a sheet for a language model, and its answer: shown beside the plan,
never instead of it.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.advisor.output import contents
from octavo.advisor.plan import Plan
from octavo.core.errors import ConfigError

_TIMEOUT_S = 300.0
_MOST_TOKENS = 2048


def question_sheet(plan: Plan) -> str:
    """Model, hardware, traffic and SLO filled in; no answer of the plan is given away."""
    question = plan.question
    model, traffic, device = question.model, question.traffic, plan.deployed.hardware.device
    lengths, spec = traffic.lengths, model.spec
    kv = spec.kv_bytes_per_token(plan.deployed.settings.kv)
    moe = (
        f", {model.num_experts} experts, {spec.num_active_parameters / 1e9:.2f} billion active"
        if model.num_experts
        else ""
    )
    assumed = ", uniform within 50 % of the means" if traffic.is_assumed else ""
    flops = ", ".join(f"{value / 1e12:,.0f} TFLOP/s {name}" for name, value in device.flops.items())
    link = "none" if device.link is None else (
        f"{device.link.kind}, {device.link.bytes_per_second / 1e9:,.0f} GB/s"
    )  # fmt: skip
    return f"""\
You size and configure LLM serving. Answer with numbers and the arithmetic behind them; say what you
are not sure of.

## Model
{model.name}: {model.architecture}, {spec.num_parameters / 1e9:.2f} billion parameters{moe}
Layers {len(spec.layers)}, hidden size {spec.hidden_size:,}, vocabulary {spec.vocab_size:,}, \
positions {spec.max_position:,}
Weights {model.matrices.name}, {model.weight_bytes / 1e9:.2f} GB; KV cache \
{plan.deployed.settings.kv.dtype}, {kv:,} bytes a token

## Hardware
{plan.deployed.hardware}: {device.memory_bytes / 1e9:.1f} GB and \
{device.read_bytes_per_second / 1e9:,.0f} GB/s each; {flops}; between devices: {link}

## Traffic
{traffic.workload.name}: {lengths.input_mean:,.0f} tokens in (p99 {lengths.input_p99:,.0f}), \
{lengths.output_mean:,.0f} out{assumed}; longest request {lengths.longest:,}
{traffic.load_in_words}; {traffic.hit_rate:.0%} of prompt tokens known from other requests

## SLO
{"none" if question.promise is None else question.promise}

## What to answer
1. Does it fit, line by line, and for how many users at mean and at longest length?
2. TTFT p50 and p99, TPOT p50 and p99, tokens/s at this load; is the SLO met, and what binds?
3. Which engine (vLLM, TensorRT-LLM, SGLang, TGI, Octavo), and its launch command?
4. Memory share, max batch, token budget, speculation, prefix caching, precisions: values and why.
5. Tensor parallel, pipeline parallel or none, and why not the others? How many replicas?
6. Which loads to test, what to expect, how to see saturation?
7. If the SLO can't be met: which physical limit, and the nearest change that would do?
"""


def ask(url: str, sheet: str, *, model: str | None = None, api_key: str | None = None) -> str:
    """The answer of an OpenAI-compatible server. model: None is its first. Raises ConfigError."""
    import httpx

    from octavo.bench.output.text import printable

    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S) as client:
            name = model or _json(client.get("/models"))["data"][0]["id"]
            reply = client.post(
                "/chat/completions",
                json={
                    "model": name,
                    "messages": [{"role": "user", "content": sheet}],
                    "max_tokens": _MOST_TOKENS,
                    "temperature": 0,
                },
            )
            content = _json(reply)["choices"][0]["message"]["content"]
            if not isinstance(content, str):
                raise KeyError("text")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"--ask {url}: no answer ({reason}); the plan above stands") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--ask {url}: the answer is not that of an OpenAI-compatible server (no {error})"
        ) from error
    lines = content.expandtabs().strip().splitlines()
    return "\n".join([f"{printable(str(name))} says:", "", *map(printable, lines)])


def beside(plan: Plan) -> str:
    """What the plan says, in two lines, above another's opinion."""
    return f"this plan: {contents.title(plan)}\n{contents.verdict(plan)}"


def _json(reply: Any) -> Any:
    reply.raise_for_status()
    try:
        return reply.json()
    except json.JSONDecodeError as error:
        raise KeyError("JSON body") from error

"""From what a user asked for to the plan of an experiment."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from octavo.bench.ab.experiment import Plan
from octavo.bench.ab.knobs import knob_arms
from octavo.bench.ab.results import Regime
from octavo.bench.ab.waterfall import ladder
from octavo.bench.launch import BASELINES, Arm, parse_arm
from octavo.bench.workloads.tokenizing import encoder_named
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.bench.workloads.workload import Workload
from octavo.config import DEFAULT_MODEL
from octavo.core.errors import ConfigError

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def with_arms(plan: Plan, a: str, others: Sequence[str], knob: str | None) -> Plan:
    """The plan with --a as the candidate against each --b, or with the arms of --knob, of which the
    first is the baseline. Equal arms, of an A/A test, get names that differ. Raises ConfigError.
    """
    if knob is not None:
        if others:
            raise ConfigError("--knob compares --a with itself; leave out --b")
        arms = knob_arms(knob, parse_arm(a))
        against = [(arms[0].name, arm.name) for arm in arms[1:]]
    else:
        if not others:
            raise ConfigError("nothing to compare with: give --b SERVER, --knob or --waterfall")
        arms = _renamed([parse_arm(text) for text in (a, *others)])
        against = [(arm.name, arms[0].name) for arm in arms[1:]]
    return replace(plan, arms=arms, against=against)


def with_ladder(plan: Plan, model: str, max_model_len: int) -> Plan:
    """The plan with the arms of a waterfall, each against the one before."""
    rungs = ladder(model, max_model_len)
    against = [(below.arm.name, rung.arm.name) for below, rung in pairwise(rungs)]
    return replace(plan, arms=[rung.arm for rung in rungs], against=against, rungs=rungs)


def regimes(*, rate: float | None, concurrency: int | None, offline: bool) -> list[Regime]:
    """Those that were asked for; else offline and online."""
    asked = [
        *([Regime(name="offline")] if offline else []),
        *([] if concurrency is None else [Regime(name="closed", concurrency=concurrency)]),
        *([] if rate is None else [Regime(name="online", rate=rate)]),
    ]
    return asked or [Regime(name="offline"), Regime(name="online")]


def seconds(text: str) -> float:
    """Of 90, 90s, 10m or 1.5h. Raises ConfigError."""
    found = re.fullmatch(r"(\d+\.?\d*)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"--budget must be a time like 90s, 10m or 1.5h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def model_of(arms: Sequence[Arm]) -> str | None:
    """The model that a command of ours names, as far as it is known here."""
    for arm in arms:
        words = shlex.split(arm.text)
        if arm.url is not None or not (arm.is_octavo or words[0] in BASELINES):
            continue
        for word, value in pairwise([*words, ""]):
            if word == "--model":
                return value
            if word.startswith("--model="):
                return word.removeprefix("--model=")
        given = [word for word in words[1:3] if word != "serve"][:1] if arm.is_octavo else []
        return given[0] if given and not given[0].startswith("-") else DEFAULT_MODEL
    return None


def longest_request(plan: Plan, workload: Workload, tokenizer: str) -> int:
    """Tokens of prompt and output together, over all rounds; a multiple of 16, as blocks are."""
    vocabulary = Vocabulary.learn(encoder_named(tokenizer))
    longest = max(
        request.prompt_len + request.max_tokens
        for number in range(plan.num_rounds)
        for request in workload.requests(
            seed=plan.seed + number, count=plan.num_requests, vocabulary=vocabulary
        )
    )
    return -(-longest // 16) * 16


def _renamed(arms: Sequence[Arm]) -> list[Arm]:
    """The second of a name is NAME (2)."""
    seen: Counter[str] = Counter()
    named = []
    for arm in arms:
        seen[arm.name] += 1
        count = seen[arm.name]
        named.append(arm if count == 1 else replace(arm, name=f"{arm.name} ({count})"))
    return named

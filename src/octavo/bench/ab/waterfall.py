"""A ladder of arms, each one change from the one before, and what each change brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import geometric_mean

from octavo import assembly
from octavo.bench.ab.design import Block, rate_effect, verdict_of
from octavo.bench.ab.results import Step, Waterfall
from octavo.bench.launch import Arm, parse_arm
from octavo.bench.statistics import holm
from octavo.config import ModelConfig
from octavo.core.errors import InvariantError

RESERVED = 8


@dataclass(frozen=True)
class Rung:
    """An arm, and how it differs from the rung below."""

    arm: Arm
    change: str


def ladder(model: str, max_model_len: int) -> list[Rung]:
    """From transformers, one request after another, to Octavo as it is by default.

    max_model_len: of the longest request, which must be known where memory is reserved. All but the
    first have the same memory for keys and values: in float32 it lasts for `RESERVED` requests of
    that length, so that it is memory that limits the batch, as on a GPU. Raises ConfigError.
    """
    spec = assembly.unloaded_model(assembly.open_model(ModelConfig(model=model))).spec
    token_bytes = sum(2 * 4 * heads * size for heads, size in spec.kv_heads)
    num_bytes = RESERVED * max_model_len * token_bytes
    memory = f"--kv-cache-memory-bytes {num_bytes} --max-model-len {max_model_len}"
    octavo = f"octavo {model} {memory} --no-enable-prefix-caching"
    exact = f"{octavo} --dtype float32"
    rungs = [
        ("naive", f"hf-naive --model {model}", "transformers, one request after another"),
        ("static", f"hf-static --model {model} {memory}", "static batches, padded"),
        (
            "engine",
            f"{exact} --backend torch --batching static --kv-policy reserve-max",
            "Octavo's engine on torch: no padding",
        ),
        (
            "continuous",
            f"{exact} --backend torch --kv-policy reserve-max",
            "continuous batching",
        ),
        ("paged", f"{exact} --backend torch", "paging"),
        ("native", exact, "native kernels"),
        ("formats", octavo, "weights as stored, KV in bfloat16"),
    ]
    return [Rung(parse_arm(f"{name}={text}"), change) for name, text, change in rungs]


def waterfall(rungs: Sequence[Rung], blocks: Sequence[Block]) -> Waterfall | None:
    """The factors by which output tokens/s change; they multiply to the total, as all rungs were
    played in the same rounds. None if one of them delivered nothing.
    """
    names = [rung.arm.name for rung in rungs]
    by_arm = {name: [block for block in blocks if block.arm == name] for name in names}
    if len({frozenset(block.round for block in own) for own in by_arm.values()}) != 1:
        raise InvariantError("the rungs of a ladder were not played in the same rounds")
    found = [rate_effect(by_arm[a], by_arm[b]) for a, b in pairwise(names)]
    total = rate_effect(by_arm[names[0]], by_arm[names[-1]])
    effects = [effect for effect in found if effect is not None]
    if total is None or len(effects) < len(found):
        return None
    asked = [effect.p_value for effect in effects if effect.p_value is not None]
    p_values = holm(asked) if len(asked) == len(effects) else [None] * len(effects)
    return Waterfall(
        first=names[0],
        first_rate=geometric_mean(block.output_rate for block in by_arm[names[0]]),
        steps=[
            Step(
                name=rung.arm.name,
                change=rung.change,
                factor=effect.ratio,
                output_rate=geometric_mean(b.output_rate for b in by_arm[rung.arm.name]),
                verdict=verdict_of(effect.ratio.value, p_value),
            )
            for rung, effect, p_value in zip(rungs[1:], effects, p_values, strict=True)
        ],
        total=total.ratio,
    )

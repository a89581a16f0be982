"""An engine to tune, in closed form: its best setting is known, and its measurements are noisy."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from octavo.advisor.tuning.objective import Load, Outcome, Stage
from octavo.advisor.tuning.space import Dimension, Setting, Space

SPACE = Space(
    (
        Dimension("max_num_seqs", (None, 4, 8, 16, 32, 64, 256), is_ordered=True),
        Dimension("max_num_batched_tokens", (None, 64, 128, 256, 1024, 2048), is_ordered=True),
        Dimension("enable_chunked_prefill", (None, False)),
        Dimension("block_size", (None, 8, 32, 64), is_ordered=True),
        Dimension("threads", (None, 1), is_ordered=True),
    )
)

_PROMPT, _OUTPUT = 150, 100
_TTFT_S, _TPOT_S = 0.25, 0.04
_BLOCK_SPEEDS = {8: 0.97, 16: 1.0, 32: 1.02, 64: 0.99}


@dataclass
class TunedEngine:
    """A `ServedMeasure`. step_s: of an empty step; sequence_s, token_s: what a decoding sequence
    and a prompt's token add. noise: of a play of 10 s, of its own; common: of all plays with a
    seed; both standard deviations of the use's logarithm. is_flat: no knob does anything. broken:
    settings that can't be served. clock_s: passes with plays and starts.
    """

    seed: int = 0
    step_s: float = 0.01
    sequence_s: float = 0.0012
    token_s: float = 0.0001
    noise: float = 0.05
    common: float = 0.15
    is_flat: bool = False
    broken: Collection[Setting] = ()
    start_s: float = 2.0
    clock_s: float = 0.0
    num_starts: int = 0
    stages: list[Stage] = field(default_factory=list)
    loads: list[tuple[Setting, Load]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._served: Setting | None = None

    def begin(self, stage: Stage) -> None:
        self.stages.append(stage)
        self.new_server()

    def new_server(self) -> None:
        self._served = None

    def server_key(self, setting: Setting) -> object:
        return setting

    def __call__(self, setting: Setting, load: Load) -> Outcome:
        self.loads.append((setting, load))
        if setting != self._served:
            self._served = setting
            self.num_starts += 1
            self.clock_s += self.start_s
        if setting in self.broken:
            return Outcome(use=math.inf, failure="out of memory: no room")
        self.clock_s += 1.15 * load.seconds
        luck = random.Random(f"{self.seed} {load.seed}").gauss(0, self.common)
        own = random.Random(f"{self.seed} {load.seed} {setting} {load.rate:.9g}")
        luck += own.gauss(0, self.noise * math.sqrt(10 / load.seconds))
        use = self.use(setting, load.rate) * math.exp(luck)
        return Outcome(use=use, share=min(1.0, 1 / use), figures=_figures(use))

    def use(self, setting: Setting, rate: float) -> float:
        """Without noise."""
        values = SPACE.named(SPACE.default if self.is_flat else setting)
        sequences = values["max_num_seqs"] or 128
        budget = values["max_num_batched_tokens"] or 512
        speed = _BLOCK_SPEEDS[values["block_size"] or 16] * (0.6 if values["threads"] else 1.0)
        step_s, sequence_s, token_s = (
            seconds / speed for seconds in (self.step_s, self.sequence_s, self.token_s)
        )
        work_s = _PROMPT * token_s + _OUTPUT * sequence_s  # of a request, beside its steps
        busy = rate * (work_s + _OUTPUT * step_s / sequences)
        batch = min(sequences, rate * _OUTPUT * step_s / max(0.02, 1 - rate * work_s))
        decode_s = step_s + sequence_s * batch
        is_chunked = values["enable_chunked_prefill"] is None
        chunk = min(budget, 3 * _PROMPT) if is_chunked else 4 * _PROMPT
        tpot_s = decode_s + chunk * token_s * min(1.0, 2 * rate * decode_s)
        own_chunk = min(chunk, _PROMPT)
        waiting_s = 0.05 * min(busy, 0.999) / (1 - min(busy, 0.999)) + 5 * max(0.0, busy - 0.999)
        ttft_s = _PROMPT / own_chunk * (decode_s + own_chunk * token_s) + waiting_s
        return max(ttft_s / _TTFT_S, tpot_s / _TPOT_S)

    def edge(self, setting: Setting) -> float:
        """Requests per second, without noise."""
        low, high = 1e-3, 100.0
        for _ in range(50):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.use(setting, middle) <= 1 else (low, middle)
        return low

    def best_edge(self) -> float:
        return max(map(self.edge, SPACE.sample(SPACE.size, random.Random(0))))


def _figures(use: float) -> dict[str, float]:
    return {
        "ttft_p50": 120 * use,
        "ttft_p90": 200 * use,
        "tpot_p50": 30 * use,
        "tpot_p90": 35 * use,
        "e2e_p50": 3000 * use,
        "output_rate": 300.0,
    }

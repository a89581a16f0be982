"""What steps cost on this machine by the speed of its kernels, which `octavo.bench.op_speeds`
measures in some seconds and keeps.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from octavo.core.model_spec import MLPSpec, ModelSpec, MoESpec
from octavo.core.weight_format import WeightFormat
from octavo.simulator.cost_model import Provenance
from octavo.simulator.hardware import CPU, Efficiency
from octavo.simulator.roofline import Deployment
from octavo.simulator.work import AttentionFlops, StepWork, work_of_drafter

_OPS_PER_LAYER = 14
"""That a step runs one after another in a layer, whatever its rows."""
_HIDDEN_OPS = 6
"""Of these, those that go over each value of the hidden state."""
_SPREAD = 0.08
"""Standard deviation, as a share, of how a whole model's steps differ from the sum of its ops."""
_ATTENTION_SPREAD = 0.15

Curve = tuple[tuple[int, float], ...]
"""(rows, seconds of a weight), in order of rows."""


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """Of a machine's kernels, all threads together.

    linear: by format of the weights. decoding: seconds to read a byte of keys and values, by dtype
    of the cache; chunks: seconds of a FLOP of attention where many tokens of a sequence are
    computed. value_seconds: of one value in ops on rows; op_seconds: of an op on next to nothing.
    """

    threads: int
    linear: Mapping[str, Curve]
    decoding: Mapping[str, float]
    chunks: Mapping[str, float]
    value_seconds: float
    op_seconds: float

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None if there is no such file, or not a whole one."""
        try:
            values = json.loads(path.read_bytes())
            values["linear"] = {
                name: tuple((int(rows), float(seconds)) for rows, seconds in curve)
                for name, curve in values["linear"].items()
            }
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def kernel_format(weights: WeightFormat) -> str:
    """In which format Octavo's kernels hold weights that are stored so."""
    if weights.bits <= 4.5:
        return "int4"
    if weights.bits <= 5:
        return "int4 with minimum"
    if weights.bits <= 8.5:
        return "int8"
    return "bfloat16" if weights.bits <= 16 else "float32"


class MeasuredCost:
    """A `CostModel`: the sum of what each op of a model takes by itself on this machine, and what
    the engine around it is expected to add.

    speeds must have the deployment's formats. Parallelism is not for CPUs and is left out.
    """

    num_stages = 1
    provenance: Provenance = "measured"

    def __init__(
        self,
        spec: ModelSpec,
        speeds: MachineSpeeds,
        deployment: Deployment,
        host: Efficiency | None = None,
        *,
        slowness: float = 1.0,
        attention_slowness: float = 1.0,
    ) -> None:
        """host: what it adds, None is usual. slowness: factors on all ops, and on attention."""
        self._spec = spec
        self._speeds = speeds
        self._deployment = deployment
        self._host = host or Efficiency.named(CPU)
        self._slowness = slowness
        self._attention_slowness = attention_slowness
        self.windows = spec.windows
        self._matrices = speeds.linear[kernel_format(deployment.matrices)]
        self._head = speeds.linear[kernel_format(deployment.rest)]
        byte_seconds = speeds.decoding[deployment.kv.dtype]
        self._flop_seconds = speeds.chunks[deployment.kv.dtype]
        self._decoding = dict.fromkeys(spec.windows, 0.0)
        for layer in spec.layers:
            if (attention := layer.attention) is not None:
                num_bytes = attention.kv_bytes_per_token(deployment.kv)
                self._decoding[attention.window] += byte_seconds * num_bytes
        self._flops = {window: AttentionFlops.of(spec, window) for window in spec.windows}
        # No kernel has recurrent layers: their states are read and written as fast as a cache is
        # read, and their arithmetic is as fast as attention's.
        self._state_seconds = byte_seconds * 2 * spec.state_bytes
        self._recurrent_seconds = self._flop_seconds * spec.recurrent_flops_per_token
        self._experts = Counter(
            layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)
        )
        # Norms, rotation and sums are of the hidden state's size; the gate is of the MLP's.
        values = sum(
            _HIDDEN_OPS * spec.hidden_size + _inner_size(layer.mlp) for layer in spec.layers
        )
        self._row_seconds = speeds.value_seconds * values
        self._fixed_seconds = speeds.op_seconds * _OPS_PER_LAYER * len(spec.layers)
        self._drafter = None
        if deployment.drafter is not None:
            self._drafter = MeasuredCost(
                deployment.drafter.spec,
                speeds,
                replace(deployment, drafter=None),
                host,
                slowness=slowness,
                attention_slowness=attention_slowness,
            )

    @property
    def read_bytes_per_second(self) -> float:
        """The most that a kernel of this deployment reached, with one row or token."""
        formats = self._deployment
        return max(
            formats.matrices.num_bytes(1) / self._matrices[0][1],
            formats.rest.num_bytes(1) / self._head[0][1],
            1 / self._speeds.decoding[formats.kv.dtype],
        )

    @property
    def flops_per_second(self) -> float:
        """The most that a product of this deployment reached, with as many rows as it likes."""
        return max(
            2 * rows / seconds for curve in (self._matrices, self._head) for rows, seconds in curve
        )

    def seconds(self, work: StepWork) -> float:
        rows = work.num_tokens
        spec = self._spec
        ops = self._product_seconds(rows) + self._row_seconds * rows + self._fixed_seconds
        if work.num_logit_rows:
            ops += spec.num_embedding_parameters * _at(self._head, work.num_logit_rows)
        attention = self._state_seconds * work.num_sequences + self._recurrent_seconds * rows
        for one in work.attention:
            attention += one.decoding_context * self._decoding[one.window]
            attention += self._flops[one.window].of_chunks(one) * self._flop_seconds
        host = self._host.step_seconds + self._host.sequence_seconds * work.num_sequences
        return self._slowness * (ops + self._attention_slowness * attention) + host

    def draft_seconds(self, work: StepWork) -> float:
        """A drafter's steps, one after another; other methods only look up what they guess."""
        if self._drafter is None or not work.longest_draft:
            return 0.0
        one = work_of_drafter(work, self._drafter.windows)
        return work.longest_draft * self._drafter.seconds(one)

    def draw(self, rng: random.Random) -> MeasuredCost:
        return MeasuredCost(
            self._spec,
            self._speeds,
            self._deployment,
            self._host.draw(rng),
            slowness=math.exp(rng.gauss(0, _SPREAD)),
            attention_slowness=math.exp(rng.gauss(0, _ATTENTION_SPREAD)),
        )

    def _product_seconds(self, rows: int) -> float:
        """With the layers' matrices. Rows are spread over the experts that the step touches, so
        that each of these has few.
        """
        touched = self._spec.num_touched_parameters(rows)
        seconds = 0.0
        for moe, count in self._experts.items():
            num_touched = moe.num_touched_experts(rows)
            weights = count * num_touched * moe.expert.num_parameters(self._spec.hidden_size)
            touched -= weights
            seconds += weights * _at(self._matrices, rows * moe.num_active / num_touched)
        return seconds + touched * _at(self._matrices, rows)


def with_more(known: MachineSpeeds, more: MachineSpeeds) -> MachineSpeeds:
    """Of one machine: what `more` has replaces what is known."""
    return replace(
        more,
        linear={**known.linear, **more.linear},
        decoding={**known.decoding, **more.decoding},
        chunks={**known.chunks, **more.chunks},
    )


def _inner_size(mlp: MLPSpec | MoESpec | None) -> int:
    """Of what one token's gates are applied to."""
    if mlp is None:
        return 0
    if isinstance(mlp, MLPSpec):
        return mlp.inner_size
    return mlp.num_active * mlp.expert.inner_size + _inner_size(mlp.shared)


def _at(curve: Curve, rows: float) -> float:
    """Lines between what was measured; beyond it, on as steep as between the last two."""
    index = min(max(1, bisect_right(curve, (rows, math.inf))), len(curve) - 1)
    (first, below), (last, above) = curve[index - 1 : index + 1]
    if rows <= first:
        return below
    return below + (above - below) * (rows - first) / (last - first)

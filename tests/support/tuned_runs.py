"""What `octavo tune` found, on an engine in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.advisor.tuning.engines import OctavoEngine
from octavo.advisor.tuning.feasibility import Cut
from octavo.advisor.tuning.run import Tuned, Wish
from octavo.advisor.tuning.search import Plan, search
from octavo.bench.ab.design import compare
from octavo.bench.ab.results import Regime
from octavo.bench.load.target import Target
from octavo.bench.slo import parse_slo
from octavo.bench.workloads.presets import workload_named
from support import ab_blocks
from support.tuned_engine import SPACE, TunedEngine


def tuned(*, is_flat: bool = False, engine: Any = None, broken: bool = False, **plan: Any) -> Tuned:
    served = TunedEngine(is_flat=is_flat, broken=[(4, *(None,) * 4)] if broken else ())
    result = search(
        served,
        SPACE,
        Plan(**{"budget_s": 1200.0, "first_rate": 2.0, **plan}),
        clock=lambda: served.clock_s,
    )
    blocks = ab_blocks.blocks({"default": 0.012, "new": 0.01}, regime="online", rate=2.0)
    promise = compare("default", "new", Regime(name="online", rate=2.0), blocks)
    return Tuned(
        wish=Wish(
            engine=engine or OctavoEngine("org/m", {"quantization": "int8"}),
            space=SPACE,
            workload=workload_named("chat"),
            slo=parse_slo("attain(ttft<250ms & tpot<40ms) >= 0.9"),
            budget_s=1200.0,
            folder=Path("."),
            load_flags="--workload chat",
        ),
        target=Target(base_url="http://x/v1", model="m", engine="octavo", version="1.0"),
        result=result,
        cuts=(Cut("enable_prefix_caching", (False,), "nothing to share"),),
        promises=dict.fromkeys(result.final.gains, promise),
    )

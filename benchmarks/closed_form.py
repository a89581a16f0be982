"""How near the planner's closed form comes to its simulations: the tables of docs/plan.md.

python benchmarks/closed_form.py
"""

from __future__ import annotations

from dataclasses import replace

from octavo.advisor.estimate import Deployed
from octavo.advisor.layout import Layout, Settings
from octavo.advisor.model import planned_from_config
from octavo.advisor.queueing import Load
from octavo.advisor.traffic import Traffic, read_traffic
from octavo.core.model_spec import KVFormat
from octavo.simulator.hardware import parse_hardware

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
WANTED = (("tpot", 0.5), ("tpot", 0.99), ("ttft", 0.5), ("ttft", 0.99))
SHARES = (0.1, 0.3, 0.5, 0.7, 0.85)
USERS = (1, 4, 16, 64)


def case(hardware: str, traffic: Traffic) -> Deployed:
    return Deployed(
        model=planned_from_config(LLAMA_8B, "8B"),
        hardware=parse_hardware(hardware),
        layout=Layout(),
        settings=Settings(
            memory_share=0.9,
            num_seqs=256,
            token_budget=2048,
            max_model_len=16384,
            kv=KVFormat("bfloat16"),
        ),
        traffic=traffic,
    )


def row(name: str, deployed: Deployed) -> str:
    """Closed form over simulation, less 1."""
    found = deployed.lane_at(deployed.load)
    _, outcome = deployed.simulated(WANTED)
    if outcome is None:
        return f"| {name} | more than it can do |"
    output = deployed.traffic.lengths.output_mean
    off = [found.quantile(m, q, output) / outcome.quantile(m, q) - 1 for m, q in WANTED]
    return f"| {name} | " + " | ".join(f"{value:+.0%}" for value in off) + " |"


def main() -> None:
    head = ("load", *(f"{metric.upper()} p{100 * q:g}" for metric, q in WANTED))
    for workload in ("chat", "azure_conv", "azure_code"):
        print(f"\n8B on an H100, {workload}\n\n| " + " | ".join(head) + " |")
        print("|---" * len(head) + "|")
        for users in USERS:
            traffic = read_traffic(workload=workload, users=users)
            print(row(f"{users} users", case("H100", traffic)))
        open_loop = replace(read_traffic(workload=workload), users=None, rate=1.0)
        deployed = case("H100", open_loop)
        most = deployed.lane_at(Load(users=4 * deployed.most_running)).request_rate
        for share in SHARES:
            traffic = replace(open_loop, rate=share * most)
            print(row(f"{share:g} of the most requests", case("H100", traffic)))


if __name__ == "__main__":
    main()

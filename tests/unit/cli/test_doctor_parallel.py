"""What is said of machines and models that a test makes up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import machine
from octavo.cli.doctor_parallel import parallel_facts, topology_facts
from octavo.cli.main import main
from octavo.core.errors import ConfigError
from support.fake_machines import fake_machine

TWO_NODES = [[(0, 4), (1, 5)], [(2, 6), (3, 7)]]
MIB, GIB = 2**20, 2**30
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def facts_of(
    tmp_path: Path, *, tensor: int | None = None, stages: int | None = None, **changes: Any
) -> dict[str, Any]:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(LLAMA | changes))
    return parallel_facts(str(path), tensor=tensor, stages=stages, token=None)


def test_the_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES, num_gpus=1)
    facts = topology_facts()
    assert facts == {
        "NUMA nodes": [
            "0 with 4.0 GiB: CPUs 0-1,4-5 on 2 cores",
            "1 with 4.0 GiB: CPUs 2-3,6-7 on 2 cores",
        ],
        "hardware threads": "2 a core",
        "last-level caches": ["16 MiB for CPUs 0-1,4-5", "16 MiB for CPUs 2-3,6-7"],
        "GPUs": 1,
        "1 worker": "worker 0: CPUs 0-7 (8 threads): 8 CPUs on 2 NUMA nodes",
        "2 workers": "worker 0: CPUs 0-1,4-5 (4 threads); worker 1: CPUs 2-3,6-7 (4 threads): "
        "8 CPUs on 2 NUMA nodes, in equal parts",
        "4 workers": "worker 0: CPUs 0,4 (2 threads); worker 1: CPUs 1,5 (2 threads); "
        "worker 2: CPUs 2,6 (2 threads); worker 3: CPUs 3,7 (2 threads): "
        "8 CPUs on 2 NUMA nodes, in equal parts",
    }


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    facts = topology_facts()
    assert facts["NUMA nodes"][0].startswith("0: CPUs ")
    assert (facts["last-level caches"], facts["GPUs"]) == ("unknown", "none")


def test_sizes_that_work_and_why_others_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=[[(0,), (1,)]])
    facts = facts_of(tmp_path)
    assert list(facts) == [
        "model",
        *(f"tensor {size}" for size in range(1, 9)),
        *(f"pipeline {size}" for size in range(2, 9)),
        "recommended",
    ]
    assert facts["model"] == (
        "MODEL: 4 layers, heads 6, key/value heads 3, vocabulary 1024, weights 8.8 MiB in bfloat16"
    )
    assert facts["tensor 2"] == (
        "heads 4 + 2, key/value heads 2 + 1; weights 2 x 4.4 MiB; KV 2.00 + 1.00 KiB a token"
    )
    assert facts["tensor 3"].startswith("heads 3 x 2, key/value heads 3 x 1; weights 3.0 + ")
    assert facts["tensor 3"].endswith("KV 3 x 1.00 KiB a token; 3 workers share 2 CPUs")
    assert facts["tensor 4"].startswith("no: 6 attention heads with 3 key/value heads can't be")
    assert facts["pipeline 2"].startswith("layers 2 x 2; weights ")
    assert facts["pipeline 5"] == (
        "no: the model has 4 layers, and each stage needs one; use at most 4, and "
        "--tensor-parallel-size or --data-parallel-size for what is left"
    )
    assert facts["recommended"].startswith("one process with all its 2 CPUs: on one NUMA node")


def test_a_layout_is_shown_rank_by_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES)
    facts = facts_of(tmp_path, tensor=2, stages=2)
    ranks = [facts[f"TP 2 x PP 2, rank {rank}"] for rank in range(4)]
    assert ranks[0].startswith("layers 0-1; heads 4, key/value heads 2; weights ")
    assert ranks[0].endswith(" MiB; KV 1.00 KiB a token; CPUs 0,4 (2 threads)")
    assert ranks[3].startswith("layers 2-3; heads 2, key/value heads 1; weights ")
    assert ranks[3].endswith("CPUs 3,7 (2 threads)")
    assert facts_of(tmp_path, tensor=5)["TP 5 x PP 1"].startswith("no: 6 attention heads")


def test_memory_refuses_and_recommends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES, free_bytes=12 * MIB)
    facts = facts_of(tmp_path)
    assert facts["tensor 1"] == (
        "no: TP 1 x PP 1: the workers of a machine would need 15 MiB for weights and the KV cache "
        "of 2048 tokens, and 12 MiB are free"
    )
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES, free_bytes=8 * MIB)
    assert facts_of(tmp_path)["recommended"].startswith("the weights (0.01 GiB) don't fit the ")


@pytest.mark.parametrize(
    ("free_bytes", "num_gpus", "changes", "begin"),
    [
        (GIB, 0, {}, "--data-parallel-size 2, a copy on each NUMA node, "),
        (18 * MIB, 0, {}, "--tensor-parallel-size 2, a part on each NUMA node: 2 copies of "),
        (
            18 * MIB,
            0,
            {"num_attention_heads": 5, "num_key_value_heads": 1},
            "--pipeline-parallel-size 2, a part on each NUMA node: ",
        ),
        (GIB, 1, {}, "one process: there is one GPU"),
        (GIB, 3, {}, "if the weights (0.01 GiB) and a KV cache fit one GPU, --data-parallel-size"),
    ],
)
def test_recommendations(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free_bytes: int,
    num_gpus: int,
    changes: dict[str, int],
    begin: str,
) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES, free_bytes=free_bytes, num_gpus=num_gpus)
    assert facts_of(tmp_path, **changes)["recommended"].startswith(begin)


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=TWO_NODES, num_gpus=3)
    facts = facts_of(tmp_path)
    assert facts["recommended"].endswith(
        "else the smallest of --tensor-parallel-size 2 or 3 that is enough"
    )
    assert facts["pipeline 4"] == (
        "no: TP 1 x PP 4: 4 workers of a machine need a GPU each, and there are 3"
    )


def test_groups_of_a_quantized_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=[[(0,), (1,)]])
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    odd = {"head_dim": 72, "num_attention_heads": 2, "num_key_value_heads": 2}
    facts = facts_of(tmp_path, quantization_config=gptq)
    assert facts["tensor 2"].startswith("heads 4 + 2")
    facts = facts_of(tmp_path, quantization_config=gptq, **odd)
    assert facts["tensor 2"].startswith(
        "no: attention's output projection has 144 columns in groups of 32, of which columns 72 "
    )
    facts = facts_of(tmp_path, quantization_config=gptq | {"desc_act": True})
    assert "lie scattered over its rows (desc_act)" in facts["tensor 2"]
    assert facts["pipeline 2"].startswith("layers")


def test_other_engines_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_machine(monkeypatch, tmp_path, nodes=[[(0,), (1,)]])
    facts = facts_of(tmp_path, model_type="seed_oss")
    assert facts["tensor 1"].startswith("heads 6")
    assert facts["tensor 2"] == (
        "no: seed_oss runs as transformers' module, which can't be divided"
    )


def test_without_a_model_it_is_the_default_one_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    facts = parallel_facts(None, tensor=None, stages=None, token=None)
    assert facts == {"model": "the default one is not in the cache; name one"}
    with pytest.raises(ConfigError, match="does not exist"):
        parallel_facts("/no/such/model", tensor=None, stages=None, token=None)


def test_the_command_takes_a_model_and_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["doctor", str(tmp_path / "config.json"), "--tp", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "TP 2 x PP 1, rank 1" in report["parallel sizes"]
    assert report["topology"]["1 worker"].startswith("worker 0: CPU")

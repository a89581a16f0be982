"""run.json: what is in it, and that it can be read again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from octavo.bench.capacity import capacity_of
from octavo.bench.curves import ceiling, knee, rungs_of, scalability
from octavo.bench.isotonic import Trial
from octavo.bench.kneedle import annotated_knee
from octavo.bench.load.target import Target
from octavo.bench.output.run import ClientMachine, Phase, Run, Served, schema
from octavo.bench.points import CheckStatus
from octavo.core.errors import ConfigError
from support.bench_points import check, closed_point, estimate, open_point, run_of
from support.json_schema import violations

SCHEMA = Path(__file__).parents[4] / "docs" / "run.schema.json"

LADDER = rungs_of(closed_point(users) for users in (1, 2, 4, 8, 16, 32, 64))


TRIALS = [
    Trial(rate=rate, seed=0, uses={"ttft_p99<500ms": estimate(rate / 8)}, num_requests=300)
    for rate in (4.0, 7.0, 9.0)
]


FULL = run_of(
    closed_point(1),
    open_point(9, failures={"overloaded": 3}, server={"kv_usage_mean": 0.4}),
    slo="ttft_p99<500ms",
    phases=(Phase(name="point", start_ns=1, end_ns=2, label="1 users", seed=0),),
    checks=(check("self_test"),),
    findings=(
        ceiling(LADDER),
        knee(LADDER),
        scalability(LADDER),
        capacity_of(TRIALS),
        annotated_knee(LADDER),
    ),
    notes=("3 requests were shortened",),
)


def test_a_run_is_read_back_as_it_was() -> None:
    read = Run.from_json(json.loads(json.dumps(FULL.to_json())))
    assert read == FULL
    assert [type(finding) for finding in read.findings] == [type(f) for f in FULL.findings]


def test_what_is_written_keeps_the_published_schema() -> None:
    published = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert published == schema(), "python -m octavo.bench.output.run > docs/run.schema.json"
    assert violations(json.loads(json.dumps(FULL.to_json())), published) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"valid": "yes"}, "$.valid"),
        ({"started_at": None}, "$.started_at"),
        ({"checks": [{"id": "little"}]}, "$.checks[0]"),
        ({"points": [{**FULL.to_json()["points"][0], "mode": 1}]}, "$.points[0].mode"),
    ],
)
def test_the_schema_says_where_a_file_is_wrong(change: dict[str, object], where: str) -> None:
    found = violations({**FULL.to_json(), **change}, schema())
    assert found
    assert found[0].startswith(where)


def test_one_failed_check_of_one_point_makes_the_run_invalid() -> None:
    bad = closed_point(4, checks=(check("little", CheckStatus.FAIL),))
    warned = closed_point(4, checks=(check("little", CheckStatus.WARN),))
    assert run_of(closed_point(1), bad).to_json()["valid"] is False
    assert run_of(closed_point(1), warned).to_json()["valid"] is True


def test_a_run_of_another_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="version 99, this Octavo reads 1"):
        Run.from_json({**FULL.to_json(), "schema_version": 99})


def test_a_damaged_run_says_which_field() -> None:
    values = FULL.to_json()
    values["points"][1]["offered"] = "many"
    with pytest.raises(ConfigError, match=r"points\.1\.offered"):
        Run.from_json(values)


def test_no_key_of_the_server_is_kept() -> None:
    target = Target(
        base_url="https://me:secret@host:8000/v1",
        model="m",
        headers={"Authorization": "Bearer secret"},
        version="1.2",
    )
    served = Served.of(target, {"max_num_seqs": "64"})
    assert served.base_url == "https://host:8000/v1"
    assert served.version == "1.2"
    assert "secret" not in json.dumps(run_of(served=served).to_json())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "sk-secret"],
        ["--api-key=sk-secret"],
        ["--api-key", "a secret"],
        ["--header", "Authorization=Bearer secret"],
        ["--header", "X-Key=secret"],
        ["--header=X-Key=secret"],
        ["octavo default --api-key sk-secret"],
    ],
)
def test_no_key_of_the_command_is_kept(arguments: list[str]) -> None:
    command = shlex.join(["octavo", "bench", "serve", *arguments, "--seed", "3"])
    assert "secret" in command
    kept = run_of(command=command).command
    assert "secret" not in kept
    assert "…" in kept
    assert kept.endswith(" --seed 3")
    served = Served.of(Target(base_url="http://h/v1", model="m"), {"started as": command})
    assert "secret" not in served.settings["started as"]


def test_the_clients_machine_is_described() -> None:
    here = ClientMachine.here()
    assert here.usable_cpus >= 1
    assert here.processor

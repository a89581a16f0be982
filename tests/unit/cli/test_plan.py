"""`octavo plan` as users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from octavo.bench.workloads.presets import read_workload
from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.simulator.hardware import parse_hardware
from support import public_configs as public
from support.plan_scenarios import short_simulations

CHAT = ["--input-len", "800", "--output-len", "300"]
SLO = ["--slo", "ttft<500ms,p99 tpot<50ms"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    named = {**public.LLAMA_3_1_8B, "_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
    path.write_text(json.dumps(named))
    return str(path)


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    with short_simulations():
        yield


def test_two_screens_with_every_part(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["plan", config, "--hardware", "RTX 4090", "--weights", "int4", *CHAT, *SLO])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert len(lines) <= 96
    text = "\n".join(lines)
    for part in (
        "meta-llama/Llama-3.1-8B-Instruct (int4) on RTX 4090",
        "What to expect",
        "Memory of a device",
        "Layout",
        "Engine",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct",
        "Knobs",
        "Load test",
        "octavo bench sweep",
        "Pitfalls",
        "Taken for granted",
        "[spec]",
        "[prior]",
    ):
        assert part in text


def test_a_missed_slo_is_the_exit_status(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", config, "--hardware", "L4", *CHAT, "--users", "200", *SLO]
    assert main(command) == 1
    assert "Nearest changes" in capsys.readouterr().out


def test_what_does_not_fit_says_by_how_much_and_chooses_no_knobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(public.LLAMA_3_70B))
    assert main(["plan", str(path), "--hardware", "L40S:2", "--rate", "9", *CHAT]) == 1
    text = capsys.readouterr().out
    assert re.search(r"does not fit: TP 2: weights take 65.* \[spec\]", text)
    [change] = re.findall(r"^  fp8 weights: fits.*; with vLLM:\n    (.*)", text, re.MULTILINE)
    assert change.startswith("vllm serve MODEL --tensor-parallel-size 2")
    assert text.count("vllm serve") == 1
    assert re.search(r"left for KV +-\d\d\.\d\d GiB", text)
    assert "Engine, when it fits" in text
    for part in ("Knobs", "one or two users", "max-num-seqs above"):
        assert part not in text


def test_an_open_loop_puts_out_what_comes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--hardware", "H100:2", *CHAT, "--rate", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prediction"]["output_rate"]["value"] == pytest.approx(1200, rel=0.01)
    for layout in plan["layouts"]:
        assert layout["output_rate"] == pytest.approx(1200, rel=0.01)


def test_a_late_first_token_is_explained_by_the_prompt(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slo = ["--slo", "ttft<250ms"]
    main(["plan", config, "--hardware", "L4", *CHAT, *slo])
    assert re.search(r"TTFT p99 \d+ of 250 ms; a prompt of 1,1\d\d tokens", capsys.readouterr().out)


def test_of_several_devices_the_first_that_does_is_planned(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = "L4,RTX 4090,H100"
    options = ["--weights", "int4", *CHAT, "--users", "50", *SLO, "--json"]
    assert main(["plan", config, "--hardware", hardware, *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["hardware"]["name"] == "RTX 4090"
    assert [other["hardware"] for other in plan["other_hardware"]] == ["L4"]


def test_json_says_where_every_number_is_from(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", config, "--hardware", "H100", *CHAT, "--rate", "2", *SLO, "--format", "json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["schema_version"] == 1
    assert plan["slo"] == "ttft_p99<500ms,tpot_p99<50ms"
    assert {line["provenance"] for line in plan["memory"]["lines"]} <= {
        "specification",
        "measured",
        "fitted",
        "prior",
    }
    assert plan["prediction"]["costs"] == "specification"
    predicted = (plan["prediction"], plan["load_test"], *plan["layouts"], *plan["knobs"])
    assert {one["provenance"] for one in predicted} == {"prior"}
    assert plan["binding_provenance"] == plan["capacity_provenance"] == "prior"
    assert {bound["provenance"] for bound in plan["bounds"]} == {"specification"}
    assert plan["traffic"]["rate"] == 2
    assert all(f["source"] and f["as_of"] for f in plan["pitfalls"])


def test_files_of_a_plan_and_its_workload_that_bench_reads(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    lengths = ["--input-len", "p50:600,p90:1500,max:4000", "--output-len", "p50:200,max:800"]
    main(["plan", config, "--hardware", "H100", *lengths, "--out", str(out), "--format", "md"])
    text = capsys.readouterr().out
    assert "--workload workload.yaml" in text
    assert "[prior]; --out DIR writes workload.yaml" in text
    assert text.strip() == (out / "plan.md").read_text().strip()
    assert json.loads((out / "plan.json").read_text())["verdict"] == "fits"
    workload = read_workload(out / "workload.yaml")
    assert workload.classes[0].input.at(0.5) == 600
    assert yaml.safe_load((out / "workload.yaml").read_text())["name"]


def test_kv_alone(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kv", config, "--hardware", "H100", *CHAT]) == 0
    text = capsys.readouterr().out
    assert "KV of a token" in text
    assert "131,072 B" in text
    assert "Engine" not in text


def test_kv_of_a_layout_is_that_of_the_rank_with_most_heads(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight heads, one of three ranks has three; six ranks can't have them."""
    asked = ["plan", "kv", config, "--hardware", "H100", *CHAT]
    assert main([*asked, "--tp", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == 131_072 * 3 / 8
    assert main([*asked, "--tp", "6"]) == 1
    assert "one rank would have 2 of the 8 key/value heads" in capsys.readouterr().err


def test_kv_of_a_share_of_the_memory(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for share in ("0.5", "0.9"):
        options = ["--gpu-memory-utilization", share, "--json"]
        assert main(["plan", "kv", config, "--hardware", "H100", *CHAT, *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["kv_bytes"])
    memory = parse_hardware("H100").device.memory_bytes
    assert found[1] - found[0] == pytest.approx(0.4 * memory, rel=1e-3)


def test_kv_of_a_revision_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def read(model: str, **options: object) -> None:
        asked.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr("octavo.advisor.model.read_model", read)
    assert main(["plan", "kv", "org/m", "--revision", "v2", "--hf-token", "hush"]) == 1
    assert (asked["revision"], asked["token"]) == ("v2", "hush")


def test_one_rule_is_explained_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "P8"]) == 0
    assert "P8 (layout): tensor parallelism over PCIe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hardware", "H1000"], "no device 'H1000' is known"),
        (["--hardware", "H100", "--slo", "itl_p99<5ms"], "a plan predicts ttft, tpot, e2e"),
        (["--hardware", "H100", "--weights", "int3"], "no weight format 'int3'"),
        (["--hardware", "H100", "--kv-cache-dtype", "q4"], "--kv-cache-dtype must be"),
        (["--hardware", "H100", "--users", "2", "--rate", "1"], "not both"),
        (["--hardware", "H100:2,H100:99999"], "how many, 1 to 9999"),
        (["--hardware", "H100", "--slo", "ttftt<5ms"], "no such metric; did you mean ttft?"),
        (["--hardware", "H100", "--scale", "1e9"], "below 1e9"),
        (["--hardware", "H100", "--out", "/dev/null/plan"], "name another folder"),
        (["--hardware", "H100", "--picture", "/dev/null/plan.png"], "name another file"),
        (["--hardware", "H100:2", "--tp", "4"], "more than the 2 devices"),
        (["--hardware", "H100", "--max-model-len", "9999999"], "lower it"),
        (["--hardware", "H100", "--max-model-len", "100"], "would be refused"),
        (["--hardware", "H100", "--kv-cache-memory-bytes", "much"], "such as 4G"),
        (["--hardware", "H100", "--kv-cache-memory-bytes", "-4G"], "such as 4G"),
        (["--explain", "E99"], "no rule 'E99'"),
    ],
)
def test_mistakes_name_the_value_and_the_remedy(
    config: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--users", "--request-rate", "--burstiness"])
def test_numbers_without_end_are_refused(
    config: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--hardware", "H100", option, "inf"]) == 2
    assert "less than or equal to" in capsys.readouterr().err


def test_a_queue_that_grows_is_said_without_an_slo(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--hardware", "L4", *CHAT, "--request-rate", "100"]) == 0
    assert "fits: more comes than can be done, the queue grows" in capsys.readouterr().out


def test_requests_that_the_model_is_too_short_for_are_named(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--input-len", "130000", "--output-len", "2000"]
    main(["plan", config, "--hardware", "H100", *lengths, "--format", "md"])
    assert "requests of more than 131,072 tokens" in capsys.readouterr().out


def test_kv_that_was_told_must_be_there(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", config, "--hardware", "H100", "--kv-cache-memory-bytes"]
    assert main([*plan, "70G"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "weights take 15.0 of 71.7 usable GiB a device, all that is needed" in text
    assert main([*plan, "60G"]) == 0


def test_where_nothing_fits_the_hardware_that_misses_least_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(public.LLAMA_3_70B))
    assert main(["plan", str(path), "--hardware", "L4,H100,A10"]) == 1
    text = capsys.readouterr().out
    assert "on H100" in text.splitlines()[0]
    assert "L4: does not fit" in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nowhere/config.json", "does not exist"),
        ("what is this", "there is no model"),
    ],
)
def test_models_that_are_none(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--hardware", "H100"]) == 1
    assert words in capsys.readouterr().err


def test_the_question_sheet_gives_no_answer_away(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", config, "--hardware", "L4:2", *CHAT, "--users", "9", *SLO, "--prompt"])
    sheet = capsys.readouterr().out.partition("You size and configure")[2]
    for part in ("8.03 billion", "2x L4", "9 users", "TTFT p99 < 500 ms", "131,072 bytes a token"):
        assert part in sheet
    assert "vllm serve" not in sheet
    assert "--max-num-seqs" not in sheet


class _Opinion(BaseHTTPRequestHandler):
    """An OpenAI-compatible server with an opinion. asked, keys: what it was sent."""

    asked: list[dict[str, object]] = []  # noqa: RUF012  # one server of one test
    keys: set[str | None] = set()  # noqa: RUF012

    def do_GET(self) -> None:
        self.keys.add(self.headers["Authorization"])
        self._say({"data": [{"id": "oracle"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.keys.add(self.headers["Authorization"])
        self._say({"choices": [{"message": {"content": "It\x1b[2J\tfits.\nSo there."}}]})

    def _say(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


def test_another_opinion_stands_beside_the_plan(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what would move the cursor, and for no other key than Octavo's."""
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    monkeypatch.setenv("OCTAVO_API_KEY", "one,two")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Opinion)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        status = main(["plan", config, "--hardware", "H100", *CHAT, *SLO, "--ask", url])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    text = capsys.readouterr().out
    assert status == 0
    assert "What to expect" in text
    beside = text.partition("this plan: ")[2]
    assert "meets the SLO" in beside
    assert "oracle says:\n\nIt\N{REPLACEMENT CHARACTER}[2J  fits.\nSo there.\n" in beside
    assert _Opinion.keys == {"Bearer one"}
    [asked] = _Opinion.asked
    assert asked["model"] == "oracle"
    assert "You size and configure" in asked["messages"][0]["content"]  # type: ignore[index]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://host:port"])
def test_a_server_that_is_not_there_leaves_the_plan(
    config: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", config, "--hardware", "H100", *CHAT, "--ask", url]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert "What to expect" in captured.out
    assert "the plan above stands" in captured.err


def test_it_answers_in_two_seconds_without_torch(config: str) -> None:
    """Of processor time, which a busy machine doesn't stretch; with its full simulation."""
    code = (
        "import sys, resource\n"
        "from octavo.cli.main import main\n"
        f"status = main(['plan', {config!r}, '--hardware', 'L4:2', '--users', '40', "
        "*['--input-len', '800', '--output-len', '300'], '--slo', 'ttft<1s,tpot<100ms'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print('seconds', used.ru_utime + used.ru_stime)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert float(done.stdout.rsplit("seconds", 1)[1]) < 2.0

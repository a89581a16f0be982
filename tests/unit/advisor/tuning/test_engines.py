from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.advisor.engines import engines
from octavo.advisor.knobs import knobs
from octavo.advisor.tuning.engines import OctavoEngine, TemplateEngine, engine_named, template_names
from octavo.bench.launch import free_port
from octavo.core.errors import ConfigError


def template(target: str, *asked: str, model: str | None = "org/m") -> TemplateEngine:
    return engine_named(target, model=model, asked=asked)


class TestOctavo:
    def test_its_command_has_what_the_user_set_and_what_is_changed(self, tmp_path: Path) -> None:
        flags = {"quantization": "int8", "enable_prefix_caching": False, "config": "my file.yaml"}
        engine = OctavoEngine("org/m", flags)
        arm = engine.arm({"max_num_seqs": 8, "enable_chunked_prefill": False})
        assert arm.is_octavo
        assert list(arm.command[3:-2]) == [
            "serve", "org/m", "--quantization", "int8", "--no-enable-prefix-caching", "--config",
            "my file.yaml", "--max-num-seqs", "8", "--no-enable-chunked-prefill",
        ]  # fmt: skip

    def test_only_the_first_server_records(self, tmp_path: Path) -> None:
        path = tmp_path / "steps.jsonl"
        engine = OctavoEngine(None).recording_to(path)
        assert f"--record-steps {path}" in engine.arm({}).text
        path.write_text("")
        assert "--record-steps" not in engine.arm({}).text

    def test_servers_of_the_race_can_be_adjusted(self) -> None:
        assert "--enable-live-limits" in OctavoEngine(None).adjustable_arm({}).text
        assert "--enable-live-limits" not in OctavoEngine(None).arm({}).text

    @pytest.mark.parametrize(("key", "headers"), [(None, {}), ("k", {"Authorization": "Bearer k"})])
    def test_limits_are_changed_with_the_key(
        self, key: str | None, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: dict[str, Any] = {}

        def post(url: str, **options: Any) -> httpx.Response:
            sent.update(options, url=url)
            return httpx.Response(200)

        monkeypatch.setattr(httpx, "post", post)
        assert OctavoEngine(None, api_key=key).adjust("http://box", {"max_num_seqs": 8})
        assert (sent["url"], sent["json"]) == ("http://box/limits", {"max_num_seqs": 8})
        assert sent["headers"] == headers

    def test_a_server_that_is_gone_takes_nothing(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        assert not OctavoEngine(None).adjust(url, {"max_num_seqs": 8})


class TestTemplates:
    @pytest.mark.parametrize("name", template_names())
    def test_each_has_a_command_and_values_for_its_knobs(self, name: str) -> None:
        engine = template(name)
        assert engine.space.size > 10
        assert "org/m" in engine.arm({}).text
        for dimension in engine.space.dimensions:
            value = dimension.values[1]
            arm = engine.arm({dimension.name: value})
            assert set(engine.flags({dimension.name: value})) <= set(arm.command)

    @pytest.mark.parametrize("name", sorted({*template_names()} & {*engines()}))
    def test_they_are_started_and_set_as_in_a_plan(self, name: str) -> None:
        """Both have the engine's flags: one that changes must change in both."""
        planned = [part.text for part in engines()[name].arguments]
        assert planned[0].startswith(
            template(name).command.partition(" --port")[0].replace("org/m", "{model}")
        )
        in_plans = {word for text in planned for word in text.split() if word.startswith("-")}
        in_plans |= {knob.flags[name] for knob in knobs() if name in knob.flags}
        tuned_only = {
            "--no-enable-prefix-caching",
            "--schedule-policy",
            "--schedule-conservativeness",
        }
        for dimension in template(name).space.dimensions:
            for value in dimension.values[1:]:
                flag = template(name).flags({dimension.name: value})[0]
                assert flag in in_plans | tuned_only

    def test_the_name_of_its_program_will_do(self) -> None:
        assert template("trtllm") == template("tensorrt-llm")

    def test_flags_of_a_value_and_of_a_name(self) -> None:
        arm = template("vllm").arm({"max-num-seqs": 64, "enable-prefix-caching": "off"})
        assert arm.text == (
            "vllm serve org/m --port '{port}' --max-num-seqs 64 --no-enable-prefix-caching"
        )
        assert template("vllm").arm({}).text == "vllm serve org/m --port '{port}'"

    def test_the_knobs_that_are_asked_for(self) -> None:
        engine = template("vllm", "max_num_seqs=8,24", "stream-interval=1,4", "--block-size=16,32")
        assert {d.name: d.values for d in engine.space.dimensions} == {
            "max-num-seqs": (None, 8, 24),
            "stream-interval": (None, 1, 4),
            "--block-size": (None, 16, 32),
        }
        assert "--stream-interval 4" in engine.arm({"stream-interval": 4}).text

    def test_a_command_of_a_known_program_has_its_knobs(self) -> None:
        engine = template("vllm serve x --port {port} {flags} --enforce-eager", model=None)
        assert engine.arm({"max-num-seqs": 64}).text == (
            "vllm serve x --port '{port}' --max-num-seqs 64 --enforce-eager"
        )

    def test_a_command_of_an_unknown_program_needs_knobs(self) -> None:
        with pytest.raises(ConfigError, match="nothing is known of the knobs of 'mine'"):
            template("mine --port {port}")
        assert template("mine --port {port}", "-b=1,2").arm({"-b": 2}).command[-2:] == ("-b", "2")

    def test_a_model_is_needed_where_the_command_has_one(self) -> None:
        with pytest.raises(ConfigError, match="needs a MODEL"):
            template("vllm", model=None)

    def test_a_file_for_a_server_elsewhere(self, tmp_path: Path) -> None:
        path = tmp_path / "box.yaml"
        path.write_text(
            "url: http://box:8000/\n"
            "restart: ssh box restart-vllm {flags}\n"
            "knobs: {max-num-seqs: [8, 16]}\n"
        )
        arm = template(str(path), model=None).arm({"max-num-seqs": 8})
        assert arm.url == "http://box:8000"
        assert arm.restart == ("ssh", "box", "restart-vllm", "--max-num-seqs", "8")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("- x", "must be a mapping"),
            ("knobs: {a: [1]}", "needs either"),
            ("knobs: {a: [1]}\nurl: http://x", "needs either"),
            ("knobs: {a: 1}\ncommand: x {port}", "needs a list of values"),
            ("knobs: {a: [1]}\ncomand: x {port}", "did you mean 'command'"),
            ("knobs: [", "can't be read"),
        ],
    )
    def test_files_with_mistakes(self, content: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "t.yaml"
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            template(str(path))

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("http://localhost:8000", "restart"),
            ("vlm", "neither a template"),
            ("missing.yaml", "can't be read"),
            ("mine {port} 'x", "check its quotes"),
        ],
    )
    def test_targets_that_can_not_be(self, target: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            template(target)


def test_numbers_have_an_order_and_names_have_none() -> None:
    found: dict[str, Any] = {d.name: d.is_ordered for d in template("sglang").space.dimensions}
    assert found["max-running-requests"]
    assert not found["schedule-policy"]

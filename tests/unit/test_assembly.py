from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import assembly
from octavo.config import Config, ModelConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledStep, StepOutput
from octavo.executor import worker
from octavo.executor.base import Executor, PendingStep
from octavo.layers.rope import RopeTable
from octavo.models import stored_piece
from octavo.ops import OPS
from octavo.ops.native.backend import NativeBackend
from octavo.ops.native.ops import ISAS
from octavo.ops.op import Choice, Target
from octavo.ops.torch.backend import TorchBackend
from octavo.parallel.replica_shares import ReplicaShare
from octavo.scheduler.settings import SchedulerSettings
from octavo.text.generation_config import default_sampling
from octavo.text.served_model import ServedModel
from octavo.weights import Checkpoint
from support.checkpoints import make_checkpoint


def served(config: ModelConfig) -> ServedModel:
    checkpoint = assembly.open_model(config)
    text = assembly.load_text(config, checkpoint)
    return assembly.served_model(
        config, checkpoint, text, assembly.EngineFacts(64, 4, 1, {}, "f", ())
    )


def test_mdl_15_the_models_sampling_defaults_are_used() -> None:
    shipped = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "eos_token_id": 2,
        "max_new_tokens": 50,
    }
    defaults = default_sampling(ModelConfig(), shipped)
    assert defaults == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_tokens": 50,
    }
    assert default_sampling(ModelConfig(generation_config="none"), shipped) == {}


def test_mdl_15_do_sample_false_means_greedy() -> None:
    greedy = {"do_sample": False, "temperature": 0.7}
    assert default_sampling(ModelConfig(), greedy)["temperature"] == 0.0
    assert default_sampling(ModelConfig(), {"do_sample": None}) == {}


@pytest.mark.parametrize("off", [0, -1])
def test_smp_10_top_k_off_in_generation_config(off: int) -> None:
    defaults = default_sampling(ModelConfig(), {"do_sample": True, "top_k": off})
    assert SamplingParams(**defaults).top_k == 0


def test_overridden_sampling_defaults_win() -> None:
    config = ModelConfig(override_generation_config={"temperature": 0.2, "max_new_tokens": 7})
    defaults = default_sampling(config, {"temperature": 0.7, "top_p": 0.9})
    assert defaults == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7}


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temprature": 1}])
def test_sampling_defaults_that_cannot_be_used_stop_the_start(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--override-generation-config"):
        default_sampling(ModelConfig(override_generation_config=bad), {})


def test_eos_ids_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 7, 100_000]}))
    model = served(ModelConfig(model=str(folder)))
    assert model.eos_token_ids == {2, 7}
    assert model.vocab_size == 320


def test_cht_01_a_model_without_chat_template_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text())
    known.pop("chat_template")
    path.write_text(json.dumps(known))
    config = ModelConfig(model=str(folder))
    with caplog.at_level(logging.WARNING):
        text = assembly.load_text(config, assembly.open_model(config))
    assert not text.chat_template.exists
    assert "--chat-template" in caplog.text


def test_a_length_beyond_the_models_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = Config.from_flat({"model": str(folder), "max_model_len": 1000})
    with pytest.raises(ConfigError, match="more than the 512 tokens"):
        assembly.build_engine(config, 320)


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(stored_piece.StoredPiece, "read", read)
    monkeypatch.setattr(stored_piece.StoredPiece, "read_stored", read)


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize(
    ("free_bytes", "knobs", "message"),
    [
        (100_000, {}, r"weights need 0\.00 GiB in float32.*of cpu memory are free; .*bfloat16"),
        (100_000, {"dtype": "bfloat16"}, "or use a smaller model$"),
        (800_000, {"max_model_len": 512}, r"512 tokens needs 256\.0 KiB of KV.*of 0\.\d MiB free"),
        (2**21, {"kv_cache_memory_bytes": 2**21}, r"2\.0 MiB, but only 1\.\d MiB are free beside"),
        (
            2**24,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 511},
            r"--max-num-batched-tokens 511 is less than the max_model_len of 512 tokens.*use 512",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    knobs: dict[str, object],
    message: str,
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(TorchBackend, "free_memory_bytes", lambda _: free_bytes)
    config = Config.from_flat(
        {"model": str(folder), "backend": "torch", "max_num_seqs": 1, **knobs}
    )
    with pytest.raises(ConfigError, match=message):
        assembly.build_engine(config, 320)


@pytest.mark.usefixtures("no_reads")
def test_one_of_several_engines_has_its_share_of_the_memory(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = Config.from_flat({"model": str(folder), "backend": "torch", "data_parallel_size": 3})
    share = ReplicaShare(0, 3, 1, 100_000)
    with pytest.raises(ConfigError, match=r"only 0\.00 GiB .* each of the 3 engines; .*-parallel-"):
        assembly.build_engine(config, 320, share=share)
    with pytest.raises(ConfigError, match=r"512 tokens needs 256\.0 KiB of KV.*of 0\.\d MiB free"):
        assembly.build_engine(
            replace(config, model=replace(config.model, max_model_len=512)),
            320,
            share=share._replace(memory_bytes=800_000),
        )
    with pytest.raises(ConfigError, match="--data-parallel-size 3: this runs one engine"):
        assembly.build_engine(config, 320)


def test_rotary_tables_are_as_long_as_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as long as the model reaches: that may be more than there is memory for."""
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=10**8)
    lengths = []
    compute = RopeTable.compute

    def recorded(table: RopeTable, num_positions: int) -> np.ndarray:
        lengths.append(num_positions)
        return compute(table, num_positions)

    monkeypatch.setattr(RopeTable, "compute", recorded)
    knobs = {"model": str(folder), "max_model_len": -1, "kv_cache_memory_bytes": "1M"}
    loop, facts = assembly.build_engine(Config.from_flat(knobs), 320)
    loop.close()
    assert facts.max_model_len == 2**20 // 512
    assert lengths == [facts.max_model_len]


def test_a_draft_model_has_its_own_revision_and_the_targets_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (
        make_checkpoint("llama", tmp_path / name, max_position_embeddings=10**8)
        for name in ("target", "draft")
    )
    opened, lengths = [], []
    open_model, compute = assembly.open_model, RopeTable.compute

    def opening(config: ModelConfig) -> Checkpoint:
        opened.append((config.model, config.revision))
        return open_model(config)

    def recorded(table: RopeTable, num_positions: int) -> np.ndarray:
        lengths.append(num_positions)
        return compute(table, num_positions)

    monkeypatch.setattr(assembly, "open_model", opening)
    monkeypatch.setattr(worker, "open_model", opening)
    monkeypatch.setattr(RopeTable, "compute", recorded)
    knobs: dict[str, Any] = {
        "model": str(target),
        "revision": "main",
        "max_model_len": 50,
        "kv_cache_memory_bytes": "1M",
        "speculative_config": {"model": str(draft)},
    }
    loop, _ = assembly.build_engine(Config.from_flat(knobs), 320)
    loop.close()
    assert opened == [(str(target), "main"), (str(draft), None)]
    assert lengths == [50, 50]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({}, "the model's generation_config.json (--generation-config none ignores it)"),
        ({"temperature": 0.2, "top_p": 0.5}, "--override-generation-config"),
        (
            {"top_p": 0.5},
            "the model's generation_config.json (--generation-config none ignores it) and "
            "--override-generation-config",
        ),
    ],
)
def test_mdl_15_sampling_defaults_are_told(
    tmp_path: Path, override: dict[str, float], reason: str
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    config = ModelConfig(model=str(folder), override_generation_config=override)
    (decision,) = assembly.sampling_decisions(served(config), config)
    expected = {"temperature": 0.7} | override
    assert decision.value == ", ".join(f"{name} {value}" for name, value in expected.items())
    assert decision.reason == reason


def test_without_sampling_defaults_none_are_told(tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_checkpoint("llama", tmp_path)), generation_config="none")
    assert assembly.sampling_decisions(served(config), config) == ()


def test_a_fingerprint_names_what_computes(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    choices: list[dict[str, str]] = [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"backend": "torch"},
    ]
    fingerprints = []
    for knobs in choices:
        config = {"model": str(folder), "kv_cache_memory_bytes": "1M", **knobs}
        loop, facts = assembly.build_engine(Config.from_flat(config), 320)
        loop.close()
        fingerprints.append(facts.fingerprint)
    assert len(set(fingerprints)) == len(choices)


def test_a_fingerprint_names_the_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_flat(
        {"model": str(make_checkpoint("llama", tmp_path)), "kv_cache_memory_bytes": "1M"}
    )
    choose = NativeBackend.choose

    def chosen_otherwise(self: NativeBackend, *args: Any) -> tuple[Choice, ...]:
        def other(choice: Choice) -> Choice:
            if choice.op != "rotary":
                return choice
            name = next(name for name, why_not in choice.rejected if why_not.startswith("takes"))
            return OPS["rotary"].choices("native", Target("cpu", "float32"), name)[0]

        return tuple(map(other, choose(self, *args)))

    if len([problem for problem in ISAS.values() if not problem]) < 2:
        pytest.skip("there is no choice here")
    fingerprints = []
    for method in (choose, choose, chosen_otherwise):
        monkeypatch.setattr(NativeBackend, "choose", method)
        loop, facts = assembly.build_engine(config, 320)
        loop.close()
        fingerprints.append(facts.fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def told(**knobs: object) -> dict[str, tuple[str, str]]:
    """What was decided, with value and reason."""
    config = Config.from_flat({"kv_cache_memory_bytes": "1M", **knobs})
    loop, facts = assembly.build_engine(config, 320)
    loop.close()
    return {d.what: (d.value, d.reason) for d in facts.decisions}


@pytest.mark.parametrize(
    ("quantization", "formats"),
    [("int8", "int8, float32"), ("int4", "int8, int4 with minimum, float32")],
)
def test_quantization_is_told(tmp_path: Path, quantization: str, formats: str) -> None:
    decided = told(model=str(make_checkpoint("llama", tmp_path)), quantization=quantization)
    assert decided["weights"] == (formats, "set by --quantization")
    assert decided["KV cache dtype"][0] == "bfloat16"


def test_what_was_decided_is_told_with_a_reason(tmp_path: Path) -> None:
    decided = told(model=str(make_checkpoint("llama", tmp_path)))
    assert decided["weights"][0] == "float32"
    assert decided["KV cache dtype"][0] == "float32"
    # 2 layers, 2 heads of 16, keys and values in 4 bytes: 512 bytes a token.
    assert decided["KV cache"][0] == f"{2**20 // 8192 * 16} tokens"
    assert all(value and reason for value, reason in decided.values())


def test_a_reservation_is_told_with_how_many_fit(tmp_path: Path) -> None:
    folder = str(make_checkpoint("llama", tmp_path))
    value, reason = told(model=folder, kv_policy="reserve-max")["KV reservation"]
    assert value == "512 tokens a sequence"
    # 2048 tokens in 1 MiB, see above.
    assert reason.endswith("memory for 4 sequences at once, and no prefix caching")
    assert "KV reservation" not in told(model=folder)


@pytest.mark.parametrize(
    ("knobs", "budget"),
    [
        ({}, "512 tokens"),
        ({"enable_chunked_prefill": False}, "768 tokens"),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, "512 tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1000}, "1000 tokens"),
    ],
)
def test_a_step_has_room_for_a_prompt_that_is_computed_whole(
    tmp_path: Path, knobs: dict[str, object], budget: str
) -> None:
    folder = str(make_checkpoint("llama", tmp_path, max_position_embeddings=768))
    assert told(model=folder, **knobs)["step budget"][0] == budget


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "speculative_config": '{"method": "ngram"}'}, 1),
        ({"tensor_parallel_size": 2, "record_steps": "steps.jsonl"}, 1),
        ({"pipeline_parallel_size": 2, "speculative_config": '{"method": "ngram"}'}, 2),
    ],
)
def test_steps_in_flight(
    settings: dict[str, Any], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses of one sequence must not let others go on alone, but where batches are in parts."""
    monkeypatch.chdir(tmp_path)
    config = Config.from_flat(settings)
    sizes = SchedulerSettings(
        num_blocks=50,
        max_model_len=64,
        max_num_batched_tokens=64,
        block_size=4,
        max_num_seqs=4,
        num_stages=config.parallel.pipeline_parallel_size,
    )
    executor = WaitingExecutor()
    loop = assembly._loop(config, executor, sizes)
    for number in range(2):
        loop.add(
            Request(
                request_id=str(number),
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(),
                max_tokens=9,
                seed=0,
            )
        )
    with pytest.raises(EngineDeadError):
        loop.step()
    assert executor.num_submitted == expected


def test_a_pipeline_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    settings = {"pipeline_parallel_size": 2, "record_steps": str(path)}
    config = Config.from_flat({"model": str(make_checkpoint("llama", tmp_path)), **settings})
    with pytest.raises(ConfigError, match="leave one of --record-steps and --pipeline-parallel"):
        assembly.build_engine(config, 320)
    assert not path.exists()


class WaitingExecutor(Executor):
    """Has no result of any step."""

    num_blocks = 50
    max_steps_in_flight = 2
    num_submitted = 0

    def submit(self, step: ScheduledStep) -> PendingStep:
        self.num_submitted += 1
        return self

    def result(self) -> StepOutput:
        raise EngineDeadError("it computes nothing")

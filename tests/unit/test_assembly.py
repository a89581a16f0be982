from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from octavo import assembly
from octavo.config import Config, ModelConfig
from octavo.core.errors import ConfigError
from support.checkpoints import make_checkpoint


def test_mdl_15_the_models_sampling_defaults_are_used() -> None:
    shipped = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "eos_token_id": 2,
        "max_new_tokens": 50,
    }
    defaults = assembly.default_sampling(ModelConfig(), shipped)
    assert defaults == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_tokens": 50,
    }
    assert assembly.default_sampling(ModelConfig(generation_config="none"), shipped) == {}


def test_mdl_15_do_sample_false_means_greedy() -> None:
    greedy = {"do_sample": False, "temperature": 0.7}
    assert assembly.default_sampling(ModelConfig(), greedy)["temperature"] == 0.0
    assert assembly.default_sampling(ModelConfig(), {"do_sample": None}) == {}


def test_overridden_sampling_defaults_win() -> None:
    config = ModelConfig(override_generation_config={"temperature": 0.2, "max_new_tokens": 7})
    defaults = assembly.default_sampling(config, {"temperature": 0.7, "top_p": 0.9})
    assert defaults == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7}


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temprature": 1}])
def test_sampling_defaults_that_cannot_be_used_stop_the_start(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--override-generation-config"):
        assembly.default_sampling(ModelConfig(override_generation_config=bad), {})


def test_eos_ids_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 7, 100_000]}))
    config = ModelConfig(model=str(folder))
    checkpoint = assembly.open_model(config)
    text = assembly.load_text(config, checkpoint)
    facts = assembly.EngineFacts(64, 4, "f", ())
    model = assembly.served_model(config, checkpoint, text, facts)
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


def test_what_was_decided_is_told_with_a_reason(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = Config.from_flat({"model": str(folder), "kv_cache_memory_bytes": "1M"})
    loop, facts = assembly.build_engine(config, 320)
    loop.close()
    decided = {d.what: (d.value, d.reason) for d in facts.decisions}
    assert decided["dtype"][0] == "float32"
    # 2 layers, 2 heads of 16, keys and values in 4 bytes: 512 bytes a token.
    assert decided["KV cache"][0] == f"{2**20 // 8192 * 16} tokens"
    assert all(value and reason for value, reason in decided.values())

"""The default model, read as transformers reads it: an independent reader and un-permuter."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.weights import Checkpoint

pytestmark = pytest.mark.real


def test_the_default_model_is_what_transformers_loads(default_checkpoint: Checkpoint) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = default_checkpoint
    with torch.device("meta"):  # only its parameters' names are looked at
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config))
    # from_pretrained(gguf_file=...) does the same, but also asks for the accelerate package.
    loaded = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=model)
    assert set(checkpoint.tensors) == set(loaded["tensors"])
    for name, spec in checkpoint.tensors.items():
        tensor = loaded["tensors"][name].numpy()
        assert spec.shape == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    config = {**loaded["config"], "rope_parameters": checkpoint.config["rope_parameters"]}
    assert config.pop("rope_theta") == checkpoint.config["rope_parameters"]["rope_theta"]
    for key in config.keys() & checkpoint.config.keys() - {"rms_norm_eps"}:
        assert config[key] == checkpoint.config[key], key
    assert np.float32(config["rms_norm_eps"]) == np.float32(checkpoint.config["rms_norm_eps"])


def test_the_default_model_is_named_after_itself(default_checkpoint: Checkpoint) -> None:
    assert default_checkpoint.name == "SmolLM2-135M-Instruct"
    assert default_checkpoint.generation_config["eos_token_id"] == 2
    assert "<|im_start|>" in default_checkpoint.text_assets().tokenizer_config["chat_template"]

"""Of models that also see, the language model is served: logits of those that transformers saves
whole, and of the names that it used to save.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.assembly import build_engine
from octavo.config import Config
from octavo.core.errors import ConfigError
from octavo.models.registry import build_model
from octavo.weights import open_checkpoint
from octavo.weights.language_model import LanguageModel
from support.backends import BACKENDS, cpu_backend
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forward import Forward, load_model
from support.oracle import load_oracle

TOKENS = np.random.default_rng(3).integers(VOCAB_SIZE, size=50).tolist()
_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {**_EYES, "model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": ("mistral", {**_EYES, "model_type": "pixtral"}, {"tie_word_embeddings": False}),
    "llama4": (
        "llama4_text",
        {
            **_EYES,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        {},
    ),
}


def make_whole(family: str, folder: Path) -> tuple[Path, np.ndarray]:
    """A checkpoint with its eyes, and the logits that transformers gives of TOKENS."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text_family, eyes, further = _WHOLES[family]
    text_folder = make_checkpoint(text_family, folder / "text")
    text = load_oracle(text_folder)
    config = AutoConfig.for_model(
        family, text_config=text.config.to_dict(), vision_config=eyes, **further
    )
    whole = speaking = AutoModelForImageTextToText.from_config(config).eval()
    if family == "llama4":  # whose whole wants images
        speaking = whole.language_model
        speaking.load_state_dict(text.state_dict())
    else:
        whole.model.language_model.load_state_dict(text.model.state_dict())
        whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder / "whole")
    with torch.inference_mode():
        logits = speaking(input_ids=torch.tensor([TOKENS])).logits[0].float().numpy()
    return folder / "whole", logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", _WHOLES)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, family: str, backend: str) -> None:
    folder, expected = make_whole(family, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    assert isinstance(checkpoint, LanguageModel)
    assert checkpoint.num_left_out > 10
    model = load_model(pickle.loads(pickle.dumps(checkpoint)), cpu_backend(backend))
    actual = Forward(model, cpu_backend(backend)).prompt(TOKENS)
    np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=2e-4)


def test_other_names_are_read_and_unknown_ones_refused(tmp_path: Path) -> None:
    folder, expected = make_whole("gemma3", tmp_path)
    file = folder / "model.safetensors"
    tensors = {
        "model." + name.replace("language_model.model.", "language_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    actual = Forward(load_model(folder, cpu_backend("native")), cpu_backend("native"))
    np.testing.assert_allclose(actual.prompt(TOKENS), expected, atol=2e-4, rtol=2e-4)
    save_file({**tensors, "ears.weight": np.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"unexpected: ears\.weight"):
        load_model(folder, cpu_backend("native"))


def test_the_start_says_what_is_not_served(tmp_path: Path) -> None:
    folder, _ = make_whole("mistral3", tmp_path)
    config = Config.from_flat({"model": str(folder), "kv_cache_memory_bytes": "1M"})
    loop, facts = build_engine(config, VOCAB_SIZE)
    loop.close()
    (decision,) = (one for one in facts.decisions if one.what == "model")
    assert decision.value == "text only"
    assert re.search(r"its \d\d tensors for images are left unread", decision.reason)


def test_what_a_config_leaves_out_is_gemmas_default(tmp_path: Path) -> None:
    """As that of gemma-3-4b-it."""
    folder, _ = make_whole("gemma3", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config["eos_token_id"] = [1, 106]
    path.write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(folder))
    spec = build_model(checkpoint.config).spec
    assert (spec.vocab_size, spec.max_position, spec.ties_embeddings) == (262208, 131072, True)
    assert checkpoint.config["eos_token_id"] == [1, 106]

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.weights import TensorSpec, open_checkpoint
from octavo.weights.attention_windows import llama4_windows
from octavo.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.model_config import ModelConfig
from octavo.weights.safetensors_folder import SafetensorsFolder
from support.checkpoints import CHATML_TEMPLATE, SPECIAL_TOKENS, make_checkpoint
from support.gguf_files import write_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""Whose files say all that their configs say, in the same names."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


def convert(folder: Path, tmp_path: Path, **options: Any) -> GGUFCheckpoint:
    return GGUFCheckpoint(write_gguf(folder, tmp_path / "model.gguf", **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_weights_are_those_of_the_hugging_face_checkpoint(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = SafetensorsFolder(folders[family])
    checkpoint = convert(folders[family], tmp_path)
    assert checkpoint.tensors == expected.tensors
    for name in expected.tensors:
        array = checkpoint.read(name)
        if family == "gemma3_text" and name.endswith("norm.weight"):  # 1 + w was rounded
            np.testing.assert_allclose(array, expected.read(name), rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(array, expected.read(name))
        np.testing.assert_array_equal(checkpoint.read(name, slice(8, 24)), array[8:24])


def test_quantized_projections_are_put_in_order_too(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = SafetensorsFolder(folders["llama"])
    checkpoint = convert(folders["llama"], tmp_path, matrix_type="Q8_0")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert checkpoint.tensors[name] == TensorSpec(name, (64, 64), "Q8_0")
    array = checkpoint.read(name)
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, expected.read(name), atol=0.01)
    np.testing.assert_array_equal(checkpoint.read(name, slice(16, 32)), array[16:32])


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_0", "Q4_1"])
def test_stored_blocks_are_put_in_order_too(
    matrix_type: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = convert(folders["llama"], tmp_path, matrix_type=matrix_type)
    for part in ("q_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        blocks = checkpoint.read_stored(name)
        assert blocks.dtype == np.uint8
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[matrix_type])
        np.testing.assert_array_equal(values, checkpoint.read(name))
        np.testing.assert_array_equal(checkpoint.read_stored(name, slice(5, 20)), blocks[5:20])


def test_plain_types_are_stored_as_they_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = convert(folders["llama"], tmp_path, matrix_type="F16")
    for name, dtype in (("self_attn.q_proj", "float16"), ("input_layernorm", "float32")):
        name = f"model.layers.0.{name}.weight"
        stored = checkpoint.read_stored(name)
        assert stored.dtype.name == dtype
        np.testing.assert_array_equal(stored, checkpoint.read(name))


def test_released_pages_come_back(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = convert(folders["llama"], tmp_path)
    array = checkpoint.read("model.embed_tokens.weight")
    before = array.copy()
    checkpoint.release_pages()
    np.testing.assert_array_equal(array, before)


def test_the_content_has_an_id(folders: dict[str, Path], tmp_path: Path) -> None:
    path = convert(folders["llama"], tmp_path).path
    first = GGUFCheckpoint(path).content_id()
    assert GGUFCheckpoint(path).content_id() == first
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert GGUFCheckpoint(path).content_id() != first
    content[-3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert GGUFCheckpoint(path).content_id() != first


@pytest.mark.parametrize("family", FAMILIES)
def test_config_says_what_the_hugging_face_config_says(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = SafetensorsFolder(folders[family]).config
    metadata = {}
    if family == "gemma3_text":  # not in the file: what llama.cpp takes is head_dim
        expected["query_pre_attn_scalar"] = expected["head_dim"]
    expected.setdefault("head_dim", expected["hidden_size"] // expected["num_attention_heads"])
    config = convert(folders[family], tmp_path, metadata=metadata).config
    told_apart = {"attention_bias"}  # transformers fixes it per family instead of writing it
    for key in config.keys() - told_apart:
        assert config[key] == expected.get(key), key
    assert config["attention_bias"] is (family == "qwen2")


def test_tied_embeddings_have_no_head(folders: dict[str, Path], tmp_path: Path) -> None:
    """QNT-07, with a quantized embedding."""
    checkpoint = convert(folders["qwen2"], tmp_path, embedding_type="Q8_0")
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.tensors["model.embed_tokens.weight"].dtype == "Q8_0"
    untied = convert(folders["llama"], tmp_path)
    assert untied.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in untied.tensors


def test_a_padded_vocabulary_counts_the_rows(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, vocab_size=352)
    checkpoint = convert(folder, tmp_path)
    assert checkpoint.config["vocab_size"] == 352
    gguf_metadata = checkpoint.text_assets().gguf
    assert gguf_metadata is not None
    assert len(gguf_metadata["tokenizer.ggml.tokens"]) == 320


class TestRope:
    def test_llama3_factors_are_those_of_transformers(self, tmp_path: Path) -> None:
        """QNT-05: base frequencies divided by the factors are the scaled frequencies."""
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        folder = make_checkpoint("llama", tmp_path, rope_parameters=LLAMA3_ROPE)
        checkpoint = convert(folder, tmp_path)
        rope = checkpoint.config["rope_parameters"]
        assert rope["rope_type"] == "freq_factors"
        assert rope["rope_theta"] == 500_000.0
        assert "rope_freqs.weight" not in checkpoint.tensors
        base = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
        config = AutoConfig.from_pretrained(folder)
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        np.testing.assert_allclose(base / np.array(rope["factors"]), expected.numpy(), rtol=1e-5)
        assert len({round(factor, 3) for factor in rope["factors"]}) > 2

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 20_000.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10_000.0,
            },
        ],
    )
    def test_scaling_comes_back(self, rope: dict[str, Any], tmp_path: Path) -> None:
        folder = make_checkpoint("llama", tmp_path, rope_parameters=rope)
        found = convert(folder, tmp_path).config["rope_parameters"]
        assert found == rope
        assert {key: type(value) for key, value in found.items()} == {
            key: type(value) for key, value in rope.items()
        }

    def test_yarn_options(self, folders: dict[str, Path], tmp_path: Path) -> None:
        prefix = "llama.rope.scaling."
        metadata = {
            prefix + "type": "yarn",
            prefix + "factor": 4.0,
            prefix + "original_context_length": 128,
            prefix + "yarn_beta_fast": 16.0,
            prefix + "yarn_attn_factor": 1.5,
            prefix + "finetuned": True,
        }
        rope = convert(folders["llama"], tmp_path, metadata=metadata).config["rope_parameters"]
        assert rope["beta_fast"] == 16.0
        assert rope["attention_factor"] == 1.5
        assert "beta_slow" not in rope

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"type": "longrope", "factor": 4.0}, "rope scaling 'longrope'"),
            ({"type": "linear", "factor": 4.0, "yarn_ext_factor": 1.0}, "yarn_ext_factor"),
            ({"type": "yarn", "factor": 4.0}, "original_context_length' is missing"),
            ({"type": "linear", "factor": -1.0}, "factor' is -1.0"),
        ],
    )
    def test_what_cannot_be_followed_is_refused(
        self, metadata: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        full = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
        with pytest.raises(ConfigError, match=message):
            convert(folders["llama"], tmp_path, metadata=full)


class TestGemma:
    def test_attention_pattern_and_local_base_that_llama_cpp_assumes(self, tmp_path: Path) -> None:
        folder = make_checkpoint("gemma3_text", tmp_path, num_hidden_layers=7, layer_types=None)
        key = "gemma3.attention.sliding_window_pattern"
        config = convert(folder, tmp_path, metadata={key: None}).config
        assert config["layer_types"] == SafetensorsFolder(folder).config["layer_types"]
        assert config["layer_types"].count("full_attention") == 1
        local = config["rope_parameters"]["sliding_attention"]
        assert local == {"rope_type": "default", "rope_theta": 10_000.0}

    def test_linear_scaling_is_for_global_layers_only(
        self, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        metadata = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
        rope = convert(folders["gemma3_text"], tmp_path, metadata=metadata).config[
            "rope_parameters"
        ]
        assert rope["full_attention"]["factor"] == 8.0
        assert rope["sliding_attention"]["rope_type"] == "default"

    def test_soft_cap(self, folders: dict[str, Path], tmp_path: Path) -> None:
        metadata = {"gemma3.final_logit_softcapping": 30.0}
        config = convert(folders["gemma3_text"], tmp_path, metadata=metadata).config
        assert config["final_logit_softcapping"] == 30.0


class TestTokens:
    def test_text_assets(self, folders: dict[str, Path], tmp_path: Path) -> None:
        assets = convert(folders["llama"], tmp_path).text_assets()
        assert assets.tokenizer_json is None
        assert assets.tokenizer_config == {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": CHATML_TEMPLATE,
        }
        assert assets.gguf is not None
        assert assets.gguf["tokenizer.ggml.tokens"][:3] == list(SPECIAL_TOKENS)
        assert all(key.startswith("tokenizer.") for key in assets.gguf)

    @pytest.mark.parametrize(
        ("metadata", "eos"),
        [
            ({}, 2),
            ({"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}, [2, 5, 6]),
            ({"tokenizer.ggml.eos_token_id": 0}, [0, 2]),  # <|im_end|> ends a turn all the same
            ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.token_type": [1] * 320}, 0),
        ],
    )
    def test_all_ids_that_end_a_reply(
        self, metadata: dict[str, Any], eos: Any, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        checkpoint = convert(folders["llama"], tmp_path, metadata=metadata)
        assert checkpoint.generation_config["eos_token_id"] == eos
        assert checkpoint.config["eos_token_id"] == eos

    def test_sampling_defaults(self, folders: dict[str, Path], tmp_path: Path) -> None:
        metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
        checkpoint = convert(folders["qwen3"], tmp_path, metadata=metadata)
        assert checkpoint.generation_config["temperature"] == 0.6
        assert checkpoint.generation_config["top_k"] == 20


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "metadata key 'llama.block_count' is missing"),
        ({"llama.block_count": 1 << 31}, "announces 2147483648 layers but has 21 tensors"),
        ({"llama.attention.head_count": [4, 2]}, r"is \[4, 2\]; a positive whole number is needed"),
        ({"llama.attention.head_count": "4"}, "is '4'; a positive whole number"),
        ({"llama.attention.head_count": 0}, "is 0; a positive whole number"),
        ({"llama.attention.head_count": 3}, "'blk.0.attn_q.weight' of shape .* 3 heads"),
        ({"llama.attention.value_length": 8}, "value_length is 8 but heads are 16 wide"),
        ({"llama.rope.dimension_count": 0}, "dimension_count' is 0; a positive whole number"),
        ({"llama.expert_count": 8}, "'llama.expert_used_count' is missing"),
        ({"llama.expert_count": 1 << 20, "llama.expert_used_count": 1}, "1048576 experts a layer"),
        ({"split.count": 3}, "one of 3 parts; merge"),
        ({"tokenizer.ggml.tokens": 3}, "tokens' is no list of strings"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id' is 'x', no token id"),
        ({"general.architecture": "mamba"}, "architecture 'mamba'; supported are llama, qwen2"),
    ],
)
def test_odd_metadata_is_refused_by_name(
    metadata: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        convert(folders["llama"], tmp_path, metadata=metadata)
    assert str(tmp_path / "model.gguf") in str(raised.value)


def test_a_tensor_that_the_architecture_lacks_keeps_its_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for key in ("block_count", "embedding_length", "feed_forward_length", "context_length"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    for name in ("token_embd.weight", "blk.0.ffn_gate_exps.weight"):
        writer.add_tensor(name, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(str(tmp_path / "a.gguf"))
    assert set(checkpoint.tensors) == {"model.embed_tokens.weight", "blk.0.ffn_gate_exps.weight"}
    assert checkpoint.name == "a"
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.norm\.weight'"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize(
    ("metadata", "chunk", "rotates"),
    [({}, 8192, [1, 1, 1, 0]), ({"llama4.attention.sliding_window": 0}, None, [1, 1, 1, 1])],
)
def test_llama_4_has_the_pattern_that_llama_cpp_knows(
    metadata: dict[str, Any], chunk: int | None, rotates: list[int], tmp_path: Path
) -> None:
    folder = make_checkpoint("llama4_text", tmp_path / "model")
    config = convert(folder, tmp_path, metadata=metadata).config
    assert config["attention_chunk_size"] == chunk
    assert config["no_rope_layers"] == rotates
    assert llama4_windows(ModelConfig(config), 4) == [chunk if one else None for one in rotates]


def test_sizes_of_latent_attention_must_fit(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"key_length_mla is 16, of which 16 .* have positions"):
        convert(folder, tmp_path, metadata={"deepseek2.attention.key_length_mla": 16})


def test_experts_must_be_as_many_as_announced(tmp_path: Path) -> None:
    """Else their names stay what they are, and the model lacks them."""
    folder = make_checkpoint("mixtral", tmp_path / "model")
    checkpoint = convert(folder, tmp_path, metadata={"llama.expert_count": 5})
    assert "blk.0.ffn_gate_exps.weight" in checkpoint.tensors

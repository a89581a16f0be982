from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.core.errors import ConfigError
from octavo.weights import open_checkpoint
from octavo.weights.safetensors_folder import SafetensorsFolder
from support.checkpoints import CHATML_TEMPLATE, FAMILIES, make_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_are_those_that_transformers_saved(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    expected = load_file(tmp_path / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    assert checkpoint.config["model_type"] == family
    assert checkpoint.generation_config["eos_token_id"] == 2


def test_shards_read_as_one(shards: Path, plain: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 2
    checkpoint, whole = SafetensorsFolder(shards), SafetensorsFolder(plain)
    assert checkpoint.tensors == whole.tensors
    for name in whole.tensors:
        np.testing.assert_array_equal(checkpoint.read(name), whole.read(name))


def test_the_content_of_every_shard_counts(shards: Path) -> None:
    first = SafetensorsFolder(shards).content_id()
    assert SafetensorsFolder(shards).content_id() == first
    for shard in shards.glob("*.safetensors"):
        status = shard.stat()
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert SafetensorsFolder(shards).content_id() != first
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert SafetensorsFolder(shards).content_id() == first


def test_released_pages_come_back(shards: Path) -> None:
    checkpoint = SafetensorsFolder(shards)
    arrays = {name: checkpoint.read_stored(name) for name in checkpoint.tensors}
    before = {name: array.copy() for name, array in arrays.items()}
    checkpoint.release_pages()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


def test_bfloat16_is_read_as_stored(tmp_path: Path, plain: Path) -> None:
    make_checkpoint("llama", tmp_path, dtype="bfloat16")
    checkpoint = SafetensorsFolder(tmp_path)
    name = "model.embed_tokens.weight"
    assert checkpoint.tensors[name].dtype == "bfloat16"
    assert checkpoint.read(name).dtype.name == "bfloat16"
    error = checkpoint.read(name).astype(np.float32) - SafetensorsFolder(plain).read(name)
    assert 0 < np.abs(error).max() < 0.01


def test_the_name_is_the_folder_unless_told(folder: Path) -> None:
    assert open_checkpoint(str(folder)).name == "model"
    assert SafetensorsFolder(folder, "org/name").name == "org/name"


def test_a_single_file_may_have_any_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "lm_head.weight" in SafetensorsFolder(folder).tensors


def test_an_unknown_tensor_name_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.nope'"):
        SafetensorsFolder(folder).read("model.nope")


class TestTextAssets:
    def test_tokenizer_and_template(self, folder: Path) -> None:
        assets = SafetensorsFolder(folder).text_assets()
        assert assets.tokenizer_json == folder / "tokenizer.json"
        assert assets.tokenizer_config["chat_template"] == CHATML_TEMPLATE
        assert assets.gguf is None

    def test_the_template_file_wins(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("{{ messages }} 🙂", encoding="utf-8")
        assets = SafetensorsFolder(folder).text_assets()
        assert assets.tokenizer_config["chat_template"] == "{{ messages }} 🙂"

    def test_special_tokens_come_as_strings_and_the_tokenizer_config_wins(
        self, folder: Path
    ) -> None:
        (folder / "special_tokens_map.json").write_text(
            json.dumps({"bos_token": "<map>", "cls_token": {"content": "<cls>", "lstrip": False}})
        )
        config = SafetensorsFolder(folder).text_assets().tokenizer_config
        assert config["bos_token"] == "<|im_start|>"
        assert config["cls_token"] == "<cls>"

    def test_without_any_tokenizer_file(self, folder: Path) -> None:
        for file in folder.glob("tokenizer*"):
            file.unlink()
        assets = SafetensorsFolder(folder).text_assets()
        assert (assets.tokenizer_json, assets.tokenizer_config) == (None, {})


class TestBrokenFolders:
    """CFG-08 and MDL-09: one sentence that names the path and what is missing."""

    def refuse(self, folder: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as raised:
            open_checkpoint(str(folder))
        text = str(raised.value)
        assert str(folder) in text
        assert "\n" not in text

    def test_missing(self, tmp_path: Path) -> None:
        self.refuse(tmp_path / "nope", "does not exist")

    def test_empty(self, tmp_path: Path) -> None:
        self.refuse(tmp_path, "is empty")

    def test_config_only(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        self.refuse(folder, r"has no weights \(\*\.safetensors\)")

    def test_weights_only(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        self.refuse(folder, r"no config\.json")

    def test_a_folder_named_like_the_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()
        self.refuse(folder, "is a folder, not a safetensors file")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{"model_type": "llama",', "config.json is broken JSON"),
            (b"[1]", "holds a JSON list"),
            (b"\xff", "is not UTF-8"),
            (b"[" * 100_000, "config.json is broken JSON"),
        ],
    )
    def test_broken_config(self, folder: Path, content: bytes, message: str) -> None:
        (folder / "config.json").write_bytes(content)
        self.refuse(folder, message)

    def test_only_pickles(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        self.refuse(folder, r"only as pytorch_model\.bin\. Octavo never opens pickle files")

    def test_only_gguf(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-q8.gguf")
        self.refuse(folder, r"pass a GGUF file itself: .*model-q8\.gguf")

    def test_several_files_without_index(self, shards: Path) -> None:
        (shards / INDEX).unlink()
        self.refuse(shards, f"but no {INDEX}")

    def test_missing_shard(self, shards: Path) -> None:
        sorted(shards.glob("*.safetensors"))[1].unlink()
        self.refuse(shards, r"lacks 1 of the \d files .* model-00002-of-0000\d\.safetensors")

    def test_a_tensor_missing_from_its_shard(self, shards: Path) -> None:
        index = json.loads((shards / INDEX).read_text())["weight_map"]
        file = shards / index["lm_head.weight"]
        tensors = load_file(file)
        del tensors["lm_head.weight"]
        save_file(tensors or {"x": np.zeros(1)}, file)
        self.refuse(shards, r"names 1 tensors that its files lack, the first is 'lm_head\.weight'")

    def test_a_tensor_in_two_shards(self, shards: Path) -> None:
        first, second = sorted(shards.glob("*.safetensors"))[:2]
        save_file(load_file(second) | load_file(first), second)
        self.refuse(shards, r"is in model-00001.* and again in model-00002")

    def test_an_index_may_not_lead_out_of_the_folder(self, shards: Path) -> None:
        (shards / INDEX).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
        self.refuse(shards, r"'\.\./other\.safetensors', which is no file name")

    def test_a_truncated_shard(self, shards: Path) -> None:
        file = sorted(shards.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[:-10])
        self.refuse(shards, r"model-00001-of-.* is truncated: tensor")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800"])
def test_an_index_may_name_what_no_file_can_be_called(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError, match="lacks 1 of the 1 files"):
        SafetensorsFolder(tmp_path)

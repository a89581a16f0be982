"""The planner and the engine agree on what a budget of memory holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from octavo import assembly
from octavo.advisor.choosing import Choices, first_settings
from octavo.advisor.layout import Layout
from octavo.advisor.memory import Memory, account
from octavo.advisor.model import OCTAVO_FAMILIES, read_model
from octavo.advisor.traffic import read_traffic
from octavo.config import Config
from octavo.core.errors import ConfigError, RequestError
from octavo.core.model_spec import KVFormat
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kvcache.sizing import decide_num_blocks
from octavo.layers.share import Share
from octavo.models import registry
from octavo.models.cut_groups import column_unit
from octavo.models.registry import engine_model
from octavo.ops.backend import load_backend
from octavo.parallel.layout import NO_BLOCKS, Blocks
from octavo.simulator.hardware import Hardware, this_cpu
from octavo.simulator.model_configs import spec_from_config
from octavo.simulator.real_time import stored_format
from octavo.weights import open_checkpoint
from support.checkpoints import make_checkpoint
from support.forked_workers import workers_are_forked
from support.gguf_files import write_gguf

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"), max_position_embeddings=2**15)


def planned(folder: Path, num_bytes: int, dtype: str, tp: int = 1) -> Memory:
    model = read_model(str(folder))
    traffic = read_traffic(input_len="20", output_len="10")
    choices = Choices(kv=KVFormat(dtype), kv_memory_bytes=num_bytes)
    hardware = Hardware(this_cpu())
    settings = first_settings(model, hardware, traffic, choices)
    return account(model, hardware, Layout(tp), settings, traffic.lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("mib", [1, 7, 64])
def test_pln_06_blocks_are_those_that_the_engine_allocates(
    folder: Path, mib: int, dtype: str
) -> None:
    """PLN-06: tokens are blocks x block size, nothing is reserved; the longest request that fits
    is served, one token more is refused.
    """
    knobs = {
        "model": str(folder),
        "backend": "native",
        "kv_cache_memory_bytes": mib * MIB,
        "kv_cache_dtype": dtype,
        "max_model_len": -1,
        "max_num_seqs": 1,
        "threads": 1,
    }
    loop, facts = assembly.build_engine(Config.from_flat(knobs), 320)
    found = planned(folder, mib * MIB, dtype)
    assert found.num_blocks == facts.num_blocks
    assert found.num_tokens == facts.num_blocks * 16
    assert facts.max_model_len == min(found.num_tokens, 2**15)
    if mib > 1:
        return  # a long prompt takes its time
    longest = facts.max_model_len
    with pytest.raises(RequestError):
        loop.add(_request("too long", longest))
    loop.add(_request("longest", longest - 1))
    deltas = [delta for _ in range(longest) if loop.has_work for delta in loop.step()]
    assert deltas[-1].finish_reason is not None
    assert deltas[-1].error is None
    loop.close()


def _request(name: str, prompt_len: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(5 + i % 300 for i in range(prompt_len)),
        sampling=SamplingParams(temperature=0),
        max_tokens=1,
        seed=0,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("mib", [1, 7, 64])
@pytest.mark.parametrize("heads", [{}, {"num_attention_heads": 6, "num_key_value_heads": 3}])
def test_pln_06_blocks_of_two_ranks_are_those_that_the_fuller_one_has(
    tmp_path: Path, heads: dict[str, int], mib: int, dtype: str
) -> None:
    """PLN-06: with equal parts, and where one of two ranks has two of three heads."""
    folder = make_checkpoint("qwen3", tmp_path, max_position_embeddings=2**15, **heads)
    backend = load_backend("native", device="cpu", threads=1)
    config = open_checkpoint(str(folder)).config
    allocated = []
    for rank in range(2):
        model = engine_model(config)
        model.shard(Share(rank, 2))
        decision = decide_num_blocks(
            model.max_position,
            block_size=16,
            block_bytes=backend.kv_block_bytes(16, model.kv_shapes, KVFormat(dtype)),
            kv_cache_memory_bytes=mib * MIB,
            free_memory_bytes=2**40,
            memory_share=0.5,
            max_num_seqs=1,
            max_model_len=None,
        )
        allocated.append(decision.num_blocks)
    assert planned(folder, mib * MIB, dtype, tp=2).num_blocks == min(allocated)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pln_06_workers_allocate_what_is_planned(folder: Path, dtype: str) -> None:
    """PLN-06: an engine of two processes, for each budget."""
    for mib in (1, 7, 64):
        knobs = {
            "model": str(folder),
            "kv_cache_memory_bytes": mib * MIB,
            "kv_cache_dtype": dtype,
            "max_model_len": -1,
            "max_num_seqs": 1,
            "tensor_parallel_size": 2,
        }
        with workers_are_forked():
            loop, facts = assembly.build_engine(Config.from_flat(knobs), 320)
            found = planned(folder, mib * MIB, dtype, tp=2)
            assert found.num_blocks == facts.num_blocks
            assert facts.max_model_len == min(found.num_tokens, 2**15)
            with pytest.raises(RequestError):
                loop.add(_request("too long", facts.max_model_len))
            if mib == 1:  # a long prompt takes its time
                loop.add(_request("longest", facts.max_model_len - 1))
                deltas = [delta for _ in range(2000) if loop.has_work for delta in loop.step()]
                assert deltas[-1].finish_reason is not None
                assert deltas[-1].error is None
            loop.close()


def test_blocks_that_stay_whole_are_those_that_ranks_go_by(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "q8.gguf", matrix_type="Q8_0")
    model = read_model(str(path))
    assert model.blocks == Blocks(inner=column_unit(open_checkpoint(str(path))), output=32)
    assert read_model(str(folder)).blocks == NO_BLOCKS
    assert read_model(str(folder), weights="int4").blocks == NO_BLOCKS


def test_the_weights_of_a_plan_are_the_tensors_of_the_files(folder: Path) -> None:
    model = read_model(str(folder))
    assert model.stored_bytes == sum(
        4 * _elements(tensor.shape) for tensor in _tensors(folder).values()
    )
    assert model.weight_bytes == model.stored_bytes
    assert model.notes == ()
    assert model.octavo_runs(is_gpu=False)


def test_files_without_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    empty = Path(shutil.copytree(folder, tmp_path / "empty"))
    save_file({}, empty / "model.safetensors")
    with pytest.raises(ConfigError, match=r"empty\.gguf has no tensor 'token_embd\.weight'"):
        read_model(str(write_gguf(empty, tmp_path / "empty.gguf")))
    checkpoint = open_checkpoint(str(empty))
    with pytest.raises(ConfigError, match="the checkpoint has no tensors"):
        stored_format(checkpoint, spec_from_config(checkpoint.config))


def test_the_planner_knows_which_families_octavo_runs() -> None:
    registry.architectures()  # loads them all
    assert tuple(sorted(registry._MODEL_TYPES)) == OCTAVO_FAMILIES


def _tensors(folder: Path):  # type: ignore[no-untyped-def]
    from octavo.weights.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(folder).tensors


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

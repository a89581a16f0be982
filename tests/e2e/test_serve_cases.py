"""Cases from public bug reports, against the whole server as a command on tiny random models."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.quantized_files import gptq, quantize_checkpoint
from support.serve_command import ServeProcess, is_alive, refusal, serving, wait_until

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 0}


def tokens(reply: httpx.Response) -> list[list[str]]:
    """The tokens of each choice; the request asked for logprobs."""
    assert reply.status_code == 200, reply.text
    return [choice["logprobs"]["tokens"] for choice in reply.json()["choices"]]


def test_smp_05_a_seed_holds_in_any_company(server: ServeProcess) -> None:
    seeded = {"seed": 7, "temperature": 1, "max_tokens": 20, "ignore_eos": True, "logprobs": 0}
    with ThreadPoolExecutor(5) as pool:
        twins = [pool.submit(server.completion, **seeded) for _ in range(2)]
        first, second = (tokens(twin.result()) for twin in twins)
        company = [
            pool.submit(server.completion, prompt=[20 + i] * 9, max_tokens=60) for i in range(3)
        ]
        later = [pool.submit(server.completion, **seeded) for _ in range(2)]
        assert [tokens(one.result()) for one in later] == [first, first] == [second, second]
        assert all(one.result().status_code == 200 for one in company)
    pair = tokens(server.completion(**seeded, n=2))
    assert pair == tokens(server.completion(**seeded, n=2))
    assert pair[0] == first[0]
    assert pair[0] != pair[1]


def test_smp_12_a_penalty_stays_with_its_request(server: ServeProcess) -> None:
    penalised = {**GREEDY, "prompt": [5, 6, 7, 8, 9], "repetition_penalty": 2, "max_tokens": 30}
    seeded = {**GREEDY, "prompt": [40], "temperature": 1, "seed": 9, "top_k": 1, "max_tokens": 30}
    alone = [tokens(server.completion(**body)) for body in (penalised, seeded)]
    for order in (1, -1):
        with ThreadPoolExecutor(2) as pool:
            bodies = [penalised, seeded][::order]
            together = [pool.submit(server.completion, **body) for body in bodies]
            assert [tokens(one.result()) for one in together] == alone[::order]


def test_pfx_01_prompt_logprobs_of_a_cached_prompt_are_those_of_an_uncached_one(
    folder: Path, server: ServeProcess, tmp_path: Path
) -> None:
    rng = random.Random(4)
    with serving(tmp_path / "log", str(folder), "--no-enable-prefix-caching") as uncached:
        for length in (15, 16, 17, 32, 33):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
            server.completion(prompt=prompt)  # fills the cache
            for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
                body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
                expected = uncached.completion(**body).json()["choices"]
                for _ in range(3):
                    assert server.completion(**body).json()["choices"] == expected
            assert len(expected[0]["logprobs"]["token_logprobs"]) == length + 4
            assert expected[0]["logprobs"]["token_logprobs"][0] is None


def test_sch_08_priorities_over_http(long_folder: Path, tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "priority")
    with serving(tmp_path / "log", str(long_folder), *flags) as server:
        order: list[str] = []

        def ask(name: str, priority: int, max_tokens: int) -> None:
            body = {"priority": priority, "max_tokens": max_tokens, "ignore_eos": True}
            assert server.completion(**body).status_code == 200
            order.append(name)

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, "low", 5, 3000)]
            wait_until(lambda: server.metric("num_requests_running") == 1, 10)
            # Long enough that the answers can't overtake each other on their way.
            for name, priority in (("high", 1), ("equal 1", 5), ("equal 2", 5)):
                asked.append(pool.submit(ask, name, priority, 300))
                time.sleep(0.05)
            for one in asked:
                one.result()
        assert order == ["high", "low", "equal 1", "equal 2"]
        assert server.metric("num_preemptions_total") == 1


def test_sch_10_outputs_under_load_and_aborts_equal_solo_runs(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 50))] for _ in range(20)]
    small = ("--kv-cache-memory-bytes", str(16 * 8192), "--max-model-len", "128")
    with serving(tmp_path / "log", str(folder), *small) as server:
        body = {**GREEDY, "max_tokens": 30}
        alone = [tokens(server.completion(prompt=prompt, **body)) for prompt in prompts]

        def play(number: int, delay: float, leaves: bool) -> None:
            time.sleep(delay)
            if leaves:
                stream = {"prompt": prompts[number], **body, "stream": True}
                url = f"{server.url}/v1/completions"
                with httpx.stream("POST", url, json=stream, timeout=60, verify=False) as reply:
                    next(reply.iter_lines())
                return
            assert tokens(server.completion(prompt=prompts[number], **body)) == alone[number]

        jobs = [(i % 20, 0.2 * rng.random(), rng.random() < 0.1) for i in range(100)]
        rng.shuffle(jobs)
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(play, *zip(*jobs, strict=True)))
        wait_until(lambda: server.metric("num_requests_running") == 0, 10)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("num_preemptions_total") > 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_cfg_03_a_second_signal_leaves_no_engine_behind(
    long_folder: Path, tmp_path: Path, second: signal.Signals
) -> None:
    with serving(tmp_path / "log", str(long_folder), "--shutdown-timeout", "60") as server:
        children = server.children()
        assert children
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.completion, max_tokens=8000, ignore_eos=True)
            wait_until(lambda: server.metric("num_requests_running") == 1, 10)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            server.process.send_signal(second)
            assert server.process.wait(10) == 0
            assert reply.result(10).status_code == 200  # finish_reason abort
        wait_until(lambda: not any(map(is_alive, children)), 10)


def test_mdl_09_missing_files_and_tensors_stop_the_start(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from support.gguf_files import write_gguf

    shards = make_checkpoint("llama", tmp_path / "shards", max_shard_size="60KB")
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    whole = make_checkpoint("llama", tmp_path / "whole")
    quantized = write_gguf(whole, tmp_path / "q8.gguf", matrix_type="Q8_0")
    quantized.write_bytes(quantized.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    gptq_folder, _ = quantize_checkpoint(gptq(), whole, tmp_path / "gptq")
    for folder, name in ((whole, "up_proj.weight"), (gptq_folder, "up_proj.scales")):
        tensors = load_file(folder / "model.safetensors")
        del tensors[f"model.layers.1.mlp.{name}"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for model, missing in (
        (shards, gone.name),
        (whole, "model.layers.1.mlp.up_proj.weight"),
        (quantized, "model.layers.1.mlp.up_proj.weight"),
        (gptq_folder, "model.layers.1.mlp.up_proj.scales"),
    ):
        code, stderr = refusal(str(model), "--port", "0")
        assert code == 1
        assert missing in stderr
        assert "Traceback" not in stderr


def test_a_quantized_checkpoint_is_served_and_a_format_that_is_not_read_refused(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    quantized, _ = quantize_checkpoint(gptq(), folder, tmp_path)
    with serving(tmp_path / "log", str(quantized)) as server:
        reply = server.completion(max_tokens=4, temperature=0, ignore_eos=True)
        assert reply.json()["usage"]["completion_tokens"] == 4
    path = quantized / "config.json"
    path.write_text(path.read_text().replace('"gptq"', '"aqlm"', 1))
    code, stderr = refusal(str(quantized), "--port", "0")
    assert code == 1
    assert "quantized with 'aqlm', which is not read" in stderr
    assert "gptq" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_mdl_02_rope_scaling_at_start(key: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "yarn", max_position_embeddings=64)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    yarn = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    path.write_text(json.dumps(config | {"rope_scaling": yarn}))
    with serving(tmp_path / "log", str(folder)) as server:
        models = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]
        assert models[0]["max_model_len"] == 256
    path.write_text(json.dumps(config | {"rope_scaling": {key: "spiral", "factor": 4.0}}))
    code, stderr = refusal(str(folder), "--port", "0")
    assert code == 1
    assert "'spiral'" in stderr


def test_mdl_13_overflow_in_half_precision(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(
        "llama", tmp_path / "overflow", dtype="bfloat16", max_position_embeddings=8192
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][VOCAB_SIZE - 1] = torch.tensor(1e6)  # float16: infinite
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with serving(tmp_path / "log", str(folder), "--dtype", "float16") as server:
        good = {**GREEDY, "max_tokens": 3000, "logit_bias": {str(VOCAB_SIZE - 1): -100}}
        alone = tokens(server.completion(**good))
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.completion, **good)
            wait_until(lambda: server.metric("num_requests_running") == 1, 10)
            bad = server.completion(prompt=[VOCAB_SIZE - 1, 5])
            assert tokens(other.result()) == alone
        assert bad.status_code == 500
        assert "non-finite logits" in bad.json()["error"]["message"]
        log = server.log.read_text()
        assert "non-finite logits" in log
        assert "WARNING" in log.split("serves")[0], "of bfloat16 weights in float16"


def test_mdl_15_the_models_sampling_defaults_are_told(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "gen"
    shutil.copytree(folder, target)
    shipped = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    (target / "generation_config.json").write_text(json.dumps(shipped))
    with serving(tmp_path / "log", str(target)) as server:
        assert "generation_config.json" in server.log.read_text()
        assert "0.7" in server.log.read_text()


def test_qnt_11_a_tensor_type_without_support_stops_the_start(folder: Path, tmp_path: Path) -> None:
    from support.gguf_files import write_gguf

    path = write_gguf(folder, tmp_path / "odd.gguf")
    name = b"blk.0.ffn_up.weight"
    for number, shown in ((17, "IQ2_XS"), (99, "number 99")):
        content = bytearray(path.read_bytes())
        at = content.index(name) + len(name) + 4 + 2 * 8
        content[at : at + 4] = number.to_bytes(4, "little")
        path.write_bytes(content)
        code, stderr = refusal(str(path), "--port", "0")
        assert code == 1
        assert all(word in stderr for word in (name.decode(), shown, "Q8_0"))


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_smp_01_tiny_temperatures_over_http(server: ServeProcess, temperature: float) -> None:
    for first in range(5, 25):
        body = {"prompt": [first, 6, 7], "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
        reply = server.completion(**body, seed=1, temperature=temperature)
        assert reply.status_code == 200
        found = reply.json()["choices"][0]["logprobs"]
        for logprob, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
            best, second = sorted(top.values(), reverse=True)[:2]
            assert logprob == best or best - second <= 20 * temperature


def test_smp_16_a_bias_moves_the_greedy_token_over_http(server: ServeProcess) -> None:
    body = {**GREEDY, "max_tokens": 40}
    spelled = {}
    for token in range(VOCAB_SIZE):
        reply = server.completion(**GREEDY | {"max_tokens": 1, "allowed_token_ids": [token]})
        spelled[token] = tokens(reply)[0][0]
    greedy = tokens(server.completion(**body))[0][0]
    best = [token for token, text in spelled.items() if text == greedy]
    without = tokens(server.completion(**body, logit_bias=dict.fromkeys(map(str, best), -100)))[0]
    assert greedy not in without
    other = next(token for token, text in spelled.items() if text != greedy)
    assert set(tokens(server.completion(**body, logit_bias={str(other): 100}))[0]) == {
        spelled[other]
    }

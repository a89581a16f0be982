from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, OctavoError, RequestError
from support.checkpoints import make_checkpoint
from support.serve_command import descendants

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(str(make_checkpoint("llama", tmp_path_factory.mktemp("llm"))), max_model_len=256)
    yield llm
    llm.shutdown()


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "one two"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert llm.generate(ids, GREEDY)[0].prompt_token_ids == ids
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": "x"}, GREEDY)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    lengths = [3, 1, 5]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([PROMPT] * 3, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.times for output in outputs)
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts"):
        llm.generate([PROMPT] * 2, params)


def test_a_stop_string_ends_one_continuation(llm: LLM) -> None:
    whole = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    stop = whole.text[3:5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop], logprobs=1)
    output = llm.generate([PROMPT], params)[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) <= len(whole.token_ids)
    assert llm.get_metrics().kv_usage == 0.0


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0, n=2)
    result = llm.generate([PROMPT], params)[0]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [list(entry or {}) for entry in result.prompt_logprobs[1:]] == [[6], [7], [8]]
    for output in result.outputs:
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert entry[token].rank == 1
            assert len(entry) == 2
        assert output.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
        )


def test_one_sequence_that_fails_leaves_the_others(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=1, max_tokens=4)
    failed, fine = llm.generate([PROMPT, PROMPT], [impossible, GREEDY])
    assert failed.outputs[0].finish_reason == "error"
    assert "allowed_token_ids" in (failed.outputs[0].error or "")
    assert len(fine.outputs[0].token_ids) == 12


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    whole = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    pieces = list(llm.stream(PROMPT, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum(piece.num_tokens for piece in pieces) == 12
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]


def test_streams_and_batches_may_be_interleaved(llm: LLM) -> None:
    whole = llm.generate([PROMPT], GREEDY)[0].outputs[0].text
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, GREEDY)
    begun = next(first).text
    begun_too = next(second).text
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].text == whole
    assert begun_too + "".join(piece.text for piece in second) == whole
    assert begun + "".join(piece.text for piece in first) == whole


def test_a_stream_that_fails_raises(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=1, max_tokens=4)
    with pytest.raises(OctavoError, match="allowed_token_ids"):
        list(llm.stream(PROMPT, impossible))


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.get_metrics().num_running == 1
    stream.close()
    assert llm.get_metrics().num_running == 0
    assert llm.get_metrics().kv_usage == 0.0


def test_chat_takes_what_the_template_takes(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    one, other = llm.chat([hello, hello], GREEDY, chat_template_kwargs={"unused": 1})
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    begun = [*hello, {"role": "assistant", "content": "The answer is"}]
    ongoing = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    decoded = llm.get_tokenizer().decode(ongoing[0].prompt_token_ids, skip_special_tokens=False)
    assert decoded.endswith("The answer is")


def test_the_prefix_cache_can_be_forgotten(llm: LLM) -> None:
    prompt = [*range(10, 60)]
    llm.generate([prompt], GREEDY)
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 48
    llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_settings_of_the_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="port is a setting of `octavo serve`"):
        LLM(port=3)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)


def test_several_engines_are_one_llm(llm: LLM, tmp_path: Path) -> None:
    prompts = [[*range(start, start + 20)] for start in range(10, 130, 10)]
    stop = llm.generate(prompts, GREEDY)[3].outputs[0].text[2:4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop], n=2)
    alone = [[o.text for o in output.outputs] for output in llm.generate(prompts, params)]
    folder = make_checkpoint("llama", tmp_path)
    pair = LLM(str(folder), max_model_len=256, data_parallel_size=2)
    try:
        outputs = pair.generate(prompts, params)
        assert [[o.text for o in output.outputs] for output in outputs] == alone
        assert all(output.finished and output.times for output in outputs)
        assert pair.get_metrics().num_engines == 2
        with pytest.raises(RequestError, match="context length"):
            pair.generate([prompts[0], [5] * 300], GREEDY)

        stream = pair.stream(prompts[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        assert pair.get_metrics().num_running == 1
        stream.close()
        assert pair.get_metrics().num_running == 0
        assert pair.generate([prompts[0]], GREEDY)[0].num_cached_tokens == 16
        pair.reset_prefix_cache()
        assert pair.generate([prompts[0]], GREEDY)[0].num_cached_tokens == 0

        whole = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        expected = [output.outputs[0].text for output in llm.generate(prompts, whole)]
        stream = pair.stream(prompts[1], whole)
        next(stream)  # works on, beside the others
        victim = engine_pids()[0]
        threading.Timer(0.02, os.kill, (victim, signal.SIGKILL)).start()
        outputs = pair.generate(prompts, whole)
        assert [output.outputs[0].text for output in outputs] == expected
        stream.close()
        pair.generate(prompts, GREEDY)
    finally:
        pair.shutdown()
    pair.shutdown()
    assert engine_pids() == []


def engine_pids() -> list[int]:
    return [
        pid
        for pid in descendants(os.getpid())
        if b"octavo-engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]

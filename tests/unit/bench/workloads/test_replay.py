"""From rows of files to requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.workloads.replay import FileWorkload
from octavo.bench.workloads.vocabulary import Vocabulary
from octavo.core.errors import ConfigError
from support.served_models import model_named


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests in three cells of a grid of 3 s; two share two blocks of 512 tokens."""
    path = tmp_path / "trace.jsonl"
    blocks = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [], [1, 2, 3]]
    lines = [
        {
            "timestamp": 27_000 + 3000 * (i // 2),
            "input_length": 1200,
            "output_length": 10 + i,
            "hash_ids": ids,
        }
        for i, ids in enumerate(blocks)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def texts(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def count_tokens(text: str) -> int:
    return len(model_named("byte_level_bpe").tokenizer.encode(text))


def test_equal_blocks_are_equal_tokens_and_nothing_else_is(
    trace: Path, vocabulary: Vocabulary
) -> None:
    replay = FileWorkload(path=trace).requests(seed=1, count=9, vocabulary=vocabulary)
    prompts = [r.prompt for r in replay.requests]
    assert {len(p) for p in prompts} == {1200}
    assert [r.shared_len for r in replay.requests] == [0, 0, 1024, 0, 1200]
    assert prompts[0][:1024] == prompts[2][:1024]
    assert prompts[0][1024:1040] != prompts[2][1024:1040]
    assert prompts[0] == prompts[4]
    assert len({p[:16] for p in prompts}) == 3
    other = FileWorkload(path=trace).requests(
        seed=1, count=9, vocabulary=vocabulary, nonce="next point"
    )
    assert not {p[:16] for p in prompts} & {r.prompt[:16] for r in other.requests}


def test_a_scale_keeps_what_is_shared(trace: Path, vocabulary: Vocabulary) -> None:
    replay = FileWorkload(path=trace, scale=1 / 16).requests(seed=1, count=9, vocabulary=vocabulary)
    assert [len(r.prompt) for r in replay.requests] == [75] * 5
    assert [r.shared_len for r in replay.requests] == [0, 0, 64, 0, 75]
    assert [r.max_tokens for r in replay.requests] == [1] * 5


def test_times_on_a_coarse_grid_are_moved_within_their_cells(
    trace: Path, vocabulary: Vocabulary
) -> None:
    replay = FileWorkload(path=trace).requests(
        seed=1, count=9, vocabulary=vocabulary, time_scale=2.0
    )
    times = [r.arrival_s or 0.0 for r in replay.requests]
    assert all(a < b for a, b in pairwise(times))
    assert [int(time / 6) for time in times] == [0, 0, 1, 1, 2]
    assert [r.index for r in replay.requests] == [0, 1, 2, 3, 4]
    assert "grid of 3 s" in replay.notes[0]
    again = FileWorkload(path=trace).requests(
        seed=1, count=9, vocabulary=vocabulary, time_scale=2.0
    )
    assert again == replay


def test_fine_times_are_kept(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.5,9,3\n2023-11-16 18:17:04.0,8,2\n2023-11-16 18:17:09.25,0,2\n"
        "2023-11-16 18:17:10.25,7,1\n"
    )
    replay = FileWorkload(path=path).requests(
        seed=1, count=9, vocabulary=vocabulary, time_scale=1.0
    )
    seen = [(r.index, r.arrival_s, r.prompt_len) for r in replay.requests]
    assert seen == [(0, 0.0, 8), (1, 0.5, 9), (2, 6.25, 7)]
    assert replay.dropped == {"no input or no output tokens": 1}
    assert replay.notes == ["azure.csv has 3 requests of the 9 asked for"]


def test_no_more_is_read_than_is_asked_for(trace: Path, vocabulary: Vocabulary) -> None:
    with trace.open("a") as file:
        file.write("\nbroken")
    workload = FileWorkload(path=trace)
    assert len(workload.requests(seed=1, count=3, vocabulary=vocabulary).requests) == 3
    assert len(workload.requests(seed=1, count=5, vocabulary=vocabulary).requests) == 5
    with pytest.raises(ConfigError, match="line 6"):
        workload.requests(seed=1, count=6, vocabulary=vocabulary)


def test_a_rate_replaces_the_files_times(trace: Path, vocabulary: Vocabulary) -> None:
    replay = FileWorkload(path=trace).requests(seed=1, count=9, vocabulary=vocabulary, rate=1e3)
    assert 0 < (replay.requests[-1].arrival_s or 0) < 0.1
    with pytest.raises(ConfigError, match="not both"):
        FileWorkload(path=trace).requests(
            seed=1, count=9, vocabulary=vocabulary, rate=1.0, time_scale=1.0
        )


def test_long_requests_are_shortened_to_the_context(trace: Path, vocabulary: Vocabulary) -> None:
    replay = FileWorkload(path=trace).requests(
        seed=1, count=9, vocabulary=vocabulary, max_model_len=605
    )
    for request in replay.requests:
        assert len(request.prompt) == request.prompt_len
        assert request.prompt_len + request.max_tokens == 605
        assert request.clipped_len > 600


def test_texts_are_sent_after_words_of_their_own(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = texts(tmp_path, {"prompt": "def add(a, b):", "output_tokens": 7}, {"prompt": "hello"})
    workload = FileWorkload(path=path, count_tokens=count_tokens, output_len=99)
    a, b = workload.requests(seed=1, count=9, vocabulary=vocabulary).requests
    assert str(a.prompt).endswith("\n\ndef add(a, b):")
    assert a.prompt_len == count_tokens(str(a.prompt))
    assert (a.max_tokens, a.is_forced) == (7, True)
    assert (b.max_tokens, b.is_forced) == (99, False)
    other = workload.requests(seed=1, count=9, vocabulary=vocabulary, nonce="next").requests
    assert str(other[0].prompt)[:20] != str(a.prompt)[:20]
    [chat, _] = workload.requests(seed=1, count=9, vocabulary=vocabulary, api="chat").requests
    assert isinstance(chat.prompt[0], dict)
    assert chat.prompt[0]["role"] == "user"


def test_texts_that_do_not_fit_are_dropped_and_counted(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = texts(
        tmp_path,
        {"prompt": "hello " * 300, "output_tokens": 7},
        {"prompt": "hello", "output_tokens": 0},
        {"prompt": "hello", "output_tokens": 5},
    )
    replay = FileWorkload(path=path, count_tokens=count_tokens).requests(
        seed=1, count=9, vocabulary=vocabulary, max_model_len=200
    )
    assert len(replay.requests) == 1
    assert replay.dropped == {"more than the context's 200 tokens": 1, "no output tokens": 1}


def test_sharegpt_is_filtered_as_vllm_does(tmp_path: Path, vocabulary: Vocabulary) -> None:
    long, short, fine = "hello " * 1100, "hi", "hello hello hello hello hello"
    turns = [(fine, fine), (short, fine), (fine, short), (long, fine), (fine, "hello " * 2044)]
    path = tmp_path / "sharegpt.json"
    conversations = [[{"from": "human", "value": a}, {"from": "gpt", "value": b}] for a, b in turns]
    path.write_text(json.dumps([{"conversations": each} for each in conversations]))
    replay = FileWorkload(path=path, count_tokens=count_tokens).requests(
        seed=1, count=9, vocabulary=vocabulary
    )
    [request] = replay.requests
    assert request.max_tokens == count_tokens(fine)
    assert sorted(replay.dropped.values()) == [2, 2]


def test_what_cannot_be_played_is_told(tmp_path: Path, trace: Path, vocabulary: Vocabulary) -> None:
    path = texts(tmp_path, {"prompt": "hello"})
    with pytest.raises(ConfigError, match="--tokenizer"):
        FileWorkload(path=path).requests(seed=1, count=1, vocabulary=vocabulary)
    workload = FileWorkload(path=path, count_tokens=count_tokens)
    with pytest.raises(ConfigError, match="no times of arrival"):
        workload.requests(seed=1, count=1, vocabulary=vocabulary, time_scale=1.0)
    with pytest.raises(ConfigError, match="time scale is 0"):
        FileWorkload(path=trace).requests(seed=1, count=1, vocabulary=vocabulary, time_scale=0.0)
    with pytest.raises(ConfigError, match="no request that can be sent"):
        workload.requests(seed=1, count=1, vocabulary=vocabulary, max_model_len=4)

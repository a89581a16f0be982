"""benchmarks/speculation.py: what it computes from what it measured, and that it runs."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SequenceOutput, StepOutput
from support.checkpoints import make_checkpoint

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("speculation")


@pytest.fixture
def copying(script: ModuleType) -> ModuleType:
    return import_module("copying")


@pytest.fixture
def stepping(script: ModuleType) -> ModuleType:
    return import_module("stepping")


def test_the_work_is_all_different() -> None:
    work = yaml.safe_load((FOLDER / "workloads" / "speculation.yaml").read_text(encoding="utf-8"))
    asks = [task["ask"] for task in work["copying"]]
    for items, count in ((asks, 16), (work["questions"], 16), (work["prose"], 32)):
        assert len(set(items)) == len(items) == count


def test_counts_are_by_position_and_add_up(stepping: ModuleType) -> None:
    counts = stepping.Counts()
    drafted = [
        SequenceOutput(0, (5, 6, 7), num_drafts=3),
        SequenceOutput(1, (5, 6), num_drafts=1),
        SequenceOutput(2, (5,)),
    ]
    counts.count(StepOutput(0, drafted, 0.25, (0.5, 0.25)), 2.0)
    counts.count(StepOutput(1, [SequenceOutput(0, (8,))], 0.125, (0.0, 0.0)), 1.0)
    assert counts.num_accepted == [2, 1]
    assert (counts.num_steps, counts.num_tokens, counts.seconds) == (2, 7, 3.0)
    assert (counts.step_seconds, counts.draft_seconds) == (0.375, 0.75)
    assert (counts.num_plain_steps, counts.plain_seconds) == (1, 0.125)
    assert (counts.num_drafts, counts.num_draft_tokens) == (2, 4)
    assert counts.acceptance == 0.75
    twice = counts + counts
    assert twice.num_accepted == [4, 2]
    assert twice.rate == counts.rate


def test_a_speedup_follows_from_tokens_and_costs(script: ModuleType, stepping: ModuleType) -> None:
    counts = stepping.Counts(
        num_steps=10, num_tokens=30, step_seconds=2.0, draft_seconds=0.5, num_draft_tokens=40
    )
    idle = stepping.Counts(num_steps=5, num_plain_steps=4, plain_seconds=0.4)
    costs = script.Costs.of(counts, idle)
    assert (costs.tokens, costs.most_tokens) == (3.0, 5.0)
    assert costs.verify == pytest.approx(2.0)
    assert costs.draft == pytest.approx(0.5)
    assert costs.speedup == pytest.approx(3 / 2.5)
    assert costs.figures[-3:] == pytest.approx((5 / 2.5, 3 / 2, 3 / 1.5))


def test_tokens_by_one_rate_are_the_papers_equation(
    script: ModuleType, stepping: ModuleType
) -> None:
    """Eight drafts of two tokens: half of them, and half of these, accepted one more."""
    counts = stepping.Counts(num_steps=8, num_drafts=8, num_accepted=[4, 2])
    assert script.tokens_by_one_rate(counts, 2) == pytest.approx((1 - 0.5**3) / (1 - 0.5))
    counts.num_steps = 16  # half of the steps had no draft
    assert script.tokens_by_one_rate(counts, 2) == pytest.approx((1.75 + 1) / 2)
    perfect = stepping.Counts(num_steps=3, num_drafts=3, num_accepted=[3, 3])
    assert script.tokens_by_one_rate(perfect, 2) == 3


def test_arms_take_turns_from_both_ends(copying: ModuleType) -> None:
    arms = ["a", "b", "c"]
    orders = [copying.in_turn(arms, number) for number in range(6)]
    assert all(sorted(order) == arms for order in orders)
    for forwards, backwards in zip(orders[::2], orders[1::2], strict=True):
        assert backwards == forwards[::-1]
    assert {order[0] for order in orders[::2]} == set(arms)


def test_rates_leave_the_prompt_out_and_ratios_are_by_round(copying: ModuleType) -> None:
    answers = [copying.Answer(11, 1.0, 2.0), copying.Answer(21, 2.0, 4.0)]
    assert copying.decode_rate(answers) == pytest.approx(30 / 3)
    assert copying.whole_rate(answers) == pytest.approx(32 / 6)
    found = {
        "one": {"decode_rates": [10, 20, 30], "whole_rates": [5, 5, 5]},
        "one+ngram": {"decode_rates": [20, 30, 90], "whole_rates": [10, 10, 10]},
        "two": {"decode_rates": [40, 40, 40], "whole_rates": [10, 10, 10]},
    }
    rows = copying.table(found)
    assert rows[2] == ["one+ngram", "30.0 (20.0–90.0)", "2.00 (1.50–3.00)", "10.00 (10.00–10.00)",
                       "2.00 (2.00–2.00)"]  # fmt: skip
    assert rows[3][2] == ""
    sentence = copying.ahead(found, ["one", "one+ngram"])
    assert sentence == "one+ngram against two: 0.75 (0.50–2.25) times the tokens/s"


def test_a_program_plays_the_tasks_and_its_warm_up_does_not_count(
    copying: ModuleType, tmp_path: Path
) -> None:
    code = (
        "import json, sys; tasks = json.load(open(sys.argv[1])); print('hello'); "
        "print(json.dumps([[t['max_tokens'], len(t['token_ids']), 9] for t in tasks]))"
    )
    program = copying.rival(f"other={sys.executable} -c {shlex.quote(code)} {{tasks}}")
    tasks = [copying.Task("warm-up", [1], 4), copying.Task("task", [1, 2, 3], 8)]
    assert program.answer(tasks, tmp_path, "0") == [copying.Answer(8, 3, 9)]


def test_a_program_that_fails_says_why(copying: ModuleType, tmp_path: Path) -> None:
    program = copying.rival(f"other={sys.executable} -c 'raise SystemExit(\"why\")' {{tasks}}")
    with pytest.raises(SystemExit, match="other ended with 1: why"):
        program.answer([], tmp_path, "0")


def test_only_llama_cpp_is_asked_not_to_reuse_a_prompt(copying: ModuleType) -> None:
    assert copying.rival("a=llama-server --port {port}").extra == {"cache_prompt": False}
    assert copying.rival("a=vllm serve --port {port}").extra == {}


def test_texts_that_differ_end_the_run(script: ModuleType) -> None:
    script.check_equal({"off": [[1, 2]], "ngram": [[1, 2]]})
    with pytest.raises(SystemExit, match="ngram wrote other texts than off"):
        script.check_equal({"off": [[1, 2]], "ngram": [[1, 3]]})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


def test_an_engine_keeps_so_many_requests_at_work(stepping: ModuleType, tiny: str) -> None:
    """Of three requests of five tokens, two at a time: the third one decodes alone, and steps in
    which one computes its prompt don't count either.
    """
    engine = stepping.Engine(tiny, "ngram", max_model_len=64, kv_cache_memory_bytes="4M")
    try:
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        played = engine.play([[5, 6, 7], [8, 9], [10, 11, 12]], sampling, 2)
        alone = engine.play([[5, 6, 7]], sampling, 1)
    finally:
        engine.close()
    assert [len(text) for text in played.texts] == [5, 5, 5]
    assert alone.texts == played.texts[:1]
    assert alone.decoding.num_tokens == 4
    assert played.decoding.num_tokens <= 8
    assert played.seconds > played.decoding.seconds > 0


def test_the_picture_is_drawn(script: ModuleType, tmp_path: Path) -> None:
    draw = import_module("speculation_plot").draw
    panel = {"1": [1.5, 0.9], "adaptive": [1.4, 1.0]}
    draw(tmp_path / "a.png", (1, 2), {"Copying": panel, "Questions": panel}, "tiny")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_engines_that_take_turns_write_what_each_would_alone(
    script: ModuleType, stepping: ModuleType, tiny: str
) -> None:
    settings = {"max_model_len": 64, "kv_cache_memory_bytes": "4M"}
    arms = {name: stepping.Engine(tiny, name, **settings) for name in ("off", "ngram")}
    try:
        sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        plays = {name: engine.start([[5, 6, 7]], sampling, 1) for name, engine in arms.items()}
        while any(play.has_work for play in plays.values()):
            for play in plays.values():
                if play.has_work:
                    play.step()
        alone = arms["off"].play([[5, 6, 7]], sampling, 1)
    finally:
        for engine in arms.values():
            engine.close()
    assert [play.played.texts for play in plays.values()] == [alone.texts] * 2


def test_a_fixed_number_of_guesses_is_not_adaptive(script: ModuleType) -> None:
    assert json.loads(script.fixed(3)) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    assert json.loads(script.fixed(2, '{"method": "eagle", "model": "x"}'))["model"] == "x"

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import RequestError
from octavo.server.prompts import MAX_PROMPTS, Prompt, PromptEncoder
from octavo.server.schemas import ChatFields
from support.scripted import byte_model


@pytest.fixture(scope="module")
def prompts() -> PromptEncoder:
    return PromptEncoder(byte_model(max_model_len=64))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", [Prompt([104, 105], "hi")]),
        (["a", "b"], [Prompt([97], "a"), Prompt([98], "b")]),
        ([1, 2], [Prompt([1, 2])]),
        ([[1], [2, 3]], [Prompt([1]), Prompt([2, 3])]),
        (["a", [1]], [Prompt([97], "a"), Prompt([1])]),
    ],
)
def test_forms_of_a_prompt(prompts: PromptEncoder, value: Any, expected: list[Prompt]) -> None:
    assert prompts.completions(value, add_special_tokens=True) == expected


@pytest.mark.parametrize(
    "value",
    [5, True, 1.5, {}, [True], [1.5], [1, True], [1, "a"], [[]], [[1, 2.0]], [None], ["a", 1]],
)
def test_other_forms_are_refused(prompts: PromptEncoder, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        prompts.completions(value, add_special_tokens=True)
    assert caught.value.param == "prompt"


def test_number_of_prompts_is_bounded(prompts: PromptEncoder) -> None:
    assert len(prompts.completions(["a"] * MAX_PROMPTS, add_special_tokens=True)) == MAX_PROMPTS
    with pytest.raises(RequestError, match="1025"):
        prompts.completions(["a"] * (MAX_PROMPTS + 1), add_special_tokens=True)


def test_hopelessly_long_text_is_refused_before_tokenizing(
    prompts: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(prompts._model.tokenizer), "encode", never)
    longest = max(map(len, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    text = "x" * (65 * longest)
    with pytest.raises(RequestError, match="maximum context length is 64 tokens"):
        prompts.text(text)
    with pytest.raises(AssertionError):
        prompts.text("x" * (64 * longest))


def test_hopelessly_long_messages_are_refused_before_the_template(prompts: PromptEncoder) -> None:
    longest = len("<|endoftext|>")
    half = "x" * (33 * longest)
    for content in (half * 2, [{"type": "text", "text": half}, half]):
        with pytest.raises(RequestError, match="which are at least") as caught:
            prompts.chat(
                [{"role": "user", "content": content}], ChatFields(), add_special_tokens=False
            )
        assert caught.value.param == "messages"


def test_the_vocabulary_is_walked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptEncoder(byte_model())

    def never(*args: Any) -> bytes:
        raise AssertionError("in a request")

    monkeypatch.setattr(type(prompts._model.tokenizer), "token_bytes", never)
    assert prompts.text("hi") == [104, 105]

"""Which replica knows how a prompt begins."""

from __future__ import annotations

import json

from octavo.deploy.prefixes import PrefixMemory, prefix_keys


def body(prompt: str, **before: object) -> bytes:
    return json.dumps({**before, "prompt": prompt}).encode()


def test_prompts_share_the_keys_of_what_they_share() -> None:
    common = "a" * 1000
    one, other = prefix_keys(body(common + "b" * 1000)), prefix_keys(body(common + "c" * 1000))
    shared = [key for key, same in zip(one, other, strict=True) if key == same]
    assert len(one) == len(other) == (2000 + len('"prompt": ""}')) // 256
    assert shared == list(one[: (1000 + len('"prompt": "')) // 256])
    assert len(set(one)) == len(one)


def test_a_key_stands_for_all_that_is_before_it() -> None:
    """The second piece is the same, the first is not."""
    one, other = "a" * 256 + "x" * 600, "b" * 256 + "x" * 600
    assert set(prefix_keys(body(one))).isdisjoint(prefix_keys(body(other)))


def test_settings_before_the_prompt_do_not_count() -> None:
    prompt = "a" * 1000
    warm = prefix_keys(body(prompt, temperature=1.0, model="m"))
    assert warm == prefix_keys(body(prompt))
    chat = [{"role": "user", "content": prompt}]
    keys = prefix_keys(json.dumps({"model": "m", "messages": chat}).encode())
    assert keys == prefix_keys(json.dumps({"messages": chat}).encode())
    assert len(keys) == 4


def test_what_is_short_or_no_prompt_has_no_keys() -> None:
    assert prefix_keys(b"") == prefix_keys(body("short")) == prefix_keys(b"x" * 9999) == ()


def test_no_more_is_hashed_than_decides() -> None:
    assert len(prefix_keys(body("a" * 10**6))) == 64


def test_the_longest_prefix_wins_among_those_that_are_there() -> None:
    memory: PrefixMemory[str] = PrefixMemory()
    memory.note([b"1"], "first")
    memory.note([b"1", b"2"], "second")
    memory.note([b"1", b"2", b"3"], "third")
    memory.note([b"1", b"2"], "second")
    assert memory.longest([b"1", b"2", b"3", b"4"], {"second", "third"}) == "third"
    assert memory.longest([b"1", b"2", b"x"], {"second", "third"}) == "second"
    assert memory.longest([b"1", b"2", b"3"], {"second"}) == "second"
    assert memory.longest([b"x"], {"second"}) is None


def test_the_oldest_prefixes_and_lost_replicas_are_forgotten() -> None:
    memory: PrefixMemory[str] = PrefixMemory(capacity=2)
    memory.note([b"1"], "a")
    memory.note([b"2"], "b")
    memory.note([b"1"], "a")
    memory.note([b"3"], "b")
    assert [memory.longest([key], {"a", "b"}) for key in (b"1", b"2", b"3")] == ["a", None, "b"]
    memory.forget("a")
    assert [memory.longest([key], {"a", "b"}) for key in (b"1", b"3")] == [None, "b"]

"""Rules as data: all can be used, each says where it is from, one can be asked for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from octavo.advisor.case_facts import layout_facts
from octavo.advisor.engines import engines
from octavo.advisor.rules import Kind, matching, rule_named, rules
from octavo.core.errors import ConfigError
from octavo.core.model_spec import KVFormat
from octavo.core.weight_format import WEIGHT_FORMATS
from octavo.simulator.hardware import device_names, parse_hardware
from support.plan_scenarios import SCENARIOS, plan_of

PLAIN = plan_of(SCENARIOS[0])
"""8B in 16 bits on an L4, one user."""


def test_each_rule_has_a_source_and_a_month() -> None:
    for rule in rules():
        assert len(rule.source) > 8, rule.id
        assert re.fullmatch(r"20\d\d-\d\d", rule.as_of), rule.id
        assert rule.verdict, rule.id
        assert rule.reason, rule.id


def test_engine_rules_speak_of_engines_that_there_are() -> None:
    for rule in rules():
        if rule.kind is Kind.ENGINE:
            assert isinstance(rule.effect, dict)
            assert set(rule.effect) <= set(engines()), rule.id


def compared(condition: str) -> Iterator[tuple[str, str]]:
    """Names and the words that they are compared with."""
    for node in ast.walk(ast.parse(condition)):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
            for word in (n for part in node.comparators for n in ast.walk(part)):
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield node.left.id, word.value


def test_words_in_conditions_are_words_that_facts_can_have() -> None:
    """A misspelt one would only make its rule silent."""
    devices = [parse_hardware(name).device for name in device_names()]
    known = {
        "weight_format": set(WEIGHT_FORMATS),
        "kv_format": {"bfloat16", "float16", "float32", "fp8", "int8"},
        "generation": {device.architecture for device in devices},
        "vendor": {device.vendor for device in devices},
        "link": {"switched", "bus", "none"},
    }
    assert all(KVFormat(name).bytes_per_pair(64) for name in known["kv_format"])
    for rule in rules():
        for name, word in compared(rule.when.text):
            assert word in known[name], rule.id


def test_a_rule_is_explained_with_all_that_it_is() -> None:
    text = rule_named("e1").explained()
    assert "E1 (engine): only where it runs already" in text
    assert "effect: tgi exclude" in text
    assert "2025-12-11" in text
    assert "https://github.com/huggingface/text-generation-inference" in text
    assert "confidence: high" in text


def test_an_unknown_rule_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no rule 'E99'; did you mean E.*There are E1, "):
        rule_named("E99")


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("E5", {"trt_llm_lists": True, "generation": "blackwell", "weight_format": "nvfp4"}),
        ("E14", {"is_gguf": True}),
        ("F8", {"generation": "ampere", "meets_slo": False}),
        (
            "F9",
            {"num_devices": 4, "ttft_limit": 500.0, "input_mean": 4e3, "prefill_share": 0.5},
        ),
        ("W2", {"logits_gib": 0.5}),
        ("W5", {"num_seqs": 1000}),
        ("W21", {"weight_format": "int8"}),
    ],
)
def test_rules_of_rare_cases(rule: str, changes: dict[str, object]) -> None:
    kind = rule_named(rule).kind
    rare = replace(PLAIN.facts, **changes)  # type: ignore[arg-type]
    assert rule in {finding.id for finding in matching(kind, rare.as_dict())}
    assert rule not in {finding.id for finding in matching(kind, PLAIN.facts.as_dict())}


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("P3", {"tp": 3}),
        ("P4", {"pp": 33}),
        ("P12", {"is_refused": True}),
        ("P6", {"tp": 2, "quant_group": 128, "inner_size": 14_336 + 128}),
    ],
)
def test_rules_of_rare_layouts(rule: str, changes: dict[str, object]) -> None:
    plain = layout_facts(PLAIN.deployed)
    rare = replace(plain, **changes)  # type: ignore[arg-type]
    assert rule in {finding.id for finding in matching(Kind.LAYOUT, rare.as_dict())}
    assert rule not in {finding.id for finding in matching(Kind.LAYOUT, plain.as_dict())}

"""Several replicas' metrics as one text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.deploy.merged_metrics import merged
from support.scripted import ScriptedExecutor, always, byte_model, post, scripted_server


def exposition(count: int) -> str:
    registry = CollectorRegistry()
    Counter("octavo:replies", "Replies.", ["reason"], registry=registry).labels("stop").inc(count)
    Histogram("octavo:seconds", "Time.", buckets=(1, 2), registry=registry).observe(count)
    return generate_latest(registry).decode()


def test_each_sample_says_whose_it_is() -> None:
    text = merged({"a": exposition(1), "b": exposition(3)}).decode()
    assert 'octavo:replies_total{reason="stop",replica="a"} 1.0' in text
    assert 'octavo:replies_total{reason="stop",replica="b"} 3.0' in text
    assert 'octavo:seconds_bucket{le="2.0",replica="a"} 1.0' in text
    assert 'octavo:seconds_bucket{le="2.0",replica="b"} 0.0' in text
    assert text.count("# HELP octavo:replies_total Replies.") == 1
    assert text.count("# TYPE octavo:seconds histogram") == 1


def test_nothing_of_octavos_own_is_lost() -> None:
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        post(server, "/v1/completions", prompt="x", max_tokens=3)
        own = server.http.get("/metrics").text
    before = list(text_string_to_metric_families(own))
    after = {f.name: f for f in text_string_to_metric_families(merged({"r": own}).decode())}
    assert len(before) > 20
    for family in before:
        same = after[family.name]
        assert (same.type, same.documentation) == (family.type, family.documentation)
        samples = [(s.name, {**s.labels, "replica": "r"}, s.value) for s in family.samples]
        assert [(s.name, s.labels, s.value) for s in same.samples] == samples


def test_without_replicas_there_are_none() -> None:
    assert merged({}) == b""

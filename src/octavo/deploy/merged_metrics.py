"""Prometheus' text of several replicas as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(expositions: Mapping[str, str]) -> bytes:
    """All samples, each with the label `replica`: the key that its exposition has."""
    registry = CollectorRegistry()
    registry.register(_Families(expositions))
    return generate_latest(registry)


class _Families:
    """A collector, as prometheus_client has it."""

    def __init__(self, expositions: Mapping[str, str]) -> None:
        self._expositions = expositions

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._expositions.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()

"""deploy/kubernetes: valid, as the manifests' schemas have it, and in step with Octavo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from octavo.cli.settings import load_config
from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from support.json_schema import violations
from support.leader_worker_set import SCHEMA, VARIABLES
from support.scripted import ScriptedExecutor, always, byte_model, scripted_server

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUBERNETES = "1.29"
"""The oldest release that the manifests are held against; the newest known one is, too."""
DRAIN_SECONDS = 15
"""What an end takes beyond --shutdown-timeout: 3 s to flush and cut, 10 s for the engine."""


class Pod(NamedTuple):
    """A pod template. serves: it has the HTTP server."""

    name: str
    template: dict[str, Any]
    serves: bool


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield f"{path.name}:{document['kind']}", document


def kind(name: str) -> list[dict[str, Any]]:
    return [manifest for _, manifest in manifests() if manifest["kind"] == name]


def pods() -> list[Pod]:
    [deployment] = kind("Deployment")
    [group] = kind("LeaderWorkerSet")
    templates = group["spec"]["leaderWorkerTemplate"]
    return [
        Pod("deployment", deployment["spec"]["template"], serves=True),
        Pod("leader", templates["leaderTemplate"], serves=True),
        Pod("worker", templates["workerTemplate"], serves=False),
    ]


def container(pod: Pod) -> dict[str, Any]:
    [found] = pod.template["spec"]["containers"]
    return found


def config_of(pod: Pod) -> Config:
    """What `octavo serve` makes of the arguments and the environment."""
    verb, model, *flags = container(pod)["args"]
    assert verb == "serve"
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    values = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "a.b"}
    environ = {entry["name"]: entry.get("value", "secret") for entry in container(pod)["env"]}

    def warn(message: str) -> None:
        pytest.fail(message)

    return load_config(
        {name: values.get(value, value) for name, value in given.items()},
        model=model,
        environ=environ,
        warn=warn,
    )


def check(manifest: dict[str, Any]) -> None:
    """Raises for a manifest that Kubernetes would refuse, or ignore a part of."""
    if manifest["kind"] == "LeaderWorkerSet":
        assert violations(manifest, SCHEMA) == []
        for pod in ("leaderTemplate", "workerTemplate"):
            template = manifest["spec"]["leaderWorkerTemplate"][pod]
            check({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
        return
    for version in (KUBERNETES, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


every_manifest = pytest.mark.parametrize(
    "manifest", [pytest.param(manifest, id=name) for name, manifest in manifests()]
)
every_pod = pytest.mark.parametrize("pod", pods(), ids=lambda pod: pod.name)


@every_manifest
def test_it_is_as_its_schema_says(manifest: dict[str, Any]) -> None:
    check(manifest)


@every_manifest
def test_a_misspelt_field_would_be_found(manifest: dict[str, Any]) -> None:
    wrong = deepcopy(manifest)
    wrong["spec"]["misspelt"] = 1
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError), match="misspelt"):
        check(wrong)


@every_pod
def test_a_misspelt_field_of_a_pod_would_be_found(pod: Pod) -> None:
    wrong = deepcopy(pod.template)
    wrong["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        check({"apiVersion": "v1", "kind": "PodTemplate", "template": wrong})


@every_pod
def test_octavo_understands_its_arguments_and_environment(pod: Pod) -> None:
    config = config_of(pod)
    assert config.model.model == "default"
    known = {spec.flag for spec in knobs()}
    assert {flag.split("=")[0] for flag in container(pod)["args"][2:]} <= known


def test_a_flag_that_is_no_setting_would_be_found() -> None:
    pod = deepcopy(pods()[0])
    container(pod)["args"].append("--shutdown-timeouts=1")
    with pytest.raises(ConfigError, match="shutdown-timeout"):
        config_of(pod)


@every_pod
def test_a_service_called_octavo_changes_no_setting(pod: Pod) -> None:
    """Its links would be OCTAVO_PORT=tcp://..., which is no port."""
    assert pod.template["spec"]["enableServiceLinks"] is False


@every_pod
def test_what_runs_may_be_ended_only_after_it_has_drained(pod: Pod) -> None:
    hook = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(hook[1]) + config_of(pod).server.shutdown_timeout + DRAIN_SECONDS
    assert pod.template["spec"]["terminationGracePeriodSeconds"] >= needed


@every_pod
def test_probes_ask_paths_that_exist_on_a_port_that_is_listened_on(pod: Pod) -> None:
    probes = {name: probe for name, probe in container(pod).items() if name.endswith("Probe")}
    assert len(probes) == (3 if pod.serves else 0)
    with scripted_server(ScriptedExecutor(always([97])), byte_model()) as server:
        for probe in probes.values():
            assert server.http.get(probe["httpGet"]["path"]).status_code == 200
            assert probe["httpGet"]["port"] == "http"
    if pod.serves:
        ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        assert ports["http"] == config_of(pod).server.port
        assert config_of(pod).server.host == "0.0.0.0"


@every_pod
def test_it_runs_without_privileges_and_writes_to_its_volumes_only(pod: Pod) -> None:
    spec = pod.template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    security = container(pod)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    folders = {e["name"]: e["value"] for e in container(pod)["env"] if "value" in e}
    for name in ("HOME", "HF_HOME", "OCTAVO_CACHE_ROOT"):
        assert "/" + folders[name].split("/")[1] in mounts
    assert "/tmp" in mounts
    assert {m["name"] for m in container(pod)["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }


def test_claims_exist() -> None:
    claims = {claim["metadata"]["name"] for claim in kind("PersistentVolumeClaim")}
    named = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods()
        for volume in pod.template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert named == claims


def test_services_and_the_budget_find_the_pods_that_serve() -> None:
    services = kind("Service")
    for pod in pods():
        labels = pod.template["metadata"]["labels"].items()
        found = [s for s in services if s["spec"]["selector"].items() <= labels]
        assert len(found) == (1 if pod.serves else 0), pod.name
        for service in found:
            names = {port["name"] for port in container(pod)["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    [budget] = kind("PodDisruptionBudget")
    [deployment] = kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_machines_of_a_group_are_told_the_same() -> None:
    _, leader, worker = pods()
    assert container(leader)["args"] == container(worker)["args"]
    assert container(leader)["env"] == container(worker)["env"]
    named = set(re.findall(r"\$\((\w+)\)", " ".join(container(leader)["args"])))
    assert named == set(VARIABLES)
    config = config_of(worker)
    assert config.parallel.cluster_key == "secret"
    assert config.parallel.master_port in {
        port["containerPort"] for port in container(leader)["ports"]
    }
    [group] = kind("LeaderWorkerSet")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    assert config.parallel.num_workers % size == 0


@every_pod
def test_no_secret_is_written_down(pod: Pod) -> None:
    secret = {spec.env for spec in knobs() if spec.secret} | {"HF_TOKEN"}
    written = {entry["name"] for entry in container(pod)["env"] if "value" in entry}
    assert secret.isdisjoint(written)
    flags = {flag.split("=")[0] for flag in container(pod)["args"]}
    assert {spec.flag for spec in knobs() if spec.secret}.isdisjoint(flags)

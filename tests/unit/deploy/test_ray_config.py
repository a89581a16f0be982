"""The file of a Ray Serve application."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from octavo.config import Config, knobs
from octavo.core.errors import ConfigError
from octavo.deploy.ray_config import RayApplication, read_serve_file, settings_of


def text(**args: Any) -> str:
    return RayApplication(**args).to_yaml(name="octavo", host="0.0.0.0", port=8000)


def test_what_is_written_is_read() -> None:
    application = RayApplication(
        settings={"model": "org/name", "max-num-seqs": 7},
        min_replicas=2,
        max_replicas=5,
        requests_per_replica=9,
        cpus_per_replica=2.5,
        gpus_per_replica=1,
    )
    read = read_serve_file(application.to_yaml(name="n", host="h", port=1), "f")
    assert read.application == application
    assert (read.name, read.route_prefix, read.proxy_location) == ("n", "/", "EveryNode")
    assert read.http_options == {"host": "h", "port": 1}


def test_the_settings_are_those_that_differ_and_the_model() -> None:
    config = Config.from_flat({"max_num_seqs": 3, "port": 9, "host": "h", "api_key": ["secret"]})
    assert settings_of(config) == {"model": "default", "max-num-seqs": 3}
    application = RayApplication(settings=settings_of(config))
    assert application.replica_config({}).scheduler.max_num_seqs == 3
    assert application.max_ongoing_requests == 4


def test_secrets_come_from_the_environment_and_stay_out_of_the_file() -> None:
    application = RayApplication()
    environ = {"OCTAVO_API_KEY": "a,b", "OCTAVO_HF_TOKEN": "t", "OCTAVO_CLUSTER_KEY": "c"}
    config = application.replica_config(environ)
    assert config.server.api_key == ["a", "b"]
    assert (config.model.hf_token, config.parallel.cluster_key) == ("t", "c")
    assert {spec.env for spec in knobs() if spec.secret} == environ.keys()
    for name in ("api-key", "hf-token", "cluster_key"):
        with pytest.raises(ConfigError, match="is a secret"):
            RayApplication(settings={name: "x"})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"min_replicas": 0}, "min_replicas must be"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is more than max_replicas 2"),
        ({"requests_per_replica": "many"}, "requests_per_replica must be"),
        ({"cpus_per_replica": -1}, "cpus_per_replica must be"),
        ({"settings": {"max-num-seqs": 0}}, "--max-num-seqs must be at least 1"),
        ({"settings": {"max-num-sex": 1}}, "did you mean 'max_num_seqs'"),
        ({"settings": {"port": 9}}, "--port is not for replicas under Ray"),
        ({"settings": {"nnodes": 2}}, "--nnodes is not for replicas under Ray"),
        ({"settings": {"data-parallel-size": 2}}, "--max-replicas is how many"),
        ({"replicas": 2}, "unknown args of the application: replicas"),
    ],
)
def test_mistakes_are_told(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RayApplication.from_args(args)


def test_a_port_is_needed() -> None:
    with pytest.raises(ConfigError, match="--port 0"):
        RayApplication().to_yaml(name="n", host="h", port=0)


def test_a_replica_may_drain() -> None:
    assert RayApplication(settings={"shutdown-timeout": 60}).drain_seconds == 75


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"import_path": "other:app"}, "is not Octavo's: its import_path is other:app"),
        ({"runtime_env": {}}, "has runtime_env: run it with `serve deploy`"),
    ],
)
def test_files_that_are_for_rays_tools_are_refused(change: dict[str, Any], words: str) -> None:
    content = yaml.safe_load(text())
    content["applications"][0].update(change)
    with pytest.raises(ConfigError, match=words):
        read_serve_file(yaml.safe_dump(content), "f")


@pytest.mark.parametrize("wrong", ["", "a: b", "applications: []", "applications: [1]", "{"])
def test_what_is_no_such_file_is_told(wrong: str) -> None:
    with pytest.raises(ConfigError, match="f is no file of Ray Serve with one application"):
        read_serve_file(wrong, "f")

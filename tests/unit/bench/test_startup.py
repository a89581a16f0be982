from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.bench import startup
from octavo.bench.startup import evict, measure_startup, serve_command
from octavo.cli.settings import load_config
from octavo.config import Config
from octavo.core.errors import OctavoError


def test_the_server_gets_every_setting_that_is_not_the_default() -> None:
    settings = {
        "model": "some/model",
        "max_num_seqs": 7,
        "enable_prefix_caching": False,
        "allowed_origins": ["http://a", "http://b"],
        "access_log": True,
        "api_key": ["secret"],
    }
    config = Config.from_flat(settings)
    flags = serve_command(config)[4:]
    assert "secret" not in " ".join(flags)
    assert flags.count("--port") == 1
    assert "--no-enable-prefix-caching" in flags
    assert "--access-log" in flags
    texts = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in pairwise(flags)
        if name.startswith("--") and not value.startswith("--")
    }
    given = load_config(texts, environ={}).to_flat()
    assert {name: given[name] for name in ("model", "max_num_seqs", "allowed_origins", "port")} == {
        "model": "some/model",
        "max_num_seqs": 7,
        "allowed_origins": ["http://a", "http://b"],
        "port": 0,
    }
    assert startup._environment(config)["OCTAVO_API_KEY"] == "secret"


def test_settings_of_the_environment_reach_the_server_as_flags_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", "/somewhere")
    environment = startup._environment(Config())
    assert "OCTAVO_MAX_NUM_SEQS" not in environment
    assert environment["OCTAVO_CACHE_ROOT"] == "/somewhere"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="there is no way to ask")
def test_files_are_evicted_one_by_one_or_by_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "inner" / "a")
    assert evict(tmp_path)
    assert evict(tmp_path / "inner" / "a")


def test_cold_starts_keep_nothing_and_warm_ones_do(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    (tmp_path / "models").mkdir()
    config = Config.from_flat({"model": tiny, "api_key": ["secret"], "threads": 1})
    cold = measure_startup(config, num_iters_cold=1, num_iters_warmup=0, num_iters_warm=0)
    assert len(cold.cold) == 1
    assert cold.warm == []
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    warm = measure_startup(config, num_iters_cold=0, num_iters_warmup=0, num_iters_warm=1)
    assert len(warm.warm) == 1
    assert not warm.was_evicted
    assert (tmp_path / "kernels").is_dir()
    for start in (*cold.cold, *warm.warm):
        assert 0 < start.ready_s < start.first_token_s < 60
    assert cold.command.startswith("octavo serve --model ")


def test_a_server_that_ends_is_an_error_with_its_last_words(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(startup, "serve_command", lambda config: [sys.executable, "-c", code, ""])
    with pytest.raises(OctavoError, match=r"(?s)exit status 3 before it listened.*out of luck"):
        measure_startup(
            Config.from_flat({"model": tiny}),
            num_iters_cold=0,
            num_iters_warmup=0,
            num_iters_warm=1,
        )

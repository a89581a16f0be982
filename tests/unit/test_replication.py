from __future__ import annotations

import pytest

from octavo.assembly import EngineFacts
from octavo.config import BackendConfig, Config
from octavo.decisions import Decision
from octavo.parallel.replica_shares import ReplicaShare
from octavo.replication import _combined, _is_for_gpus
from support.truth import make_request

DECISION = Decision("device", "cpu", "here")


def facts(max_model_len: int, num_blocks: int) -> EngineFacts:
    return EngineFacts(max_model_len, num_blocks, 1024, {}, "f", (DECISION,))


@pytest.mark.parametrize("caches", [True, False])
def test_engines_as_one(caches: bool) -> None:
    config = Config.from_flat({"enable_prefix_caching": caches, "data_parallel_size": 2})
    share = ReplicaShare(0, 2, 4, 3 * 2**30)
    combined = _combined(config, share, [facts(512, 10), facts(480, 9)])
    assert combined.facts.max_model_len == 480, "what both can do"
    assert combined.facts.num_blocks == 19
    assert combined.num_blocks == [10, 9]
    engines, *others = combined.facts.decisions
    assert others == [DECISION]
    assert (engines.what, engines.value) == ("engines", "2")
    assert "4 threads and has 3.0 GiB" in engines.reason
    size = config.cache.block_size
    combined.router.place(make_request("a", range(2 * size + 1)), (0,))
    known = combined.router.place(make_request("b", range(2 * size + 1)), (0,)).unread == 1
    assert known is caches


def test_one_engine_is_described_as_if_it_were_none_of_several() -> None:
    combined = _combined(Config.from_flat({"restart_workers": True}), None, [facts(512, 10)])
    assert combined.facts == facts(512, 10)


@pytest.mark.parametrize(
    ("backend", "is_for_gpus"),
    [
        (BackendConfig(backend="native"), False),
        (BackendConfig(device="cpu"), False),
        (BackendConfig(device="cuda"), True),
        (BackendConfig(device="cuda", simulate="H100"), False),
    ],
)
def test_who_needs_gpus(backend: BackendConfig, is_for_gpus: bool) -> None:
    assert _is_for_gpus(backend) is is_for_gpus

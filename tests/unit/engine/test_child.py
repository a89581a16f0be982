"""The process that engines run in: what it loads, and when it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.child import EngineChild
from octavo.engine.process import EngineProcess
from support.child_functions import build_with_facts, modules, warm_up
from support.engines import (
    build_for_ever,
    build_loop,
    build_nothing,
    build_without_a_worker,
)


def facts_of(child: EngineChild, make_facts: Any) -> Any:
    """What `make_facts` says in the child, as an engine is built."""
    build = partial(build_with_facts, make_facts)
    child.begin(build)
    engine = EngineProcess(build, child)

    async def main() -> Any:
        await engine.start()
        await engine.shutdown()
        return engine.facts

    return asyncio.run(main())


def test_it_warms_up_and_imports_nothing_of_its_parents() -> None:
    with EngineChild(warm_up) as child:
        loaded = facts_of(child, modules)
    assert child.exit_code == 0
    assert "warmed up" in loaded
    assert {"octavo.cli", "typer", "starlette", "tokenizers"}.isdisjoint(loaded)


def test_collections_pause_only_while_an_engine_is_built() -> None:
    with EngineChild() as child:
        assert facts_of(child, gc.isenabled) is False


def test_it_ends_when_nothing_is_built() -> None:
    with EngineChild() as child:
        assert child.is_alive
    assert child.exit_code == -signal.SIGKILL


def test_it_ends_when_its_parent_does(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it was doing, and without a word."""
    for build in (None, build_loop):
        child = EngineChild()
        if build is not None:
            child.begin(build)
        child.channel.close()
        child.wait(20)
        assert child.exit_code == 0
    assert capfd.readouterr().err == ""


def test_it_ends_when_its_parent_does_though_it_builds() -> None:
    child = EngineChild()
    child.begin(build_for_ever)
    child.channel.close()
    child.wait(30)
    assert child.exit_code == 1


def test_modules_of_the_current_folder_do_not_shadow_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("signal", "multiprocessing", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with EngineChild() as child:
        assert facts_of(child, os.getcwd) == str(tmp_path)


def test_why_nothing_was_built_is_told() -> None:
    with EngineChild() as child:
        child.begin(build_nothing)
        with pytest.raises(ConfigError, match="there is no such model"):
            asyncio.run(EngineProcess(build_nothing, child).start())


def test_whom_it_lost_while_it_was_built_is_told() -> None:
    with EngineChild() as child:
        child.begin(build_without_a_worker)
        with pytest.raises(EngineDeadError, match=r"^worker 1 has run out of memory"):
            asyncio.run(EngineProcess(build_without_a_worker, child).start())


def test_a_child_that_was_killed_before_its_work_is_told() -> None:
    with EngineChild() as child:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.begin(build_loop)
        with pytest.raises(EngineDeadError, match="while starting \\(exit code -9\\)"):
            asyncio.run(EngineProcess(build_loop, child).start())

from __future__ import annotations

import asyncio

import pytest

from octavo.config import ServerConfig
from octavo.core.clock import monotonic
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import RequestStream
from octavo.server.serving import Serving
from support.scripted import ScriptedExecutor, always, byte_model, scripted_engine


def test_a_cancelled_start_takes_back_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = byte_model()
    engine = scripted_engine(ScriptedExecutor(always([97]), step_seconds=0.005), model)
    serving = Serving(model, engine, ServerConfig(), monotonic, {})
    submit = engine.submit
    sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
    requests = [model.request(name, [97], sampling) for name in ("accepted", "waiting")]

    async def cancelled_between() -> None:
        is_accepted = asyncio.Event()

        async def first_only(request: Request) -> RequestStream:
            if request.request_id == "waiting":
                await asyncio.Event().wait()
            stream = await submit(request)
            is_accepted.set()
            return stream

        monkeypatch.setattr(engine, "submit", first_only)
        await engine.start()
        try:
            starting = asyncio.create_task(serving.start(requests))
            await is_accepted.wait()
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            while engine.stats.num_running + engine.stats.num_waiting or engine.stats.kv_usage:
                await asyncio.sleep(0.01)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(cancelled_between(), 5))

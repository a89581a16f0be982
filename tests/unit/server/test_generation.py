"""A reply whose request begins again on another engine."""

from __future__ import annotations

import asyncio

import pytest

from octavo.config import ServerConfig
from octavo.core.clock import monotonic
from octavo.core.errors import EngineDeadError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.replicas import Combined, Replicas
from octavo.engine.routing import Router
from octavo.server.generation import Piece, collect
from octavo.server.serving import Serving
from support.scripted import byte_model
from support.told_engine import ToldEngine


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_was_lost_does_not_count(is_streamed: bool) -> None:
    model = byte_model()
    engines = [ToldEngine(), ToldEngine()]
    client = Replicas(list(engines), lambda _: Combined(None, Router(16, [9, 9]), [9, 9]))
    serving = Serving(model, client, ServerConfig(), monotonic, {})
    params = SamplingParams(n=2, max_tokens=5)
    requests = [model.request(name, [97, 98], params) for name in ("lost", "kept")]

    async def main() -> None:
        await client.start()
        starting = asyncio.create_task(serving.start(requests))
        await asyncio.sleep(0.01)
        [first] = [engine for engine in engines if "lost" in engine.has]
        other = engines[1 - engines.index(first)]
        for engine in engines:
            engine.accept(engine.has[0])
        streamed: list[Piece] = []
        async with await starting as generation:
            reading = asyncio.create_task(
                generation.deliver(streamed.append) if is_streamed else collect(generation)
            )
            await asyncio.sleep(0.01)
            first.token("lost", 0, final=True)
            first.token("lost", 1)
            other.token("kept", 1)
            assert generation.usage.completion_tokens == 3
            first.die()
            if is_streamed:
                with pytest.raises(EngineDeadError):
                    await reading
                assert len(streamed) == 3
                return
            assert generation.usage.completion_tokens == 1
            other.accept("lost")
            for name, index, num_tokens in (("lost", 0, 2), ("lost", 1, 2), ("kept", 0, 2)):
                for number in range(num_tokens):
                    other.token(name, index, final=number == num_tokens - 1)
            other.token("kept", 1, final=True)
            pieces = await reading
            assert pieces is not None
            assert [len(piece.token_ids) for piece in pieces] == [2] * 4
            assert generation.usage.completion_tokens == 8
        await client.shutdown()
        text = serving.metrics.exposition().decode()
        labels = 'engine="0",model_name="scripted"'
        assert f"octavo:generation_tokens_total{{{labels}}} 10.0" in text
        assert f"octavo:request_generation_tokens_sum{{{labels}}} 10.0" in text
        ended = {"error": 1, "length": 5}  # a sequence of the lost run had ended
        for reason, count in ended.items():
            name = f'engine="0",finished_reason="{reason}",model_name="scripted"'
            assert f"octavo:request_success_total{{{name}}} {count}.0" in text

    asyncio.run(main())

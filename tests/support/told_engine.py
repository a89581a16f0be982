"""Engines that say what the test has them say, when it has them say it."""

from __future__ import annotations

import asyncio

from octavo.core.errors import ConfigError, RequestError
from octavo.core.request import FinishReason
from octavo.core.step import EngineStats, LiveLimits, TokenDelta
from octavo.engine.client import SingleEngine
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import (
    Add,
    Close,
    Command,
    End,
    ForgetPrefixes,
    Report,
    SetLimits,
)


class ToldEngine(SingleEngine):
    """commands: all that it was sent. It obeys none by itself but Close and SetLimits."""

    def __init__(self, *, fails_to_start: bool = False) -> None:
        super().__init__(_no_build)
        self.commands: list[Command] = []
        self.totals = EngineStats()
        self.is_joined = False
        self._fails_to_start = fails_to_start

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self._fails_to_start:
            raise ConfigError("there is no memory left")
        self.facts = "facts"
        self._is_started = True

    @property
    def has(self) -> list[str]:
        """Ids of the requests that it was given."""
        return [command.request.request_id for command in self.commands if isinstance(command, Add)]

    @property
    def open(self) -> list[str]:
        """Ids of the requests that it has not ended."""
        return list(self._streams)

    @property
    def has_started(self) -> bool:
        return self._is_started

    @property
    def ends(self) -> list[tuple[str, FinishReason]]:
        return [(c.request_id, c.reason) for c in self.commands if isinstance(c, End)]

    @property
    def num_forgotten(self) -> int:
        return sum(isinstance(command, ForgetPrefixes) for command in self.commands)

    def accept(self, request_id: str) -> None:
        self.report([(request_id, None)])

    def refuse(self, request_id: str, refusal: RequestError) -> None:
        self.report([(request_id, refusal)])

    def token(self, request_id: str, index: int = 0, *, final: bool = False) -> None:
        reason = FinishReason.LENGTH if final else None
        self.report([], [TokenDelta(request_id, index, (7,), finish_reason=reason)])

    def ended(self, request_id: str, reason: FinishReason, index: int = 0) -> None:
        self.report([], [TokenDelta(request_id, index, (), finish_reason=reason)])

    def report(
        self,
        answers: list[tuple[str, RequestError | LiveLimits | None]] | None = None,
        deltas: list[TokenDelta] | None = None,
        **stats: float,
    ) -> None:
        self.totals = self.totals._replace(**stats)  # type: ignore[arg-type]
        self._take(Report(answers or [], deltas or [], self.totals))

    def restarting(self, is_restarting: bool) -> None:
        self._take(Report([], [], self.totals, is_restarting=is_restarting))

    def die(self) -> None:
        """As a process that is killed."""
        self._die("killed")

    def fail(self, *, is_hopeless: bool = False) -> None:
        """As an engine that has lost its executor, and can still say so."""
        deltas = [
            TokenDelta(i, n, (), finish_reason=FinishReason.ERROR, error="no executor")
            for i, stream in self._streams.items()
            for n in range(stream.num_unfinished)
        ]
        report = Report([], deltas, self.totals, "no executor", True, is_hopeless=is_hopeless)
        self._take(report)

    def _send(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, SetLimits):
            self.report([(command.key, LiveLimits(command.max_num_seqs or 8, 64))])
        if isinstance(command, Close):
            deltas = [
                TokenDelta(i, n, (), finish_reason=FinishReason.ABORT)
                for i, stream in self._streams.items()
                for n in range(stream.num_unfinished)
            ]
            self._take(Report([], deltas, self.totals, None, True))

    async def _join(self) -> None:
        self.is_joined = True

    def _kill(self) -> None:
        raise NotImplementedError


def _no_build() -> tuple[EngineLoop, str]:
    raise NotImplementedError

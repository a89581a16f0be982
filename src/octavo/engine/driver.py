"""Runs an engine loop on commands from a client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from octavo.core.errors import EngineDeadError, OctavoError, RequestError, TooManyDeathsError
from octavo.core.request import Request
from octavo.core.step import LiveLimits, TokenDelta
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import (
    Add,
    Answer,
    Close,
    Command,
    End,
    ForgetPrefixes,
    Report,
    SetLimits,
)

logger = logging.getLogger("octavo.engine")

# While there is nothing to do: so long may it take until a dead executor is noticed.
_IDLE_SECONDS = 1.0

Receive = Callable[[float], list[Command]]
"""The commands that have come; waits at most so many seconds for one. Raises EOFError if the client
is gone.
"""


def drive(loop: EngineLoop, receive: Receive, send: Callable[[Report], None]) -> None:
    """Serve until the client closes or disappears, or the engine dies. Commands are taken between
    steps, and wait while a new executor starts.

    The last report says `closed`, whatever happened.
    """
    driver = _Driver(loop, send)
    try:
        while not driver.is_closing:
            is_idle = not loop.has_work
            commands = receive(_IDLE_SECONDS if is_idle else 0.0)
            if is_idle and not commands:
                driver.check()
                continue
            for command in commands:
                driver.obey(command)
            driver.advance()
        driver.close()
    except EOFError:
        logger.info("the engine's client is gone; stopping")
    except Exception as error:  # those who wait must hear of it, whatever it was
        logger.critical("the engine has died", exc_info=True)
        # Only Octavo's own messages are fit for users' eyes.
        driver.die(
            str(error) if isinstance(error, OctavoError) else "internal error",
            is_hopeless=isinstance(error, TooManyDeathsError),
        )
    finally:
        loop.close()


class _Driver:
    def __init__(self, loop: EngineLoop, send: Callable[[Report], None]) -> None:
        self.is_closing = False
        self._loop = loop
        self._send = send
        self._answers: list[tuple[str, Answer]] = []
        self._deltas: list[TokenDelta] = []

    def obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._answers.append((request.request_id, self._try_add(request)))
            case End(request_id, which, reason):
                self._deltas += self._loop.end(request_id, which, reason)
            case ForgetPrefixes():
                self._loop.forget_prefixes()
            case SetLimits(key, max_num_seqs, max_num_batched_tokens):
                self._answers.append((key, self._try_limits(max_num_seqs, max_num_batched_tokens)))
            case Close():
                self.is_closing = True

    def advance(self) -> None:
        """Report, and run a step if there is one."""
        if self._loop.has_work and not self.is_closing:
            if self._answers:
                self._report()  # before the step, which may take long
            try:
                self._deltas += self._loop.step()
            except EngineDeadError as death:
                self._go_on_after(death)
        self._report()

    def check(self) -> None:
        """Look after the executor, which is not used now."""
        try:
            self._loop.check()
        except EngineDeadError as death:
            self._go_on_after(death)
            self._report()

    def close(self) -> None:
        self._deltas += self._loop.abort_all()
        self._report(closed=True)

    def die(self, error: str, *, is_hopeless: bool = False) -> None:
        try:
            self._deltas += self._loop.abandon(error)
        finally:  # whatever state the loop is in, those who wait must hear of it
            self._report(error=error, closed=True, is_hopeless=is_hopeless)

    def _go_on_after(self, death: EngineDeadError) -> None:
        """With another executor. Raises EngineDeadError if there is to be none."""
        self._deltas += self._loop.start_over_after(death)
        self._report(is_restarting=True)  # before it starts, which takes long
        self._loop.restart()

    def _try_add(self, request: Request) -> RequestError | None:
        try:
            self._loop.add(request)
        except RequestError as refusal:
            return refusal
        return None

    def _try_limits(
        self, max_num_seqs: int | None, max_num_batched_tokens: int | None
    ) -> RequestError | LiveLimits:
        try:
            return self._loop.set_limits(max_num_seqs, max_num_batched_tokens)
        except RequestError as refusal:
            return refusal

    def _report(self, **state: Any) -> None:
        """state: fields of the report."""
        answers, self._answers = self._answers, []
        deltas, self._deltas = self._deltas, []
        self._send(Report(answers, deltas, self._loop.stats(), **state))

"""Every error that Octavo raises on purpose.

A user's mistake is a `ConfigError` (start-up) or a `RequestError` (one request); both say the
value, the limit and the remedy. A broken invariant is an `InvariantError`: a bug in Octavo, never
in its input.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all of them."""


class ConfigError(OctavoError):
    """Octavo can't start this way: a bad flag, a broken model folder, too little memory, a port in
    use.

    The CLI prints the message as one line and exits with 1; the message ends in what to do next.
    """


class RequestError(OctavoError):
    """One request can't be served; the others go on.

    `param` names the request field at fault (None if no single one), `status` is the HTTP status
    (400 unless told).
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross the process border to the engine; Exception's own pickling drops keyword
        # arguments.
        return (_rebuild_request_error, (self.message, self.param, self.status))


def _rebuild_request_error(message: str, param: str | None, status: int) -> RequestError:
    return RequestError(message, param=param, status=status)


class QueueFullError(RequestError):
    """Admission limit reached; the client may retry. HTTP 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503)

    def __reduce__(self) -> tuple[object, ...]:
        return (QueueFullError, (self.message,))


class EngineDeadError(OctavoError):
    """The executor or the engine process is gone; nothing can be served until a restart."""


class TooManyDeathsError(EngineDeadError):
    """It has been started again too often of late, and will not be once more."""


class NoPlaceError(ConfigError, EngineDeadError):
    """A machine, or room on one, is missing: the engine can't start, or start again. Nothing has
    died of its work, so it doesn't count as one start too many.
    """


class InvariantError(OctavoError):
    """A state that the code promises can't happen."""

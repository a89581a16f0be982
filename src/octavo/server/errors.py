"""OpenAI's error bodies, and which exception becomes which.

Every reply that isn't a success has the same shape, also for unknown paths and methods. What is
said comes from messages that Octavo wrote for its users; an unexpected exception is logged and
answered with one fixed sentence, so nothing of the machine leaks.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from octavo.core.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

MAX_ERRORS_SHOWN = 10
MAX_INPUT_CHARS = 200
# Cuts lists, objects and texts before they are rendered: a client's may be huge.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * MAX_INPUT_CHARS
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
SERVER_ERROR = "The server had an error while processing your request."

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_PRIVATE = re.compile(r"(?<![\w/])(?:~?/|[A-Za-z]:\\)[^\s:,;'\")]+|\b0x[0-9a-fA-F]+")
_CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that left; nobody reads it


def error_body(error: RequestError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}."""
    kind = _TYPES.get(error.status, "BadRequestError" if error.status < 500 else _TYPES[500])
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse(error_body(error), error.status, headers)


def server_error(error: Exception) -> RequestError:
    """What a client may know of a failure that isn't its own; the log has the rest."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        logger.error("request failed: %s", error)
        return RequestError(f"{SERVER_ERROR} ({sanitized(str(error))})", status=500)
    logger.error("unexpected error in a request", exc_info=error)
    return RequestError(SERVER_ERROR, status=500)


def shown(value: Any) -> str:
    """An input as an error message quotes it, cut to a bearable length."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_INPUT_CHARS else text[:MAX_INPUT_CHARS] + "..."


def sanitized(message: str) -> str:
    """A failure's first line without paths and addresses, short enough to send."""
    line = message.strip().partition("\n")[0]
    return _PRIVATE.sub("...", line)[:MAX_INPUT_CHARS]


def validation_error(error: ValidationError) -> RequestError:
    """pydantic's findings as one sentence each; `param` is the first field at fault."""
    # All of them are rendered here: the schemas see to it that they are few (FailFast).
    found = error.errors(include_url=False, include_context=False)
    sentences = [
        _sentence(item["loc"], item["msg"], item["input"], item["type"])
        for item in found[:MAX_ERRORS_SHOWN]
    ]
    if (hidden := len(found) - MAX_ERRORS_SHOWN) > 0:
        sentences.append(f"and {hidden} more errors")
    return RequestError("; ".join(sentences), param=_field(found[0]["loc"]))


def _sentence(location: Sequence[int | str], message: str, value: Any, kind: str) -> str:
    name = _field(location)
    if kind == "missing":
        return f"{name} is required but missing"
    message = message.removeprefix("Value error, ")
    quoted = shown(value)
    return f"{name}: {message}, got {quoted} (parameter={name}, value={quoted})"


def _field(location: Sequence[int | str]) -> str:
    """('messages', 0, 'role') is messages[0].role."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


async def _on_request_error(request: Request, error: Exception) -> Response:
    return error_response(server_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(server_error(error))
    if error.status_code == 401:  # OpenAI's and vLLM's clients know this body
        return JSONResponse({"error": "Unauthorized"}, 401, error.headers)
    path = shown(request.url.path)
    message = {
        404: f"There is nothing at {path}",
        405: f"{request.method} is not allowed for {path}",
    }.get(error.status_code, str(error.detail))
    response = error_response(RequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # starlette raises it again for the server, which logs it with its traceback.
    return error_response(RequestError(SERVER_ERROR, status=500))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


HANDLERS: Mapping[type[Exception], ExceptionHandler] = {
    RequestError: _on_request_error,
    EngineDeadError: _on_request_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_disconnect,
    Exception: _on_unexpected,
}
"""Make every error of the application an OpenAI error body."""

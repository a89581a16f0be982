"""From the bytes of a request to a checked schema.

Bodies are untrusted: their size is bounded while they arrive, their nesting after parsing, and what
JSON leaves open (NaN, duplicate names, lone surrogates) is refused instead of guessed.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request

from octavo.config import ServerConfig, nearest
from octavo.core.errors import RequestError
from octavo.server.errors import shown, validation_error
from octavo.server.schemas import RequestBody

Schema = TypeVar("Schema", bound=RequestBody)

MAX_DEPTH = 64
LARGE_BODY_BYTES = 16 * 1024
"""From here on parsing, templates and tokenizing leave the event loop: the hop costs less then."""
_MAX_FIELDS_LISTED = 20
_HIGH_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Body(Generic[Schema]):
    """ignored: unknown names that the server was told to accept."""

    fields: Schema
    num_bytes: int
    ignored: tuple[str, ...]

    @property
    def is_large(self) -> bool:
        """Whether working on it would hold the event loop up for long."""
        return self.num_bytes >= LARGE_BODY_BYTES

    @property
    def warning_headers(self) -> dict[str, str]:
        """What `--ignore-unknown-fields` promises."""
        if not self.ignored:
            return {}
        names = [quote(name[:100], safe="") for name in self.ignored[:_MAX_FIELDS_LISTED]]
        return {"X-Octavo-Ignored-Fields": ", ".join(names)}


async def read_body(request: Request, schema: type[Schema], config: ServerConfig) -> Body[Schema]:
    """Read, parse and validate. Raises RequestError."""
    _check_content_type(request.headers.get("content-type"))
    body = await _read(request, config.max_body_bytes)
    if len(body) < LARGE_BODY_BYTES:
        return parse(body, schema, config.ignore_unknown_fields)
    return await asyncio.to_thread(parse, body, schema, config.ignore_unknown_fields)


def parse(body: bytes, schema: type[Schema], ignore_unknown: bool) -> Body[Schema]:
    """Raises RequestError.

    A null means that the field was not given. Unknown names are refused, with the nearest known
    one, or listed in the result under `ignore_unknown`.
    """
    # Without the nulls `model_fields_set` is exactly what the client asked for.
    given = {name: value for name, value in parse_json(body).items() if value is not None}
    for name in given:
        if (reason := schema.refused.get(name)) is not None:
            raise RequestError(f"{name} {reason}", param=name)
    unknown = [name for name in given if name not in schema.model_fields]
    if unknown and not ignore_unknown:
        name = unknown[0]
        hint = nearest(name, list(schema.model_fields))
        raise RequestError(
            f"unknown field {shown(name)}{hint} (--ignore-unknown-fields accepts such fields)",
            param=name[:200],
        )
    try:
        fields = schema.model_validate(given)
    except ValidationError as error:
        raise validation_error(error) from None
    return Body(fields, len(body), tuple(unknown))


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that the body holds. Raises RequestError for anything else."""
    try:
        value = json.loads(
            body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSON, UTF-8, digits beyond Python's limit, our own refusals
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(value)}")
    # Most bodies have too few brackets for any of these to matter.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _HIGH_SURROGATE_ESCAPE.search(body):
        _check_text(value)
    return value


def _check_content_type(value: str | None) -> None:
    kind = (value or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            f"Content-Type must be application/json, got {shown(value or '')}", status=415
        )


async def _read(request: Request, limit: int) -> bytes:
    """The whole body; refused at the first byte over the limit, declared or not."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than {limit} bytes (--max-body-bytes); send less", status=413
    )


def _too_deep() -> RequestError:
    return RequestError(f"the body nests deeper than {MAX_DEPTH} levels; flatten it")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep()


def _check_text(value: Any) -> None:
    """JSON can spell half a surrogate pair; no tokenizer, template or reply can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            "the body has half of a surrogate pair (such as \\ud800), which is not text; "
            "send whole characters"
        ) from None

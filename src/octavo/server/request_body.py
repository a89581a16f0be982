"""From the bytes of a request to a checked schema.

Bodies are untrusted: their size is bounded while they arrive, their nesting after parsing, and what
JSON leaves open (NaN, duplicate names, lone surrogates) is refused instead of guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args
from urllib.parse import quote

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.core import strict_json
from octavo.core.errors import RequestError
from octavo.knob import nearest
from octavo.server.errors import shown, validation_error
from octavo.server.offload import offloaded
from octavo.server.schemas import RequestBody

Schema = TypeVar("Schema", bound=RequestBody)

LARGE_BODY_BYTES = 16 * 1024
"""From here on parsing, templates and tokenizing leave the event loop: the hop costs less then."""
_MAX_FIELDS_LISTED = 20


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
        # An empty name must not leave the header's end bare: h11 refuses to send that.
        names = [quote(name[:100], safe="") or "''" for name in self.ignored[:_MAX_FIELDS_LISTED]]
        return {"X-Octavo-Ignored-Fields": ", ".join(names)}


async def read_body(request: Request, schema: type[Schema], config: ServerConfig) -> Body[Schema]:
    """Read, parse and validate. Raises RequestError."""
    _check_content_type(request.headers.get("content-type"))
    body = await _read(request, config.max_body_bytes)
    return await offloaded(
        len(body) >= LARGE_BODY_BYTES, lambda: parse(body, schema, config.ignore_unknown_fields)
    )


def parse(body: bytes, schema: type[Schema], ignore_unknown: bool) -> Body[Schema]:
    """Raises RequestError.

    A null means that the field was not given. Unknown names are refused, with the nearest known
    one, or listed in the result under `ignore_unknown`.
    """
    given = parse_json(body)
    for name, value in given.items():
        if value is not None and (reason := schema.refused.get(name)) is not None:
            raise RequestError(f"{name} {reason}", param=name)
    given, unknown = _known(given, schema)
    if unknown and not ignore_unknown:
        raise _unknown_field(*unknown[0])
    try:
        fields = schema.model_validate(given)
    except ValidationError as error:
        raise validation_error(error) from None
    return Body(fields, len(body), tuple(name for name, _ in unknown))


def _known(
    given: dict[str, Any], schema: type[BaseModel], prefix: str = ""
) -> tuple[dict[str, Any], list[tuple[str, type[BaseModel]]]]:
    """(what of `given` the schema has, without nulls; (full name, schema) of what it has not).

    Without the nulls `model_fields_set` is exactly what the client asked for.
    """
    fields = {field.alias or name: field for name, field in schema.model_fields.items()}
    known: dict[str, Any] = {}
    unknown: list[tuple[str, type[BaseModel]]] = []
    for name, value in given.items():
        if value is None:
            continue
        if name not in fields:
            unknown.append((prefix + name, schema))
            continue
        inner = _object_schema(fields[name].annotation)
        if inner is not None and isinstance(value, dict):
            value, unknown_inside = _known(value, inner, f"{prefix}{name}.")
            unknown += unknown_inside
        known[name] = value
    return known, unknown


def _object_schema(hint: Any) -> type[BaseModel] | None:
    """StreamOptions of `StreamOptions | None`; None for a field that is no object of a schema."""
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _unknown_field(name: str, schema: type[BaseModel]) -> RequestError:
    known = [field.alias or name for name, field in schema.model_fields.items()]
    hint = nearest(name.rpartition(".")[2], known)
    return RequestError(
        f"unknown field {shown(name)}{hint} (--ignore-unknown-fields accepts such fields)",
        param=name[:200],
    )


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that the body holds. Raises RequestError for anything else."""
    try:
        value = strict_json.loads(body.decode())
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(value)}")
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

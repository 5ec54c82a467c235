"""Parts that routes share: path parameters, the service behind them, request bodies, and answers encoded by msgspec.

Bodies are bounded one by one and in total, decoded, and described for OpenAPI here. Content types are ignored but for
acknowledgements: `curl -d` says form data and means JSON, as Flink's users do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Path, Request, Response
from pydantic import ValidationError

from holdfast.api.errors import BodyTooLargeError, BusyError, UnsupportedMediaTypeError
from holdfast.api.flink import schemas
from holdfast.api.flink.schemas import RequestBody
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.protocol import connection_of
from holdfast.api.snapshots.disposals import Disposals
from holdfast.api.snapshots.served import SnapshotDirectories
from holdfast.barriers import codec
from holdfast.barriers.messages import clip
from holdfast.barriers.tunable import NAME_BYTES_SHOWN_MAX
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import InvalidConfigError

JobId = Annotated[str, Path(alias="jobid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
VertexId = Annotated[str, Path(alias="vertexid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
TriggerId = Annotated[str, Path(alias="triggerid", pattern=schemas.ID_PATTERN, description="32 lower-case hex digits")]
CheckpointNumber = Annotated[int, Path(alias="checkpointid", ge=0, lt=2**63)]
Slot = Annotated[int, Path(ge=0, lt=32_768)]

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Errors, "description": text}
    for status, text in (
        (400, "Malformed"),
        (401, "Missing or wrong token"),
        (403, "The token's role, or its job, does not allow it"),
        (404, "No such thing"),
        (409, "Fenced, or in conflict with something that exists"),
        (413, "The body is too large"),
        (429, "Too many requests: again after Retry-After"),
        (503, "Try again"),
    )
}


async def service_of(request: Request) -> Coordinator:
    """The coordinator of the application. Asynchronous, or each request would go through the thread pool."""
    service: Coordinator = request.app.state.service
    return service


Service = Annotated[Coordinator, Depends(service_of)]


def _directories(request: Request, places: Callable[[], SavepointPlaces]) -> SnapshotDirectories:
    """The one rule of where snapshots may be read and disposed of."""
    settings = request.app.state.settings
    return SnapshotDirectories((settings.location, *settings.snapshot_dirs), places=places)


async def _shown_directories(request: Request, service: Service) -> SnapshotDirectories:
    return _directories(request, service.published_savepoint_places)


async def _held_directories(request: Request, service: Service) -> SnapshotDirectories:
    return _directories(request, service.savepoint_places)


ShownDirectories = Annotated[SnapshotDirectories, Depends(_shown_directories)]
"""For reading: it takes no turn of a job."""
HeldDirectories = Annotated[SnapshotDirectories, Depends(_held_directories)]
"""For writing and deleting: where jobs have savepoints is asked of the jobs, as no view is trusted for that."""


async def _disposals(request: Request) -> Disposals:
    found: Disposals = request.app.state.disposals
    return found


KnownDisposals = Annotated[Disposals, Depends(_disposals)]


def answer(record: msgspec.Struct, status: int = 200) -> Response:
    """Response with a record of the worker protocol."""
    return Response(codec.encode(record), status_code=status, media_type="application/json")


def encoded(model: schemas.Record) -> Response:
    """Response with an answer that pydantic describes, for routes that FastAPI does not serve."""
    return Response(model.model_dump_json(), media_type="application/json")


Record = TypeVar("Record", bound=msgspec.Struct)
Model = TypeVar("Model", bound=RequestBody)

REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of one kind of request; never more than the service's `body_bytes_max`."""

    bytes_max: int
    pieces: str | None = None
    """`pieces` of `codec.decode_large`."""


REQUEST = BodyLimits(64 * 1024)
"""Flink's dialect: a handful of settings."""
GRAPH = BodyLimits(16 * 1024 * 1024)
"""Submissions: two kilobytes a vertex."""
REPORT = BodyLimits(64 * 1024 * 1024)
"""States with their tracebacks, and counters, of all subtasks of a worker."""
ACKNOWLEDGEMENTS = BodyLimits(1 << 62, "items")
"""Acknowledgements, with the state of the memory backend: bounded by `body_bytes_max` alone."""
WORKER_ANSWER = BodyLimits(2 * 1024 * 1024)
"""What a worker says about itself: its fields have bounds of their own, which come to less."""
REGISTRATION = BodyLimits(1 << 62, "unanswered")
"""Registrations, with unanswered acknowledgements."""

SMALL_BYTES = 64 * 1024
"""A body up to this size is read whatever is held: acknowledgements of files never wait for those of megabytes."""

LARGE_BYTES = 1024 * 1024
"""A body above this size is decoded by a thread, one at a time."""

_STEP_BYTES = 1024 * 1024
"""Bytes taken from the budget at a time for a body of unknown length."""


@contextlib.asynccontextmanager
async def held_body(request: Request, limits: BodyLimits) -> AsyncIterator[bytearray]:
    """Read the whole body, counted among the held ones until the block ends.

    Raises BodyTooLargeError as soon as it is known to exceed its bound, BusyError when others leave no room for it, and
    ClientDisconnect."""
    state = request.app.state
    size_max = min(limits.bytes_max, state.settings.body_bytes_max)
    announced = int(request.headers.get("content-length", 0))
    if announced > size_max:
        raise _too_large(size_max)
    connection = connection_of(request.scope)
    caller = CallerKind.CLIENT if connection is None else connection.caller
    held, number = 0, next(_numbers)

    def hold(size: int) -> None:
        nonlocal held
        if size > max(held, SMALL_BYTES):
            if not state.bodies.take(number, size - held, caller):
                raise BusyError(f"no room for a body of {size} bytes beside those of others: ask again", size=size)
            held = size

    try:
        hold(announced)
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > size_max:
                raise _too_large(size_max)
            body += chunk
            if len(body) > max(held, SMALL_BYTES):
                hold(min(len(body) + _STEP_BYTES, size_max))
        yield body
    finally:
        state.bodies.give_back(number)


_numbers = itertools.count(1)


def _too_large(size_max: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request's body is larger than {size_max} bytes", size_max=size_max)


async def read_record(request: Request, kind: type[Record], limits: BodyLimits) -> Record:
    """Decode the body as a record of the worker protocol. Raises ProtocolError naming the path of the first wrong field."""
    async with held_body(request, limits) as body:
        if len(body) <= LARGE_BYTES:
            return codec.decode(body, kind)
        decode = functools.partial(codec.decode_large, body, kind, limits.pieces)
        return await asyncio.get_running_loop().run_in_executor(request.app.state.decoding, decode)


async def read_packed(request: Request, kind: type[Record], limits: BodyLimits) -> Record:
    """As `read_record`, of JSON or msgpack by the request's content type; without one it is JSON.

    Raises UnsupportedMediaTypeError for any other type before the body is read, BodyTooLargeError for more msgpack than
    `codec.MSGPACK_BYTES_MAX`."""
    content_type = request.headers.get("content-type", codec.JSON_TYPE)
    match content_type.partition(";")[0].strip().lower():
        case codec.JSON_TYPE:
            return await read_record(request, kind, limits)
        case codec.MSGPACK_TYPE:
            packed = BodyLimits(min(limits.bytes_max, codec.MSGPACK_BYTES_MAX))
            async with held_body(request, packed) as body:
                return codec.decode_packed(body, kind)
    shown = clip(content_type, NAME_BYTES_SHOWN_MAX)
    text = f"the content type {shown!r} is not taken here: {codec.JSON_TYPE} and {codec.MSGPACK_TYPE} are"
    raise UnsupportedMediaTypeError(text, content_type=shown)


def parse_model(body: bytes | bytearray, model: type[Model]) -> Model:
    """Parse a request body of Flink's dialect; an empty body means `{}`. Raises InvalidConfigError, also for a name that is there
    twice: whichever value held, somebody meant the other."""
    try:
        parsed = model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}" for problem in error.errors()
        )
        raise InvalidConfigError(
            f"the request did not match the expected format {model.__name__}: {problems}", expected=model.__name__
        ) from error
    if body:
        json.loads(body, object_pairs_hook=_once_each)
    return parsed


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        shown = clip(name, NAME_BYTES_SHOWN_MAX)
        raise InvalidConfigError(f"the request gives {shown!r} more than once", setting=shown)
    return found


def body_of(model: type[Model], limits: BodyLimits = REQUEST) -> Callable[[Request], Coroutine[Any, Any, Model]]:
    """A dependency that reads and parses a body of Flink's dialect."""

    async def read(request: Request) -> Model:
        async with held_body(request, limits) as body:
            return parse_model(body, model)

    return read


def describe_model(model: type[RequestBody], *, required: bool = False) -> dict[str, Any]:
    """OpenAPI's description of a body of Flink's dialect. Models within it are described in their place: a body's own `$defs` are
    none that the document has."""
    schema = model.model_json_schema(by_alias=True)
    parts = schema.pop("$defs", {})
    return _described(_in_place(schema, parts), required=required)


def _in_place(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_in_place(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _in_place(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _in_place(each, parts) for name, each in schema.items()}


def describe_record(kind: type[msgspec.Struct], *media_types: str) -> dict[str, Any]:
    """OpenAPI's description of a body of the worker protocol, which is JSON, or of these types as well; the record itself is
    among the components."""
    return _described({"$ref": REFERENCE.format(name=kind.__name__)}, *media_types, required=True)


def _described(schema: dict[str, Any], *media_types: str, required: bool) -> dict[str, Any]:
    content = {media_type: {"schema": schema} for media_type in (codec.JSON_TYPE, *media_types)}
    return {"requestBody": {"required": required, "content": content}}


def describe_answer(kind: type[msgspec.Struct], media_type: str = "application/json") -> dict[str, Any]:
    """OpenAPI's description of an answer of the worker protocol."""
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"description": f"A {kind.__name__}.", "content": {media_type: {"schema": schema}}}

"""Request bodies: read within a bound, decode strictly, describe for OpenAPI.

Content types are not looked at: `curl -d` says form data and means JSON, as Flink's users do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError

from api.errors import BodyTooLargeError
from api.schemas import RequestBody
from barriers import codec
from statebackends.errors import InvalidConfigError

Record = TypeVar("Record", bound=msgspec.Struct)
Model = TypeVar("Model", bound=RequestBody)

REFERENCE = "#/components/schemas/{name}"


async def read_body(request: Request) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to exceed the service's bound."""
    size_max: int = request.app.state.settings.body_bytes_max
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > size_max:
        raise _too_large(size_max)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > size_max:
            raise _too_large(size_max)
        chunks.append(chunk)
    return b"".join(chunks) if len(chunks) != 1 else chunks[0]


def _too_large(size_max: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request's body is larger than {size_max} bytes", size_max=size_max)


async def read_record(request: Request, kind: type[Record]) -> Record:
    """The body as a record of the worker protocol. Raises ProtocolError naming the path of the first wrong field."""
    return codec.decode(await read_body(request), kind)


def parse_model(body: bytes, model: type[Model]) -> Model:
    """A request body of Flink's dialect; an empty body stands for `{}`. Raises InvalidConfigError."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}" for problem in error.errors()
        )
        raise InvalidConfigError(
            f"the request did not match the expected format {model.__name__}: {problems}", expected=model.__name__
        ) from error


def body_of(model: type[Model]) -> Callable[[Request], Coroutine[Any, Any, Model]]:
    """A dependency that reads and parses a body of Flink's dialect."""

    async def read(request: Request) -> Model:
        return parse_model(await read_body(request), model)

    return read


def describe_model(model: type[RequestBody], *, required: bool = False) -> dict[str, Any]:
    """OpenAPI's description of a body of Flink's dialect."""
    return _described(model.model_json_schema(by_alias=True), required=required)


def describe_record(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """OpenAPI's description of a body of the worker protocol; the record itself is among the components."""
    return _described({"$ref": REFERENCE.format(name=kind.__name__)}, required=True)


def _described(schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def describe_answer(kind: type[msgspec.Struct], media_type: str = "application/json") -> dict[str, Any]:
    """OpenAPI's description of an answer of the worker protocol."""
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"description": f"A {kind.__name__}.", "content": {media_type: {"schema": schema}}}

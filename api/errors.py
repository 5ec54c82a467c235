"""Errors on the wire: a HoldfastError becomes a status, a Flink-shaped body and headers, and is rebuilt by the client.

The body is `{"errors": [...]}` and nothing else, as Flink's clients expect; the class and its fields travel in headers. The kind of
error alone decides the status; the route does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.barriers.codec import ERROR_HEADER, FIELDS_HEADER, decode_fields
from holdfast.statebackends.errors import (
    ERROR_CLASSES,
    AccessDeniedError,
    AuthenticationError,
    CorruptStateError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    NotLeaderError,
    ObjectMissingError,
    ProtocolError,
    RecoveringError,
    RestoreError,
    SnapshotLabelledError,
    StorageUnavailableError,
    TooManyRequestsError,
    TransportSecurityError,
)

FIELDS_BYTES_MAX = 4_096
"""Bytes of the fields header; larger fields are left out, largest first (HTTP clients refuse long header lines)."""

MESSAGE_CHARACTERS_MAX = 16_384
"""Characters of one message; a user's exception may have any text."""


RECOVERING_RETRY_S = 1
"""Seconds until the next request to a coordinator that has just begun."""


class BodyTooLargeError(InvalidConfigError):
    """A request's body is larger than the service accepts."""

    size_max: int


class HeadTooLargeError(InvalidConfigError):
    """The head of a request is larger than the service accepts."""

    size_max: int


class UnsupportedMediaTypeError(InvalidConfigError):
    """A request's body has a content type that its route does not take."""

    content_type: str


class MethodNotAllowedError(InvalidConfigError):
    """The path is known, and has nothing by this method."""

    method: str


class BusyError(StorageUnavailableError):
    """The service holds as many bytes as its limit allows: ask again."""

    size: int
    """Bytes of the request."""


class NoCounterpartError(NotFoundError):
    """Flink's dialect has this, and Holdfast has nothing of the kind."""

    name: str | None = None


class ForeignOriginError(HoldfastError):
    """A browser was made to ask for a change by a page that is none of this service."""


class FlinkUiError(InvalidConfigError):
    """The jar of `--flink-ui` has no UI, or none that can be served."""

    path: str | None = None


class ConnectionLostError(StorageUnavailableError):
    """The coordinator can't be reached."""

    url: str | None = None


class RemoteError(HoldfastError):
    """The coordinator failed in a way that has no class of its own."""

    status: int


_STATUS: tuple[tuple[type[HoldfastError], int], ...] = (
    (AuthenticationError, 401),
    (AccessDeniedError, 403),
    (ForeignOriginError, 403),
    (NotFoundError, 404),
    (ObjectMissingError, 404),
    (MethodNotAllowedError, 405),
    (BodyTooLargeError, 413),
    (UnsupportedMediaTypeError, 415),
    (TransportSecurityError, 426),
    (FencedError, 409),
    (JobExistsError, 409),
    (TooManyRequestsError, 429),
    (HeadTooLargeError, 431),
    (SnapshotLabelledError, 409),
    (StorageUnavailableError, 503),
    (InvalidConfigError, 400),
    (RestoreError, 400),
    (CorruptStateError, 400),
    (ProtocolError, 400),
)
"""Status by class; the first match counts, any other class is 500."""

_OWN = (
    BodyTooLargeError,
    BusyError,
    ConnectionLostError,
    FlinkUiError,
    ForeignOriginError,
    HeadTooLargeError,
    MethodNotAllowedError,
    NoCounterpartError,
    RemoteError,
    UnsupportedMediaTypeError,
)

_KINDS: dict[str, type[HoldfastError]] = {
    **ERROR_CLASSES,
    **{kind.__name__: kind for kind in _OWN},
}


@dataclass(frozen=True, slots=True)
class WireError:
    """One error as an HTTP response."""

    status: int
    body: bytes
    headers: dict[str, str]


def status_of(error: HoldfastError) -> int:
    """HTTP status of a typed error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(*messages: str) -> bytes:
    """Flink's error body."""
    return json.dumps({"errors": [message[:MESSAGE_CHARACTERS_MAX] for message in messages]}).encode()


def encode_error(error: HoldfastError) -> WireError:
    """Encode an error as a response."""
    headers = {ERROR_HEADER: type(error).__name__, "Content-Type": "application/json"}
    if error.fields:
        headers[FIELDS_HEADER] = _encode_fields(error.fields)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RecoveringError):
        headers["Retry-After"] = str(RECOVERING_RETRY_S)
    if isinstance(error, TooManyRequestsError):
        headers["Retry-After"] = str(max(1, -(-int(error.fields.get("retry_after_ms", 0)) // 1000)))
    return WireError(status_of(error), error_body(error.message), headers)


def _encode_fields(fields: Mapping[str, Any]) -> str:
    texts = {name: json.dumps(value, default=str) for name, value in sorted(fields.items())}
    while sum(len(name) + len(text) + 6 for name, text in texts.items()) > FIELDS_BYTES_MAX:
        del texts[max(texts, key=lambda name: len(texts[name]))]
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}"


def decode_error(status: int, body: bytes, headers: Mapping[str, str]) -> HoldfastError:
    """Decode the error of a response; a RemoteError when the peer named no class that is known here."""
    message = _message_of(body) or f"the coordinator answered with status {status}"
    fields = decode_fields(headers.get(FIELDS_HEADER))
    kind = _KINDS.get(headers.get(ERROR_HEADER, ""))
    if kind is not None:
        return kind.of(message, fields)
    if status == 401:
        return AuthenticationError.of(message, fields)
    if status == 404:
        return NotFoundError.of(message, fields)
    if status == 503:
        return NotLeaderError.of(message, fields)
    if 400 <= status < 500 and status != 409:
        return InvalidConfigError.of(message, fields)
    return RemoteError.of(message, {**fields, "status": status})


def _message_of(body: bytes) -> str:
    try:
        errors = json.loads(body)["errors"]
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace").strip()
    return "; ".join(str(error) for error in errors) if isinstance(errors, list) else str(errors)

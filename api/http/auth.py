"""Access to the service: bearer tokens, where a token is stored, and which paths need none.

It decides access before any route runs; it knows nothing of jobs. Tokens are compared in constant time and never logged."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.api.docs.page import OPEN_PATHS as DOCUMENTATION_PATHS
from holdfast.api.errors import encode_error
from holdfast.api.http.connection_budget import CallerKind
from holdfast.api.http.protocol import prove
from holdfast.statebackends.errors import AuthenticationError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import TOKEN_FILE

log = logging.getLogger("holdfast.auth")

OPEN_PATHS = DOCUMENTATION_PATHS | {"/healthz", "/readyz"}
"""Paths that need no token; they reveal nothing about jobs."""

_TOKEN_CHARACTERS_MIN = 16
_TOKEN_CHARACTERS_MAX = 4_096


def is_loopback(host: str) -> bool:
    """Whether a listener on this host can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token: str | None) -> None:
    """Raise InvalidConfigError for a listener beyond loopback without a token."""
    if token is None and not is_loopback(host):
        raise InvalidConfigError(
            f"refusing to listen on {host} without a token: it can be reached from other machines; "
            "drop --no-token, or listen on 127.0.0.1",
            setting="token",
        )


def read_token(path: Path) -> str:
    """Read the token in a file, stripped. Raises InvalidConfigError if the file is missing, unreadable or no token."""
    try:
        text = path.read_text("utf-8").strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"can't read the token file {path}: {error}", path=str(path)) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("token file %s can be read by other users: chmod 600 it", path)
    return check_token(text, origin=str(path))


def check_token(token: str, *, origin: str) -> str:
    """Return the token if it fits into a header and is long enough. Raises InvalidConfigError."""
    if not _TOKEN_CHARACTERS_MIN <= len(token) <= _TOKEN_CHARACTERS_MAX:
        raise InvalidConfigError(f"the token in {origin} has {len(token)} characters, needs {_TOKEN_CHARACTERS_MIN} or more")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfigError(f"the token in {origin} has characters that are not allowed in a header")
    return token


def load_or_create_token(state_dir: Path) -> str:
    """The state directory's token, drawn at its first use; it survives restarts. Two concurrent starts agree on one token."""
    path = state_dir / TOKEN_FILE
    if not path.exists():
        _create_token(path)
    return read_token(path)


def _create_token(path: Path) -> None:
    temporary = path.with_name(f"{TOKEN_FILE}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_urlsafe(32).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another start was first: its token counts
        finally:
            temporary.unlink()
    except OSError as error:
        raise StorageUnavailableError(f"can't write the token file {path}: {error}", path=str(path)) from error


class BearerAuth:
    """ASGI middleware: 401 unless a request carries the token or asks for an open path; decided before any byte of its body is
    read.

    `token=None` lets loopback callers in without one, if they name a loopback host: a web page that rebinds its name to 127.0.0.1
    still sends its own name. A page that posts to 127.0.0.1 by that name sends its own origin."""

    def __init__(self, app: ASGIApp, *, token: str | None, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._expected = token.encode() if token is not None else None
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or self._allowed(scope):
            if not is_open:
                prove(scope, CallerKind.CLIENT)
            await self._app(scope, receive, send)
            return
        wire = encode_error(AuthenticationError("missing or wrong bearer token"))
        headers = [(name.lower().encode(), value.encode()) for name, value in wire.headers.items()]
        headers.append((b"content-length", str(len(wire.body)).encode()))
        await send({"type": "http.response.start", "status": wire.status, "headers": headers})
        await send({"type": "http.response.body", "body": wire.body})

    def _allowed(self, scope: Scope) -> bool:
        if self._expected is None:
            return is_loopback(_host_of(_header(scope, b"host"))) and _from_here(_header(scope, b"origin"))
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._expected)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _from_here(origin: bytes) -> bool:
    """Whether no browser sent it, or a page of this machine did. Browsers add an origin to every request that may change
    something."""
    return not origin or is_loopback(_host_of(origin.partition(b"://")[2]))


def _host_of(header: bytes) -> str:
    text = header.decode("latin-1")
    return text[: text.rfind("]") + 1] if text.startswith("[") else text.partition(":")[0]

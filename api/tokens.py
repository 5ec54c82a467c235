"""The token of a service: where it is stored, what may be one, and when a listener needs one. A client imports it, too.

Tokens are never logged."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import stat
from pathlib import Path

from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import TOKEN_FILE

log = logging.getLogger("holdfast.auth")

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


def check_cleartext(host: str, *, is_encrypted: bool, insecure_http: bool) -> None:
    """Raise InvalidConfigError for a listener beyond loopback without TLS, unless somebody said that it may be."""
    if not is_encrypted and not insecure_http and not is_loopback(host):
        raise InvalidConfigError(
            f"refusing to listen on {host} in clear text: tokens could be read on the way; drop --tls off (TLS is the default), "
            "give --tls-cert and --tls-key, or say --insecure-http where the network itself is encrypted",
            setting="tls",
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

"""The file of webhooks (`serve --webhooks FILE`): which events go where, and by which secret they are signed.

    [[webhook]]
    name = "pager"
    url = "https://hooks.example.com/holdfast"
    secret_file = "/etc/holdfast/pager.secret"     # whsec_..., or secret = "whsec_..." here: then the file is for its owner alone
    kinds = ["failure", "state"]                   # all if left out
    jobs = ["flights"]                             # names or ids; all if left out
    ca_file = "/etc/ssl/own-ca.pem"                # of a receiver with a certificate of your own

Paths in it are relative to the file. It is judged as a whole at the start; nothing is sent by one that has a fault."""

from __future__ import annotations

import base64
import binascii
import re
import ssl
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3

from holdfast.api.events.cloudevents import KINDS
from holdfast.statebackends.errors import InvalidConfigError

WEBHOOKS_MAX = 16
"""Each has a thread and a connection."""
FILE_BYTES_MAX = 64 * 1024
URL_CHARACTERS_MAX = 2_048
NAMES_MAX = 1_000
SECRET_PREFIX = "whsec_"
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64
"""Bytes of a secret. Source: Standard Webhooks, signature scheme."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_KNOWN = frozenset({"name", "url", "secret", "secret_file", "kinds", "jobs", "insecure_http", "ca_file"})


@dataclass(frozen=True, slots=True)
class Webhook:
    """One receiver of events."""

    name: str
    url: str
    key: bytes
    """The secret's bytes; never shown."""
    kinds: frozenset[str] = frozenset()
    """Empty: all."""
    jobs: frozenset[str] = frozenset()
    """Names or ids; empty: all."""
    ca_file: str | None = None
    """Certificates that the receiver's is trusted by; None: the system's."""

    def __repr__(self) -> str:
        return f"Webhook({self.name!r})"

    def wants(self, kind: str, job_id: str, job_name: str) -> bool:
        return (not self.kinds or kind in self.kinds) and (not self.jobs or job_id in self.jobs or job_name in self.jobs)

    @property
    def secret_texts(self) -> tuple[str, ...]:
        """What logs must not show."""
        return (base64.b64encode(self.key).decode(),)


def read_webhooks(path: Path) -> tuple[Webhook, ...]:
    """Raises InvalidConfigError naming the webhook and the field that is wrong; no message has a secret."""
    text, is_private = _read(path, partial(_wrong, path))
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(path, f"is no TOML: {error}") from error
    tables = found.pop("webhook", [])
    if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _wrong(path, "has [[webhook]] tables, and nothing else")
    if len(tables) > WEBHOOKS_MAX:
        raise _wrong(path, f"has {len(tables)} webhooks, at most {WEBHOOKS_MAX} are allowed")
    webhooks = tuple(_webhook(path, table, is_private=is_private) for table in tables)
    if len({webhook.name for webhook in webhooks}) < len(webhooks):
        raise _wrong(path, "has two webhooks of one name: how far each has got is kept by its name")
    return webhooks


def _read(path: Path, wrong: Callable[[str], InvalidConfigError]) -> tuple[str, bool]:
    """Text, and whether it is for its owner and its group alone. `wrong`: the error by what the file is not."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
            mode = path.stat().st_mode
        if len(content) > FILE_BYTES_MAX:
            raise wrong(f"is larger than {FILE_BYTES_MAX} bytes")
        return content.decode("utf-8"), not mode & (stat.S_IWGRP | stat.S_IRWXO)  # Kubernetes gives a pod's group its secrets
    except OSError as error:
        raise wrong(f"can't be read: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, or a path that no file can have
        raise wrong(f"can't be read: {error}") from error


def _webhook(path: Path, table: Mapping[str, Any], *, is_private: bool) -> Webhook:
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(path, "has a webhook whose name is not 1 to 40 lower-case letters, digits and hyphens")
    if unknown := sorted(set(table) - _KNOWN):
        raise _wrong(path, f"webhook {name} has {unknown[0][:40]!r}, which does not exist")
    url = _url(path, name, table)
    ca_file = _ca_file(path, name, table)
    kinds = _names(path, name, table, "kinds")
    if unknown := sorted(kinds - set(KINDS)):
        raise _wrong(path, f"webhook {name}: there is no kind {unknown[0][:40]!r}; there are {', '.join(KINDS)}")
    return Webhook(name, url, _key(path, name, table, is_private=is_private), kinds, _names(path, name, table, "jobs"), ca_file)


def _url(path: Path, name: str, table: Mapping[str, Any]) -> str:
    url, insecure = table.get("url"), table.get("insecure_http", False)
    if not isinstance(url, str) or len(url) > URL_CHARACTERS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise _wrong(path, f"webhook {name}: url is missing, or no URL")
    try:
        parts = urlsplit(url)
        port = parts.port
        urllib3.util.parse_url(url)  # what sends is stricter: a host like `%HOST%` would end the service
    except ValueError as error:
        raise _wrong(path, f"webhook {name}: url is no URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _wrong(path, f"webhook {name}: url is not https://host/...")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise _wrong(path, f"webhook {name}: url has a user, a password or a fragment: events are signed, and need none")
    if parts.scheme == "http" and insecure is not True:
        raise _wrong(path, f"webhook {name}: url is http, which anybody on the way reads: use https, or insecure_http = true")
    return url


def _ca_file(path: Path, name: str, table: Mapping[str, Any]) -> str | None:
    """Where the certificates are that a receiver is trusted by. They are read here once: each try to send would fail otherwise."""
    given = table.get("ca_file")
    if given is None:
        return None
    if not isinstance(given, str):
        raise _wrong(path, f"webhook {name}: ca_file is no path")
    place = (path.parent / given).absolute()
    try:
        ssl.create_default_context(cafile=str(place))
    except (OSError, ValueError) as error:  # those of SSL are of the first kind, a path that no file can have of the second
        reason = getattr(error, "strerror", None) or error
        raise _wrong(path, f"webhook {name}: its ca_file {place} can't be used: {reason}") from error
    return str(place)


def _names(path: Path, name: str, table: Mapping[str, Any], field: str) -> frozenset[str]:
    given = table.get(field, [])
    if not isinstance(given, list) or len(given) > NAMES_MAX or not all(isinstance(each, str) and each for each in given):
        raise _wrong(path, f"webhook {name}: {field} is no list of up to {NAMES_MAX} texts")
    return frozenset(given)


def _key(path: Path, name: str, table: Mapping[str, Any], *, is_private: bool) -> bytes:
    secret, file = table.get("secret"), table.get("secret_file")
    if (secret is None) == (file is None):
        raise _wrong(path, f"webhook {name}: give secret_file, or secret")
    if file is not None:
        if not isinstance(file, str):
            raise _wrong(path, f"webhook {name}: secret_file is no path")
        secret_path = (path.parent / file).absolute()
        secret, is_private = _read(secret_path, lambda what: _wrong(path, f"webhook {name}: its secret_file {secret_path} {what}"))
    if not is_private:
        raise _wrong(path, f"webhook {name}: other users can read its secret: chmod 600 the file that has it")
    if not isinstance(secret, str) or not secret.strip().startswith(SECRET_PREFIX):
        raise _wrong(path, f"webhook {name}: its secret does not begin with {SECRET_PREFIX}")
    try:
        key = base64.b64decode(secret.strip().removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise _wrong(path, f"webhook {name}: behind {SECRET_PREFIX} its secret is no base64") from error
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise _wrong(path, f"webhook {name}: its secret has {len(key)} bytes, needs {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}")
    return key


def _wrong(path: Path, what: str) -> InvalidConfigError:
    return InvalidConfigError(f"the file of webhooks {path} {what}", setting="webhooks", path=str(path))

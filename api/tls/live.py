"""SHELL: the TLS of a listening server, which follows its certificate: files that change, or one that is made anew before its end.

Connections that are open stay as they are; new ones get the newest pair that was good. A new pair that is broken is logged once,
and the old one stays."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key

from holdfast.api.tls.authority import MEMBER_DAYS, Authority, Pair, issue_pair
from holdfast.api.tls.files import expires_at, read_pair
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError

log = logging.getLogger("holdfast.tls")

REFRESH_S = 2.0
"""Seconds between two looks at the files."""
SET_BACK = datetime.timedelta(hours=1)
"""Less is an ordinary correction of a clock, and certificates are backdated by days."""
WARN_DAYS = 14
"""A certificate of files that ends sooner is warned of, once a day."""


class PairSource(Protocol):
    """Where a server's certificate comes from."""

    def signature(self, now: datetime.datetime) -> object:
        """Changes when there may be a new pair. Reads no more than what is cheap."""

    def read(self, now: datetime.datetime) -> Pair:
        """Raises HoldfastError."""


class FilePair:
    """Two files of the user's."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = (certificate, key)

    def signature(self, now: datetime.datetime) -> object:
        return tuple(_facts(path) for path in self._paths)

    def read(self, now: datetime.datetime) -> Pair:
        return read_pair(*self._paths, now)


def _facts(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class OwnPair:
    """A pair of the state directory's authority, made anew at half of its time, and when the clock was set back: one that was made
    by a clock some days ahead is refused by everybody until then."""

    def __init__(self, authority: Authority, hosts: tuple[str, ...]) -> None:
        self._authority = authority
        self._hosts = hosts
        self._made_at: datetime.datetime | None = None
        self._set_back = 0
        """How often the clock was found to be before the time at which the newest pair was made."""

    def signature(self, now: datetime.datetime) -> object:
        if self._made_at is not None and now < self._made_at - SET_BACK:
            self._set_back, self._made_at = self._set_back + 1, now
        return self._set_back, now.toordinal() // (MEMBER_DAYS // 2)

    def read(self, now: datetime.datetime) -> Pair:
        pair = issue_pair(self._authority, self._hosts, now)
        self._made_at = now
        return pair


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class LiveContext:
    """The server side of TLS, as it is now. `context` may be read from any thread."""

    def __init__(self, source: PairSource, *, now: Callable[[], datetime.datetime] = _now) -> None:
        """Raises InvalidConfigError for a pair that can't be used."""
        self._source = source
        self._now = now
        self._signature = source.signature(now())
        self.pair = source.read(now())
        self.context = server_context(self.pair)
        self._refused: object = None
        """Signature of the newest pair that can't be used, as far as it is one."""
        self._warned: datetime.date | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def refresh(self) -> bool:
        """Take a new pair, if there is one; whether it did. One that is broken is logged, once, and tried again each time: what is
        wrong with it may end without a change of the files, such as whose they are, or the clock."""
        now = self._now()
        self._warn_of_end(now)
        signature = self._source.signature(now)
        if signature == self._signature:
            return False
        try:
            pair = self._source.read(now)
            context = server_context(pair)
        except (HoldfastError, OSError) as error:
            if signature != self._refused:
                log.error("the new certificate is not used, the one before stays: %s", error)
            self._refused = signature
            return False
        self._signature, self._refused, self.pair, self.context = signature, None, pair, context
        log.info("new connections get a new certificate, valid until %s", expires_at(pair).date())
        return True

    def _warn_of_end(self, now: datetime.datetime) -> None:
        if now.date() == self._warned:
            return
        self._warned = now.date()
        end = expires_at(self.pair)
        if end - now < datetime.timedelta(days=WARN_DAYS):
            log.warning("the certificate ends at %s UTC: clients refuse it from then on", f"{end:%Y-%m-%d %H:%M}")

    def start(self) -> None:
        """Follow the source, in a thread."""
        self._thread = threading.Thread(target=self._follow, name="holdfast-tls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; waits for nothing but a look at the files."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(REFRESH_S)

    def _follow(self) -> None:
        while not self._stopping.wait(REFRESH_S):
            try:
                self.refresh()
            except Exception:  # nothing else starts this thread anew
                log.exception("the certificate can't be looked at")


def server_context(pair: Pair) -> ssl.SSLContext:
    """TLS 1.2 or later with a pair. Raises InvalidConfigError for one that OpenSSL refuses, such as too short a key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    phrase = secrets.token_bytes(24).hex().encode()
    key = load_pem_private_key(pair.key_pem, None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(phrase))
    with tempfile.NamedTemporaryFile(prefix="holdfast-tls-") as file:  # 0600; OpenSSL takes a file alone, so none holds an open key
        file.write(locked + b"\n" + pair.certificate_pem)
        file.flush()
        try:
            context.load_cert_chain(file.name, password=phrase)
        except ssl.SSLError as error:
            text = f"the certificate can't be used: {error.reason or error}"
            raise InvalidConfigError(text, setting="tls_cert") from error
    return context

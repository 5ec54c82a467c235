"""The coordinator from here and from executors, and certificates. Bounded: a few requests, each with a time."""

from __future__ import annotations

import email.utils
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
from cryptography import x509

from holdfast.api.doctor.findings import Finding, fault, ok, skipped, warning
from holdfast.api.doctor.storage import skew
from holdfast.operators.worker.trust import CA_BYTES_MAX, client_context
from holdfast.statebackends.errors import CorruptStateError, PermissionDeniedError
from holdfast.statebackends.layout import AUTHORITY_FILE, CA_FILE
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import StatFile, Storage, run_flow

TIMEOUT_S = 5.0
EXPIRY_WARNING_S = 30 * 24 * 3600
EXPIRY_SHARE = 3
"""A certificate that holds for less than 90 days is warned of in the last third of its time: those of `--tls auto` hold for 30, and
are made anew at half of that."""
_ROUNDS_MAX = 20
_RENEW = "renew it, for the host names of the coordinator"
_RENEW_SHOWN = f"{_RENEW}; one of `--tls auto` is made anew by the coordinator itself: see its log, and restart it"
_REPLACE = "replace it before, and give the new one to clients: docs/security.md, TLS"


def coordinator(url: str, token: str | None, authorities: str | None = None) -> Iterator[Finding]:
    """Whether it answers, is ready, knows the token, and has the same time. `authorities`: certificates to trust, PEM; None: those
    of the system."""
    http = urllib3.PoolManager(retries=False, timeout=TIMEOUT_S, ssl_context=client_context(authorities))
    try:
        answer = http.request("GET", f"{url}/healthz")
    except urllib3.exceptions.SSLError as error:
        why, fix = _reason(error), "give --ca, the state directory's _ca.pem; or have its certificate issued for the URL's host"
        if "expired" in why or "not yet valid" in why:
            fix = f"compare this host's clock with the coordinator's; then {_RENEW_SHOWN}"
        yield fault("coordinator", f"the certificate of {url} is not accepted: {why}", fix)
        return
    except urllib3.exceptions.HTTPError as error:
        fix = "compare host and port with `serve`'s own line and --advertised-host; look at firewalls and NetworkPolicies between"
        yield fault("coordinator", f"{url} does not answer: {_reason(error)}", fix)
        return
    if answer.status != 200:
        text = f"{url}/healthz is {answer.status}: something else answers there"
        yield fault("coordinator", text, "correct the URL, or the proxy")
        return
    yield ok("coordinator", f"{url} answers")
    if url.startswith("https://"):
        yield _shown(url, authorities)
    date = email.utils.parsedate_to_datetime(answer.headers["Date"]) if "Date" in answer.headers else None
    if date is not None:
        off_s = max(date.timestamp() - time.time(), time.time() - date.timestamp() - 1.0, 0.0)
        yield skew("coordinator clock", int(off_s * 1000), "the clock of the coordinator")
    if http.request("GET", f"{url}/readyz").status != 200:
        fix = "docs/runbook.md: the coordinator is not ready"
        yield warning("ready", "it has not recovered all jobs of its state directory", fix)
    if token is None:
        return
    status = http.request("GET", f"{url}/v1/overview", headers={"Authorization": f"Bearer {token}"}).status
    if status == 401:
        yield fault("token", "the coordinator does not know it", "give --token-file, or HOLDFAST_TOKEN: `holdfast token list`")
    else:
        yield ok("token", "the coordinator knows it")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)[:200]


def _shown(url: str, authorities: str | None) -> Finding:
    """How long the certificate holds that a coordinator shows, and that this host accepts."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    try:
        with (
            socket.create_connection((host, parts.port or 443), TIMEOUT_S) as opened,
            client_context(authorities).wrap_socket(opened, server_hostname=host) as secured,
        ):
            shown: dict[str, Any] = secured.getpeercert() or {}
    except OSError as error:
        return warning("certificate", f"{url} did not show it a second time: {error}", "ask again")
    begins_s, ends_s = (ssl.cert_time_to_seconds(str(shown[name])) for name in ("notBefore", "notAfter"))
    return _lasts("certificate", f"the one that {url} shows", begins_s, ends_s, _RENEW_SHOWN)


def authority(trusted: str | None, state_directory: str | None) -> Iterator[Finding]:
    """How long clients have an authority to trust. `trusted`: PEM, what they trust; None: what the state directory has for them."""
    text, origin = trusted, "the authority that clients here trust"
    if text is None and state_directory is not None:
        try:
            path, text = _stored_authority(open_storage(state_directory))
        except CorruptStateError as error:
            yield fault("authority", error.message, _REPLACE)
            return
        origin = f"{path} of the state directory"
    if text is None:
        yield skipped("authority", "none is known here: clients trust those of their system, or the coordinator has no TLS")
        return
    try:
        found = x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        yield fault("authority", f"{origin} holds no certificate in PEM: {error}", _REPLACE)
        return
    last = max(found, key=lambda each: each.not_valid_after_utc)  # of several, as while one is replaced
    yield _lasts("authority", origin, last.not_valid_before_utc.timestamp(), last.not_valid_after_utc.timestamp(), _REPLACE)


def _stored_authority(storage: Storage) -> tuple[str, str | None]:
    """Where a state directory has its authority, and the certificate, PEM: the copy for clients, else the original, which only the
    coordinator's user may read where it is a file. Raises CorruptStateError for one that is too long."""
    for path in (CA_FILE, AUTHORITY_FILE):
        try:
            if storage.execute(StatFile(path)) is not None:
                return path, run_flow(read_whole(path, CA_BYTES_MAX), storage).decode("ascii", "replace")
        except PermissionDeniedError:
            continue
    return "", None


def _lasts(check: str, what: str, begins_s: float, ends_s: float, fix: str) -> Finding:
    """A finding about a certificate of this time."""
    now_s = time.time()
    first, last = (datetime.fromtimestamp(each_s, UTC).date().isoformat() for each_s in (begins_s, ends_s))
    if not begins_s <= now_s < ends_s:
        held = "expired on" if now_s >= ends_s else "is not valid before"
        return fault(check, f"{what} {held} {last if now_s >= ends_s else first} by the clock of this host", fix)
    if ends_s - now_s < min(EXPIRY_WARNING_S, (ends_s - begins_s) / EXPIRY_SHARE):
        return warning(check, f"{what} expires on {last}", fix)
    return ok(check, f"{what} holds until {last}")


def certificates(certificate: Path, key: Path, authority: Path | None) -> Iterator[Finding]:
    """Whether a certificate is that of its key, is trusted by its authority, and how long it holds."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        fix = "both must be PEM, of one another and without a password: openssl x509 -noout -pubkey, openssl pkey -pubout"
        yield fault("certificate", f"{certificate} and {key} can't be used together: {error}", fix)
        return
    try:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may be the only one that is trusted
        client.load_verify_locations(authority or certificate)
        shown = _shake_hands(server, client)
    except (OSError, ssl.SSLError) as error:
        why = str(getattr(error, "verify_message", "") or error)
        fix = _RENEW if "expired" in why else "have it issued anew, by the authority that workers and clients are given"
        yield fault("certificate", f"{certificate} is not accepted: {why}", fix)
        return
    yield _expiry(certificate, str(shown.get("notAfter", "")), time.time())
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    if names:
        yield ok("certificate names", ", ".join(map(str, names[:10])))
    else:
        text = f"{certificate} has no subjectAltName, without which no client accepts a host"
        yield fault("certificate names", text, "have it issued with the host names of the coordinator")


def _no_password() -> str:
    raise ValueError("the key has a password")


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What the client sees of the server's certificate. No socket is opened. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    done = [False, False]
    for _ in range(_ROUNDS_MAX):
        for index, end in enumerate(ends):
            if not done[index]:
                try:
                    end.do_handshake()
                    done[index] = True
                except ssl.SSLWantReadError:
                    pass
        if all(done):
            return dict(ends[0].getpeercert() or {})
    raise ssl.SSLError("the handshake does not end")


def _expiry(certificate: Path, text: str, now_s: float) -> Finding:
    ends_s = ssl.cert_time_to_seconds(text)
    day = datetime.fromtimestamp(ends_s, UTC).date().isoformat()
    if ends_s - now_s < EXPIRY_WARNING_S:
        return warning("certificate", f"{certificate} expires on {day}", _RENEW)
    return ok("certificate", f"{certificate} belongs to its key, and holds until {day}")

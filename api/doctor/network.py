"""The coordinator from here and from executors, and certificates. Bounded: a few requests, each with a time."""

from __future__ import annotations

import email.utils
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3

from holdfast.api.doctor.findings import Finding, fault, ok, warning
from holdfast.api.doctor.storage import skew
from holdfast.operators.worker.trust import client_context

TIMEOUT_S = 5.0
EXPIRY_WARNING_S = 30 * 24 * 3600
_ROUNDS_MAX = 20
_RENEW = "renew it, for the host names of the coordinator"


def coordinator(url: str, token: str | None, authorities: str | None = None) -> Iterator[Finding]:
    """Whether it answers, is ready, knows the token, and has the same time. `authorities`: certificates to trust, PEM; None: those
    of the system."""
    http = urllib3.PoolManager(retries=False, timeout=TIMEOUT_S, ssl_context=client_context(authorities))
    try:
        answer = http.request("GET", f"{url}/healthz")
    except urllib3.exceptions.SSLError as error:
        fix = "give --ca, the state directory's _ca.pem; or have its certificate issued for the host that the URL names"
        yield fault("coordinator", f"the certificate of {url} is not accepted: {_reason(error)}", fix)
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

"""SHELL: HTTP between members: the only module in which one member calls another, so that one place says how.

It sends what it is given and judges nothing but the answer to a probe."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from holdfast.api.http.cutoff import cutoff
from holdfast.operators.worker.leader_retrieval import is_safe_step
from holdfast.operators.worker.trust import client_context
from holdfast.statebackends.errors import NotLeaderError

MEMBER_HEADER = "X-Holdfast-Member"
"""In answers to `GET /leader` and `/standby`: the id of the process, by which a probe knows that no other listens there now."""

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 60.0
"""Silence of the active member after which a forwarded request counts as lost: longer than any of its own deadlines."""
CONNECTIONS_MAX = 64
"""Idle connections kept to one member."""


class Peers:
    """Connections to the other members. Thread-safe."""

    def __init__(self, url: str, authorities: str | None = None) -> None:
        """`url`: of this member; a caller's token goes from here to no less safe a place. `authorities`: certificates by which the
        others are known, PEM; None: those of the system."""
        self._url = url
        self._context = client_context(authorities)
        self._pool = urllib3.PoolManager(num_pools=8, maxsize=CONNECTIONS_MAX, retries=False, ssl_context=self._context)

    def is_active(self, url: str, member: str, timeout_s: float) -> bool:
        """Probe: whether the process at a URL is this member, and says so within `timeout_s` that it is the active one. No token is
        sent, and nothing but the head of the answer is read: any program may listen where a dead member did, and one that dribbles,
        or tells without end, must not keep the others from taking over."""
        try:
            connection = self._connection(url, timeout_s)
            with cutoff(connection, timeout_s) as late:
                connection.connect()
                if late.is_set():  # the name took as long: there was nothing to cut yet
                    return False
                connection.request("GET", "/leader", preload_content=False)
                answer = connection.getresponse()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, ValueError, OSError):
            return False
        return answer.status == 200 and answer.headers.get(MEMBER_HEADER) == member

    def _connection(self, url: str, timeout_s: float) -> HTTPConnection:
        parts = urllib3.util.parse_url(url)
        host = (parts.host or "").strip("[]")
        if parts.scheme != "https":
            return HTTPConnection(host, parts.port or 80, timeout=timeout_s)
        return HTTPSConnection(
            host, parts.port or 443, timeout=timeout_s, ssl_context=self._context, cert_reqs=ssl.CERT_REQUIRED
        )

    def forward(self, url: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> urllib3.BaseHTTPResponse:
        """Send a caller's request to the active member; the answer's body is still to be read. `target`: path and query, as the
        caller sent them. Raises NotLeaderError where the caller's token must not go, urllib3's HTTPError if there is no answer."""
        if not is_safe_step(self._url, url):
            text = f"the active member says that it is at {url}, where no token is sent from {self._url}: members need addresses"
            raise NotLeaderError(f"{text} that all of them reach (--advertised-host), and the same scheme", url=url)
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        return self._pool.connection_from_url(url).urlopen(  # not of one URL: a target like `@host/` would make it another host's
            method,
            target,
            body=body,
            headers=headers,
            timeout=timeout,
            preload_content=False,
            decode_content=False,
            redirect=False,
            retries=False,
        )

    def close(self) -> None:
        self._pool.clear()

"""SHELL: posts one event to one webhook, within a time that nothing extends, and says what came of it."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from holdfast.api.events.addresses import ForbiddenAddressError, connect
from holdfast.api.events.cloudevents import MEDIA_TYPE, cloud_event, encode_event
from holdfast.api.events.delivery import Outcome, outcome_of, sign
from holdfast.api.events.follower import Told
from holdfast.api.events.webhook_file import Webhook
from holdfast.api.http.cutoff import cutoff
from holdfast.api.version import VERSION

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
"""Silence of a receiver."""
TOTAL_TIMEOUT_S = 20.0
"""Of one try, however the receiver dribbles."""
ANSWER_BYTES_MAX = 4_096
"""Bytes of an answer that are read; the rest is dropped with its connection."""


class _CheckedHTTP(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return connect(self._dns_host, self.port or 80, CONNECT_TIMEOUT_S)


class _CheckedHTTPS(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return connect(self._dns_host, self.port or 443, CONNECT_TIMEOUT_S)


class Sender:
    """One webhook's connection. For one thread."""

    def __init__(self, webhook: Webhook) -> None:
        self._webhook = webhook
        parts = urllib3.util.parse_url(webhook.url)
        self._path = parts.request_uri
        self._is_tls, self._host = parts.scheme == "https", (parts.host or "").strip("[]")
        self._port = parts.port or (443 if self._is_tls else 80)

    def send(self, told: Told) -> tuple[Outcome, str]:
        """Outcome, and the reason for people."""
        body, now_s = encode_event(told), int(time.time())
        event = cloud_event(told)
        message_id = f"{told.job_id}-{event['id']}"
        headers = {
            "content-type": MEDIA_TYPE,
            "user-agent": f"holdfast/{VERSION}",
            "webhook-id": message_id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": sign(self._webhook.key, message_id, now_s, body),
        }
        try:
            return self._post(body, headers)
        except ForbiddenAddressError as error:
            return Outcome.FORBIDDEN_ADDRESS, error.message
        except (TimeoutError, urllib3.exceptions.TimeoutError):
            return Outcome.TIMED_OUT, "no answer in time"
        except (OSError, urllib3.exceptions.HTTPError) as error:
            return Outcome.UNREACHABLE, f"{type(error).__name__}: {str(error)[:200]}"

    def _post(self, body: bytes, headers: dict[str, str]) -> tuple[Outcome, str]:
        connection = self._connection()
        with cutoff(connection, TOTAL_TIMEOUT_S) as late:
            try:
                connection.connect()
                if late.is_set():
                    raise TimeoutError
                connection.request("POST", self._path, body=body, headers=headers, preload_content=False)
                answer = connection.getresponse()
                answer.read(ANSWER_BYTES_MAX)
                status = answer.status
            except Exception as error:
                if late.is_set():
                    raise TimeoutError from error
                if isinstance(error, (OSError, urllib3.exceptions.HTTPError, ForbiddenAddressError)):
                    raise
                raise urllib3.exceptions.ProtocolError(f"{type(error).__name__}") from error  # of http.client: no answer of HTTP
        if late.is_set():
            raise TimeoutError
        outcome = outcome_of(status)
        return outcome, f"it answered {status}" + (", and redirects are not followed" if outcome is Outcome.REDIRECTS else "")

    def _connection(self) -> HTTPConnection:
        """A new one for each event: nothing of a receiver's state carries over, and its name is resolved and judged again."""
        options: dict[str, Any] = {"timeout": READ_TIMEOUT_S}
        if not self._is_tls:
            return _CheckedHTTP(self._host, self._port, **options)
        context = ssl.create_default_context(cafile=self._webhook.ca_file)
        return _CheckedHTTPS(self._host, self._port, ssl_context=context, cert_reqs="CERT_REQUIRED", **options)

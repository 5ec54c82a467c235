"""CORE: what becomes of one webhook's events: signatures, which outcome means what, and when the next try is due."""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

RETRY_MS, RETRY_MS_MAX = 1_000, 300_000
"""Pause before the first further try, which is doubled with each."""
TRIES_OF_A_BAD_EVENT_MAX = 10
"""Tries of an event that the receiver itself finds bad."""

_BAD_EVENT = frozenset({400, 413, 422})


class Outcome(StrEnum):
    """What became of one try."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    """4xx, which more tries may change: the receiver does not know us, or asks for less."""
    BAD_EVENT = "bad_event"
    """4xx that is about this event."""
    REDIRECTS = "redirects"
    UNAVAILABLE = "unavailable"
    """5xx, and anything else that is no answer to us."""
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    FORBIDDEN_ADDRESS = "forbidden_address"


class Then(StrEnum):
    """What is done next."""

    NEXT = "next"
    """The event is done with: the next one."""
    AGAIN = "again"
    """The same one, at `due_ms`."""
    GIVE_UP = "give_up"
    """The event is left out: the next one."""


def outcome_of(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.DELIVERED
    if 300 <= status < 400:
        return Outcome.REDIRECTS
    if status in _BAD_EVENT:
        return Outcome.BAD_EVENT
    return Outcome.REFUSED if 400 <= status < 500 else Outcome.UNAVAILABLE


def sign(key: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """`webhook-signature`. Source: Standard Webhooks, symmetric signatures (`v1`)."""
    content = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


@dataclass(slots=True)
class Delivery:
    """The tries of one webhook. Times are of a monotonic clock."""

    rng: random.Random
    due_ms: int = 0
    tries: int = 0
    """Of the event in hand."""
    failing_since_ms: int | None = None
    """When the tries of today's trouble began; None: the last one was delivered."""

    counts: Counter[str] = field(default_factory=Counter)
    """Tries by outcome, and events that were given up."""

    def ended(self, outcome: Outcome, now_ms: int) -> Then:
        """A try has ended."""
        self.tries += 1
        self.counts[outcome.value] += 1
        match outcome:
            case Outcome.DELIVERED:
                self.failing_since_ms = None
                return self._next(now_ms, Then.NEXT)
            case Outcome.BAD_EVENT if self.tries >= TRIES_OF_A_BAD_EVENT_MAX:
                self.counts["given_up"] += 1
                return self._next(now_ms, Then.GIVE_UP)
            case (
                Outcome.BAD_EVENT
                | Outcome.REFUSED
                | Outcome.REDIRECTS
                | Outcome.UNAVAILABLE
                | Outcome.TIMED_OUT
                | Outcome.UNREACHABLE
                | Outcome.FORBIDDEN_ADDRESS
            ):
                if self.failing_since_ms is None:
                    self.failing_since_ms = now_ms
                pause_ms = min(RETRY_MS << min(self.tries - 1, 20), RETRY_MS_MAX)
                self.due_ms = now_ms + pause_ms // 2 + self.rng.randrange(pause_ms // 2 + 1)
                return Then.AGAIN
            case _:
                assert_never(outcome)

    def _next(self, now_ms: int, then: Then) -> Then:
        self.tries, self.due_ms = 0, now_ms
        return then

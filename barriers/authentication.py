"""CORE: who is let in at a worker's data sockets. Handshakes in, verdicts out; sockets and threads are the shell's.

A peer that was deployed before this worker is not known here yet: its handshake is held until it is, or its time is over. Each
is held on its own, so that nobody waits behind a stranger."""

from __future__ import annotations

from hmac import compare_digest
from typing import NamedTuple

HELD_HANDSHAKES_MAX = 1_024
"""Handshakes held at once; further ones that can't be judged at once are turned away."""

CANCELLATION_TIMEOUT_MS = 30_000
"""How long a worker may take to cancel its tasks, unless its job says otherwise."""

HELD_SLACK_MS = 25_000
"""How much longer than that an unknown peer is kept waiting before it is turned away: this worker may be the last to begin."""

HANDSHAKE_SLACK_MS = 30_000
"""How much longer than that either side of a connection waits for its handshake."""

HELD_TIMEOUT_MS = CANCELLATION_TIMEOUT_MS + HELD_SLACK_MS


class Handshake(NamedTuple):
    """One connection that asks to be let in."""

    ticket: int
    """The shell's name for it."""
    identity: str
    """Public CURVE key, Z85."""
    secret: bytes | None = None
    """The attempt's, where the key is only said (unix sockets); None where the handshake itself proved the key (CURVE)."""


class Judged(NamedTuple):
    """The answer to a handshake."""

    ticket: int
    identity: str
    let_in: bool


class PeerAuthentication:
    """Lets in the peers of the present attempt; holds the others for a while."""

    def __init__(self, *, held_max: int = HELD_HANDSHAKES_MAX, held_timeout_ms: int = HELD_TIMEOUT_MS) -> None:
        self._held_max = held_max
        self._held_timeout_ms = held_timeout_ms
        self._keys: frozenset[str] = frozenset()
        self._secret = b""
        self._held: dict[int, tuple[Handshake, int]] = {}
        """Ticket -> (handshake, until when it is held)."""

    @property
    def held_count(self) -> int:
        return len(self._held)

    def allow(self, keys: frozenset[str], secret: str) -> list[Judged]:
        """An attempt began: its peers' keys, and what they show at the unix socket. Returns those held who are let in now."""
        self._keys, self._secret = keys, secret.encode()
        known = [handshake for handshake, _ in self._held.values() if self._knows(handshake)]
        return [self._end(handshake, let_in=True) for handshake in known]

    def ask(self, handshake: Handshake, *, now_ms: int) -> list[Judged]:
        """A connection asks; nothing comes back while it is held."""
        if self._knows(handshake):
            return [self._end(handshake, let_in=True)]
        if len(self._held) >= self._held_max:
            return [self._end(handshake, let_in=False)]
        self._held[handshake.ticket] = (handshake, now_ms + self._held_timeout_ms)
        return []

    def expire(self, *, now_ms: int) -> list[Judged]:
        """Turn away those who waited long enough."""
        late = [handshake for handshake, until_ms in self._held.values() if until_ms <= now_ms]
        return [self._end(handshake, let_in=False) for handshake in late]

    def next_deadline_ms(self) -> int | None:
        return min((until_ms for _, until_ms in self._held.values()), default=None)

    def _knows(self, handshake: Handshake) -> bool:
        if handshake.identity not in self._keys:
            return False
        return handshake.secret is None or (bool(self._secret) and compare_digest(handshake.secret, self._secret))

    def _end(self, handshake: Handshake, *, let_in: bool) -> Judged:
        self._held.pop(handshake.ticket, None)
        return Judged(handshake.ticket, handshake.identity, let_in)

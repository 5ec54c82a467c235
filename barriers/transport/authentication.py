"""CORE: decides which peers are let in at a worker's data sockets. Handshakes in, answers out; sockets and threads are the shell's.

A peer that was deployed before this worker is not known here yet: its handshake is held until it is, or its time is over. Each
is held on its own, so that no peer waits behind a stranger."""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import NamedTuple

HELD_HANDSHAKES_MAX = 1_024
"""Handshakes held at one time; further ones that can't be answered immediately are turned away."""

CANCELLATION_TIMEOUT_MS = 30_000
"""How long a worker may take to cancel its tasks, unless its job says otherwise."""

HELD_SLACK_MS = 25_000
"""How much longer than that an unknown peer is kept waiting before it is turned away: this worker may be the last to begin."""

HANDSHAKE_SLACK_MS = 30_000
"""How much longer than that either side of a connection waits for its handshake."""

HELD_TIMEOUT_MS = CANCELLATION_TIMEOUT_MS + HELD_SLACK_MS


_Z85 = {
    digit: value
    for value, digit in enumerate("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
}
"""The digits of ZeroMQ's encoding of keys (RFC 32): five of them are a number of 32 bits."""

_DATA_ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Za-z:.%]+\]):([0-9]{1,5})")


def is_data_key(text: str) -> bool:
    """Whether a text is a public CURVE key in Z85, which peers can connect with: 40 digits, 32 bytes."""
    if len(text) != 40 or not all(digit in _Z85 for digit in text):
        return False
    return all(_number(text[start : start + 5]) < 1 << 32 for start in range(0, 40, 5))


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * len(_Z85) + _Z85[digit]
    return number


def is_data_address(text: str) -> bool:
    """Whether a text is what peers connect to: `tcp://<host>:<port>`, an address of version 6 in brackets."""
    match = _DATA_ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[1]) <= 65_535


class Handshake(NamedTuple):
    """One connection that asks to be let in."""

    ticket: int
    """The shell's name for it."""
    identity: str
    """Public CURVE key, Z85."""
    secret: bytes | None = None
    """The attempt's, where the key is only said (unix sockets); None where the handshake itself proved the key (CURVE)."""


class HandshakeAnswer(NamedTuple):
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

    def allow(self, keys: frozenset[str], secret: str) -> list[HandshakeAnswer]:
        """An attempt began: its peers' keys, and what they show at the unix socket. Returns those held who are let in now."""
        self._keys, self._secret = keys, secret.encode()
        known = [handshake for handshake, _ in self._held.values() if self._knows(handshake)]
        return [self._end(handshake, let_in=True) for handshake in known]

    def ask(self, handshake: Handshake, *, now_ms: int) -> list[HandshakeAnswer]:
        """A connection asks to be let in; returns nothing while it is held."""
        if self._knows(handshake):
            return [self._end(handshake, let_in=True)]
        if len(self._held) >= self._held_max:
            return [self._end(handshake, let_in=False)]
        self._held[handshake.ticket] = (handshake, now_ms + self._held_timeout_ms)
        return []

    def expire(self, *, now_ms: int) -> list[HandshakeAnswer]:
        """Turn away those who waited long enough."""
        late = [handshake for handshake, until_ms in self._held.values() if until_ms <= now_ms]
        return [self._end(handshake, let_in=False) for handshake in late]

    def next_deadline_ms(self) -> int | None:
        return min((until_ms for _, until_ms in self._held.values()), default=None)

    def _knows(self, handshake: Handshake) -> bool:
        if handshake.identity not in self._keys:
            return False
        return handshake.secret is None or (bool(self._secret) and compare_digest(handshake.secret, self._secret))

    def _end(self, handshake: Handshake, *, let_in: bool) -> HandshakeAnswer:
        self._held.pop(handshake.ticket, None)
        return HandshakeAnswer(handshake.ticket, handshake.identity, let_in)

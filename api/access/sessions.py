"""CORE: sessions of browsers: who logged in, and until when. Nothing is stored; after a restart people log in again.

A session holds no token: the id of its record and the hash in it, by which each request asks whether the token is still good. Of
the session's own text only a hash is held."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

SESSIONS_MAX = 1_000
SESSIONS_PER_TOKEN_MAX = 50
"""Further ones end the oldest of the same token: whoever has one token can't end the sessions of others."""
LIFE_MS = 12 * 3_600_000
"""Longest time of a session; it ends with its token, too."""
OWN_TOKEN = ""
"""Token id of the service's own token, which has no record."""

_SECRET_BYTES = 32
_TEXT_CHARACTERS_MAX = 128


@dataclass(frozen=True, slots=True)
class Session:
    """One login."""

    token_id: str
    """OWN_TOKEN: the service's own."""
    secret_hash: str
    """That of the token's record: another token of the same id is not this one."""
    ends_ms: int
    """On the monotonic clock."""
    expires_at_ms: int
    """ms since the epoch, for people; the earlier one of its own end and the token's."""


class Sessions:
    """All sessions of a service, SESSIONS_MAX at most. Not thread-safe: its event loop owns it."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        """By the hash of the text, oldest first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, token_id: str, secret_hash: str, *, now_ms: int, wall_ms: int, token_expires_ms: int = 0) -> tuple[str, Session]:
        """A new session and its text, which only the browser has. `token_expires_ms`: ms since the epoch; 0: never."""
        expires_at_ms = wall_ms + LIFE_MS if not token_expires_ms else min(token_expires_ms, wall_ms + LIFE_MS)
        session = Session(token_id, secret_hash, now_ms + expires_at_ms - wall_ms, expires_at_ms)
        self._make_room(token_id, now_ms)
        text = secrets.token_urlsafe(_SECRET_BYTES)
        self._sessions[_hash(text)] = session
        return text, session

    def _make_room(self, token_id: str, now_ms: int) -> None:
        for key in [key for key, session in self._sessions.items() if session.ends_ms <= now_ms]:
            del self._sessions[key]
        own = [key for key, session in self._sessions.items() if session.token_id == token_id]
        if len(own) >= SESSIONS_PER_TOKEN_MAX:
            del self._sessions[own[0]]
        elif len(self._sessions) >= SESSIONS_MAX:
            self._sessions.popitem(last=False)

    def find(self, text: str, *, now_ms: int) -> Session | None:
        """The session of a text, if it goes on."""
        if len(text) > _TEXT_CHARACTERS_MAX:
            return None
        session = self._sessions.get(_hash(text))
        return session if session is not None and now_ms < session.ends_ms else None

    def close(self, text: str) -> None:
        """End a session. Idempotent."""
        self._sessions.pop(_hash(text), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

"""CORE: the sessions of one key, and what a record does to them. Source: Flink, MergingWindowSet.

A session has two numbers that name where its state is: `contents` stays while the session grows, so that its records are not
moved; `trigger` changes with each merge, so that the state of the old windows can be read, and cleared, beside that of the new one.
Numbers are the lowest that are free among the key's sessions: there are as few namespaces as one key has sessions at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from holdfast.operators.functions.windows.bounds import TimeWindow
from holdfast.statebackends.state import ValueStateDescriptor

SESSIONS = ValueStateDescriptor("window_sessions", list[int])
"""Start, end, contents and trigger of each session of the key, by start."""
SESSION_FIELDS = 4
"""Numbers of each."""


class SessionWindow(NamedTuple):
    """One session of a key."""

    start: int
    end: int
    contents: int
    trigger: int

    @property
    def window(self) -> TimeWindow:
        return TimeWindow(self.start, self.end)


class Merge(NamedTuple):
    """A record's window among the sessions of its key."""

    session: SessionWindow
    """The one that it is in now."""
    merged: tuple[SessionWindow, ...]
    """Those that became it, by start; empty if it is new, or as it was."""
    sessions: list[SessionWindow]
    """All of the key from now on."""


def decode_sessions(stored: Sequence[int]) -> list[SessionWindow]:
    return [SessionWindow(*stored[at : at + SESSION_FIELDS]) for at in range(0, len(stored), SESSION_FIELDS)]


def encode_sessions(sessions: Iterable[SessionWindow]) -> list[int]:
    return list(chain.from_iterable(sessions))


def merged_window(sessions: Iterable[SessionWindow], start: int, end: int) -> TimeWindow:
    """[start, end) with every session that overlaps or touches it."""
    for session in sessions:
        if session.start <= end and session.end >= start:
            start, end = min(start, session.start), max(end, session.end)
    return TimeWindow(start, end)


def merge(sessions: list[SessionWindow], window: TimeWindow) -> Merge:
    """`window`: as `merged_window` has made it."""
    inside = tuple(session for session in sessions if session.start <= window.end and session.end >= window.start)
    if len(inside) == 1 and inside[0].start == window.start and inside[0].end == window.end:
        return Merge(inside[0], (), sessions)
    contents = inside[0].contents if inside else _free({session.contents for session in sessions})
    session = SessionWindow(window.start, window.end, contents, _free({session.trigger for session in sessions}))
    others = [other for other in sessions if other not in inside]
    return Merge(session, inside, sorted([*others, session]))


class Joined(NamedTuple):
    """A record of a session."""

    contents: int
    """Number of its contents."""
    absorbed: tuple[int, ...] = ()
    """Those of the sessions that it has brought into this one, by start."""


class KeySessions:
    """The sessions of one key while the records of a batch join them, where no trigger has state."""

    def __init__(self, sessions: list[SessionWindow]) -> None:
        self.sessions = sessions
        """By start."""
        self.has_changed = False
        self._opened: set[int] = set()

    def join(self, start: int, end: int, watermark_ms: int) -> Joined | None:
        """Put [start, end) among them; None if the session that it would be in is late."""
        inside = [session for session in self.sessions if session[0] <= end and session[1] >= start]
        if inside:
            start, end = min(start, inside[0].start), max(end, inside[-1].end)
        if end - 1 <= watermark_ms:
            return None
        if len(inside) == 1 and inside[0].start == start and inside[0].end == end:
            return Joined(inside[0].contents)
        self.has_changed = True
        if inside:
            first = inside[0]
            grown = SessionWindow(start, end, first.contents, first.trigger)
            place = self.sessions.index(first)
            self.sessions[place : place + len(inside)] = [grown]
            return Joined(first.contents, tuple(session.contents for session in inside[1:]))
        contents = _free({session.contents for session in self.sessions})
        trigger = _free({session.trigger for session in self.sessions})
        self.sessions = sorted([*self.sessions, SessionWindow(start, end, contents, trigger)])
        self._opened.add(contents)
        return Joined(contents)

    def opened(self) -> list[SessionWindow]:
        """Sessions of which a part is new. The others have a timer, at an end that they had before: when it is due, it is set
        again. So a session is not followed by a timer from record to record."""
        return [session for session in self.sessions if session.contents in self._opened] if self._opened else []


def _free(taken: set[int]) -> int:
    return next(number for number in range(len(taken) + 1) if number not in taken)

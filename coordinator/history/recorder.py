"""CORE: decides which records of a job's history are written when. Records and time in, files to write out.

Written behind: what is recorded waits for WRITE_INTERVAL_MS, or until it is WRITE_BYTES. One file is written at a time; one that
could not be is tried again, and what comes meanwhile waits, up to WAITING_BYTES_MAX: then the oldest is lost, and its numbers stay
free, so that the loss shows. Nothing waits for a write."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.coordinator.history.records import encode_line

WRITE_INTERVAL_MS = 5_000
"""Longest time that a record waits, while storage answers."""

WRITE_BYTES = 256 << 10
"""Records of this size are written at once; a file is larger by one record at most."""

WAITING_BYTES_MAX = 4 * WRITE_BYTES
"""Bytes of records that wait for storage."""

RETRY_MS, RETRY_MS_MAX = 5_000, 60_000
"""Pause before the first further try, which is doubled with each."""

LAST_TRIES_MAX = 3
"""Tries to write what is left once the job has ended here."""


@dataclass(frozen=True, slots=True)
class WriteHistory:
    """Create the file of these records."""

    first: int
    """Number of the first."""
    content: bytes


class HistoryRecorder:
    """The records of one leadership of a job."""

    def __init__(self) -> None:
        self._next_number = 1
        self._lines: deque[bytes] = deque()
        """Waiting; the last one has the number before `_next_number`."""
        self._size = 0
        self._writing: WriteHistory | None = None
        self._is_under_way = False
        self._due_ms: int | None = None
        """When the next write is due; None: nothing waits, or a write is under way."""
        self._tries = 0
        self._is_ending = False
        self.lost = 0
        """Records that were given up."""

    def record(self, kind: str, facts: Mapping[str, Any], *, now_ms: int, wall_ms: int) -> tuple[int, bytes]:
        """Returns the record's number and line."""
        number = self._next_number
        line = encode_line(number, wall_ms, kind, facts)
        self._next_number += 1
        self._lines.append(line)
        self._size += len(line)
        while self._size > WAITING_BYTES_MAX and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())
            self.lost += 1
        if self._writing is None:
            due_ms = now_ms if self._size >= WRITE_BYTES or self._is_ending else now_ms + WRITE_INTERVAL_MS
            self._due_ms = due_ms if self._due_ms is None else min(self._due_ms, due_ms)
        return number, line

    def end(self, now_ms: int) -> None:
        """The job has ended here: what is left is due at once, and is given up after LAST_TRIES_MAX."""
        self._is_ending = True
        self._tries = 0
        if not self._is_under_way and (self._writing is not None or self._lines):
            self._due_ms = now_ms

    def next_deadline_ms(self) -> int | None:
        return self._due_ms

    def advance(self, now_ms: int) -> WriteHistory | None:
        """The file to write now, if one is due."""
        if self._due_ms is None or now_ms < self._due_ms:
            return None
        if self._writing is None:
            self._writing = self._take()
        self._is_under_way, self._due_ms = True, None
        return self._writing

    def take_rest(self) -> tuple[WriteHistory, ...]:
        """What waits, if no turn follows: beside a write that is under way, since each has a file of its own."""
        rest = [self._writing] if self._writing is not None and not self._is_under_way else []
        while self._lines:
            rest.append(self._take())
        self._writing, self._due_ms = None, None
        return tuple(rest)

    def _take(self) -> WriteHistory:
        first, taken, size = self._next_number - len(self._lines), [], 0
        while self._lines and size < WRITE_BYTES:
            line = self._lines.popleft()
            taken.append(line)
            size += len(line)
        self._size -= size
        return WriteHistory(first, b"".join(taken))

    def written(self, action: WriteHistory, now_ms: int) -> None:
        """The file is stored; or it never will be, since its name is taken."""
        if self._writing is not action:
            return
        self._writing, self._is_under_way, self._tries = None, False, 0
        if self._lines:
            soon = self._size >= WRITE_BYTES or self._is_ending
            self._due_ms = now_ms if soon else now_ms + WRITE_INTERVAL_MS

    def failed(self, action: WriteHistory, now_ms: int) -> bool:
        """Storage failed, or did not say: the same file is tried again. False if it is given up."""
        if self._writing is not action:
            return True
        self._is_under_way = False
        self._tries += 1
        if self._is_ending and self._tries >= LAST_TRIES_MAX:
            self.lost += action.content.count(b"\n")
            self._writing, self._due_ms = None, None
            if self._lines:
                self._tries, self._due_ms = 0, now_ms
            return False
        self._due_ms = now_ms + min(RETRY_MS << min(self._tries - 1, 8), RETRY_MS_MAX)
        return True

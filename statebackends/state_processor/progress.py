"""How far a tool has come: rows and bytes that it has read, told to whoever wants to show it.

One listener a process, as a tool is one command; without one a note costs a comparison. Any thread may note."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Work:
    """What was done since it began; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows = 0
        self.size = 0
        """Bytes of files that were read and checked."""
        self.what = ""
        """Operator and state whose rows came last."""

    def add(self, rows: int, size: int, what: str) -> None:
        with self._lock:
            self.rows += rows
            self.size += size
            self.what = what or self.what


_listening: Work | None = None


def note(*, rows: int = 0, size: int = 0, what: str = "") -> None:
    """So much more was read."""
    if _listening is not None:
        _listening.add(rows, size, what)


@contextmanager
def noted(work: Work) -> Iterator[None]:
    """All that is done within is added to `work`."""
    global _listening
    before, _listening = _listening, work
    try:
        yield
    finally:
        _listening = before

"""Progress of a tool: rows and bytes that it has read, for a command that shows it.

A process has one listener, as a tool is one command; without a listener a note costs a comparison. Any thread may note."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Work:
    """Work done so far. Thread-safe."""

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
    """Add rows and bytes that were read. `what`: operator and state of the rows."""
    if _listening is not None:
        _listening.add(rows, size, what)


@contextmanager
def noted(work: Work) -> Iterator[None]:
    """Add all notes within to `work`."""
    global _listening
    before, _listening = _listening, work
    try:
        yield
    finally:
        _listening = before

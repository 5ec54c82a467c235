"""The trace of a run: one line an event, the same bytes for the same seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

Entry = tuple[int, str, str, str]
"""(time in us, actor, event, details)."""


class Trace:
    """Events of a run, kept as tuples and made into text when somebody looks."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, actor: str, event: str, details: str = "") -> None:
        """`details` must not hold anything that differs between two processes: no addresses, no real times or paths."""
        self._entries.append((self._now_us(), actor, event, details.replace("\n", " | ") if "\n" in details else details))

    def lines(self, last: int | None = None) -> list[str]:
        """The whole trace, or its last events, one aligned line each."""
        entries = self._entries if last is None else self._entries[-last:]
        return [
            ("%12.3f  %-16s %-22s %s" % (time_us / 1000, actor, event, details)).rstrip()  # noqa: UP031 - twice as fast
            for time_us, actor, event, details in entries
        ]

    def digest(self) -> str:
        """Of all lines."""
        return hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16).hexdigest()

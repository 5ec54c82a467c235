"""SHELL: the end of what this process has printed, kept in memory for whoever asks for it over REST.

A tee in the place of `sys.stdout`: what functions print goes where it went before, and its end is kept besides. What goes past
`sys.stdout` (its `buffer`, file descriptor 1, other processes) is not. Nothing that goes wrong in keeping reaches who prints."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from holdfast.barriers.messages import LOG_CHARACTERS_MAX, LogTail, printable
from holdfast.statebackends.secrets import HIDDEN_LENGTH_MIN, hide, hide_resolved

OUTPUT_CHARACTERS_MAX = 64 * 1024
SECRET_CHARACTERS_MAX = 16 * 1024
"""In front of these, kept and never shown: the oldest that is kept may begin within a secret, which then is not known as one."""
_KEPT_MAX = OUTPUT_CHARACTERS_MAX + SECRET_CHARACTERS_MAX


class KeptOutput:
    """A bounded number of characters, the oldest first out. Thread-safe; only the process that made it keeps anything."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = tuple(secret for secret in secrets if len(secret) >= HIDDEN_LENGTH_MIN)
        self._process = os.getpid()
        self._lock = threading.RLock()  # a handler of signals may print between two lines of ours
        self._pieces: collections.deque[str] = collections.deque()
        self._characters = 0
        self._lines_gone = 0
        self._is_cut = False
        self._changed_ms = -1
        self.is_open = True

    def add(self, text: object) -> None:
        """Never raises, and waits for a reader's copy at most: a forked process might find the lock taken for ever, and keeps
        nothing."""
        if self.is_open and isinstance(text, str) and os.getpid() == self._process:
            with contextlib.suppress(Exception):
                self._add(str.__str__(text))  # of a class of its own, none of its methods

    def _add(self, text: str) -> None:
        if not text:
            return
        kept = text[-_KEPT_MAX:]
        with self._lock:
            self._lines_gone += text.count("\n", 0, len(text) - len(kept))
            self._is_cut |= len(kept) < len(text)
            self._pieces.append(kept)
            self._characters += len(kept)
            while self._characters > _KEPT_MAX:
                self._drop()
            self._changed_ms = time.time_ns() // 1_000_000

    def _drop(self) -> None:
        """Cut what is too much off the oldest piece, or take it away."""
        oldest = self._pieces.popleft()
        surplus = min(len(oldest), self._characters - _KEPT_MAX)
        self._characters -= surplus
        self._lines_gone += oldest.count("\n", 0, surplus)
        self._is_cut = True
        if surplus < len(oldest):
            self._pieces.appendleft(oldest[surplus:])

    def read(self) -> LogTail:
        """Its end, from the beginning of a line if one begins there, as a terminal may show it: without secrets and escapes."""
        with self._lock:
            text, gone, is_cut, changed_ms = "".join(self._pieces), self._lines_gone, self._is_cut, self._changed_ms
        shown = hide_resolved(hide(text, self._secrets))
        if is_cut:
            shown, hidden = _shown(shown)
            gone += hidden
        shown = printable(shown.replace("\r\n", "\n").replace("\r", "\n"), keep="\n\t")
        return LogTail(shown[-LOG_CHARACTERS_MAX:], changed_ms, gone)


def _shown(text: str) -> tuple[str, int]:
    """What is shown of a text whose beginning is lost, and how many line breaks are in front of it."""
    start = min(len(text), SECRET_CHARACTERS_MAX)
    start = text.find("\n", start - 1) + 1 or start
    return text[start:], text.count("\n", 0, start)


class _Tee:
    """A standard output whose end is kept. All that it does not do itself, its target does: also what it raises."""

    def __init__(self, target: TextIO, kept: KeptOutput) -> None:
        self._target = target
        self._kept = kept

    def write(self, text: str) -> int:
        self._kept.add(text)
        return self._target.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._target)

    def __enter__(self) -> _Tee:
        self._target.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._target.__exit__(*raised)


@contextlib.contextmanager
def keeping_output(secrets: tuple[str, ...]) -> Iterator[KeptOutput]:
    """Keep the end of what is printed until the end of the block; of a process without standard output, nothing. `secrets`: texts
    that are never shown."""
    kept, before = KeptOutput(secrets), sys.stdout
    tee = cast("TextIO", _Tee(before, kept)) if before is not None else None
    if tee is not None:
        sys.stdout = tee
    try:
        yield kept
    finally:
        kept.is_open = False
        if tee is not None and sys.stdout is tee:  # else somebody else's is in its place, and may be built upon ours
            sys.stdout = before

"""SHELL: the newest lines of this process's log, kept in memory for whoever asks for them over REST.

Every record that a logger lets through is kept, whoever writes it: functions, libraries, Holdfast. They are taken where records are
made, and not by a handler: one would silence Python's own output of warnings, and `logging.basicConfig` of the user's program.
Secrets that this process has resolved, and its tokens, are not shown. What is printed is kept by `kept_output.py`."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.barriers.messages import LOG_CHARACTERS_MAX, LogTail, clip, clip_front, printable
from holdfast.statebackends.secrets import HIDDEN_LENGTH_MIN, hide, hide_resolved

KEPT_CHARACTERS_MAX = LOG_CHARACTERS_MAX // 2
"""Of the lines; what hides a secret that came later may be longer than the secret."""
MESSAGE_BYTES_MAX = 2_048
TRACEBACK_BYTES_MAX = 4_096


class KeptLog:
    """A bounded number of characters, oldest lines first out. Thread-safe."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = tuple(secret for secret in secrets if len(secret) >= HIDDEN_LENGTH_MIN)
        self._lock = threading.RLock()  # a line may be written by a handler of signals, between two lines of ours
        self._lines: collections.deque[str] = collections.deque()
        self._characters = 0
        self._left_out = 0
        self._changed_ms = -1
        self.is_open = True

    def add(self, record: logging.LogRecord) -> None:
        """Never raises: logging must not fail for it."""
        try:
            line = _line(record, self._without_secrets)
        except Exception:
            line = f"{_time(record)} {record.levelname} {clip(printable(str(record.name)), 200)}: (a line that can't be shown)"
        with self._lock:
            self._lines.append(line)
            self._characters += len(line) + 1
            while self._characters > KEPT_CHARACTERS_MAX and len(self._lines) > 1:
                self._characters -= len(self._lines.popleft()) + 1
                self._left_out += 1
            self._changed_ms = time.time_ns() // 1_000_000

    def read(self) -> LogTail:
        """The lines, without what has turned out to be a secret since."""
        with self._lock:
            lines, changed_ms, left_out = list(self._lines), self._changed_ms, self._left_out
        text = self._without_secrets("".join(f"{line}\n" for line in lines))
        return LogTail(text[-LOG_CHARACTERS_MAX:], changed_ms, left_out)

    def _without_secrets(self, text: str) -> str:
        return hide_resolved(hide(text, self._secrets))


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _line(record: logging.LogRecord, hidden: Callable[[str], str]) -> str:
    """One line, and those of a traceback behind it, each after a bar: no message can pass for a line of another. Secrets go before
    anything is cut, which might leave half of one."""
    text = clip(printable(hidden(record.getMessage())), MESSAGE_BYTES_MAX)
    line = f"{_time(record)} {record.levelname} {clip(printable(str(record.name)), 200)}: {text}"
    if not record.exc_info or record.exc_info[0] is None:
        return line
    told = clip_front(hidden("".join(traceback.format_exception(*record.exc_info))), TRACEBACK_BYTES_MAX)
    return "".join([line, *(f"\n  | {printable(each)}" for each in told.splitlines())])


@contextlib.contextmanager
def keeping_log(secrets: tuple[str, ...]) -> Iterator[KeptLog]:
    """Keep the log until the end of the block. `secrets`: texts that are never shown."""
    kept, made_before = KeptLog(secrets), logging.getLogRecordFactory()

    def make(name: Any, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made_before(name, *args, **kwargs)
        if kept.is_open and name is not None:  # without a name: a record from elsewhere, that is filled in later
            kept.add(record)
        return record

    logging.setLogRecordFactory(make)
    try:
        yield kept
    finally:
        kept.is_open = False
        if logging.getLogRecordFactory() is make:  # else somebody else's is built upon ours, and passes through
            logging.setLogRecordFactory(made_before)

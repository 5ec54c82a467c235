"""The coordinator's log: levels, text or JSON, and lines that can't be forged.

One line is one event. Names of jobs, messages of errors and paths come from users: unprintable characters in them are escaped and
long texts are clipped, in our own lines where they are worded (`job_log.py`), in those of libraries here. The service's token is
never written, whatever a message contains, and of an issued one no more than its id."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from holdfast.api.access.issued import hide_tokens
from holdfast.barriers.messages import clip_front
from holdfast.coordinator.dispatcher.job_log import MESSAGE_CHARACTERS_MAX, printable
from holdfast.statebackends.secrets import hide_resolved

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

TRACEBACK_BYTES_MAX = 10 * MESSAGE_CHARACTERS_MAX
"""Characters kept of a traceback's end, which names the error."""

TAIL_CHARACTERS_MAX = 1024 * 1024
"""Characters kept of the log's newest lines, for those who ask over REST."""

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("holdfast_request_id", default="")
"""Id of the request that is being answered; empty outside of one. JSON lines have it as `request_id`."""

LOGGERS = ("holdfast",)
"""Loggers of a coordinator process's own lines."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING holdfast.coordinator.jobs: message`; lines of a traceback follow, each after a bar."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {printable(self._message(record))}"
        return "".join([line, *(f"\n  | {printable(each)}" for each in self._traceback(record).splitlines())])

    def _message(self, record: logging.LogRecord) -> str:
        return self._without_secrets(record.getMessage())

    def _traceback(self, record: logging.LogRecord) -> str:
        """Traceback of a record; empty without one."""
        text = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] is not None else ""
        return clip_front(self._without_secrets(text), TRACEBACK_BYTES_MAX)

    def _without_secrets(self, text: str) -> str:
        for secret in _log.secrets:
            text = text.replace(secret, "***")
        return hide_resolved(hide_tokens(text))


class JsonFormatter(LineFormatter):
    """One JSON object a line: time, level, logger, message, and the event's fields by their names."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": printable(self._message(record)),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update((name, self._field(value)) for name, value in fields.items() if name not in line)
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if traceback := self._traceback(record):
            line["traceback"] = traceback
        written = json.dumps(line, default=str)  # escapes line breaks
        for secret in _log.secrets:
            written = written.replace(json.dumps(secret)[1:-1], "***")  # also in values that are lists or objects
        return hide_tokens(written)

    def _field(self, value: Any) -> Any:
        return self._without_secrets(value)[:MESSAGE_CHARACTERS_MAX] if isinstance(value, str) else value


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _Writer:
    """Handler of one block, and the loggers that it changes meanwhile."""

    def __init__(self, handler: logging.Handler, level: str, names: tuple[str | None, ...], secrets: tuple[str, ...]) -> None:
        """`names`: of loggers, None for the root."""
        self.secrets = tuple(secret for secret in secrets if secret)
        self._handler = handler
        self._level = level.upper()
        self._loggers = [logging.getLogger(name) for name in names]
        self._before: list[tuple[logging.Logger, int, bool]] = []

    def begin(self) -> None:
        self._before = [(logger, logger.level, logger.propagate) for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self._handler)
            logger.setLevel(self._level)
            logger.propagate = False

    def end(self) -> None:
        for logger, level, propagate in self._before:
            logger.removeHandler(self._handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _Log:
    """The one log of this process, shared by all its coordinators. The oldest open writer writes it, so that a line is written
    once; the loggers are restored when the last one has closed, in any order."""

    def __init__(self) -> None:
        self.secrets: tuple[str, ...] = ()
        """Texts removed from every line, from any source. Replaced and never changed, since any thread reads them."""
        self._lock = threading.Lock()
        self._open: list[_Writer] = []

    def enter(self, writer: _Writer) -> None:
        with self._lock:
            self._open.append(writer)
            self.secrets = self._secrets_of_all()
            if len(self._open) == 1:
                writer.begin()

    def leave(self, writer: _Writer) -> None:
        with self._lock:
            was_writing = self._open[0] is writer
            self._open.remove(writer)
            if was_writing:
                writer.end()
                if self._open:
                    self._open[0].begin()
                else:
                    tail.clear()
            self.secrets = self._secrets_of_all()

    def _secrets_of_all(self) -> tuple[str, ...]:
        return tuple(secret for writer in self._open for secret in writer.secrets)


_log = _Log()


class LogTail:
    """The newest lines of this process's log, as they were written. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque()
        self._characters = 0
        self._changed_ms = -1

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)
            self._characters += len(line)
            while self._characters > TAIL_CHARACTERS_MAX and len(self._lines) > 1:
                self._characters -= len(self._lines.popleft())
            self._changed_ms = time.time_ns() // 1_000_000

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()
            self._characters, self._changed_ms = 0, -1

    def read(self) -> tuple[str, int] | None:
        """The lines, oldest first, and when the last one was written, ms since 1970; None while no log was written here: inside a
        driver that has its own logging."""
        with self._lock:
            lines, changed_ms = list(self._lines), self._changed_ms
        if changed_ms < 0:
            return None
        text = "".join(f"{line}\n" for line in lines)
        for secret in _log.secrets:  # of a coordinator that has come since
            text = text.replace(secret, "***")
        return hide_resolved(text), changed_ms


tail = LogTail()


class _KeepingHandler(logging.StreamHandler[TextIO]):
    """Writes to the stream, and keeps the newest lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        tail.add(line)
        return line


@contextlib.contextmanager
def writing_log(
    level: str, style: str, *, secrets: tuple[str, ...] = (), stream: TextIO | None = None, everything: bool = True
) -> Iterator[None]:
    """Write the log until the end of the block, to standard error unless a stream is given; while several blocks are open, with the
    arguments of the first. `secrets`: texts removed from every line of all blocks.

    `level` and `style` as in LEVELS and FORMATS. `everything`: also the lines of libraries; otherwise only our own loggers, as
    inside a foreign process, whose own handlers then get none of it."""
    handler = _KeepingHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else LineFormatter())
    writer = _Writer(handler, level, (None,) if everything else LOGGERS, secrets)
    _log.enter(writer)
    try:
        yield
    finally:
        _log.leave(writer)
        handler.close()

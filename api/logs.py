"""The coordinator's log: levels, text or JSON, and lines that nobody can forge.

One line is one event. Names of jobs, messages of errors and paths come from users: whatever is not printable in them is escaped and
what is long is clipped, where our own lines are worded (`job_log.py`) and, for all that libraries say, here. The
service's token is never written, whatever a message holds."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from holdfast.barriers.messages import clip_front
from holdfast.coordinator.dispatcher.job_log import MESSAGE_CHARACTERS_MAX, printable

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

TRACEBACK_BYTES_MAX = 10 * MESSAGE_CHARACTERS_MAX
"""Of the end of a traceback, which names the error."""

LOGGERS = ("holdfast",)
"""Of all that a coordinator process says by itself."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING holdfast.coordinator.jobs: message`; lines of a traceback follow, each behind a bar."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {printable(self._message(record))}"
        return "".join([line, *(f"\n  | {printable(each)}" for each in self._traceback(record).splitlines())])

    def _message(self, record: logging.LogRecord) -> str:
        return self._without_secrets(record.getMessage())

    def _traceback(self, record: logging.LogRecord) -> str:
        """Empty without one."""
        text = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] is not None else ""
        return clip_front(self._without_secrets(text), TRACEBACK_BYTES_MAX)

    def _without_secrets(self, text: str) -> str:
        for secret in _log.secrets:
            text = text.replace(secret, "***")
        return text


class JsonFormatter(LineFormatter):
    """One JSON object a line: time, level, logger, message, and the facts of the event by their names."""

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
        if traceback := self._traceback(record):
            line["traceback"] = traceback
        written = json.dumps(line, default=str)  # which escapes line breaks
        for secret in _log.secrets:
            written = written.replace(json.dumps(secret)[1:-1], "***")  # also in what is no text, but a list or an object
        return written

    def _field(self, value: Any) -> Any:
        return self._without_secrets(value)[:MESSAGE_CHARACTERS_MAX] if isinstance(value, str) else value


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _Writer:
    """What one block writes with, and the loggers that it changes meanwhile."""

    def __init__(self, handler: logging.Handler, level: str, names: tuple[str | None, ...], secrets: tuple[str, ...]) -> None:
        """`names`: of loggers, None being the root."""
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
    """The one log of this process, whose loggers all its coordinators share: the oldest open writer writes it, so that a line is
    there once, and the loggers are as they were when the last one has left, in whatever order they leave."""

    def __init__(self) -> None:
        self.secrets: tuple[str, ...] = ()
        """Texts that no line has, whoever's they are: replaced and never changed, since any thread reads them."""
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
            self.secrets = self._secrets_of_all()

    def _secrets_of_all(self) -> tuple[str, ...]:
        return tuple(secret for writer in self._open for secret in writer.secrets)


_log = _Log()


@contextlib.contextmanager
def writing_log(
    level: str, style: str, *, secrets: tuple[str, ...] = (), stream: TextIO | None = None, everything: bool = True
) -> Iterator[None]:
    """Write the log until the end of the block, to standard error unless a stream is given; while several blocks are open, as the
    first of them says. `secrets`: texts that no line has, of none of the blocks.

    `level` and `style` as in LEVELS and FORMATS. `everything`: also what libraries say; else our own loggers alone, as inside
    somebody else's process, whose own handlers get nothing of it then."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else LineFormatter())
    writer = _Writer(handler, level, (None,) if everything else LOGGERS, secrets)
    _log.enter(writer)
    try:
        yield
    finally:
        _log.leave(writer)
        handler.close()

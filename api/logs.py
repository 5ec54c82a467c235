"""The coordinator's log: levels, text or JSON, and lines that nobody can forge.

One line is one event. Names of jobs, messages of errors and paths come from users: whatever is not printable in them is escaped and
what is long is clipped, where our own lines are worded (`coordinator.loglines`) and, for all that libraries say, here. The
service's token is never written, whatever a message holds."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from coordinator.loglines import MESSAGE_CHARACTERS_MAX, printable

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

LOGGERS = ("holdfast", "coordinator", "api", "statebackends")
"""Of all that a coordinator process says by itself."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING coordinator.jobs: message`; lines of a traceback follow, each behind a bar."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        """`secrets`: texts that are never written."""
        super().__init__()
        self._secrets = tuple(secret for secret in secrets if secret)

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {printable(self._message(record))}"
        return "".join([line, *(f"\n  | {printable(each)}" for each in self._traceback(record).splitlines())])

    def _message(self, record: logging.LogRecord) -> str:
        return self._without_secrets(record.getMessage())

    def _traceback(self, record: logging.LogRecord) -> str:
        """Empty without one."""
        text = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] is not None else ""
        return self._without_secrets(text)[: 10 * MESSAGE_CHARACTERS_MAX]

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
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
        return json.dumps(line, default=str)  # which escapes line breaks

    def _field(self, value: Any) -> Any:
        return self._without_secrets(value)[:MESSAGE_CHARACTERS_MAX] if isinstance(value, str) else value


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


@contextlib.contextmanager
def writing_log(
    level: str, style: str, *, secrets: tuple[str, ...] = (), stream: TextIO | None = None, everything: bool = True
) -> Iterator[None]:
    """Write the log until the end of the block, to standard error unless a stream is given.

    `level` and `style` as in LEVELS and FORMATS. `everything`: also what libraries say; else our own loggers alone, as inside
    somebody else's process, whose own handlers get nothing of it then."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(secrets) if style == "json" else LineFormatter(secrets))
    loggers = [logging.getLogger()] if everything else [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old_level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = propagate
        handler.close()

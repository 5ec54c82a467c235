"""Texts of errors as viewers are told them: without what may quote a record, a key or a value. Pure.

Errors of functions, rows and keys say what they happened on, and so may those of libraries and what a database answers. There are
too many ways to say it: so of an error that is not known to quote nothing the class and the place are told, and nothing else."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

WITHHELD = "(the rest may quote records, and is not shown to viewers)"

QUOTES_NOTHING = frozenset(
    {
        "AccessDeniedError", "AmbiguousWriteError", "AuthenticationError", "BackendMismatchError", "BodyTooLargeError",
        "CheckpointFailedError", "CommitPositionLostError", "CommittableLostError", "CommittablesLeftError",
        "ConnectionLostError", "CorruptStateError", "FencedError", "FlinkUiError", "ForeignOriginError", "ForgetError",
        "GraphError", "HeadTooLargeError", "InFlightStateError", "InputChangedError", "InputOutputError", "InvalidConfigError",
        "InvalidSplitError", "InvariantError", "JobExistsError", "MasterHookError", "MaxParallelismError",
        "MethodNotAllowedError", "NoCounterpartError", "NotEnoughSlotsError", "NotFoundError", "NotLeaderError",
        "ObjectMissingError", "OutOfSpaceError", "OutputMayRepeatError", "PeerLostError", "PermissionDeniedError",
        "ProtocolError", "QuestionNotKnownError", "RecoveringError", "RestoreError", "SinkMovedError", "SnapshotClaimedError",
        "SnapshotLabelledError", "SnapshotTooLargeError", "SourceDataLostError", "StateDirectoryNotSharedError",
        "StillMovingError", "StorageAccessError", "StorageThrottledError", "StorageUnavailableError", "TooManyFilesError",
        "TooManyRequestsError", "TransportSecurityError", "UnclaimedStateError", "UndeclaredOutputError",
        "UndeclaredStateError", "UnknownColumnError", "UnsupportedMediaTypeError", "UnsupportedVersionError", "WorkerBusyError",
        "WorkerLost", "WorkerSilentError",
    }
)
"""Classes of errors about jobs, snapshots, settings, storage and peers. A class that is not here counts as one that quotes."""

_ENDS = "Error|Exception|Invalid|Violation|Interrupt|Exit|Timeout|Warning|Failure|StopIteration"
_CLASS = re.compile(rf"(?<![\w.])(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:{_ENDS}))(?=: |:?$)")
"""The class of an error within a text. By its end: a name like `Source: orders` is none."""
_ANY_CLASS = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?=: )")
"""At the beginning of what is said to be an error, and of a line of a traceback, any name is that of a class."""
_LED_TO = re.compile(
    r"\b(?:raised |(?:FAILED|failed|declined|pending): (?=(?:\w+\.)*[A-Z]))(?:\w+\.)*([A-Za-z_]\w*)(?=: )"
)
"""Behind the words by which a sentence leads to an error, any name is that of a class, too: users end theirs as they like."""
_PLACE = re.compile(
    r": (?:operator (?:'[^'\n]*'|\"[^\"\n]*\")(?:,? subtask \d+)?(?:: |$))?(?:[\w.<>]+ \([^()\n]*:\d+\)(?: raised [\w.]+)?)?"
)
"""Behind the class: operator, subtask, function, and what that raised."""
_QUOTED = re.compile(r"; (?=(?:key|record) )|\b(?=(?:record|row|key) [^\w\s]|(?:record|row) \w+\()|\b(?=DETAIL:|CONTEXT:|Key \()")
"""Where a text of an error that is known goes on with what may be a record after all."""
_FRAME = re.compile(r'\s*File "[^"\n]*", line \d+(?:, in [\w.<>]+)?')
_ERROR_KEYS = frozenset(
    {
        "error", "errors", "exception", "failure", "failure_message", "last_failure", "message", "reason", "root-exception",
        "stack-trace", "stacktrace", "trace", "traceback",
    }
)
"""Names of fields whose texts are errors."""
_SIGNS = tuple(
    sign.encode()
    for sign in (
        *_ENDS.split("|"), *(f'"{key}":{space}"' for key in sorted(_ERROR_KEYS) for space in ("", " ")),
        '"errors":["', '"errors": ["', "record ", "row ", "key ", "DETAIL:", "CONTEXT:", "Key (",
        "raised ", "FAILED: ", "failed: ", "declined: ", "pending: ",
    )
)  # fmt: skip
"""A JSON text without any of these has nothing to be withheld. Each is looked for by itself: a pattern of all takes longer."""
KEPT_BYTES_MAX = 256 * 1024
"""Of an answer whose form for viewers is kept: many dashboards are answered the same."""
KEPT_MAX = 64


class _Cut(NamedTuple):
    """A line as viewers are told it."""

    line: str
    is_cut: bool


def without_rows(text: str, *, is_error: bool = True) -> str:
    """A text without what may quote a record. `is_error`: it is known to be that of an error, which begins with its class."""
    lines = text.split("\n")
    is_trace = len(lines) > 1 and any(_FRAME.fullmatch(line) for line in lines)
    cuts = [_cut(line, _ANY_CLASS.match(line) if is_trace or (is_error and at == 0) else None) for at, line in enumerate(lines)]
    first = next((at for at, each in enumerate(cuts) if each.is_cut), None)
    if first is None:
        return text
    before = [line for line in lines[:first] if not is_trace or not line.startswith(" ") or _FRAME.fullmatch(line)]
    return "\n".join([*before, cuts[first].line, *(line for line in lines[first + 1 :] if _FRAME.fullmatch(line))])


def _cut(line: str, beginning: re.Match[str] | None) -> _Cut:
    within = sorted((*_CLASS.finditer(line), *_LED_TO.finditer(line)), key=lambda found: found.end())
    for found in (beginning, *within):
        if found is not None and found[1] not in QUOTES_NOTHING and found.end() < len(line):
            place = _PLACE.match(line, found.end())
            return _Cut(f"{line[: found.end() if place is None else place.end()].rstrip(': ')}: {WITHHELD}", is_cut=True)
    quoted = _QUOTED.search(line)
    return _Cut(line, is_cut=False) if quoted is None else _Cut(f"{line[: quoted.end()]}{WITHHELD}", is_cut=True)


def without_rows_in_json(body: bytes) -> bytes:
    """A JSON text whose strings quote no record; the same object if none does."""
    told = _kept(body) if len(body) <= KEPT_BYTES_MAX else _told_in_json(body)
    return body if told is None else told


def _told_in_json(body: bytes) -> bytes | None:
    """None: it quotes none."""
    if not any(sign in body for sign in _SIGNS):
        return None
    try:
        content = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return msgspec.json.encode({"errors": [WITHHELD]})
    changed = False

    def told(text: str, *, is_error: bool) -> str:
        nonlocal changed
        shown = without_rows(text, is_error=is_error)
        changed = changed or shown is not text
        return shown

    shown = _walk(content, told)
    return msgspec.json.encode(shown) if changed else None


_kept = functools.lru_cache(KEPT_MAX)(_told_in_json)


def _walk(value: Any, told: Callable[..., str], *, is_error: bool = False) -> Any:
    if isinstance(value, str):
        return told(value, is_error=is_error)
    if isinstance(value, dict):
        return {key: _walk(each, told, is_error=key in _ERROR_KEYS) for key, each in value.items()}
    if isinstance(value, list):
        return [_walk(each, told, is_error=is_error) for each in value]
    return value


def without_rows_in_event(message: bytes) -> bytes:
    """Events of a stream, whole ones, whose data quote no record."""
    lines = message.split(b"\n")
    return b"\n".join([b"data: " + without_rows_in_json(line[6:]) if line.startswith(b"data: ") else line for line in lines])

"""Reports of exceptions in user code: operator, subtask, record, and the user's own frames.

Frames are printed as Python prints them, without ours. A worker gives file and line; the driver adds the source line where the
worker could not read the file (a notebook's cell, a program that exists on the driver alone)."""

from __future__ import annotations

import dis
import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NoReturn

from holdfast.barriers.messages import TEXT_BYTES_MAX, TRACEBACK_BYTES_MAX, clip, printable
from holdfast.barriers.rows import REPR_CHARACTERS_MAX
from holdfast.operators.pickling import is_own_module
from holdfast.statebackends.errors import (
    GraphError,
    HoldfastError,
    InvalidConfigError,
    InvalidKeyError,
    InvalidRowError,
    InvalidTimestampError,
    ReadOnlyStateError,
    StateOverflowError,
    StateValueError,
    UndeclaredStateError,
    UserFunctionError,
)
from holdfast.statebackends.panics import failure_of
from holdfast.statebackends.secrets import hide_resolved

FRAMES_MAX = 12
"""Most frames shown of one exception: a recursion has a thousand."""
CAUSES_MAX = 3
"""Most exceptions shown as causes of the first."""
MESSAGE_CHARACTERS_MAX = 2_000
"""Most characters of the message of each exception that is shown with its frames."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARIES = tuple(path for key in ("stdlib", "platstdlib") if (path := sysconfig.get_path(key)))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the exception that are not ours, outermost first; empty if a C function raised it."""
    return [summary for summary, is_ours in _frames(error.__traceback__) if not is_ours]


def _frames(trace: TracebackType | None) -> list[tuple[traceback.FrameSummary, bool]]:
    pairs = list(traceback.walk_tb(trace))
    summaries = traceback.StackSummary.extract(iter(pairs))
    ours = [is_own_module(str(frame.f_globals.get("__name__", ""))) for frame, _ in pairs]
    return [
        (summary, is_own or summary.filename.startswith("<frozen "))
        for summary, is_own in zip(summaries, ours, strict=True)
    ]


def place_of_error(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """`spending.py:24`: the user's innermost line, not a library's; else where `function` is defined; else empty."""
    frames = user_frames(error)
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if own:
        return f"{_basename(own[-1].filename)}:{own[-1].lineno}"
    return place_of_function(function)


def place_of_function(function: Callable[..., object] | None) -> str:
    """`spending.py:20`: where the function is defined; empty if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{_basename(code.co_filename)}:{code.co_firstlineno}"


def frames_text(error: BaseException) -> str:
    """Frames of an exception and of its causes, as lines of a traceback; empty if there are none."""
    lines = _frame_lines(error)
    seen, cause = {id(error)}, _cause(error)
    while cause is not None and id(cause) not in seen and len(seen) <= CAUSES_MAX:
        lines += [text_lines(f"caused by {type(cause).__name__}: {message_of(cause)}"), *_frame_lines(cause)]
        seen.add(id(cause))
        cause = _cause(cause)
    return "\n".join(lines)


def message_of(error: BaseException) -> str:
    """Text of an exception; a placeholder if its `str` raises."""
    try:
        return hide_resolved(str(error))[:MESSAGE_CHARACTERS_MAX]
    except Exception as failure:
        return f"<its text raises {type(failure).__name__}>"


def text_lines(text: str) -> str:
    """Make a foreign text, perhaps of a row, fit to stand among frames: control characters are escaped, and lines after the first
    get a bar in front, so that none looks like a frame."""
    return "\n  | ".join(printable(line, keep="\t") for line in text.replace("\r\n", "\n").split("\n"))


def with_source_lines(text: str) -> str:
    """Add the missing source lines of frames that this process knows, and the numbers of notebook cells."""
    lines = text.splitlines()
    found: list[str] = []
    for index, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None:
            found.append(line)
            continue
        file, number, name = match["file"], int(match["line"]), match["name"]
        cell = _cell(file)
        found.append(f"  {cell}, line {number}, in {name}" if cell else line)
        if index + 1 == len(lines) or not lines[index + 1].startswith("    "):
            source = _source_line(file, number)
            found += [f"    {source}"] if source else []
    return "\n".join(found)


def _source_line(file: str, number: int) -> str:
    """Source line of a cell, or of a module that this process has loaded: a file name in a row's text must not open another
    file."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return linecache.getline(file, number).strip() if file in linecache.cache or file in loaded else ""


def _frame_lines(error: BaseException) -> list[str]:
    lines: list[str] = []
    frames = user_frames(error)
    left_out = len(frames) - FRAMES_MAX
    for index, frame in enumerate(frames):
        if left_out > 0 and FRAMES_MAX // 3 <= index < FRAMES_MAX // 3 + left_out:
            if index == FRAMES_MAX // 3:
                lines.append(f"  ... {left_out} more frames ...")
            continue
        lines.append(f'  File "{printable(frame.filename)}", line {frame.lineno}, in {printable(frame.name)}')
        if frame.line:
            lines.append(f"    {printable(frame.line.strip())}")
    return lines


def _cause(error: BaseException) -> BaseException | None:
    """Cause of an exception; None for an error of ours, whose inner causes don't concern the user."""
    if isinstance(error, HoldfastError):
        return None
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", *_LIBRARIES)) or "site-packages" in filename or "dist-packages" in filename


def _basename(filename: str) -> str:
    return filename.replace("\\", "/").rpartition("/")[2]


def _cell(filename: str) -> str:
    """`Cell In[3]` for the code of a notebook's cell that this process runs."""
    if "IPython" not in sys.modules:
        return ""
    try:
        label, name = sys.modules["IPython"].get_ipython().compile.format_code_name(filename)
    except Exception:  # no notebook, another shell, or not one of its cells
        return ""
    return f"{label} {name}" if label == "Cell" else ""


REASON_CHARACTERS_MAX = 300
"""Most characters of an exception's text in the one-line reason; the frames have the whole text."""

STOPPED = "it let a StopIteration out, as next() without a default does"
"""Reason for a function whose StopIteration would silently end the iteration over its results, and lose the rows after it."""

_ITERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

NO_RECORD: Any = object()
"""Value of `record` for a call without one, such as `open`."""



class Described(str):
    """Description of a call's subject that is no record; shown unchanged."""

    __slots__ = ()
    __repr__ = str.__str__


_OF_ROWS = (UserFunctionError, InvalidKeyError, InvalidTimestampError, StateValueError, StateOverflowError)
"""Errors caused by the user's code or rows; our frames don't help."""
_OF_USERS = (*_OF_ROWS, ReadOnlyStateError, UndeclaredStateError, InvalidConfigError)
"""Errors that our own API raises when the user's code misuses it."""


def shown(record: Any) -> str:
    """repr of a record, cut to 500 characters; empty if there is none. A record whose repr fails does not hide the error that it
    belongs to."""
    try:
        text = "" if record is NO_RECORD else repr(record)
    except Exception as error:
        text = f"<{type(record).__name__} whose repr raises {type(error).__name__}>"
    return text[:REPR_CHARACTERS_MAX]


def function_name(function: Callable[..., Any]) -> str:
    """A name for a function or callable object."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def raise_located(
    error: Exception, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any = NO_RECORD, key: str = ""
) -> NoReturn:
    """Raise the error that `located_error` returns, from the one that `function` raised."""
    located = located_error(error, operator=operator, subtask=subtask, function=function, record=record, key=key)
    if located is error:
        raise error
    raise located from error


def located_error(
    error: Exception, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any = NO_RECORD, key: str = ""
) -> HoldfastError:
    """Convert an exception of `function` to an error that names operator, subtask, the user's line, record, and key (its repr, if
    one is current). An error of Holdfast's own is returned unchanged."""
    if not isinstance(error, HoldfastError):
        return user_error(error, operator=operator, subtask=subtask, function=function, record=record, key=key)
    if "frames" in error.fields or not isinstance(error, _OF_USERS):
        return error
    message = error.message if error.message.startswith("operator ") else f"{_where(operator, subtask)}: {error.message}"
    message += f"; in {_called(function, place_of_error(error, function))}{_on(record, key)}"
    fields = {**error.fields, "operator": operator, "subtask": subtask, "record": shown(record), "frames": _frames_of(error)}
    return type(error).of(message, fields)


def user_error(
    error: BaseException, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any, key: str = ""
) -> UserFunctionError:
    """The typed error for `error`, which `function` raised on `record`."""
    reason = f"{_called(function, place_of_error(error, function))} raised {type(error).__name__}: {_one_line(message_of(error))}"
    hint = " (the function in front of it returned None)" if record is None else ""
    return UserFunctionError(
        f"{_where(operator, subtask)}: {reason}{_on(record, key)}{hint}",
        operator=operator,
        subtask=subtask,
        record=shown(record),
        function=function_name(function),
        frames=_frames_of(error),
    )


def returned_none(
    *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any, wanted: str
) -> UserFunctionError:
    """The typed error for a function that returned None for a record instead of `wanted`."""
    reason = f"{_called(function, place_of_function(function))} returned None, not {wanted}: does it lack a `return`?"
    return UserFunctionError(
        f"{_where(operator, subtask)}: {reason}{_on(record, '')}",
        operator=operator,
        subtask=subtask,
        record=shown(record),
        function=function_name(function),
        frames="",
    )


def task_failure(error: BaseException) -> BaseException:
    """As `failure_of`, of what a subtask calls: an exit that the user's code asks for (`sys.exit`, a parser of arguments) is a
    failure, too. It would end the worker with all that is in it, and nobody would learn why."""
    return error if isinstance(error, SystemExit | GeneratorExit) else failure_of(error)


def exit_error(error: BaseException, *, operator: str, subtask: int) -> UserFunctionError:
    """The typed error for an exit; operator: uids of those of the subtask, one of which it came from."""
    place = place_of_error(error)
    reason = f"{type(error).__name__}({message_of(error)}) would end the worker: a function must not end its process"
    return UserFunctionError(
        f"{_where(operator, subtask)}: {reason}{f'; in {place}' if place else ''}",
        operator=operator,
        subtask=subtask,
        record="",
        function="",
        frames=frames_text(error),
    )


def unsent_error(error: HoldfastError, *, operator: str, subtask: int, receiver: str, receiver_subtask: int) -> HoldfastError:
    """The error of an operator whose output can't be sent to a subtask of another process, or can't be taken in there. One that
    names who made the row already keeps its words."""
    message, fields = error.message, error.fields
    if not message.startswith("operator "):
        message = f"{_where(operator, subtask)}: to {_where(receiver, receiver_subtask)}: {message}"
    if isinstance(error, InvalidRowError):
        message += "; emit what pickle takes, or columns: declare them with returns="
        fields = {**error.fields, "operator": operator, "receiver": receiver, "frames": _frames_of_row(error)}
    found = type(error).of(message, {"operator": operator, **fields, "subtask": subtask})
    found.__cause__ = error  # where it comes from, for whoever reads the whole trace
    return found


def _frames_of_row(error: InvalidRowError) -> str:
    """The user's frames of what pickled a row, or made it anew; empty where there are none: ours say nothing of a row."""
    cause = error.__cause__
    return frames_text(cause) if cause is not None and user_frames(cause) else ""


def stack_trace(error: BaseException) -> str:
    """Stack trace for REST and the log: the user's frames alone for an error of user code, the full traceback for any other."""
    frames = error.fields.get("frames") if isinstance(error, HoldfastError) else None
    if frames is None and not isinstance(error, _OF_ROWS):
        return hide_resolved("".join(traceback.format_exception(error)))
    below = clip(frames or "", TRACEBACK_BYTES_MAX - 2 * TEXT_BYTES_MAX)
    return f"{error_line(error)}\n{below}".rstrip()


def error_line(error: BaseException) -> str:
    """`ErrorClass: message` for a status; of several lines only the first."""
    return clip(text_lines(f"{type(error).__name__}: {message_of(error)}"))  # one whose text raises must not end the worker


def _frames_of(error: BaseException) -> str:
    """The user's frames, after the exception's own text if the one-line reason has only its beginning."""
    text = message_of(error)
    whole = [] if _one_line(text) == text or isinstance(error, HoldfastError) else [text_lines(f"{type(error).__name__}: {text}")]
    return "\n".join([*whole, frames_text(error)]).rstrip()


def _one_line(text: str) -> str:
    line = " ".join(text.split("\n", 1)[0].split("\r")) if "\n" in text or "\r" in text else text
    line = f"{line} ..." if "\n" in text else line
    return line if len(line) <= REASON_CHARACTERS_MAX else f"{line[:REASON_CHARACTERS_MAX]} ..."


def _where(operator: str, subtask: int | None) -> str:
    return f"operator {operator!r}" + ("" if subtask is None else f", subtask {subtask}")


def _called(function: Callable[..., Any], place: str) -> str:
    name = function_name(function)
    return f"{name} ({place})" if place else name


def _on(record: Any, key: str) -> str:
    found = [f"key {key}"] if key else []
    found += [f"record {shown(record)}"] if record is not NO_RECORD else []
    return f"; {', '.join(found)}" if found else ""


def check_returns(function: Callable[..., Any], operator: str) -> None:
    """Raise GraphError for a function that only returns None: a `return` was forgotten. Undecidable functions pass."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & _ITERATES or not _returns_only_none(code):
        return
    raise GraphError(
        f"operator {operator!r}: {_called(function, place_of_function(function))} returns None, whatever it is given: "
        "does it lack a `return`?",
        operator=operator,
        function=function_name(function),
    )


def _returns_only_none(code: CodeType) -> bool:
    """Whether the function has a return, and each one returns the constant None."""
    found = False
    previous: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST":
            is_none = instruction.argval is None
        elif instruction.opname == "RETURN_VALUE":
            is_none = previous is not None and previous.opname == "LOAD_CONST" and previous.argval is None
        else:
            previous = instruction
            continue
        if not is_none:
            return False
        found, previous = True, instruction
    return found

"""How an exception of user code is told: which operator, which subtask, which record, and the user's own frames."""

from __future__ import annotations

import dis
import inspect
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

from holdfast.barriers.messages import TEXT_BYTES_MAX, TRACEBACK_BYTES_MAX, clip
from holdfast.barriers.rows import REPR_CHARACTERS_MAX
from holdfast.operators.task.frames import frames_text, message_of, place_of_error, place_of_function, text_lines
from holdfast.statebackends.errors import (
    GraphError,
    HoldfastError,
    InvalidConfigError,
    InvalidKeyError,
    InvalidTimestampError,
    StateOverflowError,
    StateValueError,
    UndeclaredStateError,
    UserFunctionError,
)

REASON_CHARACTERS_MAX = 300
"""Of an exception's own text in the one line that tells of it; with its frames it is told at length."""

STOPPED = "it let a StopIteration out, as next() without a default does"
"""Of a function whose StopIteration would end the iteration over its results without a word, and the rows behind it with it."""

_ITERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

NO_RECORD: Any = object()
"""Of a call that is about none, such as `open`."""



class Described(str):
    """What a call was about, in words, where it is no record: shown as it is."""

    __slots__ = ()
    __repr__ = str.__str__


_OF_ROWS = (UserFunctionError, InvalidKeyError, InvalidTimestampError, StateValueError, StateOverflowError)
"""What the user's code or rows are to blame for: where we noticed says nothing."""
_OF_USERS = (*_OF_ROWS, UndeclaredStateError, InvalidConfigError)
"""What our own calls raise when the user's code makes a mistake with them."""


def shown(record: Any) -> str:
    """repr of a record, cut to 500 characters; empty if there is none. A record whose repr fails does not hide the error that it is
    part of."""
    try:
        text = "" if record is NO_RECORD else repr(record)
    except Exception as error:
        text = f"<{type(record).__name__} whose repr raises {type(error).__name__}>"
    return text[:REPR_CHARACTERS_MAX]


def function_name(function: Callable[..., Any]) -> str:
    """A name for a function or callable object."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def raise_told(
    error: Exception, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any = NO_RECORD, key: str = ""
) -> NoReturn:
    """Raise what `function` raised as `told_error`."""
    told = told_error(error, operator=operator, subtask=subtask, function=function, record=record, key=key)
    if told is error:
        raise error
    raise told from error


def told_error(
    error: Exception, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any = NO_RECORD, key: str = ""
) -> HoldfastError:
    """What `function` raised as an error that says where: operator, subtask, the user's line, record, and key (its repr, if one is
    current). What has gone wrong in us is given back as it is."""
    if not isinstance(error, HoldfastError):
        return user_error(error, operator=operator, subtask=subtask, function=function, record=record, key=key)
    if "frames" in error.fields or not isinstance(error, _OF_USERS):
        return error
    message = error.message if error.message.startswith("operator ") else f"{_where(operator, subtask)}: {error.message}"
    message += f"; in {_called(function, place_of_error(error, function))}{_on(record, key)}"
    fields = {**error.fields, "operator": operator, "subtask": subtask, "record": shown(record), "frames": _told(error)}
    return type(error)(message, **fields)


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
        frames=_told(error),
    )


def returned_none(
    *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any, wanted: str
) -> UserFunctionError:
    """The typed error for a function that returned nothing for a record, where `wanted` was to come."""
    reason = f"{_called(function, place_of_function(function))} returned None, not {wanted}: does it lack a `return`?"
    return UserFunctionError(
        f"{_where(operator, subtask)}: {reason}{_on(record, '')}",
        operator=operator,
        subtask=subtask,
        record=shown(record),
        function=function_name(function),
        frames="",
    )


def told_traceback(error: BaseException) -> str:
    """What is told of a failure beside its one line: of one of the user's code the user's frames alone, of ours all."""
    frames = error.fields.get("frames") if isinstance(error, HoldfastError) else None
    if frames is None and not isinstance(error, _OF_ROWS):
        return "".join(traceback.format_exception(error))
    below = clip(frames or "", TRACEBACK_BYTES_MAX - 2 * TEXT_BYTES_MAX)
    return f"{error_line(error)}\n{below}".rstrip()


def error_line(error: BaseException) -> str:
    """`ErrorClass: message`, as a status has it; of several lines the first stands alone."""
    return clip(text_lines(f"{type(error).__name__}: {error}"))


def _told(error: BaseException) -> str:
    """The user's frames; before them the exception's own text, if the one line has only its beginning."""
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
    """Raise GraphError for a function that can return nothing but None: a `return` was forgotten. What can't be told passes."""
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
    """Whether each of its returns, of which there is one, is of the constant None."""
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

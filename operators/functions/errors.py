"""How an exception of user code is told: which operator, which subtask, which record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barriers.rows import REPR_CHARACTERS_MAX
from statebackends.errors import UserFunctionError


def shown(record: Any) -> str:
    """repr of a record, cut to 500 characters; a record whose repr fails does not hide the error that it is part of."""
    try:
        text = repr(record)
    except Exception as error:
        text = f"<{type(record).__name__} whose repr raises {type(error).__name__}>"
    return text[:REPR_CHARACTERS_MAX]


def function_name(function: Callable[..., Any]) -> str:
    """A name for a function or callable object."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def user_error(
    error: BaseException, *, operator: str, subtask: int | None, function: Callable[..., Any], record: Any
) -> UserFunctionError:
    """The typed error for `error`, which `function` raised on `record`."""
    where = f"operator {operator!r}" + ("" if subtask is None else f", subtask {subtask}")
    name = function_name(function)
    return UserFunctionError(
        f"{where}: {name} raised {type(error).__name__}: {error}; record {shown(record)}",
        operator=operator,
        subtask=subtask,
        record=shown(record),
        function=name,
    )

"""Read sets: which columns of its row a function reads, found in its compiled code. Pure; no function is called for it.

A row that has these columns alone can't be told from the whole row by a function that does nothing with it but `row["price"]` and
`row.get("price")`, each with a name that stands in the code. Whatever else it does with the row (`**row`, iteration, a name that
is computed, a call that gets the row, a row that is kept, changed or emitted) may need all of it, and so do functions whose code
is not Python's. A read set is a proof, never a guess: nothing is learnt from the rows that happened to come first. What it takes
for granted: a function that this one calls does not look into the frames of its callers, as some templates and reporters of errors
do; those see the row with the columns that are read."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

_SEES_LOCALS = frozenset(
    {"locals", "vars", "dir", "eval", "exec", "breakpoint", "_getframe", "currentframe", "stack", "f_locals"}
    | {"query", "evaluate", "sql"}
)
"""Names by which a function could see its own variables, or that of others could be. The last three take variables of their caller
by names in a text: pandas (`frame.query("user == @row['user']")`), numexpr, DuckDB."""
_CALLS = frozenset({"PRECALL", "CALL"})
_PLACEHOLDER = getattr(functools, "Placeholder", _SEES_LOCALS)


def read_set(function: Callable[..., Any], argument: int = 0, *, is_consumed: bool = False) -> frozenset[str] | None:
    """Names that a function reads of the row that is its `argument`-th argument, from 0; None: perhaps all of it.

    An object is called through its class's `__call__`, a partial through what it calls. `is_consumed`: what the function returns is
    iterated over and given to nobody, so that a generator's frame, with the row in it, is seen by nobody either."""
    code: Any = function
    if type(code) is functools.partial:
        if any(each is _PLACEHOLDER for each in code.args):
            return None  # of Python 3.14: an argument that comes later
        code, argument = code.func, argument + len(code.args)
    if isinstance(code, MethodType):
        code, argument = code.__func__, argument + 1
    elif type(code) is not FunctionType:
        code, argument = _call_of(type(code)), argument + 1
    return _read_set(code.__code__, argument, is_consumed) if type(code) is FunctionType else None


def _call_of(kind: type) -> object:
    """What Python calls for a call of an instance; it may be a static method or another wrapper, whose arguments are others."""
    return next((vars(each)["__call__"] for each in kind.__mro__ if "__call__" in vars(each)), None)


@functools.lru_cache(maxsize=256)
def _read_set(code: CodeType, argument: int, is_consumed: bool) -> frozenset[str] | None:
    """By the code, not the function: that may get other code, and what it holds must not live as long as this cache."""
    suspends = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | (0 if is_consumed else inspect.CO_GENERATOR)
    if argument >= code.co_argcount or code.co_flags & suspends:
        return None
    row = code.co_varnames[argument]
    if row in code.co_cellvars or _may_see_locals(code):
        return None
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found: set[str] = set()
    for place, step in enumerate(steps):
        if not _concerns(step, row):
            continue
        name = _name_read(steps[place : place + 5]) if step.opname == "LOAD_FAST" else None
        if name is None:
            return None
        found.add(name)
    return frozenset(found)


def _may_see_locals(code: CodeType) -> bool:
    """Whether it has a name by which variables are seen, or a function within it has, which may look at its caller's."""
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return not _SEES_LOCALS.isdisjoint(code.co_names) or any(map(_may_see_locals, nested))


def _concerns(step: dis.Instruction, row: str) -> bool:
    """Whether an instruction loads, stores or deletes the variable: one of several that it names at once, too."""
    if not step.opname.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "MAKE_CELL")):
        return False
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return row in named


def _name_read(steps: Sequence[dis.Instruction]) -> str | None:
    """The name in `row["name"]`, `row.get("name")` or `row.get("name", constant)`, of which the first step loads the row."""
    following = [*steps[1:], *[None] * 4]
    match following:
        case [dis.Instruction(opname="LOAD_CONST", argval=str(name)), dis.Instruction(opname="BINARY_SUBSCR"), *_]:
            return name
        case [get, dis.Instruction(opname="LOAD_CONST", argval=str(name)), call, *_] if _is_get(get):
            default = following[3]
            if call is not None and (call.opname in _CALLS or (call.opname == "LOAD_CONST" and _is_call(default))):
                return name
    return None


def _is_get(step: dis.Instruction | None) -> bool:
    """Whether a step prepares a call of the row's method `get`; one that merely takes the method may give it away."""
    if step is None or step.argval != "get":
        return False
    return step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL|self" in step.argrepr)


def _is_call(step: dis.Instruction | None) -> bool:
    return step is not None and step.opname in _CALLS

"""What a user's function remembers outside of its declared state: attributes, class attributes, globals, captured variables.

It is looked at when a subtask has opened its operators and when it ends; what differs is lost with the process. It judges
nothing: a cache may differ, and be right."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

from operators.base import Operator
from operators.functions.process import ProcessFunction
from operators.packaging import OWN_PACKAGES

Memory = dict[str, bytes]
"""Place, such as `Total.seen` -> what is there, encoded."""

BYTES_MAX = 1 << 20
"""Of one place; what is larger is told by its length."""
_OWN_ATTRIBUTES = frozenset({"states", "returns", "process_element"})
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


def memory_of(operator: Operator, modules: dict[str, ModuleType]) -> Memory:
    """What the user's function of an operator remembers now. `modules`: what its process has imported of the user's."""
    function = getattr(operator, "function", None)
    if function is None:
        return {}
    memory: Memory = {}
    for place, value in (*_places(function), *_of_modules(modules)):
        encoded = _encoded(value)
        if encoded is not None:
            memory[place] = encoded
    return memory


def changed(before: Memory, after: Memory) -> list[str]:
    """Places that hold something else, or hold something now."""
    return sorted(place for place, encoded in after.items() if before.get(place) != encoded)


def _places(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from _places(function.func)
    elif isinstance(function, MethodType):
        yield from _places(function.__self__)
    elif isinstance(function, FunctionType):
        yield from _of_code(function)
    else:
        yield from _of_object(function)


def _of_object(function: Any) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(getattr(function, "__dict__", {}).items()):
        if isinstance(value, FunctionType):
            yield from _of_code(value)
        elif name not in _OWN_ATTRIBUTES:
            yield f"self.{name}", value
    for kind in type(function).__mro__:
        if kind is ProcessFunction or kind.__module__.partition(".")[0] in OWN_PACKAGES or kind is object:
            continue
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, FunctionType):
                yield from _of_code(value)
            elif not name.startswith("__") and name not in _OWN_ATTRIBUTES and not inspect.isroutine(value):
                yield f"{kind.__name__}.{name}", value


def _of_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if value.__name__ not in sys.modules:  # it came by value
                yield from _of_modules({value.__name__: value})
        elif value is not None:
            yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # nothing was captured yet


def _of_modules(modules: dict[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    for name, module in sorted(modules.items()):
        for attribute, value in sorted(vars(module).items()):
            if not attribute.startswith("__"):
                yield f"{name}.{attribute}", value


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _encoded(value: Any) -> bytes | None:
    """None: it is no data, or none of the user's."""
    if isinstance(value, type | ModuleType) or callable(value) or inspect.isdatadescriptor(value):
        return None
    if type(value).__module__.partition(".")[0] in OWN_PACKAGES:
        return None
    try:
        encoded = repr(value).encode() if isinstance(value, _PLAIN) else _pickled(value)
    except Exception:
        return None  # a connection, a lock: no data
    return encoded if len(encoded) <= BYTES_MAX else str(len(encoded)).encode()


def _pickled(value: Any) -> bytes:
    dumps: Callable[[Any], bytes] = pickle.dumps if type(value).__module__ == "builtins" else cloudpickle.dumps
    return dumps(value)


def hint(operator: str, places: list[str]) -> str:
    """What a violation says of them."""
    named = ", ".join(f"`{place}`" for place in places[:3])
    verb = "is" if len(places) == 1 else "are"
    return (
        f"hint: {named} of operator {operator!r} changed while it ran and {verb} no declared state: when the process is "
        "replaced or the job restarts, what it held is lost. Keep it in `ctx.state(...)`"
    )

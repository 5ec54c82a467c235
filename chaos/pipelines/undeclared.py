"""A user's function's memory outside of its declared state: attributes, class attributes, globals, captured variables.

It is read when a subtask has opened its operators and when it ends; what differs is lost with the process. It judges nothing: a
cache may differ without harm."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

from holdfast.chaos.pipelines.modules import UserModules, running
from holdfast.operators.base import Operator
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.pickling import is_own_module

Memory = dict[str, bytes]
"""Place, such as `Total.seen` -> digest of its content."""

_DATA_PACKAGES = frozenset({"builtins", "collections", "datetime", "decimal", "array", "numpy", "uuid"})
_OWN_ATTRIBUTES = frozenset({"states", "returns", "process_element"})
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


def memory_of(operator: Operator, modules: dict[str, ModuleType], users: frozenset[str]) -> Memory:
    """Memory of an operator's user function now. `modules`: the user's modules that its process has imported; `users`: names of all
    of them."""
    function = getattr(operator, "function", None)
    if function is None:
        return {}
    return _memory((*_places(function), *_of_modules(modules)), users)


def memory_of_imports(modules: UserModules) -> Memory:
    """Memory of the modules that a process has imported by name, as of their import."""
    fresh = UserModules(modules.names)
    with running(fresh):
        for name in sorted(modules.imported):
            with contextlib.suppress(Exception):  # the initial content is then unknown, and reported as changed
                importlib.import_module(name)
        return _memory(_of_modules(fresh.imported), modules.names)


def _memory(places: Iterable[tuple[str, Any]], users: frozenset[str]) -> Memory:
    memory: Memory = {}
    for place, value in places:
        encoded = _encoded(value, users)
        if encoded is not None:
            memory[place] = encoded
    return memory


def changed(before: Memory, after: Memory) -> list[str]:
    """Places with other content, or with content where there was none."""
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
        if kind is ProcessFunction or is_own_module(kind.__module__) or kind is object:
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
            continue  # the cell was still empty


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


def _encoded(value: Any, users: frozenset[str]) -> bytes | None:
    """Bytes of a value; None for what is no data, or a library's, such as a model or a connection."""
    if isinstance(value, type | ModuleType) or callable(value) or inspect.isdatadescriptor(value):
        return None
    module = type(value).__module__
    if module.partition(".")[0] not in _DATA_PACKAGES and module not in users:
        return None
    try:
        encoded: bytes = repr(value).encode() if isinstance(value, _PLAIN) else cloudpickle.dumps(value)
    except Exception:
        return None  # a connection, a lock: no data
    return hashlib.blake2b(encoded, digest_size=16).digest()


def hint(operator: str, places: list[str]) -> str:
    """The hint of a violation about these places."""
    named = ", ".join(f"`{place}`" for place in places[:3])
    verb = "is" if len(places) == 1 else "are"
    return (
        f"hint: {named} of operator {operator!r} changed while it ran and {verb} no declared state: a process that is replaced "
        "loses it, and a restart does not bring it back to the checkpoint. Keep it in `ctx.state(...)`"
    )

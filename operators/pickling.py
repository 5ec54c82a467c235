"""Pickling of user code for the workers: cloudpickle, extended for msgspec's records and dataclasses.

Classes of the user's program are pickled by value. cloudpickle rebuilds ordinary classes and dataclasses, but not msgspec.Struct
classes, nor the cache that msgspec attaches to a dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import io
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import msgspec

NAME = "holdfast"
"""Name of the package that contains all modules of Holdfast."""

_CACHE = "__msgspec_cache__"
_OPTIONS = (
    "tag_field",
    "tag",
    "omit_defaults",
    "forbid_unknown_fields",
    "frozen",
    "eq",
    "order",
    "repr_omit_defaults",
    "array_like",
    "gc",
    "weakref",
    "dict",
    "cache_hash",
)
_OWN = frozenset({"__module__", "__annotations__", "__slots__", "__dict__", "__weakref__", "__doc__", "__qualname__"})


def is_own_module(name: str) -> bool:
    """Whether a module of this name belongs to Holdfast: every worker has it, and it is pickled by name."""
    return name.partition(".")[0] == NAME


def dumps_by_value(value: Any) -> bytes:
    """Pickle a value, with every function and class of `__main__` and of the registered modules by value."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if obj is dataclasses.MISSING:
            # Compared by identity: a copy would give every field of a dataclass a default on the other side.
            return getattr, (dataclasses, "MISSING")
        if isinstance(obj, type) and travels_by_value(obj):
            if issubclass(obj, msgspec.Struct):
                return _reduce_struct(obj)
            if _CACHE in vars(obj):
                with contextlib.suppress(AttributeError):  # another thread pickles it, too
                    delattr(obj, _CACHE)  # msgspec makes the cache again on use
        return super().reducer_override(obj)


def travels_by_value(named: Any) -> bool:
    """Whether a class or function is pickled by value: its module is `__main__` or registered."""
    return module_travels_by_value(named.__module__ or "")


def module_travels_by_value(module: str) -> bool:
    """Whether the content of a module of this name is pickled by value."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return module == "__main__" or any(module == name or module.startswith(f"{name}.") for name in registered)


_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
"""Instructions of functions, and of bodies of classes in them, that read a global."""


def globals_of(function: FunctionType) -> dict[str, Any]:
    """Globals that a function reads, by name, in the order of first use, including those of functions and classes inside of it.
    Names not assigned yet and attributes are left out; a class defined inside reads `__name__`."""
    known = function.__globals__
    return {name: known[name] for name in sorted(_global_names(function.__code__) - {"__name__"}) if name in known}


def _global_names(code: CodeType) -> set[str]:
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _READS_GLOBAL}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*map(_global_names, inner))


def _reduce_struct(kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    """Reduce a Struct class to its definition: fields and options first, then methods, which may refer to the class itself."""
    inherited = {field.name for base in kind.__bases__ for field in _fields(base)}
    fields = [_field(field) for field in _fields(kind) if field.name not in inherited]
    options = {name: getattr(kind.__struct_config__, name) for name in _OPTIONS if hasattr(kind.__struct_config__, name)}
    slots = {field.name for field in _fields(kind)}
    members = {name: value for name, value in vars(kind).items() if name not in _OWN and name not in slots and name != _CACHE}
    members = {name: value for name, value in members.items() if not name.startswith("__struct_") and name != "__match_args__"}
    early = {name: members.pop(name) for name in ("__post_init__",) if name in members}
    early["__doc__"] = kind.__doc__
    definition = (kind.__name__, kind.__qualname__, kind.__module__, fields, kind.__bases__, early, options)
    return _define_struct, definition, members, None, None, _set_members


def _fields(kind: type) -> tuple[msgspec.structs.FieldInfo, ...]:
    if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
        return ()
    return msgspec.structs.fields(kind)


def _field(field: msgspec.structs.FieldInfo) -> tuple[str, Any, Any, Any, str | None]:
    """(name, type, default, default factory, encoded name); NODEFAULT can't be pickled, so absent ones are ()."""
    default = () if field.default is msgspec.NODEFAULT else (field.default,)
    factory: tuple[Callable[[], Any], ...] = ()
    if field.default_factory is not msgspec.NODEFAULT:
        factory = (field.default_factory,)
    return field.name, field.type, default, factory, None if field.encode_name == field.name else field.encode_name


def _define_struct(
    name: str, qualname: str, module: str, fields: Any, bases: tuple[type, ...], early: dict[str, Any], options: dict[str, Any]
) -> type:
    """Define a Struct class. Keyword-only fields keep their order: rows are always made by keyword."""
    described: list[Any] = []
    for field, kind, default, factory, encoded in fields:
        arguments: dict[str, Any] = {} if encoded is None else {"name": encoded}
        if default:
            arguments["default"] = default[0]
        elif factory:
            arguments["default_factory"] = factory[0]
        described.append((field, kind, msgspec.field(**arguments)) if arguments else (field, kind))
    options = {**options, "kw_only": _mixed(fields)}
    defined: type = msgspec.defstruct(name, described, bases=bases, module=module, namespace=early, **options)
    defined.__qualname__ = qualname
    return defined


def _mixed(fields: Any) -> bool:
    """Whether a field without a default follows one with a default, which only keyword-only fields allow."""
    seen = False
    for _, _, default, factory, _ in fields:
        if default or factory:
            seen = True
        elif seen:
            return True
    return False


def _set_members(kind: type, members: dict[str, Any]) -> None:
    for name, value in members.items():
        setattr(kind, name, value)

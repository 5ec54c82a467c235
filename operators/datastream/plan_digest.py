"""CORE: whether two plans of a job are the same: graph, settings, and the user's code with all that it refers to.

Said to be the same, a plan is not run: an edit that went unseen would be lost in silence. So whatever can't be compared counts as
another one, which costs a takeover from a checkpoint and nothing more. Line numbers, comments and file names are no difference:
a notebook's cell has new ones each time it is executed."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.operators.base import JobPlan, Source
from holdfast.operators.pickling import dumps_by_value, globals_of, module_travels_by_value, travels_by_value
from holdfast.operators.sources.dataframe import SparkSource
from holdfast.statebackends.keygroups import operator_id

WALKED_ITEMS_MAX = 10_000
"""Of one container; a larger one counts as a whole, as it travels to workers."""

_OWN_OF_A_CLASS = frozenset(
    {"__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "__msgspec_cache__", "_abc_impl"}
)
"""Made with a class, and saying nothing of what it does."""


@dataclass(frozen=True, slots=True)
class PlanDigest:
    """Of a plan as it was built, before anything of it was run."""

    graph: JobGraph
    code: dict[str, str | None]
    """operator uid -> digest of what the user gave for it; None: it can't be compared."""


def digest_plan(plan: JobPlan) -> PlanDigest:
    """Inside `modules_by_value`, if modules of the user's are to be looked into."""
    parts = {
        uid: (plan.operators.get(uid), _as_given(plan.sources.get(uid)), *_selectors(plan, uid), *_partitionings(plan, uid))
        for uid in _uids(plan)
    }
    return PlanDigest(plan.graph, {uid: _digest(part) for uid, part in parts.items()})


def _uids(plan: JobPlan) -> list[str]:
    return sorted({*plan.operators, *plan.sources, *(uid for uid, _ in plan.selectors)})


def _selectors(plan: JobPlan, uid: str) -> list[Any]:
    """Of the first input, or None; then of the others."""
    others = sorted(index for found, index in plan.selectors if found == uid and index)
    return [plan.selectors.get((uid, index)) for index in (0, *others)]


def _partitionings(plan: JobPlan, uid: str) -> list[Any]:
    """The user's functions on the edges into a vertex, by its head, in the order of the edges."""
    target = operator_id(uid)
    return [plan.partitionings[edge.edge_id] for edge in plan.graph.inputs(target) if edge.edge_id in plan.partitionings]


def _as_given(source: Source | None) -> Source | None:
    """Where a run of it has put the rows of a DataFrame says nothing of the plan: all runs of a job read them there."""
    return source.as_given() if isinstance(source, SparkSource) else source


def describe_difference(running: PlanDigest, new: PlanDigest) -> str | None:
    """What is another in the new plan; None if nothing is."""
    settings = _changed(msgspec.structs.asdict(running.graph.config), msgspec.structs.asdict(new.graph.config))
    if settings:
        return "setting " + ", ".join(f"{name}={getattr(new.graph.config, name)!r}" for name in settings)
    before, now = _operators(running.graph), _operators(new.graph)
    if before.keys() != now.keys():
        added, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
        return "; ".join(f"operators {what}: {', '.join(uids)}" for what, uids in (("added", added), ("left out", gone)) if uids)
    described = _changed(before, now)
    if described:
        return f"operator {', '.join(map(repr, described))} is described otherwise"
    if running.graph != new.graph:
        return "operators are connected, or run in parallel, otherwise"
    coded = [uid for uid in new.code if running.code.get(uid) != new.code[uid] or new.code[uid] is None]
    return f"the code, or the data, of operator {', '.join(map(repr, coded))}" if coded else None


def _operators(graph: JobGraph) -> dict[str, Any]:
    return {operator.uid: operator for vertex in graph.vertices for operator in vertex.operators}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if before.get(name) != now[name]]


def _digest(value: Any) -> str | None:
    try:
        return _hash(value)
    except Exception:  # whatever a foreign object raises when it is taken apart
        return None


def _hash(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for token in _Walk().tokens(value):
        digest.update(len(token).to_bytes(8, "big"))
        digest.update(token)
    return digest.hexdigest()


_PLAIN = (bool, int, float, complex)


class _Walk:
    """One value as a sequence of tokens, what it refers to included. An object that comes again is named by when it came first."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        """Keeps ids from being given to others."""

    def tokens(self, value: Any) -> Iterator[bytes]:
        if value is None or value is Ellipsis or type(value) in _PLAIN:  # and of no class of the user's
            yield f"{type(value).__qualname__} {value!r}".encode("utf-8", "surrogatepass")
            return
        if type(value) in (bytes, str):  # 64 MiB of a collection's rows: as they are
            yield type(value).__qualname__.encode()
            yield value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            return
        first = self._seen.get(id(value))
        if first is not None and not isinstance(value, tuple | frozenset | CodeType):
            yield b"again %d" % first
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        yield type(value).__qualname__.encode()
        yield from self._parts(value)

    def _parts(self, value: Any) -> Iterator[bytes]:
        match value:
            case CodeType():
                yield from self._code(value)
            case FunctionType():
                yield from self._function(value)
            case MethodType():
                yield from self._each((value.__func__, value.__self__))
            case CellType():
                yield from self._each(_contents(value))
            case ModuleType():
                if module_travels_by_value(value.__name__):
                    raise TypeError(f"what module {value.__name__} holds may have changed")
                yield value.__name__.encode()
            case MappingProxyType():
                yield from self._container(dict(value))
            case type():
                yield from self._class(value)
            case list() | tuple() | set() | frozenset() | dict() if type(value).__module__ == "builtins":
                yield from self._container(value)
            case _:
                yield from self._each(_reduced(value))

    def _each(self, values: Iterable[Any]) -> Iterator[bytes]:
        for value in values:
            yield from self.tokens(value)
        yield b"end"

    def _container(self, value: Any) -> Iterator[bytes]:
        if len(value) > WALKED_ITEMS_MAX:
            yield dumps_by_value(value)
        elif isinstance(value, dict):
            yield from self._each(itertools.chain.from_iterable(value.items()))
        elif isinstance(value, set | frozenset):
            yield from self._each(sorted(_hash(each) for each in value))
        else:
            yield from self._each(value)

    def _code(self, code: CodeType) -> Iterator[bytes]:
        names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable)
        yield from self._each((code.co_code, code.co_consts, *names, *shape))

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        yield f"{function.__module__}.{function.__qualname__}".encode()
        if not _is_walked(function):
            return
        given = (function.__defaults__, function.__kwdefaults__, function.__closure__, function.__dict__)
        yield from self._each((function.__code__, globals_of(function), *given, function.__annotations__))

    def _class(self, kind: type) -> Iterator[bytes]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if _is_walked(kind):
            members = {name: member for name, member in vars(kind).items() if name not in _OWN_OF_A_CLASS}
            yield from self._each((kind.__bases__, {name: _member(name, members[name]) for name in sorted(members)}))


def _is_walked(named: Any) -> bool:
    """Whether its name alone does not say what a class or a function does: it is the user's, or was made inside of another one."""
    if travels_by_value(named):
        return True
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not named  # made inside of another one, or wrapped and given the name of what it wraps


def _member(name: str, member: Any) -> Any:
    """A descriptor as the functions that it is made of."""
    match member:
        case staticmethod() | classmethod():
            return (type(member).__name__, member.__func__)
        case property():
            return ("property", member.fget, member.fset, member.fdel)
        case MemberDescriptorType() | GetSetDescriptorType():  # of a slot; `__slots__` names it
            return "slot"
    return repr(member) if name == "__struct_config__" else member


def _reduced(value: Any) -> tuple[Any, ...]:
    """An object as pickle takes it apart. Raises TypeError and others for what has no such form."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # it is known by its name; a wrapper, by what it wraps
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is None and value.__module__ == "__main__":
            raise TypeError(f"{reduced} of the user's program has no form of its own")
        return (value.__module__, reduced, wrapped)
    function, arguments, *rest = reduced
    state, items, pairs = (*rest, None, None, None)[:3]
    return (function, arguments, state, *(list(each) for each in (items, pairs) if each is not None))


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Nothing, of a variable that was not set yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()

"""Finds the variable of a function that can't be pickled for the workers, and state that can't be stored there, with a remedy."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from holdfast.operators.base import JobPlan
from holdfast.operators.pickling import dumps_by_value, globals_of, is_own_module, travels_by_value
from holdfast.operators.task.user_failures import function_name, place_of_function
from holdfast.statebackends.errors import GraphError, HoldfastError
from holdfast.statebackends.state import Pickled

DEPTH_MAX = 8
"""Most steps from an operator to the variable: an object in an object in a closure."""
CHILDREN_MAX = 500
"""Most members of one object that are searched."""

_SPARK = {
    "SparkSession": "It exists in the driver alone: read what the function needs before, and let it use the result",
    "SparkContext": "It exists in the driver alone: read what the function needs before, and let it use the result",
    "DataFrame": "It exists in the driver alone: make it a stream with env.from_dataframe(...), or collect() it into a dict first",
    "RDD": "It exists in the driver alone: make a DataFrame and a stream of it, or collect() it into a dict first",
}
"""Kinds of Spark objects, which can't be used where Spark runs the functions, with the remedy for each."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The smallest object found that can't be pickled."""

    value: Any
    name: str
    """Name in the user's code: `conn`, `self.conn`, `clients['eu']`; empty for the function itself."""
    function: Any
    """Innermost function in which it was found."""


def check_picklable(plan: JobPlan) -> None:
    """Raise GraphError naming operator, function and variable if the plan can't be pickled, before anything is started."""
    selectors = [(uid, selector) for (uid, _), selector in plan.selectors.items()]
    heads = {vertex.vertex_id: vertex.operators[0].uid for vertex in plan.graph.vertices}
    partitionings = [
        (heads[edge.target], plan.partitionings[edge.edge_id]) for edge in plan.graph.edges if edge.edge_id in plan.partitionings
    ]
    for uid, value in [*plan.operators.items(), *selectors, *partitionings, *plan.sources.items()]:
        error = _failure(value)
        if error is not None:
            raise _explained(uid, find_culprit(value), error) from error
    check_pickled_states(plan)


def check_pickled_states(plan: JobPlan) -> None:
    """Raise GraphError for state declared `Pickled` of a class that travels with the job: pickle stores a class by its name, and
    workers have no module of that name, or one with a different class."""
    for uid, operator in plan.operators.items():
        for state in operator.declared_states():
            for kind in _pickled_classes(getattr(state, field.name) for field in dataclasses.fields(state)):
                if travels_by_value(kind):
                    raise _not_importable(uid, state.name, kind)


def _not_importable(uid: str, state: str, kind: type) -> GraphError:
    return GraphError(
        f"operator {uid!r}: state {state!r} is declared Pickled, and {kind.__name__} in it is a class of the program itself "
        f"(module {kind.__module__}): pickle stores a class by its name, by which no worker can import it. Make it a dataclass or "
        "a msgspec.Struct, and declare the state with it and without Pickled; or install its module",
        operator=uid,
        state=state,
    )


def _pickled_classes(declared: Iterable[Any], *, inside: bool = False) -> Iterator[type]:
    """Classes named inside of `Pickled[...]` in types."""
    for each in declared:
        if inside and isinstance(each, type):
            yield each
        yield from _pickled_classes(get_args(each), inside=inside or get_origin(each) is Pickled)


def _failure(value: Any) -> Exception | None:
    try:
        dumps_by_value(value)
    except HoldfastError:
        raise
    except Exception as error:
        return error
    return None


def find_culprit(value: Any, name: str = "", function: Any = None, depth: int = DEPTH_MAX) -> Culprit:
    """Follow an object that can't be pickled down to its innermost part that can't."""
    if _spark_kind(value) is None and depth:
        for count, (child, child_name, inside) in enumerate(_children(value, name, function)):
            if count >= CHILDREN_MAX:
                break
            if child is not value and _failure(child) is not None:
                return find_culprit(child, child_name, inside, depth - 1)
    return Culprit(value, name, function)


def _children(value: Any, name: str, function: Any) -> Iterator[tuple[Any, str, Any]]:
    """(value, name, innermost function) of each part of an object."""
    if isinstance(value, types.MethodType):
        yield value.__self__, "self", value
        return
    if isinstance(value, types.FunctionType):
        yield from ((child, variable, value) for variable, child in _variables(value))
    elif isinstance(value, Mapping):
        yield from ((child, f"{name}[{key!r}]", function) for key, child in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((child, f"{name}[{index}]", function) for index, child in enumerate(value))
    elif isinstance(value, type):
        yield from _members(value, function)
    else:
        yield from _attributes(value, name, function)
        yield type(value), name, function


def _attributes(value: Any, name: str, function: Any) -> Iterator[tuple[Any, str, Any]]:
    """As `_children`. Attributes of our own operators have no names that the user gave; an object that is the function itself is
    `self`."""
    is_ours = is_own_module(type(value).__module__)
    if not is_ours and not name:
        name, function = "self", type(value)
    for attribute, child in getattr(value, "__dict__", {}).items():
        yield child, "" if is_ours else f"{name}.{attribute}", function


def _members(kind: type, function: Any) -> Iterator[tuple[Any, str, Any]]:
    for member, child in vars(kind).items():
        if not member.startswith("__"):
            inner = getattr(child, "__func__", child)
            yield inner, f"{kind.__name__}.{member}", inner if isinstance(inner, types.FunctionType) else function
    yield from ((base, base.__name__, function) for base in kind.__bases__)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables of the enclosing functions and of the module that a function uses, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from globals_of(function).items()
    yield from ((f"{function.__name__}'s default", default) for default in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _spark_kind(value: Any) -> str | None:
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] == "pyspark" and kind.__name__ in _SPARK:
            return kind.__name__
    return None


def _explained(uid: str, culprit: Culprit, error: Exception) -> GraphError:
    spark, function = _spark_kind(culprit.value), culprit.function
    kind = spark or f"{type(culprit.value).__module__}.{type(culprit.value).__qualname__}".removeprefix("builtins.")
    what = f"operator {uid!r}: "
    if function is not None:
        place = place_of_function(getattr(function, "__func__", function))
        what += f"{function_name(function)} ({place}) " if place else f"{function_name(function)} "
    else:
        what += "its function "
    what += f"uses {culprit.name}, a {kind}, which" if culprit.name else f"is a {kind}, which"
    hint = _SPARK[spark] if spark else "Make it in open() of the function, where each worker makes its own"
    reason = "" if spark else f" ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return GraphError(
        f"{what} can't be sent to the workers{reason}. {hint}",
        operator=uid,
        function="" if function is None else function_name(function),
        variable=culprit.name,
    )

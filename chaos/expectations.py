"""A user's expectations of a pipeline's output, where its rows are no function of the input alone.

A pipeline file states them with `hf.chaos.expect`, which has no effect outside of the simulator. This module knows neither jobs nor
runs: the user's programs import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from holdfast.statebackends.errors import InvalidConfigError

Columns: TypeAlias = str | Sequence[str]
Invariant: TypeAlias = Callable[[list[dict[str, Any]]], Any]
"""Receives all committed rows of a sink, in the order of their commits."""

EXPECTATIONS = "__holdfast_expectations__"
"""Attribute of a function that `expect` decorates."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False, slots=True)
class Expectation:
    """One call of `expect`; as a decorator it belongs to the function."""

    sink: str | None
    """Sink id; None: every sink of the job."""
    last_value_per_key: tuple[str, ...]
    ignore_columns: tuple[str, ...]
    invariant: Invariant | None

    @property
    def compares(self) -> bool:
        """Whether rows are compared with those of a run without failures."""
        return bool(self.last_value_per_key or self.ignore_columns)

    def __call__(self, pipeline: F) -> F:
        made = _collected.get()
        if made is not None and self in made:
            made.remove(self)
        if not callable(pipeline):
            raise InvalidConfigError(f"expect(...) decorates the function of a pipeline, not {pipeline!r}", setting="expect")
        setattr(pipeline, EXPECTATIONS, (self, *getattr(pipeline, EXPECTATIONS, ())))
        return pipeline


_collected: ContextVar[list[Expectation] | None] = ContextVar("holdfast_expectations", default=None)


def expect(
    *,
    last_value_per_key: Columns | None = None,
    ignore_columns: Columns | None = None,
    invariant: Invariant | None = None,
    sink: str | None = None,
) -> Expectation:
    """State what `holdfast chaos sim` must find in the committed output; within the function of a pipeline, or as its decorator.

    It replaces the comparison of all rows. Several expectations hold together; outside of the simulator they have no effect.
    last_value_per_key: of each value of these columns only the newest row is compared with that of a run without failures, in the
    order of commits; floats to nine digits. ignore_columns: columns left out of the comparison. invariant: a function of all
    committed rows, as dicts in the order of commits; it returns False or a text, or raises AssertionError, where it does not hold.
    With it alone no rows are compared. sink:
    the sink's id, which is its uid unless it has one of its own; None: every sink.
    Raises InvalidConfigError for a call without expectation, or with one that is no column or function."""
    keys, ignored = _columns(last_value_per_key, "last_value_per_key"), _columns(ignore_columns, "ignore_columns")
    if invariant is not None and not callable(invariant):
        raise InvalidConfigError(f"invariant= takes a function of the rows, not {invariant!r}", setting="invariant")
    if not (keys or ignored or invariant):
        raise InvalidConfigError("expect() says nothing: give last_value_per_key=, ignore_columns= or invariant=", setting="expect")
    both = sorted(set(keys) & set(ignored))
    if both:
        raise InvalidConfigError(f"{', '.join(both)} can't be both a key and ignored", setting="ignore_columns")
    said = Expectation(sink, keys, ignored, invariant)
    made = _collected.get()
    if made is not None:
        made.append(said)
    return said


def _columns(columns: Columns | None, setting: str) -> tuple[str, ...]:
    if columns is None:
        return ()
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidConfigError(f"{setting}= takes a column or several, not {columns!r}", setting=setting)
    return names


@contextmanager
def collecting() -> Iterator[list[Expectation]]:
    """Expectations stated within the block, decorators excepted."""
    made: list[Expectation] = []
    token = _collected.set(made)
    try:
        yield made
    finally:
        _collected.reset(token)


def of_function(pipeline: Callable[..., Any]) -> tuple[Expectation, ...]:
    """Expectations that decorate a pipeline's function."""
    found: tuple[Expectation, ...] = getattr(pipeline, EXPECTATIONS, ())
    return found

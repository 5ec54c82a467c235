"""A sabotage: one safety rule broken by a mutant that replaces a piece of the product for the length of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.chaos.faults.faults import Fault

SEEDS_MAX = 20
"""Seeds granted to most sabotages. One that shows more rarely has a number of its own: at least three times as many as caught it in
half of the cases."""

THROUGHOUT_MS = 5_000
"""Longer than a short job takes, ms."""

_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A replacement for one attribute of a class or a module."""

    owner: Any
    """The class or module. A function that others import by name is an attribute of theirs, too."""
    name: str
    make: Callable[[Any], Any]
    """From the original attribute (for a property the property itself) to its replacement."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the replacement is in place; the original is put back, also after an error."""
        own = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.make(getattr(self.owner, self.name) if own is _ABSENT else own))
        try:
            yield
        finally:
            if own is _ABSENT:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, own)


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One broken rule, and the runs that show it."""

    name: str
    meaning: str
    """The product's behaviour under it, in one line."""
    invariants: tuple[str, ...]
    """Invariants expected to catch it."""
    mutants: tuple[Mutant, ...]
    """Applied together: one mistake, in as many places as the product states the rule."""
    workloads: tuple[str, ...] = ()
    """Workloads that show it; empty: all."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults, or families, that make it show; empty: all."""
    plan: tuple[Fault, ...] | None = None
    """The faults of every seed, where drawn ones would make it show too rarely; None: drawn."""
    seeds_max: int = SEEDS_MAX
    """Number of seeds within which it is caught."""
    backend: str | None = None
    """State backend that shows it; None: any."""

    @contextmanager
    def apply(self) -> Iterator[None]:
        """The product is broken within the block. It is process-wide: no other run may be under way."""
        with ExitStack() as stack:
            for mutant in self.mutants:
                stack.enter_context(mutant.applied())
            yield


def throughout(kind: str, target: str, *, amount: int = 0, probability: float = 1.0) -> Fault:
    """A fault that lasts from the beginning of a short job to its end."""
    return Fault(kind, target, at_ms=0, duration_ms=THROUGHOUT_MS, amount=amount, probability=probability)


def constant(value: Any) -> Callable[[Any], Any]:
    """A function that only returns this value."""
    return lambda original: lambda *arguments, **options: value

"""What a sabotage is: one safety rule broken, by a mutant in the place of a piece of the product for as long as a run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.chaos.faults.faults import Fault

SEEDS_MAX = 20
"""Seeds that most sabotages are granted. One that shows more rarely has a number of its own: at least three times as many as it
took to catch it in half of the cases."""

THROUGHOUT_MS = 5_000
"""Longer than a short job takes."""

_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A replacement for one attribute of a class or a module."""

    owner: Any
    """The class or module. A function that others imported by name is an attribute of theirs too."""
    name: str
    make: Callable[[Any], Any]
    """From what stands there (for a property the property itself) to what takes its place."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """It stands there until the end of the block; what stood there before is put back, also after an error."""
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
    """One rule that is broken, and where that shows."""

    name: str
    meaning: str
    """What the product does then, as one line."""
    invariants: tuple[str, ...]
    """Expected to catch it."""
    mutants: tuple[Mutant, ...]
    """All are applied together: they are one mistake, in as many places as the product says it."""
    workloads: tuple[str, ...] = ()
    """Where it shows; empty: everywhere."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults, or families, that make it show; empty: all."""
    plan: tuple[Fault, ...] | None = None
    """The faults of every seed, where drawn ones would make it show too rarely; None: drawn."""
    seeds_max: int = SEEDS_MAX
    """It is caught within so many seeds."""
    backend: str | None = None
    """State backend in which it shows; None: any."""

    @contextmanager
    def apply(self) -> Iterator[None]:
        """The product is broken until the end of the block. It is process-wide: nothing else may run beside it."""
        with ExitStack() as stack:
            for mutant in self.mutants:
                stack.enter_context(mutant.applied())
            yield


def throughout(kind: str, target: str, *, amount: int = 0, probability: float = 1.0) -> Fault:
    """A fault that lasts from the beginning of a short job to its end."""
    return Fault(kind, target, at_ms=0, duration_ms=THROUGHOUT_MS, amount=amount, probability=probability)


def constant(value: Any) -> Callable[[Any], Any]:
    """A function that does nothing and returns this, in place of any other."""
    return lambda original: lambda *arguments, **options: value

"""Which keys of a table changed since which barrier: what an increment of a snapshot is made from.

At a barrier the keys of the generation that it froze are noted, and are kept until a checkpoint at or above it is known to be
a base: what an aborted checkpoint had stored is then still in the next one's increment. When too much has changed, or for too
many barriers, the oldest are forgotten: an increment on a base before them can't be made, and the snapshot is full. It knows
nothing of values: those are looked up in the generations that a barrier froze."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

EPOCHS_MAX = 32
"""Barriers since the base."""
KEYS_MIN = 4_096
"""Changed keys that are always kept; above it half as many as there are keys: more are no increment."""

Epoch = tuple[int, Collection[Any]]
"""(barrier, keys that changed between the one before and this one)."""


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """What is known of a table's changes at one barrier; for another thread, while that barrier's generations are pinned."""

    complete_from: int
    """The lowest base that an increment can build on."""
    epochs: tuple[Epoch, ...]
    """Newest first."""
    forgotten: list[Epoch] = field(default_factory=list)
    """To be cleared by the other thread: freeing many keys takes milliseconds."""

    def count(self, base: int) -> int:
        """Keys that may have changed since a base; one that did so twice may count twice."""
        return sum(len(keys) for barrier, keys in self.epochs if barrier > base)

    def chunks(self, base: int, rows: int) -> Iterator[list[Any]]:
        """Keys that changed since a base, each once, up to `rows` at a time: only short stretches hold the interpreter lock."""
        newer: list[Collection[Any]] = []
        for barrier, keys in self.epochs:
            if barrier <= base:
                return
            left = iter(keys)
            while some := list(islice(left, rows)):
                for other in newer:
                    some = [key for key in some if key not in other]
                if some:
                    yield some
            newer.append(keys)


class ChangeLog:
    """The keys of one table that changed up to its last barrier."""

    __slots__ = ("_complete_from", "_epochs")

    def __init__(self, complete_from: int) -> None:
        """Nothing changed since the base `complete_from`; 0: the table is new, and was empty."""
        self._complete_from = complete_from
        self._epochs: tuple[Epoch, ...] = ()

    @property
    def complete_from(self) -> int:
        """The lowest base that an increment can build on."""
        return self._complete_from

    @property
    def is_empty(self) -> bool:
        return not self._epochs

    def close(self, barrier: int, keys: Collection[Any], base: int, count: int) -> ChangedKeys:
        """At a barrier: `keys` changed since the one before. No base below `base` will be asked for; the table has `count` keys."""
        epochs = ((barrier, keys), *self._epochs) if keys else self._epochs
        kept = self._bounded([epoch for epoch in epochs if epoch[0] > base], max(KEYS_MIN, count // 2))
        self._epochs = kept
        return ChangedKeys(
            self._complete_from, kept, [epoch for epoch in epochs if epoch[0] <= base or epoch[0] <= self._complete_from]
        )

    def _bounded(self, epochs: Sequence[Epoch], keys_max: int) -> tuple[Epoch, ...]:
        kept = 0
        for number, (barrier, keys) in enumerate(epochs):
            kept += len(keys)
            if kept > keys_max or number == EPOCHS_MAX:
                self._complete_from = barrier
                return tuple(epochs[:number])
        return tuple(epochs)

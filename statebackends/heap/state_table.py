"""Copy-on-write table of one (state, namespace): an active dict over immutable ones (Flink: CopyOnWriteStateMap; LSM: memtables).

A barrier freezes in O(1): the active layer becomes immutable, and a new one goes on top. A snapshot pins immutable layers, which
then don't change, so that a pool thread may read them. When the pins are gone, the layers above are merged down in O(changed since
the barrier). A layer is a dict whose entries hide those of older layers. Without a snapshot in flight there is one layer, and an
access is one lookup. With increments there are two: the keys of the active layer are those that changed since the last barrier, so
writes need no extra bookkeeping, and only keys that didn't change cost a second lookup.

DirtyKeys records which keys changed before which barrier; increments are made from it. A barrier's keys are kept until a base at or
above it is named, so that the next increment still has what an aborted checkpoint stored. Above a bound on keys or barriers the
oldest are forgotten; an increment on a base before them can't be made, and the snapshot is full.

It does not know what a value is: that is for states.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from operator import not_
from typing import Any, Final

EPOCHS_MAX = 32
"""Barriers since the base whose changed keys are kept."""
KEYS_MIN = 4_096
"""Changed keys that are always kept. In a larger table up to half of its keys are; more make no increment worth writing."""

Epoch = tuple[int, Collection[Any]]
"""(barrier, keys that changed between the barrier before and this one)."""


@dataclass(frozen=True, slots=True)
class FrozenDirtyKeys:
    """Changed keys of one table, as known at one barrier. Another thread may read it while that barrier's layers are pinned."""

    complete_from: int
    """The lowest base that an increment can build on."""
    epochs: tuple[Epoch, ...]
    """Newest first."""
    forgotten: list[Epoch] = field(default_factory=list)
    """Epochs that the table dropped; the other thread clears them, since freeing many keys takes milliseconds."""

    def count(self, base: int) -> int:
        """Keys that changed since a base; a key that changed before several barriers counts for each."""
        return sum(len(keys) for barrier, keys in self.epochs if barrier > base)

    def batches(self, base: int, rows: int) -> Iterator[list[Any]]:
        """Keys that changed since a base, each once, at most `rows` at a time: short batches hold the interpreter lock briefly."""
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


class DirtyKeys:
    """Changed keys of one table, up to its last barrier."""

    __slots__ = ("_complete_from", "_epochs")

    def __init__(self, complete_from: int) -> None:
        """`complete_from`: the base that the rows are those of; 0 for a new, empty table."""
        self._complete_from = complete_from
        self._epochs: tuple[Epoch, ...] = ()

    @property
    def complete_from(self) -> int:
        """The lowest base that an increment can build on."""
        return self._complete_from

    @property
    def is_empty(self) -> bool:
        return not self._epochs

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Newest first."""
        return self._epochs

    def replace(self, renamed: Callable[[Collection[Any]], Collection[Any]]) -> None:
        """Name the keys of each epoch anew."""
        self._epochs = tuple((barrier, renamed(keys)) for barrier, keys in self._epochs)

    def close(self, barrier: int, keys: Collection[Any], base: int, count: int) -> FrozenDirtyKeys:
        """Record at a barrier that `keys` changed since the one before. `count`: keys of the table. Later calls name no base below
        `base`, whose epochs are dropped."""
        epochs = ((barrier, keys), *self._epochs) if keys else self._epochs
        kept = self._bounded([epoch for epoch in epochs if epoch[0] > base], max(KEYS_MIN, count // 2))
        self._epochs = kept
        return FrozenDirtyKeys(
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


class _Sentinel:
    """A marker that is not a user's value."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


MISSING: Final = _Sentinel("MISSING")
"""No value was found."""
TOMBSTONE: Final = _Sentinel("TOMBSTONE")
"""The key was deleted in this layer; hides values in older layers."""

Layer = dict[Any, Any]


class MapLayer(dict[Any, Any]):
    """Entries of one key's map in one layer. `cleared`: it hides all entries in older layers."""

    __slots__ = ("cleared",)

    def __init__(self, *, cleared: bool = False) -> None:
        super().__init__()
        self.cleared = cleared


def visible_batches(layers: Sequence[Layer], rows: int, *, maps: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """(keys, values) of layers (newest first) read as one state, about `rows` keys at a time; a map's value is a dict.

    For the pool thread, over pinned layers, which don't change. Short batches hold the interpreter lock briefly."""
    for position, layer in enumerate(layers):
        newer = layers[:position]
        older = layers[position + 1 :]
        keys_left, values_left = iter(layer), iter(layer.values())
        while keys := list(islice(keys_left, rows)):
            values = list(islice(values_left, rows))
            for other in newer:
                hidden = list(map(other.__contains__, keys))
                if any(hidden):
                    shown = list(map(not_, hidden))
                    keys, values = list(compress(keys, shown)), list(compress(values, shown))
            if maps and (newer or older):
                values = [_visible_entries(key, layers) for key in keys]
                keys = [key for key, entries in zip(keys, values, strict=True) if entries]
                values = [entries for entries in values if entries]
            elif older:
                keys = [key for key, value in zip(keys, values, strict=True) if value is not TOMBSTONE]
                values = [value for value in values if value is not TOMBSTONE]
            yield keys, values


def visible_keys(layers: Sequence[Layer], *, maps: bool) -> list[Any]:
    """Keys of layers (newest first) read as one state. For the loop thread, at any time, without the lock.

    A pool thread may merge newer layers into the lowest one meanwhile. They hide what it changes there; and listing a layer's keys,
    or getting a value, is one step that no other thread interrupts."""
    keys = list(dict.fromkeys(chain.from_iterable([list(layer) for layer in layers])))
    return [key for key, found in zip(keys, lookup(keys, layers, maps=maps), strict=True) if found is not MISSING]


def lookup(keys: Sequence[Any], layers: Sequence[Layer], *, maps: bool) -> list[Any]:
    """Value of each key in layers (newest first) read as one state; MISSING for a key without one."""
    if maps:
        return [_visible_entries(key, layers) or MISSING for key in keys]
    found = [MISSING] * len(keys)
    for layer in reversed(layers):
        found = [layer.get(key, below) for key, below in zip(keys, found, strict=True)]
    return [MISSING if value is TOMBSTONE else value for value in found]


def _visible_entries(key: Any, layers: Sequence[Layer]) -> Layer:
    stack: list[MapLayer] = []
    for layer in layers:
        entries = layer.get(key)
        if entries is not None:
            stack.append(entries)
            if entries.cleared:
                break
    found: Layer = {}
    for entries in reversed(stack):
        apply_entries(found, entries)
    return found


def apply_entries(found: Layer, entries: MapLayer) -> None:
    """Apply a newer layer's entries of one map to a dict of plain entries."""
    for entry, value in entries.items():
        if value is TOMBSTONE:
            found.pop(entry, None)
        else:
            found[entry] = value


_ROWS_PER_MERGE = 1 << 12
_LAYERS_MAX = 8
"""Unpinned immutable layers above which the loop thread merges them itself; usually a pool thread has done so."""


class CopyOnWriteStateTable:
    """Layers of one (state, namespace). `active` is the newest; `immutable` are the frozen ones, newest first."""

    __slots__ = ("_dirty", "_frozen", "_merged", "_pins", "active", "deleted", "immutable", "layered", "lock", "pinned")

    maps = False
    """Whether values are MapLayers."""

    def __init__(self) -> None:
        self.active: Layer = {}
        self.immutable: tuple[Layer, ...] = ()
        self.layered = False
        """Reads look below `active`, and deletions leave tombstones."""
        self.deleted = False
        """Some layer may hold tombstones."""
        self.pinned = False
        """A snapshot reads frozen layers: a value found there is copied before it is changed."""
        self._pins: list[int] = []  # for each snapshot in flight, how many of the oldest layers it reads
        self._dirty: DirtyKeys | None = None
        self._frozen: Layer | None = None  # the layer that the last barrier froze, until it is noted
        self._merged: tuple[Layer, ...] = ()  # frozen layers whose rows are in the lowest one
        self.lock = threading.Lock()
        """Held by a pool thread while it reads immutable layers, or merges them."""

    def find(self, key: Any) -> tuple[Any, bool]:
        """(value or MISSING, whether a pinned layer holds it, so that it must be copied before it is changed)."""
        found = self.active.get(key, MISSING)
        if found is not MISSING:
            return (MISSING if found is TOMBSTONE else found), False
        for layer in self.immutable:
            found = layer.get(key, MISSING)
            if found is not MISSING:
                return (MISSING if found is TOMBSTONE else found), self.pinned
        return self.find_below(key), False

    def find_below(self, key: Any) -> Any:
        """Value below the oldest layer, for a backend with a database below; MISSING here."""
        return MISSING

    def remove(self, key: Any) -> None:
        if self._may_be_below(key):
            self.active[key] = TOMBSTONE
            self.deleted = True
        else:
            self.active.pop(key, None)

    def _may_be_below(self, key: Any) -> bool:
        """Whether a removed key needs a tombstone. With one layer below, keys added and removed between two barriers need none."""
        return self.layered and (self._dirty is None or len(self.immutable) != 1 or key in self.immutable[0])

    def freeze(self) -> tuple[Layer, ...]:
        """Pin the present layers and return them, newest first; they don't change until `release(len(layers))`."""
        self._freeze_active()
        self._pins.append(len(self.immutable))
        self.pinned = True
        return self.immutable

    def _freeze_active(self) -> None:
        self._frozen = None
        if self.active:
            self._frozen = self.active
            self.immutable = (self.active, *self.immutable)
            self.active = {}
            self.layered = True

    def track_since(self, base: int) -> None:
        """Note changes from now on: the present rows are those of the checkpoint `base`; 0 if there are none."""
        self._freeze_active()
        self._begin(base)

    def checkpoint_started(self, barrier: int, base: int) -> FrozenDirtyKeys:
        """Changed keys up to the barrier that `freeze` was just called for; the first call begins to note changes.

        Later calls name no base below `base`. O(barriers since the base)."""
        if self._dirty is None:
            self._begin(barrier)
            return FrozenDirtyKeys(barrier, ())
        return self._dirty.close(barrier, self._frozen or (), base, sum(map(len, self.immutable)))

    def _begin(self, base: int) -> None:
        """Keep a layer below the active one from now on, and merge nothing into the active one."""
        self._dirty = DirtyKeys(base)
        if not self.immutable:
            self.immutable = ({},)
            self.layered = True

    @property
    def complete_from(self) -> int | None:
        """The lowest base that an increment can build on; None: changes are not noted yet."""
        return None if self._dirty is None else self._dirty.complete_from

    @property
    def is_idle(self) -> bool:
        """Whether it holds no rows and no changes that a later increment needs."""
        return not self.active and not self._pins and not any(self.immutable) and (self._dirty is None or self._dirty.is_empty)

    def release(self, depth: int) -> None:
        """Unpin the `depth` oldest layers, and merge all layers without a pin: O(changed since the oldest barrier)."""
        self._pins.remove(depth)
        self.pinned = bool(self._pins)
        if self._dirty is not None:
            self._drop_merged()
            return
        kept = max(self._pins, default=0)
        free = len(self.immutable) - kept
        if free <= 0:
            return
        target = self.immutable[free - 1]
        for layer in (*reversed(self.immutable[: free - 1]), self.active):
            self._merge_into(target, layer, lowest=not kept)
        self.active = target
        self.immutable = self.immutable[free:]
        self.layered = kept > 0
        self.deleted = self.deleted and self.layered

    def _drop_merged(self) -> None:
        """`release` where changes are noted: only the lowest layer is changed, and only while no other thread reads it."""
        if self._pins:
            return
        if self._merged:
            self.immutable = (*self.immutable[: len(self.immutable) - len(self._merged)], self._merged[-1])
            self._merged = ()
        if len(self.immutable) > _LAYERS_MAX:
            for layer in reversed(self.immutable[:-1]):
                self._merge_into(self.immutable[-1], layer, lowest=True)
            self.immutable = self.immutable[-1:]

    def merge(self, layers: tuple[Layer, ...]) -> None:
        """Pool thread, after reading the layers of `freeze`: merge them into the lowest one, unless another snapshot reads it.

        Until `release` the layers above hide the lowest one, so that the loop thread reads the same values."""
        with self.lock:
            if self._dirty is None or len(layers) < 2 or self._pins != [len(layers)]:
                return
            for layer in reversed(layers[:-1]):
                self._merge_by_batches(layers[-1], layer)
            self._merged = layers

    def _merge_by_batches(self, target: Layer, newer: Layer) -> None:
        keys_left, values_left = iter(newer), iter(newer.values())
        while keys := list(islice(keys_left, _ROWS_PER_MERGE)):
            values = list(islice(values_left, _ROWS_PER_MERGE))
            target.update(zip(keys, values, strict=True))
            if self.deleted:
                for key, value in zip(keys, values, strict=True):
                    if value is TOMBSTONE:
                        del target[key]

    def _merge_into(self, target: Layer, newer: Layer, *, lowest: bool) -> None:
        """Merge a newer layer into `target`. In the lowest layer tombstones delete; elsewhere they are kept."""
        target.update(newer)
        if lowest and self.deleted:
            for key, value in newer.items():
                if value is TOMBSTONE:
                    del target[key]

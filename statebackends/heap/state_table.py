"""Generations: the working state of one (state, namespace) as a live dict over frozen ones.

A barrier freezes in O(1): what was live becomes a frozen layer and a new live dict goes on top. Frozen layers never
change while a snapshot pins them, so a pool thread may read them. When the pins are gone, the layers above are folded
down in O(changed since the barrier). With no snapshot in flight there is one dict, and every access is one lookup; where
increments are made there are two, and the keys of the live one are those that changed since the barrier: whoever writes to
it has noted a change, and only keys that didn't change since cost a second lookup.
What a key's value means is decided in keyedstates.py."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

from holdfast.statebackends.heap.changes import ChangedKeys, ChangeLog
from holdfast.statebackends.heap.layers import MISSING, TOMBSTONE, Layer

_ROWS_PER_FOLD = 1 << 12
_LAYERS_MAX = 8
"""Frozen layers that no snapshot pins, before the loop thread folds what no other thread got to fold."""


class Generations:
    """Layers of one (state, namespace). `live` is the newest; `older` are frozen, newest first."""

    __slots__ = ("_folded", "_log", "_pins", "_sealed", "deleted", "layered", "live", "lock", "older", "pinned")

    maps = False
    """Whether values are MapLayers."""

    def __init__(self) -> None:
        self.live: Layer = {}
        self.older: tuple[Layer, ...] = ()
        self.layered = False
        """Whether reads must look below `live`; deletions then leave tombstones."""
        self.deleted = False
        """Whether some layer may hold tombstones."""
        self.pinned = False
        """Whether a snapshot reads frozen layers: what is found there must be copied before it is changed."""
        self._pins: list[int] = []  # of each snapshot in flight: how many of the oldest layers it reads
        self._log: ChangeLog | None = None
        self._sealed: Layer | None = None  # the layer that the last barrier froze, until it is noted
        self._folded: tuple[Layer, ...] = ()  # frozen layers that are in the lowest one by now
        self.lock = threading.Lock()
        """Held by other threads while they read frozen layers, or fold them."""

    def find(self, key: Any) -> tuple[Any, bool]:
        """(value or MISSING, whether it belongs to a frozen generation and must be copied before it is changed)."""
        found = self.live.get(key, MISSING)
        if found is not MISSING:
            return (MISSING if found is TOMBSTONE else found), False
        for layer in self.older:
            found = layer.get(key, MISSING)
            if found is not MISSING:
                return (MISSING if found is TOMBSTONE else found), self.pinned
        return self.find_below(key), False

    def find_below(self, key: Any) -> Any:
        """Value below the oldest layer, for a backend that keeps state elsewhere; MISSING here."""
        return MISSING

    def remove(self, key: Any) -> None:
        if self._may_be_below(key):
            self.live[key] = TOMBSTONE
            self.deleted = True
        else:
            self.live.pop(key, None)

    def _may_be_below(self, key: Any) -> bool:
        """Where there is but one layer below, keys that come and go between two barriers leave no tombstone behind."""
        return self.layered and (self._log is None or len(self.older) != 1 or key in self.older[0])

    def freeze(self) -> tuple[Layer, ...]:
        """The layers as they are now, newest first; they don't change until `thaw` is called with the same length."""
        self._seal()
        self._pins.append(len(self.older))
        self.pinned = True
        return self.older

    def _seal(self) -> None:
        self._sealed = None
        if self.live:
            self._sealed = self.live
            self.older = (self.live, *self.older)
            self.live = {}
            self.layered = True

    def track(self, base: int) -> None:
        """Note changes from now on: the rows are those of the checkpoint `base`, or there are none yet (0)."""
        self._seal()
        self._begin(base)

    def mark(self, barrier: int, base: int) -> ChangedKeys:
        """What changed before the barrier that `freeze` was called for just now; the first call begins to note changes.

        No base below `base` will ever be asked for. O(barriers since the base)."""
        if self._log is None:
            self._begin(barrier)
            return ChangedKeys(barrier, ())
        return self._log.close(barrier, self._sealed or (), base, sum(map(len, self.older)))

    def _begin(self, base: int) -> None:
        """From now on nothing is folded into the live layer, and there is always one below."""
        self._log = ChangeLog(base)
        if not self.older:
            self.older = ({},)
            self.layered = True

    @property
    def complete_from(self) -> int | None:
        """The lowest base that an increment can build on; None: changes are not noted yet."""
        return None if self._log is None else self._log.complete_from

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing in it, and nothing to tell of."""
        return not self.live and not self._pins and not any(self.older) and (self._log is None or self._log.is_empty)

    def thaw(self, depth: int) -> None:
        """Unpin the `depth` oldest layers and fold every layer that nobody pins: O(changed since the oldest barrier)."""
        self._pins.remove(depth)
        self.pinned = bool(self._pins)
        if self._log is not None:
            self._drop_folded()
            return
        kept = max(self._pins, default=0)
        free = len(self.older) - kept
        if free <= 0:
            return
        target = self.older[free - 1]
        for layer in (*reversed(self.older[: free - 1]), self.live):
            self._fold(target, layer, lowest=not kept)
        self.live = target
        self.older = self.older[free:]
        self.layered = kept > 0
        self.deleted = self.deleted and self.layered

    def _drop_folded(self) -> None:
        """Changes are noted. Only the lowest layer is ever changed, and only while nobody else reads it."""
        if self._pins:
            return
        if self._folded:
            self.older = (*self.older[: len(self.older) - len(self._folded)], self._folded[-1])
            self._folded = ()
        if len(self.older) > _LAYERS_MAX:
            for layer in reversed(self.older[:-1]):
                self._fold(self.older[-1], layer, lowest=True)
            self.older = self.older[-1:]

    def fold(self, layers: tuple[Layer, ...]) -> None:
        """Pool thread, done with what `freeze` gave: fold it into the lowest layer, unless another snapshot reads that.

        Until the pin is gone the layers above hide the lowest one, so that reads on the loop thread see no difference."""
        with self.lock:
            if self._log is None or len(layers) < 2 or self._pins != [len(layers)]:
                return
            for layer in reversed(layers[:-1]):
                self._fold_by_chunks(layers[-1], layer)
            self._folded = layers

    def _fold_by_chunks(self, target: Layer, newer: Layer) -> None:
        keys_left, values_left = iter(newer), iter(newer.values())
        while keys := list(islice(keys_left, _ROWS_PER_FOLD)):
            values = list(islice(values_left, _ROWS_PER_FOLD))
            target.update(zip(keys, values, strict=True))
            if self.deleted:
                for key, value in zip(keys, values, strict=True):
                    if value is TOMBSTONE:
                        del target[key]

    def _fold(self, target: Layer, newer: Layer, *, lowest: bool) -> None:
        """Fold a newer layer into `target`; in the lowest layer tombstones delete instead of being kept."""
        target.update(newer)
        if lowest and self.deleted:
            for key, value in newer.items():
                if value is TOMBSTONE:
                    del target[key]

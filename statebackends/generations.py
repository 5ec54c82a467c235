"""Generations: the working state of one (state, namespace) as a live dict over frozen ones.

A barrier freezes in O(1): what was live becomes a frozen layer and a new live dict goes on top. Frozen layers never
change while a snapshot pins them, so a pool thread may read them. When the pins are gone, the layers above are folded
down in O(changed since the barrier). With no snapshot in flight there is one dict, and every access is one lookup.
What a key's value means is decided in keyedstates.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, Final

from statebackends.backend import TimerRow

_ROWS_PER_CHUNK = 1 << 14


class _Mark:
    """A value that no user can store."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


MISSING: Final = _Mark("MISSING")
"""Nothing was found."""
TOMBSTONE: Final = _Mark("TOMBSTONE")
"""Deleted in this generation; hides what older ones hold."""

Layer = dict[Any, Any]


class MapLayer(dict[Any, Any]):
    """One generation's entries of one key's map. `cleared`: hides the entries of older generations."""

    __slots__ = ("cleared",)

    def __init__(self, *, cleared: bool = False) -> None:
        super().__init__()
        self.cleared = cleared


class Generations:
    """Layers of one (state, namespace). `live` is the newest; `older` are frozen, newest first."""

    __slots__ = ("_pins", "deleted", "layered", "live", "older")

    maps = False
    """Whether values are MapLayers."""

    def __init__(self) -> None:
        self.live: Layer = {}
        self.older: tuple[Layer, ...] = ()
        self.layered = False
        """Whether reads must look below `live`; deletions then leave tombstones."""
        self.deleted = False
        """Whether some layer may hold tombstones."""
        self._pins: list[int] = []  # of each snapshot in flight: how many of the oldest layers it reads

    def find(self, key: Any) -> tuple[Any, bool]:
        """(value or MISSING, whether it belongs to a frozen generation and must be copied before it is changed)."""
        found = self.live.get(key, MISSING)
        if found is not MISSING:
            return (MISSING if found is TOMBSTONE else found), False
        for layer in self.older:
            found = layer.get(key, MISSING)
            if found is not MISSING:
                return (MISSING if found is TOMBSTONE else found), True
        return self.find_below(key), False

    def find_below(self, key: Any) -> Any:
        """Value below the oldest layer, for a backend that keeps state elsewhere; MISSING here."""
        return MISSING

    def remove(self, key: Any) -> None:
        if self.layered:
            self.live[key] = TOMBSTONE
            self.deleted = True
        else:
            self.live.pop(key, None)

    def freeze(self) -> tuple[Layer, ...]:
        """The layers as they are now, newest first; they don't change until `thaw` is called with the same length."""
        if self.live:
            self.older = (self.live, *self.older)
            self.live = {}
            self.layered = True
        self._pins.append(len(self.older))
        return self.older

    def thaw(self, depth: int) -> None:
        """Unpin the `depth` oldest layers and fold every layer that nobody pins: O(changed since the oldest barrier)."""
        self._pins.remove(depth)
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

    def _fold(self, target: Layer, newer: Layer, *, lowest: bool) -> None:
        """Fold a newer layer into `target`; in the lowest layer tombstones delete instead of being kept."""
        target.update(newer)
        if lowest and self.deleted:
            for key, value in newer.items():
                if value is TOMBSTONE:
                    del target[key]


class MapGenerations(Generations):
    """As Generations; the value of a key is a MapLayer, and layers are folded entry by entry."""

    __slots__ = ()

    maps = True

    def find_entry(self, key: Any, entry: Any) -> tuple[Any, bool]:
        """As `find`, for one entry of a key's map."""
        frozen = False
        for layer in (self.live, *self.older):
            entries = layer.get(key)
            if entries is not None:
                found = entries.get(entry, MISSING)
                if found is not MISSING:
                    return (MISSING if found is TOMBSTONE else found), frozen
                if entries.cleared:
                    return MISSING, False
            frozen = True
        return self.find_entry_below(key, entry), False

    def find_entry_below(self, key: Any, entry: Any) -> Any:
        """Entry below the oldest layer; MISSING here."""
        return MISSING

    def entries_below(self, key: Any) -> Layer:
        """All entries below the oldest layer, in a dict of the caller's own; none here."""
        return {}

    def entries(self, key: Any) -> tuple[Layer, set[Any]]:
        """(all entries of a key's map, which of them belong to frozen generations)."""
        layers = [self.live, *self.older]
        stack: list[tuple[MapLayer, bool]] = []
        cleared = False
        for position, layer in enumerate(layers):
            entries = layer.get(key)
            if entries is not None:
                stack.append((entries, position > 0))
                if entries.cleared:
                    cleared = True
                    break
        found = {} if cleared else self.entries_below(key)
        frozen: set[Any] = set()
        for entries, is_frozen in reversed(stack):
            _apply(found, entries)
            frozen = frozen | entries.keys() if is_frozen else frozen - entries.keys()
        return found, frozen

    def remove(self, key: Any) -> None:
        if self.layered:
            self.live[key] = MapLayer(cleared=True)
        else:
            self.live.pop(key, None)

    def remove_entry(self, key: Any, entry: Any) -> None:
        entries = self.live.get(key)
        if self.layered:
            if entries is None:
                entries = self.live[key] = MapLayer()
            entries[entry] = TOMBSTONE
        elif entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self.live[key]

    def _fold(self, target: Layer, newer: Layer, *, lowest: bool) -> None:
        for key, entries in newer.items():
            below = target.get(key)
            if below is None or entries.cleared:
                target[key] = below = entries
            else:
                below.update(entries)
            if lowest:
                below.cleared = False
                for entry in [entry for entry, value in entries.items() if value is TOMBSTONE]:
                    below.pop(entry, None)
                if not below:
                    del target[key]


def _apply(found: Layer, entries: MapLayer) -> None:
    for entry, value in entries.items():
        if value is TOMBSTONE:
            found.pop(entry, None)
        else:
            found[entry] = value


class GenerationRows:
    """`backend.TimerRowProvider` over generations whose keys are the rows themselves."""

    def __init__(self, generations: Generations, load: Callable[[Sequence[TimerRow]], None]) -> None:
        self._generations = generations
        self._load = load

    def freeze(self) -> FrozenGenerationRows:
        return FrozenGenerationRows(self._generations)

    def load(self, rows: Sequence[TimerRow]) -> None:
        self._load(rows)


class FrozenGenerationRows:
    """`backend.FrozenTimerRows`."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._layers = generations.freeze()

    def rows(self) -> Iterator[TimerRow]:
        for keys, _ in visible_chunks(self._layers, _ROWS_PER_CHUNK, maps=False):
            yield from keys

    def release(self) -> None:
        self._generations.thaw(len(self._layers))


def visible_chunks(layers: Sequence[Layer], rows: int, *, maps: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """(keys, values) of some layers, newest first, as one state, about `rows` keys at a time; a map's value is a dict.

    For the pool thread: layers don't change meanwhile, and only short stretches hold the interpreter lock."""
    for position, layer in enumerate(layers):
        newer = layers[:position]
        older = layers[position + 1 :]
        keys_left, values_left = iter(layer), iter(layer.values())
        while keys := list(islice(keys_left, rows)):
            values = list(islice(values_left, rows))
            for other in newer:
                shown = [key not in other for key in keys]
                keys, values = list(compress(keys, shown)), list(compress(values, shown))
            if maps and (newer or older):
                values = [_visible_entries(key, layers) for key in keys]
                keys = [key for key, entries in zip(keys, values, strict=True) if entries]
                values = [entries for entries in values if entries]
            elif older:
                keys = [key for key, value in zip(keys, values, strict=True) if value is not TOMBSTONE]
                values = [value for value in values if value is not TOMBSTONE]
            yield keys, values


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
        _apply(found, entries)
    return found

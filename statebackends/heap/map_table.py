"""Copy-on-write table of map state: a layer holds those entries of a key's map that changed while it was active."""

from __future__ import annotations

from typing import Any

from holdfast.statebackends.heap.state_table import MISSING, TOMBSTONE, CopyOnWriteStateTable, Layer, MapLayer, apply_entries


class CopyOnWriteMapTable(CopyOnWriteStateTable):
    """CopyOnWriteStateTable whose values are MapLayers; layers are merged entry by entry."""

    __slots__ = ()

    maps = True

    def find_entry(self, key: Any, entry: Any) -> tuple[Any, bool]:
        """`find` for one entry of a key's map."""
        frozen = False
        for layer in (self.active, *self.immutable):
            entries = layer.get(key)
            if entries is not None:
                found = entries.get(entry, MISSING)
                if found is not MISSING:
                    return (MISSING if found is TOMBSTONE else found), frozen
                if entries.cleared:
                    return MISSING, False
            frozen = self.pinned
        return self.find_entry_below(key, entry), False

    def find_entry_below(self, key: Any, entry: Any) -> Any:
        """Entry below the oldest layer; MISSING here."""
        return MISSING

    def entries_below(self, key: Any) -> Layer:
        """All entries below the oldest layer, in a new dict; none here."""
        return {}

    def entries(self, key: Any) -> tuple[Layer, set[Any]]:
        """(all entries of a key's map, those of them that pinned layers hold)."""
        layers = [self.active, *self.immutable]
        stack: list[tuple[MapLayer, bool]] = []
        cleared = False
        for position, layer in enumerate(layers):
            entries = layer.get(key)
            if entries is not None:
                stack.append((entries, position > 0 and self.pinned))
                if entries.cleared:
                    cleared = True
                    break
        found = {} if cleared else self.entries_below(key)
        frozen: set[Any] = set()
        for entries, is_frozen in reversed(stack):
            apply_entries(found, entries)
            frozen = frozen | entries.keys() if is_frozen else frozen - entries.keys()
        return found, frozen

    def remove(self, key: Any) -> None:
        if self._may_be_below(key):
            self.active[key] = MapLayer(cleared=True)
        else:
            self.active.pop(key, None)

    def remove_entry(self, key: Any, entry: Any) -> None:
        entries = self.active.get(key)
        if entries is not None and entries.cleared:
            entries.pop(entry, None)
        elif self._may_have_below(key, entry):
            if entries is None:
                entries = self.active[key] = MapLayer()
            entries[entry] = TOMBSTONE
        elif entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self.active[key]

    def _may_have_below(self, key: Any, entry: Any) -> bool:
        """`_may_be_below` for an entry of a key whose map was not cleared."""
        return self._may_be_below(key) and (self._dirty is None or len(self.immutable) != 1 or entry in self.immutable[0][key])

    def _merge_into(self, target: Layer, newer: Layer, *, lowest: bool) -> None:
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

    def _merge_by_batches(self, target: Layer, newer: Layer) -> None:
        """Replaces a key's entries instead of changing them: the loop thread may be iterating over them."""
        for key, entries in newer.items():
            merged = MapLayer()
            if not entries.cleared:
                merged.update(target.get(key, ()))
            apply_entries(merged, entries)
            if merged:
                target[key] = merged
            else:
                target.pop(key, None)

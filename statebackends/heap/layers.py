"""Layers of working state, and what several of them, newest first, show as one state.

A layer is a dict; what it says of a key hides what older layers say. Which layers there are is decided in generations.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress, islice
from operator import not_
from typing import Any, Final


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
    """Keys that some layers, newest first, have as one state. For the loop thread, at any time, without the lock.

    A pool thread may fold newer layers into the lowest one meanwhile. What is hidden by them does not show, and a list of a
    layer's keys, or a value, is had in one step, in between which no other thread comes."""
    keys = list(dict.fromkeys(chain.from_iterable([list(layer) for layer in layers])))
    return [key for key, found in zip(keys, lookup(keys, layers, maps=maps), strict=True) if found is not MISSING]


def lookup(keys: Sequence[Any], layers: Sequence[Layer], *, maps: bool) -> list[Any]:
    """What some layers, newest first, have as one state for each key; MISSING for none."""
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
    for entry, value in entries.items():
        if value is TOMBSTONE:
            found.pop(entry, None)
        else:
            found[entry] = value

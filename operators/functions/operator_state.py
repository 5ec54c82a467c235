"""Operator state as functions see it: lists that belong to a subtask, and broadcast state, a map of which all subtasks have a copy.

Entries are encoded when they are written, so that a barrier takes them as they are, and a value that the function changes later is
not changed in state. What a restore gives to whom is decided in `statebackends/redistribute.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from holdfast.statebackends.backend import OperatorListState, OperatorStateBackend
from holdfast.statebackends.errors import ReadOnlyStateError, UndeclaredStateError
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.serialization.value_checks import checks_of
from holdfast.statebackends.state import (
    ListState,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    Redistribution,
    StateDescriptor,
)

K = TypeVar("K")
V = TypeVar("V")

_PAIR = TypeSerializer.of(tuple[bytes, bytes])
_NO_KEY = KeyType.parse("int64")
"""Of no operator: a map's serializer asks for one, and puts it into its description alone."""


class EntryListState(Generic[V]):
    """Implements `state.ListState` for the operator state of one subtask."""

    __slots__ = ("_check", "_decode", "_encode", "_list", "is_owned")

    def __init__(self, entries: OperatorListState, serializer: TypeSerializer | None) -> None:
        """`serializer`: None for opaque bytes."""
        self._list = entries
        self._check = checks_of(entries.name, "list", (serializer or _BYTES).value_type, None).value
        self._encode: Callable[[Any], bytes] = bytes if serializer is None else serializer.encode
        self._decode: Callable[[bytes], Any] = bytes if serializer is None else serializer.decode
        self.is_owned = False
        """The function has said which of the restored entries are this subtask's."""

    def get(self) -> list[V]:
        """Copies of all entries: a change to one is none to the state."""
        return [self._decode(entry) for entry in self._list.entries]

    def add(self, value: V) -> None:
        self._list.entries.append(self._encoded(value))

    def add_all(self, values: Iterable[V]) -> None:
        self._list.entries.extend([self._encoded(value) for value in values])

    def update(self, values: Iterable[V]) -> None:
        self._list.update([self._encoded(value) for value in values])
        self.is_owned = True

    def clear(self) -> None:
        self.update(())

    def _encoded(self, value: V) -> bytes:
        self._check(value)
        return self._encode(value)


_BYTES = TypeSerializer.of(bytes)


class OperatorLists:
    """The declared operator states of one function."""

    __slots__ = ("_backend", "_declared", "_operator", "_states")

    def __init__(self, descriptors: Iterable[StateDescriptor], backend: Callable[[], OperatorStateBackend], operator: str) -> None:
        """`backend` is asked for when a state is; `operator`: uid, for errors."""
        self._declared = {each.name: each for each in descriptors if isinstance(each, OperatorListStateDescriptor)}
        self._backend = backend
        self._operator = operator
        self._states: dict[str, EntryListState[Any]] = {}

    def get(self, state: OperatorListStateDescriptor | str) -> ListState[Any]:
        """Raises UndeclaredStateError."""
        name = state if isinstance(state, str) else state.name
        declared = self._declared.get(name)
        if declared is None or not (isinstance(state, str) or state == declared):
            raise UndeclaredStateError(
                f"operator {self._operator!r}: operator state {name!r} is not among the declared states "
                f"({', '.join(self._declared) or 'none'}): add its OperatorListStateDescriptor to the function's `states`",
                operator=self._operator,
                state=str(name),
            )
        found = self._states.get(name)
        if found is None:
            serializer = None if declared.type is None else TypeSerializer.of(declared.type)
            found = self._states[name] = EntryListState(self._backend().list_state(name), serializer)
        return cast("ListState[Any]", found)

    def check_owned(self) -> None:
        """`open` has returned. Raises UndeclaredStateError for union state of which it did not say what is this subtask's: entries
        would multiply with each restore."""
        for name, declared in self._declared.items():
            state = self._states.get(name)
            if declared.redistribution is Redistribution.UNION and (state is None or not state.is_owned):
                raise UndeclaredStateError(
                    f"operator {self._operator!r}: after a restore each subtask has all entries of the union state {name!r}, "
                    "so open(ctx) must say which it keeps: call update(...) or clear() there",
                    operator=self._operator,
                    state=name,
                )


# ---------------------------------------------------------------------------------------------------------- broadcast state


def broadcast_list(descriptor: MapStateDescriptor[Any, Any]) -> OperatorListStateDescriptor:
    """As what a broadcast state is stored: a list of its entries, ordered by key, of which each subtask has a copy."""
    pair: Any = tuple[descriptor.key_type, descriptor.type]  # type: ignore[name-defined]
    return OperatorListStateDescriptor(descriptor.name, Redistribution.BROADCAST, pair)


class BroadcastState(Generic[K, V]):
    """Implements `state.MapState`. Order is that of the encoded keys, the same on all subtasks, whatever came first.

    Values that can be changed in place are copied on the way in and out."""

    __slots__ = ("_checks", "_copy", "_entries", "_is_stored", "_list", "_order", "_serializer")

    def __init__(self, descriptor: MapStateDescriptor[K, V], entries: OperatorListState) -> None:
        """Raises CorruptStateError for restored entries that can't be read."""
        self._serializer = StateSerializer.of(descriptor, _NO_KEY)
        self._checks = self._serializer.checks
        self._copy = self._serializer.copy
        self._list = entries
        self._entries: dict[K, tuple[bytes, bytes, V]] = {}
        """Key -> (encoded key, encoded entry, value)."""
        self._order: list[K] | None = None
        self._is_stored = True
        for entry in entries.entries:
            encoded_key, encoded = _PAIR.decode(entry)
            key = self._serializer.decode_entry(encoded_key)
            self._entries[key] = (encoded_key, entry, self._serializer.decode_value(encoded))

    def store(self) -> None:
        """The barrier is here: the list is what the map has become."""
        if not self._is_stored:
            self._list.update([self._entries[key][1] for key in self._ordered()])
            self._is_stored = True

    def get(self, key: K, default: V | None = None) -> V | None:
        found = self._entries.get(key)
        if found is None:
            return default
        value = found[2]
        return value if self._copy is None else cast("V", self._copy(value))

    def put(self, key: K, value: V) -> None:
        self._checks.key(key)
        self._checks.value(value)
        encoded_key = self._serializer.encode_entry(key)
        entry = _PAIR.encode((encoded_key, self._serializer.encode(value)))
        if key not in self._entries:
            self._order = None
        self._entries[key] = (encoded_key, entry, value if self._copy is None else self._copy(value))
        self._is_stored = False

    def remove(self, key: K) -> None:
        if self._entries.pop(key, None) is not None:
            self._order = None
            self._is_stored = False

    def contains(self, key: K) -> bool:
        return key in self._entries

    def items(self) -> Iterator[tuple[K, V]]:
        """Entries as they are when the iteration begins."""
        found = [(key, self._entries[key][2]) for key in self._ordered()]
        copy = self._copy
        return iter(found) if copy is None else ((key, copy(value)) for key, value in found)

    def keys(self) -> Iterator[K]:
        return iter(list(self._ordered()))

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def is_empty(self) -> bool:
        return not self._entries

    def clear(self) -> None:
        self._entries.clear()
        self._order = None
        self._is_stored = False

    def _ordered(self) -> list[K]:
        if self._order is None:
            self._order = sorted(self._entries, key=lambda key: self._entries[key][0])
        return self._order


class ReadOnlyBroadcastState(Generic[K, V]):
    """Implements `state.ReadOnlyMapState`; whoever writes all the same is refused."""

    __slots__ = ("_name", "_operator", "contains", "get", "is_empty", "items", "keys", "values")

    def __init__(self, state: BroadcastState[K, V], name: str, operator: str) -> None:
        self._name = name
        self._operator = operator
        self.get = state.get
        self.contains = state.contains
        self.items = state.items
        self.keys = state.keys
        self.values = state.values
        self.is_empty = state.is_empty

    def put(self, key: K, value: V) -> None:
        """Raises ReadOnlyStateError, as `remove` and `clear` do."""
        self._refuse("put")

    def remove(self, key: K) -> None:
        self._refuse("remove")

    def clear(self) -> None:
        self._refuse("clear")

    def _refuse(self, call: str) -> None:
        raise ReadOnlyStateError(
            f"operator {self._operator!r}: {call}() on the broadcast state {self._name!r}: records that are not broadcast may only "
            "read it, or the copies of the subtasks would differ; change it in process_broadcast_element",
            operator=self._operator,
            state=self._name,
        )


class BroadcastStates:
    """The broadcast states of one function, made when its operator state is there."""

    __slots__ = ("_declared", "_operator", "_readable", "_states")

    def __init__(
        self, descriptors: Sequence[MapStateDescriptor[Any, Any]], backend: OperatorStateBackend, operator: str
    ) -> None:
        self._operator = operator
        self._declared = {each.name: each for each in descriptors}
        self._states = {each.name: BroadcastState(each, backend.list_state(each.name)) for each in descriptors}
        self._readable = {name: ReadOnlyBroadcastState(state, name, operator) for name, state in self._states.items()}

    def writable(self, state: MapStateDescriptor[K, V] | str) -> BroadcastState[K, V]:
        """Raises UndeclaredStateError."""
        return self._states[self._name(state)]

    def readable(self, state: MapStateDescriptor[K, V] | str) -> ReadOnlyBroadcastState[K, V]:
        """Raises UndeclaredStateError."""
        return self._readable[self._name(state)]

    def store(self) -> None:
        for state in self._states.values():
            state.store()

    def _name(self, state: MapStateDescriptor[Any, Any] | str) -> str:
        name = state if isinstance(state, str) else state.name
        declared = self._declared.get(name)
        if declared is None or not (isinstance(state, str) or state is declared or state == declared):
            raise UndeclaredStateError(
                f"operator {self._operator!r}: broadcast state {name!r} is not among those of the broadcast stream "
                f"({', '.join(self._declared)}): give its MapStateDescriptor to broadcast(...)",
                operator=self._operator,
                state=str(name),
            )
        return name

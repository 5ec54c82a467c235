"""Operator (non-keyed) state of one subtask: declared lists of opaque entries, copied at the barrier and written after it.

It knows nothing of redistribution (redistribute.py): here split, union and broadcast lists are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from holdfast.statebackends.backend import OperatorListState, RestoredOperatorState, SnapshotTarget
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, UnclaimedStateError, UndeclaredStateError
from holdfast.statebackends.handles import OperatorListHandle, StateHandle, StateMeta
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.snapshot.parts import read_part, write_part
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor
from holdfast.statebackends.storage.port import Flow

_ENTRIES = msgspec.msgpack.Decoder(list[bytes])


class ListOperatorStateBackend:
    """Implements `backend.OperatorStateBackend`."""

    def __init__(self, descriptors: Sequence[StateDescriptor], *, operator: str, keeps_event_time: bool = True) -> None:
        """Keyed descriptors among `descriptors` are ignored. `operator`: uid, for errors. `keeps_event_time`: whether snapshots
        hold the lists that are `of_event_time`. Raises InvalidConfigError."""
        self._operator = operator
        declared = [descriptor for descriptor in descriptors if isinstance(descriptor, OperatorListStateDescriptor)]
        self._metas = {descriptor.name: state_meta(descriptor, None) for descriptor in declared}
        if len(self._metas) < len(declared):
            raise InvalidConfigError(f"operator {operator!r} declares an operator list state twice", operator=operator)
        self._lists = {name: OperatorListState(name) for name in sorted(self._metas)}
        self._left_out = frozenset(each.name for each in declared if each.of_event_time and not keeps_event_time)

    def list_state(self, name: str) -> OperatorListState:
        found = self._lists.get(name)
        if found is None:
            raise UndeclaredStateError(
                f"operator {self._operator!r} has not declared the operator list state {name!r}",
                operator=self._operator,
                state=name,
            )
        return found

    def snapshot(self, checkpoint_id: int) -> FrozenLists:
        """Copies the lists, not their entries, which are immutable."""
        kept = [(name, [] if name in self._left_out else list(state.entries)) for name, state in self._lists.items()]
        return FrozenLists([(self._metas[name], entries) for name, entries in kept])

    def restore(self, state: RestoredOperatorState) -> None:
        """Raises UnclaimedStateError for entries of an undeclared state."""
        unclaimed = {name: sum(map(len, entries)) for name, entries in state.lists.items() if entries and name not in self._lists}
        if unclaimed:
            self._refuse(unclaimed)
        for name, entries in state.lists.items():
            if name in self._lists:
                self._lists[name].update(entries)

    def _refuse(self, unclaimed: dict[str, int]) -> NoReturn:
        names = ", ".join(sorted(unclaimed))
        raise UnclaimedStateError(
            f"operator {self._operator!r} has not declared the operator list state {names} that the snapshot holds",
            operators={self._operator: sum(unclaimed.values())},
            operator=self._operator,
            states=sorted(unclaimed),
        )


class FrozenLists:
    """Implements `backend.PendingOperatorSnapshot`."""

    def __init__(self, lists: Sequence[tuple[StateMeta, list[bytes]]]) -> None:
        self._lists = lists

    def flow(self, target: SnapshotTarget) -> Flow[tuple[OperatorListHandle, ...]]:
        """One part per state: a msgpack array of binaries."""
        handles = []
        for meta, entries in self._lists:
            part: StateHandle = yield from write_part(msgspec.msgpack.encode(entries), f"list-{meta.name}", target)
            handles.append(OperatorListHandle(meta, part, len(entries)))
        return tuple(handles)


def read_entries(handle: OperatorListHandle, folder: str, *, operator: str) -> Flow[list[bytes]]:
    """Entries of one handle of the snapshot in `folder`. Raises CorruptStateError."""
    data: bytes = yield from read_part(handle.part, folder, operator=operator)
    return decode_entries(handle, data, operator=operator)


def decode_entries(handle: OperatorListHandle, data: bytes, *, operator: str) -> list[bytes]:
    """Entries in the bytes of a handle's part. Raises CorruptStateError."""
    try:
        entries = _ENTRIES.decode(data)
    except msgspec.MsgspecError as error:
        raise _corrupt(handle, operator, str(error)) from error
    if len(entries) != handle.count:
        raise _corrupt(handle, operator, f"{len(entries)} entries instead of {handle.count}")
    return entries


def _corrupt(handle: OperatorListHandle, operator: str, reason: str) -> CorruptStateError:
    path = getattr(handle.part, "path", "inline")
    return CorruptStateError(
        f"operator {operator!r}: list state {handle.state.name!r} ({path}): {reason}", path=path, operator=operator, reason=reason
    )

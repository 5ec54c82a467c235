"""Operator list state: refusals, isolation of snapshots, redistribution round trip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.statebackends.backend import RestoredOperatorState, SnapshotTarget
from holdfast.statebackends.backends.operator import ListOperatorStateBackend, read_entries
from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    UnclaimedStateError,
    UndeclaredStateError,
)
from holdfast.statebackends.factory import create_operator_backend
from holdfast.statebackends.handles import FileHandle, InlineHandle, OperatorListHandle, StateMeta
from holdfast.statebackends.redistribute import split_redistribute
from holdfast.statebackends.state import OPERATOR_KINDS, OperatorListStateDescriptor, Redistribution, ValueStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

OFFSETS, PENDING = OperatorListStateDescriptor("offsets"), OperatorListStateDescriptor("pending files")
TARGET = SnapshotTarget(7, "job/chk-7", "op-0-1-n", False, 20)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def _backend() -> ListOperatorStateBackend:
    return create_operator_backend([OFFSETS, PENDING, ValueStateDescriptor("keyed", int)], operator="op")


def test_undeclared_and_twice_declared_lists_are_refused() -> None:
    with pytest.raises(UndeclaredStateError) as raised:
        _backend().list_state("keyed")
    assert raised.value.fields == {"operator": "op", "state": "keyed"}
    with pytest.raises(InvalidConfigError):
        create_operator_backend([OFFSETS, OFFSETS], operator="op")


@pytest.mark.parametrize(
    ("redistribution", "kind"),
    [
        (Redistribution.SPLIT, "operator_list"),
        (Redistribution.UNION, "operator_union"),
        (Redistribution.BROADCAST, "operator_broadcast"),
    ],
)
def test_a_stored_list_says_how_it_is_dealt_out(storage: LocalStorage, redistribution: Redistribution, kind: str) -> None:
    backend = create_operator_backend([OperatorListStateDescriptor("s", redistribution)], operator="op")
    backend.list_state("s").update([b"1"])
    (handle,) = run_flow(backend.snapshot(7).flow(TARGET), storage)
    assert handle.state == StateMeta("s", kind, "bytes")
    assert kind in OPERATOR_KINDS


def test_an_unknown_redistribution_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidConfigError, match=r"'s': redistribution is 'everywhere'; choose from split, union, broadcast"):
        OperatorListStateDescriptor("s", "everywhere")  # type: ignore[arg-type]


def test_entries_of_an_undeclared_list_are_refused_unless_there_are_none() -> None:
    with pytest.raises(UnclaimedStateError) as raised:
        _backend().restore(RestoredOperatorState({"offsets": [b"1"], "gone": [b"22", b"3"]}))
    assert raised.value.operators == {"op": 3}
    assert raised.value.states == ["gone"]
    _backend().restore(RestoredOperatorState({"gone": []}))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([b"1"])])
def test_a_part_that_is_no_list_of_that_many_entries_is_corrupt(storage: LocalStorage, data: bytes) -> None:
    handle = OperatorListHandle(StateMeta("offsets", "operator_list", "bytes"), InlineHandle(data), 2)
    with pytest.raises(CorruptStateError) as raised:
        run_flow(read_entries(handle, "job/chk-7", operator="op"), storage)
    assert raised.value.operator == "op"


def test_a_missing_file_is_named(storage: LocalStorage) -> None:
    handle = OperatorListHandle(StateMeta("offsets", "operator_list", "bytes"), FileHandle("x", 1, "xxh3_128:0"), 2)
    with pytest.raises(CorruptStateError) as raised:
        run_flow(read_entries(handle, "job/chk-7", operator="op"), storage)
    assert raised.value.path == "job/chk-7/x"


def test_a_snapshot_without_event_time_has_no_entry_of_it_and_the_task_keeps_its_own(storage: LocalStorage) -> None:
    moments = OperatorListStateDescriptor("moments", Redistribution.UNION, of_event_time=True)
    backend = ListOperatorStateBackend([OFFSETS, moments], operator="op", keeps_event_time=False)
    for name in ("offsets", "moments"):
        backend.list_state(name).update([b"5"])
    counts = {handle.state.name: handle.count for handle in run_flow(backend.snapshot(7).flow(TARGET), storage)}
    assert counts == {"offsets": 1, "moments": 0}
    assert backend.list_state("moments").entries == [b"5"]


def test_a_snapshot_holds_the_entries_of_its_barrier(storage: LocalStorage) -> None:
    backend = _backend()
    backend.list_state("offsets").update([b"5", b"a long entry that makes a file"])
    pending = backend.snapshot(7)
    backend.list_state("offsets").update([b"6"])
    backend.list_state("pending files").entries.append(b"late")
    handles = run_flow(pending.flow(TARGET), storage)
    assert [(handle.state.name, handle.count, type(handle.part)) for handle in handles] == [
        ("offsets", 2, FileHandle),
        ("pending files", 0, InlineHandle),
    ]
    stored = {handle.state.name: run_flow(read_entries(handle, TARGET.folder, operator="op"), storage) for handle in handles}
    assert stored == {"offsets": [b"5", b"a long entry that makes a file"], "pending files": []}


def test_entries_survive_a_rescale(storage: LocalStorage) -> None:
    backend = _backend()
    entries = [b"%d" % number for number in range(5)]
    backend.list_state("offsets").update(entries)
    (offsets, _) = run_flow(backend.snapshot(7).flow(TARGET), storage)
    old = {"offsets": [run_flow(read_entries(offsets, TARGET.folder, operator="op"), storage)]}
    dealt = []
    for lists in split_redistribute(old, 2):
        restored = _backend()
        restored.restore(RestoredOperatorState(lists))
        dealt += restored.list_state("offsets").entries
    assert sorted(dealt) == entries

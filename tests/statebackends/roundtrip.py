"""A snapshot restored by the real backends at any parallelism, and taken anew: the whole way of a state, without a job."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.snapshots import load_snapshot, read_lists
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import OperatorListHandle, OperatorState, OperatorSubtaskState
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import METADATA_NAME
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, encode_metadata
from holdfast.statebackends.snapshot.parts import write_part
from holdfast.statebackends.state_processor.contents import StoredSnapshot, states_of
from holdfast.statebackends.storage import resolve_folder
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, Storage, run_flow
from tests.harness.restoring import plan_restore
from tests.statebackends.snapshot_harness import _SETTINGS, DESCRIPTORS, KEY, UID

_numbers = itertools.count()


def graph_for(stored: StoredSnapshot, parallelism: int, backend: str = "memory") -> JobGraph:
    """A job with one operator, which declares what the snapshot holds."""
    (operator,) = stored.metadata.operators
    states = tuple(state.meta for state in states_of(operator).values())
    described = OperatorDescription(UID, operator.operator_id, "Totals", "process", states=states, key_type=KEY.text)
    vertex = JobVertex(operator.operator_id, "Totals", parallelism, operator.max_parallelism, (described,))
    return JobGraph("flights", (vertex,), (), JobConfig(state_backend=backend))


def restored_at(
    root: Path, stored: StoredSnapshot, kind: BackendKind, parallelism: int, *, canonical: bool = True, location: str = ""
) -> StoredSnapshot:
    """The savepoint that a job takes at once after it was restored at this parallelism, on this backend.

    `location`: where the snapshot is, if it was moved. Raises what the restore raises."""
    storage = RoutedStorage(stored.storage)
    folder = location or stored.folder
    metadata = run_flow(load_snapshot(folder), storage)
    graph = plan_restore(metadata, graph_for(stored, parallelism, kind)).graph
    lists = {
        (operator.uid, name): run_flow(read_lists(operator, name, folder), storage)
        for operator, name in find_list_states(metadata, graph)
    }
    assigned = assign_state(metadata, graph, lists)
    at, below = resolve_folder(folder, stored.storage)
    target_storage, number = LocalStorage(root / "again"), next(_numbers)
    name = f"savepoint-{number}"
    vertex = graph.vertices[0]
    subtasks = tuple(
        _restore_subtask(
            root,
            assigned[SubtaskKey(vertex.vertex_id, subtask)].get(UID, OperatorSubtaskState()),
            kind,
            (vertex.max_parallelism, parallelism, subtask),
            (at, below),
            SnapshotTarget(8, name, f"{UID}-{subtask}-1-n", canonical, 0),
            target_storage,
        )
        for subtask in range(parallelism)
    )
    (operator,) = metadata.operators
    again = msgspec.structs.replace(
        metadata,
        kind="savepoint",
        checkpoint_id=8,
        properties={} if canonical else {NATIVE_PROPERTY: kind},
        operators=(OperatorState(UID, operator.operator_id, "Totals", parallelism, vertex.max_parallelism, subtasks),),
    )
    target_storage.execute(PutIfAbsent(f"{name}/{METADATA_NAME}", encode_metadata(again)))
    return StoredSnapshot(again, target_storage, name)


def _restore_subtask(
    root: Path,
    state: OperatorSubtaskState,
    kind: BackendKind,
    place: tuple[int, int, int],
    source: tuple[Storage, str],
    target: SnapshotTarget,
    storage: Storage,
) -> OperatorSubtaskState:
    max_parallelism, parallelism, subtask = place
    backend = create_keyed_backend(
        kind,
        descriptors=DESCRIPTORS,
        key_type=KEY,
        key_groups=assign_key_groups(max_parallelism, parallelism, subtask),
        max_parallelism=max_parallelism,
        operator=UID,
        subtask=subtask,
        local_dir=str(root / f"restored-{next(_numbers)}"),
        settings=_SETTINGS,
    )
    try:
        timers = CopyOnWriteStateTable()
        backend.register_timers("_timers", TimerRows(timers, lambda rows: timers.active.update((row, True) for row in rows)))
        backend.restore(state.keyed, *source)
        pending = backend.snapshot(8)
        keyed = run_flow(pending.flow(target), storage)
        pending.release()
    finally:
        backend.dispose()
    return OperatorSubtaskState(keyed=tuple(keyed), operator=tuple(_lists(state, source, target, storage)))


def _lists(
    state: OperatorSubtaskState, source: tuple[Storage, str], target: SnapshotTarget, storage: Storage
) -> list[OperatorListHandle]:
    """Entries as the operator would store them again: of one name in one part."""
    entries: dict[str, list[bytes]] = {}
    metas = {handle.state.name: handle.state for handle in state.operator}
    for handle in state.operator:
        entries.setdefault(handle.state.name, []).extend(run_flow(read_entries(handle, source[1], operator=UID), source[0]))
    found = []
    for name, each in sorted(entries.items()):
        part = run_flow(write_part(msgspec.msgpack.encode(each), f"list-{name}", target), storage)
        found.append(OperatorListHandle(metas[name], part, len(each)))
    return found

"""A golden snapshot restored as the coordinator and the workers do it, and what operators then see."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.coordinator.ha.snapshots import load_snapshot, read_lists
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.coordinator.restore.compatibility import check_compatibility
from holdfast.statebackends.backend import RestoredOperatorState, TimerRow
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.factory import BackendKind, create_keyed_backend, create_operator_backend
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.state import NO_TIME, RowTable
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.golden.contents_v1 import JOB
from tests.golden.make_snapshots import graph
from tests.golden.model import MAX_PARALLELISM, Contents
from tests.golden.plainjson import plain


class Restored:
    """A golden snapshot in the backends of a job, as the coordinator deals it out."""

    def __init__(
        self, folder: Path, backend: BackendKind, parallelism: dict[str, int], local: Path, job: Sequence[Contents] = JOB
    ) -> None:
        self.storage = LocalStorage(folder.parent.parent)
        self.folder = f"{folder.parent.name}/{folder.name}"
        self._backend, self._local = backend, local
        self.metadata: SnapshotMetadata = run_flow(load_snapshot(self.folder), self.storage)
        self.graph = graph(job, parallelism, backend)
        compatibility = check_compatibility(self.metadata, self.graph)
        for refusal in compatibility.refusals:
            raise refusal.error()
        lists = {
            (stored.uid, name): run_flow(read_lists(stored, name, self.folder), self.storage)
            for stored, name in find_list_states(self.metadata, self.graph)
        }
        assigned = assign_state(self.metadata, self.graph, lists)
        self.states: dict[str, list[OperatorSubtaskState]] = {}
        for vertex in self.graph.vertices:
            uid = vertex.operators[0].uid
            mine = sorted((key.subtask, state) for key, state in assigned.items() if key.vertex == vertex.vertex_id)
            self.states[uid] = [state.get(uid, OperatorSubtaskState()) for _, state in mine]

    def keyed(self, contents: Contents, now_ms: int | None = None) -> Iterator[KeyedBackendBase]:
        states = self.states[contents.uid]
        for subtask, state in enumerate(states):
            backend = create_keyed_backend(
                self._backend,
                descriptors=contents.descriptors,
                key_type=contents.key,
                key_groups=assign_key_groups(MAX_PARALLELISM, len(states), subtask),
                max_parallelism=MAX_PARALLELISM,
                operator=contents.uid,
                subtask=subtask,
                local_dir=str(self._local / f"{len(contents.uid)}-{subtask}"),
                now_ms=now_ms,
            )
            try:
                backend.restore(state.keyed, self.storage, self.folder)
                yield backend
            finally:
                backend.dispose()

    def entries(self, contents: Contents) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        for state in self.states[contents.uid]:
            backend = create_operator_backend(contents.descriptors, operator=contents.uid)
            lists: dict[str, list[bytes]] = {}
            for handle in state.operator:
                lists.setdefault(handle.state.name, []).extend(
                    run_flow(read_entries(handle, self.folder, operator=contents.uid), self.storage)
                )
            backend.restore(RestoredOperatorState(lists))
            for descriptor in contents.lists:
                found.setdefault(descriptor.name, []).append([e.hex() for e in backend.list_state(descriptor.name).entries])
        return found


def keyed_contents(backend: KeyedBackendBase, contents: Contents) -> dict[str, list[Any]]:
    """What the state objects of one subtask give back, by state."""
    found: dict[str, list[Any]] = {}

    def key_of(encoded: bytes) -> Any:
        return plain(backend.key_type.decode(encoded))

    for held in contents.held:
        rows = found.setdefault(held.descriptor.name, [])
        for namespace in sorted({namespace for _, namespace, _ in held.rows}):
            for encoded in list(backend.keys(held.descriptor.name, namespace)):
                key = backend.key_type.decode(encoded)
                backend.set_current_key(encoded, backend.key_type.key_group(key, MAX_PARALLELISM))
                value = shown(backend.get_state(held.descriptor, namespace), held.descriptor)
                if value is not NOTHING:
                    rows.append({"key": key_of(encoded), "namespace": namespace.hex(), "value": value})
    if contents.columnar is not None:
        state = backend.columnar_state(contents.columnar, ["airline"])
        rows = found.setdefault(contents.columnar.name, [])
        for window in state.namespaces():
            for row in state.read(window).to_pylist():
                key = plain(row.pop("airline"))
                rows.append({"key": key, "window": window, "result": {name: plain(value) for name, value in row.items()}})
    if contents.row_table is not None:
        found[contents.row_table.name] = list(table_rows(backend.row_table(contents.row_table, ["airline"])))
    for name in contents.timers:
        timers: list[TimerRow] = []
        backend.register_timers(name, TimerRows(CopyOnWriteStateTable(), timers.extend))
        assert all(group in backend.key_groups for _, _, _, group in timers)
        found[name] = [{"key": key_of(key), "namespace": namespace.hex(), "time": time} for time, key, namespace, _ in timers]
    return found


def table_rows(table: RowTable) -> Iterator[dict[str, Any]]:
    scan = table.scan()
    while (some := scan.next(7)) is not None:
        places = zip(some.namespaces.tolist(), some.orders.tolist(), some.times.tolist(), strict=True)
        for (namespace, order, time), row in zip(places, some.take().to_pylist(), strict=True):
            key = plain(row.pop("airline"))
            shown = {name: plain(value) for name, value in row.items()}
            yield {"key": key, "namespace": namespace, "order": order, "time": None if time == NO_TIME else time, "row": shown}


NOTHING = object()
"""A key whose value has expired."""


def shown(state: Any, descriptor: Any) -> Any:
    """A state object's contents as plain JSON; NOTHING if it is empty."""
    match descriptor.kind:
        case "value":
            value = state.value(NOTHING)
            return NOTHING if value is NOTHING else plain(value, descriptor.type)
        case "list":
            return [plain(element, descriptor.type) for element in state.get()] or NOTHING
        case "map":
            entries = [[plain(entry, descriptor.key_type), plain(value, descriptor.type)] for entry, value in state.items()]
            return sorted(entries, key=json.dumps) or NOTHING
    combined = state.get()
    return NOTHING if combined is None else plain(combined, descriptor.type)

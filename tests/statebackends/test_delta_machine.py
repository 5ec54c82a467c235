"""Incremental checkpoints against a plain dict: any order of changes, barriers, confirmed, aborted and outdated bases, restores
here and at another parallelism. The coordinator's part is played with its own registry of shared files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.shared_state import SharedStateRegistry, shared_handles
from holdfast.statebackends.backend import SnapshotTarget, TimerRow
from holdfast.statebackends.columnar import state as columnar
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import KeyedStateHandle, OperatorSubtaskState
from holdfast.statebackends.heap import state_table
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.snapshot import increments as tablechains
from holdfast.statebackends.snapshot.deltas import state_parts
from holdfast.statebackends.storage.port import run_flow
from tests.examples import examples
from tests.statebackends.backend_harness import KEY, MAX_PARALLELISM, WINDOWS, union
from tests.statebackends.test_backend_machine import CHANGES, IN_FLIGHT_MAX, KEYS, BackendMachine

NAMESPACES = [b"", b"n"]
TASK = SubtaskKey("v", 0)


class TimerTable:
    """Timers of one backend."""

    def __init__(self) -> None:
        self.table = CopyOnWriteStateTable()

    def provider(self) -> TimerRows:
        return TimerRows(self.table, self._load)

    def _load(self, rows: Any) -> None:
        for row in rows:
            self.table.active[row] = True

    def rows(self) -> set[TimerRow]:
        known = {row for layer in (self.table.active, *self.table.immutable) for row in layer}
        return {row for row in known if self.table.find(row)[0] is not MISSING}


class DeltaMachine(BackendMachine):
    """What the base class calls a snapshot is here a completed checkpoint."""

    inline_threshold: int
    increments = 0
    """Checkpoints with deltas, of all runs of the machine."""

    def start_over(self, backend: Any) -> None:
        self.backend = backend
        self.timers = TimerTable()
        self.firing: set[int] = set()
        backend.register_timers("_timers", self.timers.provider())

    def __init__(self) -> None:
        super().__init__()
        rocksdb = RocksDBConfig(front_tier_bytes_max=1 << 20)
        self.cluster.settings = StateBackendSettings(memory_snapshot_bytes_max=1 << 30, rocksdb=rocksdb)
        self.newest = 0
        self.registry = SharedStateRegistry()
        self.completed: dict[int, tuple[tuple[KeyedStateHandle, ...], dict[Any, Any]]] = {}
        self.started: list[tuple[int, int | None, Any, dict[Any, Any]]] = []
        self.start_over(self.cluster.backend())

    @rule(key=st.sampled_from(KEYS), time=st.integers(0, 3), is_set=st.booleans())
    def timer(self, key: str, time: int, is_set: bool) -> None:
        row = (time, KEY.encode(key), b"", KEY.key_group(key, MAX_PARALLELISM))
        if is_set:
            self.timers.table.active[row] = True
            self.model["timers", row] = True
        else:
            self.timers.table.remove(row)
            self.model.pop(("timers", row), None)

    @rule(window=st.integers(0, 1), count=st.integers(0, 3))
    def drop_front(self, window: int, count: int) -> None:
        state = self.backend.columnar_state(WINDOWS, ["user"])
        dropped = state.read(window, 0, min(count, state.row_count(window))).column("user").to_pylist()
        state.drop_front(window, len(dropped))
        for key in dropped:
            del self.model["windows", window, key]
            self.firing.add(window)

    def _fold(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        """A window that has begun to fire gets no more rows before it is closed."""
        if len(namespace) in self.firing:
            self.close_window(len(namespace))
        super()._fold(key, namespace, tag, number)

    @rule(window=st.integers(0, 1))
    def close_window(self, window: int) -> None:
        self.firing.discard(window)
        self.backend.columnar_state(WINDOWS, ["user"]).remove(window)
        self.model = {place: value for place, value in self.model.items() if place[:2] != ("windows", window)}

    def found(self, backends: Any, timers: Any) -> dict[Any, Any]:
        return union(backends, NAMESPACES) | {("timers", row): True for table in timers for row in table.rows()}

    # -------------------------------------------------------------------------------------------------------- checkpoints

    @precondition(lambda self: len(self.started) < IN_FLIGHT_MAX)
    @rule(has_base=st.sampled_from([True, True, True, False]))
    def barrier(self, has_base: bool = True) -> None:
        self.newest += 1
        base = max(self.completed, default=None) if has_base else None
        self.started.append((self.newest, base, self.backend.snapshot(self.newest), copy.deepcopy(self.model)))

    @rule(before=st.lists(CHANGES, max_size=3), after=st.lists(CHANGES, min_size=1, max_size=4), fate=st.sampled_from("cccad"))
    def checkpoint(self, before: Any, after: Any, fate: str) -> None:
        """A checkpoint with changes on both sides of the barrier."""
        self.change(before)
        self.barrier()
        self.change(after)
        self.finish(len(self.started) - 1, fate)
        if fate == "c":
            self.check(self.newest, 1)

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1), fate=st.sampled_from("ccad"))
    def finish(self, which: int, fate: str) -> None:
        """Completed; aborted after it was acknowledged, with or without a notice; and what a newer one has overtaken."""
        number, base, pending, model = self.started.pop(which % len(self.started))
        threshold, packs = self.inline_threshold, 1 << 20 if number % 3 else 0
        target = SnapshotTarget(number, f"job/chk-{number}", "op-0-1-n", False, threshold, f"{number}-1-op-0-n", base, packs)
        handles = run_flow(pending.flow(target), self.cluster.storage)
        pending.release()
        if fate == "a" or number < max(self.completed, default=0):
            self.backend.notify_checkpoint_aborted(number)
        elif fate == "c":
            acked = {TASK: {"op": OperatorSubtaskState(keyed=handles)}}
            resolved = self.registry.resolve(number, base, acked)[TASK]["op"]
            self.registry.register(number, shared_handles([resolved]))
            self.completed[number] = (resolved.keyed, model)
            parts = state_parts(resolved.keyed, operator="op")
            assert all(len(part.deltas) <= tablechains.DELTAS_MAX for part in parts)  # type: ignore[attr-defined]
            type(self).increments += any(part.deltas for part in parts)

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1))
    def abandon(self, which: int) -> None:
        self.started.pop(which % len(self.started))[2].release()

    @precondition(lambda self: self.completed)
    @rule(parallelism=st.integers(1, 3), continues=st.booleans())
    def restore(self, parallelism: int, continues: bool = True) -> None:
        number = max(self.completed)
        self.check(number, parallelism)
        self.backend.dispose()
        self.started = []
        backend = self.cluster.backend()
        handles, model = self.completed[number]
        backend.restore(handles, self.cluster.storage, f"job/chk-{number}", checkpoint_id=number if continues else None)
        self.start_over(backend)
        self.model = copy.deepcopy(model)
        if not continues:
            self.completed = {}

    def check(self, number: int, parallelism: int) -> None:
        handles, model = self.completed[number]
        parts = [
            self.cluster.restored((handles, f"job/chk-{number}"), parallelism=parallelism, subtask=subtask)
            for subtask in range(parallelism)
        ]
        timers = [TimerTable() for _ in parts]
        for part, table in zip(parts, timers, strict=True):
            part.register_timers("_timers", table.provider())
        assert self.found(parts, timers) == model
        for part in parts:
            part.dispose()

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        if hasattr(self, "timers"):
            assert self.found([self.backend], [self.timers]) == self.model


# The base class makes the backend in a rule of its own; here it is there from the beginning.
DeltaMachine.start = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "inline_threshold", "count"),
    [("filesystem", 0, 12), ("filesystem", 1_500, 4), ("memory", 0, 2), ("rocksdb", 0, 3)],
)
@pytest.mark.parametrize("bounds", ["as they are", "small"])
def test_increments_restore_what_was_there(
    kind: BackendKind, inline_threshold: int, count: int, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bounds == "small":
        monkeypatch.setattr(state_table, "KEYS_MIN", 2)
        monkeypatch.setattr(state_table, "EPOCHS_MAX", 2)
        monkeypatch.setattr(state_table, "_LAYERS_MAX", 2)
        monkeypatch.setattr(columnar, "_REMOVED_MAX", 1)
        monkeypatch.setattr(tablechains, "DELTAS_MAX", 2)
    machine: Any = type("Machine", (DeltaMachine,), {"kind": kind, "cache_bytes_max": 0, "inline_threshold": inline_threshold})
    options = settings(max_examples=examples(count), stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=options)
    if kind == "filesystem" and not inline_threshold and bounds == "as they are":
        assert machine.increments, "no run was ever written"
    assert kind != "memory" or not machine.increments

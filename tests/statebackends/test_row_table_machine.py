"""Row tables against a plain list of rows: any order of appends, reads, deletions, merges, barriers, bases that are confirmed,
aborted or outdated, restores here and at another parallelism. The coordinator's part is played with its own registry of files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.shared_state import SharedStateRegistry, shared_handles
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import KeyedStateHandle, OperatorSubtaskState
from holdfast.statebackends.row_tables import key_codes, merge, scan, table, time_order
from holdfast.statebackends.row_tables.table import SortedRowTable
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot import increments
from holdfast.statebackends.snapshot.deltas import state_parts
from holdfast.statebackends.state import NO_ORDER, NO_TIME, RowTableStateDescriptor
from holdfast.statebackends.storage.port import run_flow
from tests.examples import examples
from tests.statebackends.backend_harness import MAX_PARALLELISM, Cluster

ROWS = RowTableStateDescriptor("rows", pa.schema([("number", pa.int64()), ("key", pa.string())]), by_time=True)
KEY = KeyType.parse("tuple<utf8,int64>")
KEYS = [("", 0), ("a", 0), ("a", 1), ("b\0", 0), ("b", -1), ("ünï", 7), ("x" * 300, 7)]
TASK = SubtaskKey("v", 0)
IN_FLIGHT_MAX = 3
BATCHES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(-1, 2), st.integers(0, 9) | st.none()), min_size=1, max_size=12
)


@dataclass(frozen=True)
class Row:
    """What the model knows of a row; its number is also the order in which it came."""

    number: int
    key: tuple[str, int]
    namespace: int
    time: int | None


def key_column(keys: Sequence[tuple[str, int]]) -> Any:
    return KEY.column_of_values(keys, max_parallelism=MAX_PARALLELISM)


def rows_in(matches: Any) -> list[Row]:
    """Rows that a read gave, in its order."""
    columns = matches.take().to_pydict()
    times = [None if time == NO_TIME else time for time in matches.times.tolist()]
    keys = zip(columns["name"], columns["part"], strict=True)
    found = [Row(*each) for each in zip(columns["number"], keys, matches.namespaces.tolist(), times, strict=True)]
    assert columns["key"] == [str(row.number) if row.number % 3 else None for row in found]
    return found


def split_rows(rows: SortedRowTable, rows_max: int) -> list[Row]:
    """In slices that a key's rows may be cut by."""
    found: list[Row] = []
    scanned = rows.scan(splits_keys=True)
    while (some := scanned.next(rows_max)) is not None:
        found += rows_in(some)
    for key in {row.key for row in found}:
        numbers = [row.number for row in found if row.key == key]
        assert numbers == sorted(numbers)
    return found


def all_rows(rows: SortedRowTable, rows_max: int) -> list[Row]:
    found: list[Row] = []
    scanned = rows.scan()
    seen: set[tuple[str, int]] = set()
    while (some := scanned.next(rows_max)) is not None:
        part = rows_in(some)
        keys = [row.key for row in part]
        numbers = some.queries.tolist()
        assert [one == other for one, other in pairwise(keys)] == [one == other for one, other in pairwise(numbers)]
        assert seen.isdisjoint(keys), "a key came in two slices"
        seen.update(keys)
        found += part
    for key in seen:
        numbers = [row.number for row in found if row.key == key]
        assert numbers == sorted(numbers)
    return found


class RowTableMachine(RuleBasedStateMachine):
    kind: BackendKind = "filesystem"
    inline_threshold = 0
    increments = 0
    merged = 0
    mapped = 0

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="holdfast-rows-"))
        self.cluster = Cluster(self.root, self.kind)
        self.newest = self.numbers = 0
        self.registry = SharedStateRegistry()
        self.completed: dict[int, tuple[tuple[KeyedStateHandle, ...], list[Row]]] = {}
        self.started: list[tuple[int, int | None, Any, list[Row]]] = []
        self.held: list[Any] = []
        self.model: list[Row] = []
        self.open(self.new_backend())

    def new_backend(self, **options: Any) -> Any:
        return self.cluster.backend((ROWS,), key_type=KEY, **options)

    def open(self, backend: Any) -> None:
        self.backend = backend
        self.rows = backend.row_table(ROWS, ["name", "part"])
        self.scanning: Any = None
        self.scanned: tuple[int | None, tuple[int, int] | None] = (None, None)
        self.held = []

    def teardown(self) -> None:
        self.cluster.close()
        shutil.rmtree(self.root)

    # ------------------------------------------------------------------------------------------------------------- changes

    @rule(batch=BATCHES)
    def append(self, batch: list[tuple[tuple[str, int], int, int | None]]) -> None:
        rows = [Row(self.numbers + at, *each) for at, each in enumerate(batch)]
        self.numbers += len(rows)
        texts = [str(row.number) if row.number % 3 else None for row in rows]
        columns = [pa.array([row.number for row in rows]), pa.array(texts, pa.string())]
        namespaces = np.array([row.namespace for row in rows])
        times = np.array([NO_TIME if row.time is None else row.time for row in rows])
        one = len({row.namespace for row in rows}) == 1
        timeless = all(row.time is None for row in rows)
        self.rows.append(
            key_column([row.key for row in rows]), rows[0].namespace if one else namespaces, columns, None if timeless else times
        )
        self.model += rows
        type(self).merged += self.rows.has_work
        type(self).mapped += self.rows.is_mapped

    @rule(namespace=st.integers(-1, 2))
    def drop(self, namespace: int) -> None:
        self.rows.drop(namespace)
        self.model = [row for row in self.model if row.namespace != namespace]

    @rule(namespace=st.integers(-1, 2))
    def drop_until(self, namespace: int) -> None:
        self.rows.drop_until(namespace)
        self.model = [row for row in self.model if row.namespace > namespace]

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), share=st.integers(1, 3))
    def find_and_hold(self, keys: list[tuple[str, int]], share: int) -> None:
        """Rows that are deleted later, whatever is merged meanwhile."""
        matches = self.rows.rows_of(key_column(keys))
        self.held.append(matches.select(np.arange(len(matches)) % share == 0))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3))
    def delete(self, which: int = 0) -> None:
        matches = self.held.pop(which % len(self.held))
        gone = {row.number for row in rows_in(matches)}
        before = len(self.model)
        self.model = [row for row in self.model if row.number not in gone]
        assert self.rows.delete(matches) == before - len(self.model)

    @rule(
        namespace=st.none() | st.integers(-1, 2),
        times=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
        rows_max=st.integers(1, 6),
    )
    def fire(self, namespace: int | None, times: tuple[int, int] | None, rows_max: int) -> None:
        """A slice of a pass is given and deleted; others go on between."""
        if self.scanning is None:
            self.scanning, self.scanned = self.rows.scan(namespace, times), (namespace, times)
        some = self.scanning.next(rows_max)
        if some is None:
            self.scanning = None
            return
        namespace, times = self.scanned
        assert all(row.namespace == namespace for row in rows_in(some)) or namespace is None
        assert times is None or all(row.time is not None and times[0] <= row.time <= times[1] for row in rows_in(some))
        gone = {row.number for row in rows_in(some)}
        assert self.rows.delete(some) == len(gone)
        self.model = [row for row in self.model if row.number not in gone]

    @rule()
    def idle(self) -> None:
        while self.backend.write_behind():
            pass

    # --------------------------------------------------------------------------------------------------------------- reads

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=5),
        namespace=st.none() | st.integers(-1, 2),
        times=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
        each=st.booleans(),
    )
    def read(self, keys: list[tuple[str, int]], namespace: int | None, times: tuple[int, int] | None, each: bool) -> None:
        namespaces = np.full(len(keys), namespace) if each and namespace is not None else namespace
        bounds = (np.full(len(keys), times[0]), times[1]) if each and times is not None else times
        matches = self.rows.rows_of(key_column(keys), namespaces, bounds)
        wanted = [
            (query, row)
            for query, key in enumerate(keys)
            for row in self.model
            if row.key == key
            and namespace in (None, row.namespace)
            and (times is None or (row.time is not None and times[0] <= row.time <= times[1]))
        ]
        assert list(zip(matches.queries.tolist(), rows_in(matches), strict=True)) == wanted

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=5),
        times=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        rows_max=st.integers(1, 9),
        slices=st.integers(0, 4),
    )
    def probe(self, keys: list[tuple[str, int]], times: tuple[int, int], rows_max: int, slices: int) -> None:
        """Some slices, and then the rest by a new probe, which is given the place of the first."""
        probe = self.rows.probe(key_column(keys), (np.full(len(keys), times[0]), times[1]))
        found: list[tuple[int, Row]] = []
        while slices and (some := probe.next(rows_max)) is not None:
            assert len(some) <= rows_max
            found += zip(some.queries.tolist(), rows_in(some), strict=True)
            assert {query for query, _ in found} <= set(range(probe.complete + 1))
            slices -= 1
        done = probe.complete
        after = np.full(len(keys) - done, NO_ORDER)
        after[:1] = probe.last_order
        rest = self.rows.probe(key_column(keys[done:]), (times[0], np.full(len(keys) - done, times[1])), after)
        while (some := rest.next(rows_max)) is not None:
            found += zip((some.queries + done).tolist(), rows_in(some), strict=True)
        assert rest.complete == len(keys) - done
        within = [row for row in self.model if row.time is not None and times[0] <= row.time <= times[1]]
        assert found == [(query, row) for query, key in enumerate(keys) for row in within if row.key == key]

    @rule(moment=st.integers(-1, 9), after=st.integers(-1, 6) | st.none(), rows_max=st.integers(1, 20), deletes=st.booleans())
    def until(self, moment: int, after: int | None, rows_max: int, deletes: bool) -> None:
        after = NO_TIME if after is None else after
        matches = self.rows.until(moment, rows_max, after)
        found = rows_in(matches)
        due = [row for row in self.model if row.time is not None and after < row.time <= moment]
        times = sorted(row.time for row in due if row.time is not None)
        assert [row.time for row in found] == times[:rows_max]
        assert set(found) <= set(due)
        assert len(set(found)) == len(found)
        if deletes:
            assert self.rows.delete(matches) == len(found)
            self.model = [row for row in self.model if row not in found]

    # --------------------------------------------------------------------------------------------------------- checkpoints

    @precondition(lambda self: len(self.started) < IN_FLIGHT_MAX)
    @rule(has_base=st.sampled_from([True, True, True, False]))
    def barrier(self, has_base: bool = True) -> None:
        self.newest += 1
        base = max(self.completed, default=None) if has_base else None
        self.started.append((self.newest, base, self.backend.snapshot(self.newest), list(self.model)))

    @rule(batch=BATCHES, fate=st.sampled_from("cccad"))
    def checkpoint(self, batch: Any, fate: str) -> None:
        if len(self.started) == IN_FLIGHT_MAX:
            self.started.pop(0)[2].release()
        self.barrier()
        self.append(batch)
        if self.held:
            self.delete()
        self.finish(len(self.started) - 1, fate)

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1), fate=st.sampled_from("ccad"))
    def finish(self, which: int, fate: str) -> None:
        number, base, pending, model = self.started.pop(which % len(self.started))
        packs = 1 << 20 if number % 3 else 0
        shared = f"{number}-1-op-0-n"
        target = SnapshotTarget(number, f"job/chk-{number}", "op-0-1-n", False, self.inline_threshold, shared, base, packs)
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
            assert all(len(part.deltas) <= increments.DELTAS_MAX for part in parts)  # type: ignore[attr-defined]
            type(self).increments += any(part.deltas for part in parts)

    @rule(parallelism=st.integers(1, 3))
    def savepoint(self, parallelism: int) -> None:
        """On any backend, at any parallelism, twice: down again from there."""
        snapshot = self.cluster.take(self.backend, canonical=True)
        kind: BackendKind = "memory" if parallelism % 2 else "filesystem"
        self.check([snapshot[0]], snapshot[1], self.model, parallelism, kind)

    @precondition(lambda self: self.completed)
    @rule(parallelism=st.integers(1, 3), continues=st.booleans(), rescaled=st.booleans())
    def restore(self, parallelism: int, continues: bool, rescaled: bool) -> None:
        number = max(self.completed)
        handles, model = self.completed[number]
        folder = f"job/chk-{number}"
        parts = self.check([handles], folder, model, parallelism, None)
        self.backend.dispose()
        self.started = []
        backend = self.new_backend()
        if rescaled:  # up, and down again from the snapshots of all subtasks
            self.newest += 1
            folder = f"job/rescaled-{self.newest}"
            taken = [self.stored(part, SnapshotTarget(self.newest, folder, f"op-{at}", False, 0)) for at, part in enumerate(parts)]
            backend.restore([handle for keyed in taken for handle in keyed], self.cluster.storage, folder)
            continues = False
        else:
            backend.restore(handles, self.cluster.storage, folder, checkpoint_id=number if continues else None)
        self.open(backend)
        self.model = list(model)
        if not continues:
            self.completed = {}

    def stored(self, backend: Any, target: SnapshotTarget) -> tuple[KeyedStateHandle, ...]:
        pending = backend.snapshot(target.checkpoint_id)
        handles: tuple[KeyedStateHandle, ...] = run_flow(pending.flow(target), self.cluster.storage)
        pending.release()
        return handles

    def check(self, handles: Any, folder: str, model: list[Row], parallelism: int, kind: BackendKind | None) -> list[Any]:
        parts = []
        for subtask in range(parallelism):
            part = self.new_backend(kind=kind, parallelism=parallelism, subtask=subtask)
            part.restore([handle for keyed in handles for handle in keyed], self.cluster.storage, folder)
            parts.append(part)
        tables = [part.row_table(ROWS, ["name", "part"]) for part in parts]
        assert sorted(row.number for each in tables for row in all_rows(each, 5)) == sorted(row.number for row in model)
        assert {row for each in tables for row in all_rows(each, 2)} == set(model)
        return parts

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.count() == len(self.model)
            assert self.rows.namespaces() == sorted({row.namespace for row in self.model})
            assert all(
                self.rows.count(namespace) == sum(row.namespace == namespace for row in self.model) for namespace in range(-1, 3)
            )

    @rule(rows_max=st.integers(1, 20))
    def read_all(self, rows_max: int) -> None:
        assert sorted(all_rows(self.rows, rows_max), key=lambda row: row.number) == self.model
        assert sorted(split_rows(self.rows, rows_max), key=lambda row: row.number) == self.model


@pytest.mark.parametrize(
    ("kind", "inline_threshold", "count"), [("filesystem", 0, 15), ("filesystem", 1_500, 5), ("memory", 0, 2), ("rocksdb", 0, 2)]
)
@pytest.mark.parametrize("bounds", ["as they are", "small", "mapped", "colliding"])
def test_row_tables_hold_what_the_model_holds(
    kind: BackendKind, inline_threshold: int, count: int, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small: heads, slices and blocks of few rows. Mapped: whatever is merged goes to files. Colliding: keys of one code."""
    if bounds != "as they are":
        monkeypatch.setattr(table, "HEAD_ROWS_MAX", 5)
        monkeypatch.setattr(table, "RUNS_PER_TIER", 2)
        monkeypatch.setattr(table, "_TIER_ROWS", 4)
        monkeypatch.setattr(table, "_WORK_PER_ROW", 1)
        monkeypatch.setattr(table, "_IDLE_ROWS", 3)
        monkeypatch.setattr(merge, "SLICE_ROWS", 3)
        monkeypatch.setattr(merge, "BLOCK_ROWS", 7)
        monkeypatch.setattr(scan, "_SCANNED_MAX", 4)
        monkeypatch.setattr(time_order, "CHUNK_ROWS", 4)
        monkeypatch.setattr(time_order, "_FEW", 2)
        monkeypatch.setattr(key_codes, "_PACKED_ROWS", 8)
        monkeypatch.setattr(key_codes, "_INDEX_MASK", np.uint64(7))
    if bounds == "small":
        monkeypatch.setattr(table, "TOMBSTONES_MIN", 2)
        monkeypatch.setattr(table, "REMOVED_MAX", 1)
        monkeypatch.setattr(increments, "DELTAS_MAX", 2)
    if bounds == "colliding":
        exact = key_codes._finished
        monkeypatch.setattr(key_codes, "_finished", lambda hashes: exact(hashes) >> np.uint64(63) << np.uint64(63))
    attributes = {"kind": kind, "inline_threshold": inline_threshold, "increments": 0, "merged": 0, "mapped": 0}
    machine: Any = type("Machine", (RowTableMachine,), attributes)
    if bounds == "mapped":
        built = machine.new_backend

        def new_backend(self: Any, **options: Any) -> Any:
            backend = built(self, **options)
            backend._row_tables["rows"]._bytes_max = 200
            return backend

        machine.new_backend = new_backend
    options = settings(
        max_examples=examples(count), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=options)
    assert not machine.mapped or bounds == "mapped"
    if kind == "filesystem" and not inline_threshold:  # of the others there are so few that chance decides
        assert machine.increments or bounds == "small", "no run was ever written"
        assert machine.merged or bounds == "as they are", "nothing was ever merged"
        assert machine.mapped or bounds != "mapped", "nothing ever went to files"

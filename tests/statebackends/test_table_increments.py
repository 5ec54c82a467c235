"""Delta runs of tables: what is stored again and what is not, when a table is written as a whole, and what tools make of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import (
    DELTA_FORMAT,
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.heap import state_table as changes
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable, DirtyKeys, MapLayer
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.snapshot import increments as tablechains
from holdfast.statebackends.snapshot.deltas import (
    DELTAS_MAX,
    REPLACED_METADATA,
    delta_table,
    merged_deltas,
    replaced_by,
    state_parts,
)
from holdfast.statebackends.snapshot.tables import keyed_table_schema
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.state_processor.contents import StoredSnapshot, check_contents
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.statebackends.backend_harness import COUNT, TAGS, WINDOWS, Cluster, columnar_update, owner, use
from tests.statebackends.test_increments import Job, placeholders, read, write, written


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    cluster = Cluster(tmp_path, "filesystem")
    yield Job(cluster)
    cluster.close()


def runs_of(handles: Sequence[KeyedStateHandle], state: str = "count") -> int:
    return max((len(part.deltas) for part in state_parts(handles, operator="op") if part.meta.name == state), default=0)


def new_bytes(handles: Sequence[KeyedStateHandle]) -> int:
    return sum(handle.new_size for handle in handles)


def write_random(backends: Sequence[KeyedBackendBase], numbers: Sequence[int], seed: int) -> None:
    """Values that don't compress."""
    rng = random.Random(seed)
    for number in numbers:
        write(backends, [number], rng.getrandbits(62))


def test_one_per_cent_of_the_keys_costs_a_few_per_cent_of_the_bytes(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write_random(backends, range(20_000), 1)
    full = new_bytes(job.checkpoint(backends, 1, None))
    sizes = []
    for number in range(2, 22):
        write_random(backends, range(number, 20_000, 100), number)
        sizes.append(new_bytes(job.checkpoint(backends, number, number - 1)))
    increments = [size for size in sizes if size < full // 4]
    assert sum(increments) / len(increments) < 0.05 * full
    assert len(increments) == len(sizes), "no table was written again"
    assert read(job.restored(21)) == read(backends)


def test_what_did_not_change_is_not_stored(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(300), 1)
    first = job.checkpoint(backends, 1, None)
    second = job.checkpoint(backends, 2, 1)
    assert (written(second), placeholders(second), runs_of(second)) == (set(), written(first), 0)
    owner(backends, "key7").get_state(COUNT).update(9)
    third = job.checkpoint(backends, 3, 2)
    assert (runs_of(third), runs_of(third, "tags")) == (1, 0)
    assert [handle.format for handle in third] == ["arrow", DELTA_FORMAT]


def test_there_are_at_most_so_many_runs_and_half_as_many_bytes_as_in_the_base(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write_random(backends, range(12_000), 1)
    job.checkpoint(backends, 1, None)
    seen = []
    for number in range(2, 56):
        write_random(backends, range(10 if number < 40 else 2_000), number)
        handles = job.checkpoint(backends, number, number - 1)
        for part in state_parts(job.completed[number], operator="op"):
            sizes = sum(delta.length for delta in part.deltas)
            assert sizes <= max(part.base.length // 2, tablechains.DELTA_BYTES_MIN)
        seen.append(runs_of(handles))
    assert seen[: DELTAS_MAX + 2] == [*range(1, DELTAS_MAX + 1), 0, 1]
    assert max(seen[40:]) < DELTAS_MAX
    assert read(job.restored(55)) == read(backends)


def test_j16_what_an_aborted_checkpoint_stored_is_in_the_next_increment(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(5), 2)
    owner(backends, "key20").get_state(COUNT).clear()
    owner(backends, "key20").get_state(TAGS).clear()
    lost = job.store(backends, 2, 1)
    backends[0].notify_checkpoint_aborted(2)
    write(backends, range(5, 10), 3)
    third = job.checkpoint(backends, 3, 1)
    assert not placeholders(third) & written(lost)
    expected = {f"key{number}": 2 if number < 5 else 3 if number < 10 else 1 for number in range(300) if number != 20}
    assert read(job.restored(3)) == expected


def test_small_runs_travel_inline_as_long_as_they_are_few(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(3_000), 1)
    job.checkpoint(backends, 1, None, threshold=5_000)
    for number in range(2, 9):
        write(backends, range(3), number)
        handles = job.checkpoint(backends, number, number - 1, threshold=5_000)
        inlined = [part for part in handles[1].parts if isinstance(part, InlineHandle)]
        for state in ("count", "tags"):
            own = [part for meta, part in zip(handles[1].states, handles[1].parts, strict=True) if meta.name == state]
            assert sum(part.length for part in own if isinstance(part, InlineHandle)) < 5_000
        assert inlined
    assert any(isinstance(part, FileHandle) for part in job.completed[8][1].parts)
    assert read(job.restored(8)) == read(backends)


def test_a_table_that_travels_inline_is_whole_each_time(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(10), 1)
    job.checkpoint(backends, 1, None, threshold=20_480)
    second = job.checkpoint(backends, 2, 1, threshold=20_480)
    assert [handle.format for handle in second] == ["arrow"]
    assert all(isinstance(part, InlineHandle) for part in second[0].parts)


@pytest.mark.parametrize(("parallelism", "own"), [(1, True), (2, True), (1, False)])
def test_a_restore_goes_on_with_runs_only_where_the_tables_are_its_own(job: Job, parallelism: int, own: bool) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(400), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(0, 400, 50), 2)
    job.checkpoint(backends, 2, 1)
    restored = job.restored(2, parallelism, own=own)
    assert read(restored) == read(backends)
    write(restored, range(7), 3)
    third = job.checkpoint(restored, 3, 2 if own else None)
    assert (runs_of(third) == 2) == (parallelism == 1 and own)
    assert bool(placeholders(third)) == (parallelism == 1 and own)
    for count in (1, 2, 3):
        assert read(job.restored(3, count)) == read(restored)


def test_a_type_that_changed_is_stored_anew(tmp_path: Path, job: Job) -> None:
    backends = [job.cluster.backend((COUNT,))]
    for number in range(100):
        owner(backends, f"k{number}").get_state(COUNT).update(number)
    job.checkpoint(backends, 1, None)
    newer = ValueStateDescriptor("count", float)
    backend = job.cluster.backend((newer,))
    backend.restore(job.completed[1], job.cluster.storage, "job/chk-1", checkpoint_id=1)
    second = job.checkpoint([backend], 2, 1)
    assert (placeholders(second), runs_of(second)) == (set(), 0)
    assert second[0].states[0].value_type == "float"


def test_switched_off_everything_is_written_in_the_checkpoints_own_folder(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "filesystem", StateBackendSettings(incremental=False))
    job = Job(cluster)
    backends = [cluster.backend((COUNT, TAGS))]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    second = job.checkpoint(backends, 2, 1)
    assert (placeholders(second), written(second), runs_of(second)) == (set(), set(), 0)
    cluster.close()


# --------------------------------------------------------------------------------------------------------- what is frozen


@pytest.mark.parametrize("base", [1, None])
def test_a_snapshot_is_not_touched_by_what_a_newer_one_folds(job: Job, base: int | None) -> None:
    """Two in flight; the newer one ends first, and may not fold below what the older one still has to read."""
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(50), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(20), 2)
    immutable = backends[0].snapshot(2)
    write(backends, range(10, 40), 3)
    newer = backends[0].snapshot(3)
    write(backends, range(3), 4)
    targets = [SnapshotTarget(number, f"job/chk-{number}", "op-0-1-n", False, 0, f"{number}-1-op-0-n", base) for number in (2, 3)]
    run_flow(newer.flow(targets[1]), job.cluster.storage)
    newer.release()
    handles = run_flow(immutable.flow(targets[0]), job.cluster.storage)
    immutable.release()
    known = {part.path: part for handle in job.completed[1] for part in handle.parts if isinstance(part, FileHandle)}
    job.completed[2] = tuple(
        msgspec.structs.replace(handle, parts=tuple(known.get(getattr(part, "path", ""), part) for part in handle.parts))
        for handle in handles
    )
    assert read(job.restored(2)) == {f"key{number}": 2 if number < 20 else 1 for number in range(50)}
    assert read(backends) == {
        f"key{number}": 4 if number < 3 else 2 if number < 10 else 3 if number < 40 else 1 for number in range(50)
    }


def test_rows_that_left_a_window_at_the_front_stay_away(job: Job) -> None:
    backend = job.cluster.backend((WINDOWS,))
    rows = [(f"k{number}", number) for number in range(50)]
    columnar_update(backend, 10, rows)
    columnar_update(backend, 20, rows[:5])
    job.checkpoint([backend], 1, None)
    state = backend.columnar_state(WINDOWS, ["user"])
    state.drop_front(10, 30)
    state.remove(20)
    columnar_update(backend, 30, [("new", 1)])
    second = job.checkpoint([backend], 2, 1)
    assert runs_of(second, "windows") == 1
    restored = job.cluster.backend((WINDOWS,))
    restored.restore(job.completed[2], job.cluster.storage, "job/chk-2")
    found = restored.columnar_state(WINDOWS, ["user"])
    assert found.namespaces() == [10, 30]
    assert sorted(found.read(10).column("user").to_pylist()) == sorted(key for key, _ in rows[30:])


def test_rows_are_noted_with_large_batches_and_with_small_ones(job: Job) -> None:
    backend = job.cluster.backend((WINDOWS,))
    model: dict[str, int] = {}

    def update(keys: Sequence[str], value: int) -> None:
        columnar_update(backend, 10, [(key, value) for key in keys])
        for key in keys:
            model[key] = model.get(key, 0) + value

    some = [f"k{number}" for number in range(10)]
    update(some, 1)
    job.checkpoint([backend], 1, None)
    for number, batches in enumerate(([some[:1] * 50, ["new"], some[2:3]], [some[:2]], [["late"], some * 3, ["new"] * 50]), 2):
        for keys in batches:
            update(keys, number)
        assert runs_of(job.checkpoint([backend], number, number - 1), "windows") == number - 1
        restored = job.cluster.backend((WINDOWS,))
        restored.restore(job.completed[number], job.cluster.storage, f"job/chk-{number}")
        found = restored.columnar_state(WINDOWS, ["user"]).read(10).to_pylist()
        assert {row["user"]: row["sum_v"] for row in found} == model


def test_a_namespace_that_was_forgotten_without_having_told_its_changes_makes_a_table_whole(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys were too many to be noted, and the base is older: nobody would delete its rows."""
    monkeypatch.setattr(changes, "KEYS_MIN", 2)
    backend = job.cluster.backend((COUNT,))
    for number in range(100):
        use(backend, f"k{number}")
        backend.get_state(COUNT).update(number)
    backend.get_state(COUNT, b"w").update(1)
    job.checkpoint([backend], 1, None)
    backend.get_state(COUNT, b"w").update(2)
    slow = backend.snapshot(2)
    for number in range(100):
        use(backend, f"k{number}")
        backend.get_state(COUNT, b"w").update(3)
        backend.get_state(COUNT, b"w").clear()
    third = backend.snapshot(3)
    for pending, number in ((slow, 2), (third, 3)):
        target = SnapshotTarget(number, f"job/chk-{number}", "op-0-1-n", False, 0, f"{number}-1-op-0-n", 1)
        run_flow(pending.flow(target), job.cluster.storage)
        pending.release()
    fourth = job.checkpoint([backend], 4, 1)
    assert ("count", b"w") not in backend._state_tables, "nothing is in it"
    assert (placeholders(fourth), runs_of(fourth)) == (set(), 0)
    restored = job.cluster.backend((COUNT,))
    restored.restore(job.completed[4], job.cluster.storage, "job/chk-4")
    assert (len(list(restored.keys("count"))), list(restored.keys("count", b"w"))) == (100, [])


def test_reads_go_on_while_another_thread_folds() -> None:
    for kind in (CopyOnWriteStateTable, CopyOnWriteMapTable):
        table = kind()
        _fill(table, 2_000, 0)
        table.track_since(0)
        for barrier in range(1, 8):
            _fill(table, 2_000, barrier)
            table.remove(b"k1")
            layers = table.freeze()
            table.checkpoint_started(barrier, barrier - 1)
            thread = threading.Thread(target=table.merge, args=(layers,))
            thread.start()
            while thread.is_alive():
                for number in (0, 2, 1_999):
                    assert _found(table, b"k%d" % number) == barrier
                assert _found(table, b"k1") is None
            thread.join()
            table.release(len(layers))
            assert len(table.immutable) == 1, "the layers above were folded"
            assert _found(table, b"k1") is None


def _fill(table: CopyOnWriteStateTable, count: int, value: int) -> None:
    for number in range(count):
        key = b"k%d" % number
        if isinstance(table, CopyOnWriteMapTable):
            table.active.setdefault(key, MapLayer())["e"] = value
        else:
            table.active[key] = value


def _found(table: CopyOnWriteStateTable, key: bytes) -> int | None:
    if isinstance(table, CopyOnWriteMapTable):
        return table.entries(key)[0].get("e")
    found = table.find(key)[0]
    return None if found is MISSING else found


def test_keys_that_come_and_go_between_two_barriers_leave_nothing_behind() -> None:
    table = CopyOnWriteStateTable()
    table.active[b"stays"] = 1
    table.track_since(0)
    for number in range(100):
        table.active[b"k%d" % number] = 1
        table.remove(b"k%d" % number)
    assert table.active == {}
    table.remove(b"stays")
    assert len(table.active) == 1


# -------------------------------------------------------------------------------------------------------------- pure parts


def test_the_log_forgets_what_is_too_much_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "KEYS_MIN", 10)
    log = DirtyKeys(0)
    assert log.close(1, set(range(4)), 0, 20).complete_from == 0
    known = log.close(2, set(range(3, 8)), 0, 20)
    assert (known.complete_from, known.count(0), known.count(1)) == (0, 9, 5)
    assert sorted(key for batch in known.batches(0, 2) for key in batch) == list(range(8)), "each once"
    known = log.close(3, set(range(5)), 0, 20)
    assert (known.complete_from, [barrier for barrier, _ in known.epochs]) == (1, [3, 2])
    assert log.close(4, (), 3, 20).epochs == ()
    for barrier in range(5, 5 + changes.EPOCHS_MAX + 3):
        known = log.close(barrier, {1}, 3, 1_000)
    assert (len(known.epochs), known.complete_from) == (changes.EPOCHS_MAX, 7)
    assert log.close(100, set(range(11)), 3, 20).complete_from == 100


FLOAT = KeyType.of(float)
META = StateMeta("s", "value", "int", "float")


def _table(keys: Sequence[float], values: Sequence[int | None], namespace: bytes = b"") -> pa.Table:
    column = FLOAT.column([pa.array(keys, pa.float64())], max_parallelism=8)
    arrays = [pa.array(column.key_groups), column.arrays[0], pa.repeat(pa.scalar(namespace, pa.binary()), len(keys))]
    schema = keyed_table_schema(FLOAT, META, pa.int64())
    return pa.Table.from_arrays([*arrays, pa.array(values, pa.int64())], schema=schema)


def test_keys_are_the_same_as_everywhere_and_namespaces_are_told_apart() -> None:
    """-0.0 is 0.0 and there is one NaN."""
    base = pa.concat_tables([_table([0.0, float("nan"), 1.0], [1, 2, 3]), _table([1.0], [4], b"n")])
    run = delta_table(_table([-0.0], [9]), _table([float("nan")], [0]).columns[:3])
    merged = merged_deltas(base, [run], FLOAT, 8)
    assert merged.schema == base.schema
    assert sorted((row["key"], row["namespace"], row["value"]) for row in merged.to_pylist()) == [
        (-0.0, b"", 9), (1.0, b"", 3), (1.0, b"n", 4),
    ]  # fmt: skip


def test_the_newest_run_decides() -> None:
    base = _table([1.0, 2.0, 3.0], [1, 2, 3])
    gone = delta_table(_table([], []), _table([1.0, 2.0], [0, 0]).columns[:3])
    back = delta_table(_table([2.0, 4.0], [20, 40]), [])
    merged = merged_deltas(base, [gone, back], FLOAT, 8)
    assert sorted((row["key"], row["value"]) for row in merged.to_pylist()) == [(2.0, 20), (3.0, 3), (4.0, 40)]
    groups = merged.column("key_group").to_pylist()
    assert groups == sorted(groups)


def test_a_run_that_is_none_is_refused() -> None:
    base = _table([1.0], [1])
    with pytest.raises(KeyError):
        merged_deltas(base, [base], FLOAT, 8)
    schema = base.schema.with_metadata({REPLACED_METADATA: b"[1, {}]"})
    with pytest.raises(ValueError, match=r"holdfast\.replaced"):
        replaced_by(schema)


# ------------------------------------------------------------------------------------------------------------------ tools


def _three(job: Job) -> KeyedBackendBase:
    backend = job.cluster.backend((COUNT, TAGS))
    write([backend], range(500), 1)
    job.checkpoint([backend], 1, None)
    write([backend], range(5), 2)
    job.checkpoint([backend], 2, 1)
    use(backend, "key3")
    backend.get_state(COUNT).clear()
    backend.get_state(TAGS).clear()
    return backend


def _snapshot(job: Job, number: int) -> StoredSnapshot:
    """One subtask with both handles."""
    handles = job.completed[number]
    job.completed[number] = handles[:1]
    stored = job.snapshot(number)
    job.completed[number] = handles
    (operator,) = stored.metadata.operators
    operator = msgspec.structs.replace(operator, parallelism=1, subtasks=(OperatorSubtaskState(keyed=handles),))
    return StoredSnapshot(msgspec.structs.replace(stored.metadata, operators=(operator,)), stored.storage, stored.folder)


def test_tools_read_a_table_with_its_runs_as_one(job: Job, tmp_path: Path) -> None:
    backend = _three(job)
    third = job.checkpoint([backend], 3, 2)
    assert runs_of(third) == 2
    pending = backend.snapshot(4)
    canonical = run_flow(pending.flow(SnapshotTarget(4, "job/chk-4", "op-0-1-n", True, 0)), job.cluster.storage)
    pending.release()
    job.completed[4] = canonical
    checkpoint, savepoint = _snapshot(job, 3), _snapshot(job, 4)
    check_contents(checkpoint)
    assert run_flow(verify_files(checkpoint), job.cluster.storage).is_sound
    assert diff_snapshots(checkpoint, savepoint).is_same
    copied = copy_snapshot(checkpoint, LocalStorage(tmp_path / "elsewhere"), "s")
    assert copied.is_self_contained
    assert diff_snapshots(copied, savepoint).is_same
    assert not diff_snapshots(_snapshot(job, 2), savepoint).is_same


def test_a_run_that_is_missing_damaged_or_alone_is_refused(job: Job) -> None:
    backend = _three(job)
    job.checkpoint([backend], 3, 2)
    base, runs = job.completed[3]
    for part in runs.parts:
        assert isinstance(part, FileHandle)
        path = Path(job.cluster.storage.root, "job/shared", part.path.rpartition("/")[2])
        content = path.read_bytes()
        for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            with pytest.raises(CorruptStateError, match=r"operator 'op'.*shared"):
                job.restored(3)
        path.unlink()
        with pytest.raises(CorruptStateError, match="the file is missing"):
            job.restored(3)
        path.write_bytes(content)
    complete = job.completed[3]
    for handles in ((runs,), (runs, base), (msgspec.structs.replace(base, key_groups=KeyGroupRange(0, 1)), runs)):
        job.completed[3] = handles
        with pytest.raises(CorruptStateError, match="no such table before it"):
            job.restored(3)
    job.completed[3] = complete
    many = msgspec.structs.replace(runs, states=runs.states * 33, parts=runs.parts * 33)
    snapshot = _snapshot(job, 3)
    (operator,) = snapshot.metadata.operators
    operator = msgspec.structs.replace(operator, subtasks=(OperatorSubtaskState(keyed=(base, many)),))
    crowded = StoredSnapshot(msgspec.structs.replace(snapshot.metadata, operators=(operator,)), snapshot.storage, snapshot.folder)
    with pytest.raises(CorruptStateError, match="more than 32 deltas"):
        check_contents(crowded)

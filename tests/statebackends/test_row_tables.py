"""Row tables: what they refuse, what a checkpoint of one stores, files that are mapped, merges when idle, and what tools make of
them. Their contents against a model: test_row_table_machine.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidConfigError,
    InvalidKeyError,
    InvariantError,
    OutOfSpaceError,
    StateValueError,
    UndeclaredStateError,
)
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import DELTA_FORMAT, StateMeta
from holdfast.statebackends.layout import ORDER, part_path
from holdfast.statebackends.row_tables import table as row_table
from holdfast.statebackends.row_tables.merge import Merge
from holdfast.statebackends.row_tables.run import Run
from holdfast.statebackends.row_tables.type_text import row_table_text, stored_name
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.snapshot.deltas import TOMBSTONE_COLUMN, replaced_by, state_parts
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.state import NO_TIME, RowTableStateDescriptor
from holdfast.statebackends.storage.port import ReadFile
from tests.golden.goldens import folder_of
from tests.statebackends.backend_harness import KEY, MAX_PARALLELISM, Cluster
from tests.statebackends.test_increments import Job

ROWS = RowTableStateDescriptor("rows", pa.schema([("v", pa.int64()), ("text", pa.string())]))
KINDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, "filesystem", StateBackendSettings(row_table_bytes_max=1 << 20))
    yield found
    found.close()


@pytest.fixture
def job(cluster: Cluster) -> Job:
    return Job(cluster)


def keys_of(numbers: Sequence[int]) -> Any:
    return KEY.column_of_values([f"key-{number}" for number in numbers], max_parallelism=MAX_PARALLELISM)


def append(backend: KeyedBackendBase, numbers: Sequence[int], *, namespace: int = 0, keys: int = 1_000, size: int = 8) -> Any:
    table = backend.row_table(ROWS, ["id"])
    texts = pa.array([np.random.default_rng(number).bytes(size // 2).hex() for number in numbers])
    table.append(keys_of([number % keys for number in numbers]), namespace, [pa.array(numbers, pa.int64()), texts])
    return table


def numbers_in(table: Any) -> list[int]:
    found: list[int] = []
    scan = table.scan()
    while (some := scan.next(1_000)) is not None:
        found += some.take(["v"]).column(0).to_pylist()
    return sorted(found)


def tables_of(job: Job, number: int) -> tuple[pa.Table, list[pa.Table]]:
    """Base and runs as they are stored."""
    (part,) = state_parts(job.completed[number], operator="op")

    def read(handle: Any) -> pa.Table:
        data = handle.data if hasattr(handle, "data") else job.cluster.storage.execute(
            ReadFile(part_path(f"job/chk-{number}", handle.path), handle.offset, handle.length)
        )  # fmt: skip
        return pa.ipc.open_file(data).read_all()

    base, *runs = map(read, part.tables)
    return base, runs


# --------------------------------------------------------------------------------------------------------- what is refused


def test_columns_of_another_type_are_refused_by_name(cluster: Cluster) -> None:
    table = cluster.backend((ROWS,)).row_table(ROWS, ["id"])
    with pytest.raises(StateValueError, match=r"'op'.*'rows'.*column 'v' is string, and int64") as refused:
        table.append(keys_of([1]), 0, [pa.array(["1"]), pa.array(["x"])])
    assert (refused.value.operator, refused.value.state) == ("op", "rows")
    with pytest.raises(StateValueError, match="1 columns were given, and 2 are declared"):
        table.append(keys_of([1]), 0, [pa.array([1])])
    assert table.count() == 0


def test_a_null_key_is_refused_where_the_keys_are_made() -> None:
    with pytest.raises(InvalidKeyError, match=r"'op'.*null"):
        KEY.column([pa.array(["a", None])], max_parallelism=MAX_PARALLELISM, operator="op")


def test_undeclared_tables_and_other_schemas_are_refused(cluster: Cluster) -> None:
    backend = cluster.backend((ROWS,))
    for descriptor in (RowTableStateDescriptor("others", ROWS.schema), RowTableStateDescriptor("rows", pa.schema([]))):
        with pytest.raises(UndeclaredStateError) as refused:
            backend.row_table(descriptor, ["id"])
        assert refused.value.operator == "op"
    with pytest.raises(InvalidConfigError, match="has 1 fields, not 2"):
        backend.row_table(ROWS, ["id", "part"])


@pytest.mark.parametrize("names", [["a", "a"], [""]])
def test_columns_that_can_not_be_told_apart_are_refused_with_the_graph(names: list[str]) -> None:
    descriptor = RowTableStateDescriptor("rows", pa.schema([(name, pa.int64()) for name in names]))
    with pytest.raises(InvalidConfigError, match="rows"):
        state_meta(descriptor, KEY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_another_schema_is_refused_by_name(cluster: Cluster, kind: BackendKind) -> None:
    backend = cluster.backend((ROWS,))
    append(backend, [1])
    snapshot = cluster.take(backend, canonical=True)
    wider = RowTableStateDescriptor("rows", pa.schema([("v", pa.float64()), ("text", pa.string())]))
    with pytest.raises(IncompatibleStateError, match=r"'op'.*'rows'.*v: int64.*v: double") as refused:
        cluster.restored(snapshot, (wider,), kind=kind)
    assert (refused.value.operator, refused.value.state) == ("op", "rows")


@pytest.mark.parametrize(("orders", "reason"), [([0, 0], "two rows have"), ([-1, 3], "not 0.."), ([1, 2**62], "not 0..")])
def test_rows_that_can_not_be_are_refused(orders: list[int], reason: str) -> None:
    meta = StateMeta("rows", "row_table", row_table_text(ROWS.schema), "utf8")
    rules = RowRules.of(meta, KEY, MAX_PARALLELISM)
    groups = np.full(2, KEY.key_group("a", MAX_PARALLELISM), np.int32)
    columns = [groups, ["a", "a"], [0, 0], orders, [None, 5], [1, None], ["x", None]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, rules.schema, strict=True)]
    with pytest.raises(ValueError, match=reason):
        rules.judged(pa.Table.from_arrays(arrays, schema=rules.schema))


def test_one_order_in_two_namespaces_of_a_key_is_refused(cluster: Cluster) -> None:
    backend = cluster.backend((ROWS,))
    table = append(backend, [1])
    rows = table.rows_from(
        keys_of([1, 1]), np.array([4, 4]), np.array([0, 1]), np.full(2, NO_TIME), [pa.array([1, 2]), pa.array(["", ""])]
    )
    with pytest.raises(CorruptStateError, match="one order"):
        table.load(rows)


# --------------------------------------------------------------------------------------------------- what checkpoints store


def test_one_per_cent_of_new_rows_costs_about_one_per_cent(job: Job) -> None:
    backend = job.cluster.backend((ROWS,))
    append(backend, range(20_000), size=80)
    full = sum(handle.new_size for handle in job.checkpoint([backend], 1, None))
    shares = []
    for number in range(2, 22):
        append(backend, range(number * 20_000, number * 20_000 + 200), size=80)
        shares.append(sum(handle.new_size for handle in job.checkpoint([backend], number, number - 1)) / full)
    assert min(shares) < 0.02
    assert sum(shares) / len(shares) <= 0.035  # of small files with footers; 0.017 of a million rows
    assert sum(share < 0.02 for share in shares) >= 17


def test_an_increment_holds_new_rows_names_of_deleted_ones_and_of_namespaces(job: Job) -> None:
    backend = job.cluster.backend((ROWS,))
    append(backend, range(2_000), size=60)
    append(backend, range(2_000, 4_000), namespace=7, size=60)
    table = append(backend, range(4_000, 4_100), namespace=8, size=60)
    job.checkpoint([backend], 1, None)
    append(backend, range(5_000, 5_010), keys=10)
    table.delete(table.rows_of(keys_of([3])))  # 3, 1003, 2003, 3003, 4003, and 5003, which no checkpoint has
    table.drop(8)
    append(backend, [6_000], namespace=9)
    table.drop(9)  # it came and went
    job.checkpoint([backend], 2, 1)
    base, (run,) = tables_of(job, 2)
    assert base.num_rows == 4_100
    gone = run.column(TOMBSTONE_COLUMN).to_pylist()
    new = run.column("v").filter(pa.array([not each for each in gone])).to_pylist()
    assert sorted(new) == [*range(5_000, 5_003), *range(5_004, 5_010)]
    assert sorted(run.column(ORDER).filter(pa.array(gone)).to_pylist()) == [3, 1_003, 2_003, 3_003, 4_003]
    assert replaced_by(run.schema) == [8]
    append(backend, [7_000], namespace=8)
    job.checkpoint([backend], 3, 2)
    _, runs = tables_of(job, 3)
    assert [each.num_rows for each in runs] == [14, 1]


def test_seven_small_runs_are_taken_in_by_the_eighth(job: Job) -> None:
    backend = job.cluster.backend((ROWS,))
    append(backend, range(40_000), size=60)
    job.checkpoint([backend], 1, None)
    counts = []
    for number in range(2, 30):
        table = append(backend, range(number * 40_000, number * 40_000 + 100), size=60)
        table.delete(table.rows_of(keys_of([number])).select(np.array([0])))
        job.checkpoint([backend], number, number - 1)
        counts.append([run.num_rows for run in tables_of(job, number)[1]])
    assert [len(each) for each in counts] == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7]
    assert counts[7][0] >= 800
    restored = job.cluster.backend((ROWS,))
    restored.restore(job.completed[29], job.cluster.storage, "job/chk-29", checkpoint_id=29)
    assert numbers_in(restored.row_table(ROWS, ["id"])) == numbers_in(table)
    append(restored, [9_999_999])
    (delta,) = [each for each in job.checkpoint([restored], 30, 29) if each.format == DELTA_FORMAT]
    assert len(delta.parts) == 8, "of runs that were restored nothing is known but that they are there"


def test_what_comes_and_goes_before_a_read_is_never_sorted(cluster: Cluster) -> None:
    backend = cluster.backend((ROWS,))
    for stretch in range(5):
        table = append(backend, range(stretch * 100, stretch * 100 + 100), namespace=stretch)
        table.drop_until(stretch - 1)
    assert (table.count(), table.namespaces()) == (100, [4])
    assert numbers_in(table) == list(range(400, 500))
    (run,) = table._runs
    assert len(run) == 100


def test_too_many_tombstones_make_the_next_checkpoint_full(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "TOMBSTONES_MIN", 4)
    backend = job.cluster.backend((ROWS,))
    table = append(backend, range(1_000), size=60)
    job.checkpoint([backend], 1, None)
    table.delete(table.rows_of(keys_of(range(600))))
    job.checkpoint([backend], 2, 1)
    base, runs = tables_of(job, 2)
    assert (base.num_rows, runs) == (400, [])


def test_a_barrier_costs_no_row(cluster: Cluster) -> None:
    """Nothing that is done behind a barrier is in its snapshot, and none of its arrays is copied for it."""
    backend = cluster.backend((ROWS,))
    table = append(backend, range(3_000))
    found = table.rows_of(keys_of([5]))
    run = table._runs[0]
    pending: Any = backend.snapshot(1)
    table.delete(found)
    append(backend, range(5_000, 5_100))
    table.drop(0)
    assert pending._sources[0]._frozen._runs == [(run, 0, 0)]
    handles, folder = cluster.finish(pending)
    assert numbers_in(cluster.restored((handles, folder), (ROWS,)).row_table(ROWS, ["id"])) == list(range(3_000))


# -------------------------------------------------------------------------------------------------- files, and idle workers


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_above_the_limit_is_mapped_from_files_of_the_working_folder(cluster: Cluster, kind: BackendKind) -> None:
    backend = cluster.backend((ROWS,), kind=kind)
    folder = Path(backend._local_dir) / "rows-rows"
    for start in range(0, 40_000, 4_000):
        table = append(backend, range(start, start + 4_000), size=100)
        table.rows_of(keys_of([1]))
    while backend.write_behind():
        pass
    assert table.is_mapped
    assert table.size() <= 1 << 20
    files = sorted(path.name for path in folder.iterdir())
    assert [name for name in files if name.endswith(".arrow")]
    assert sum(path.stat().st_size for path in folder.iterdir()) >= 40_000 * 100
    assert sum(pa.ipc.open_file(path).read_all().num_rows for path in folder.glob("*.arrow")) <= 40_000
    assert table.rows_of(keys_of([3])).take(["v"]).column(0).to_pylist() == list(range(3, 40_000, 1_000))
    held = table.rows_of(keys_of([4]))
    handles = cluster.take(backend, canonical=True)
    backend.dispose()
    assert not folder.exists()
    assert len(held.take()) == 40, "what was read before is still mapped"
    assert numbers_in(cluster.restored(handles, (ROWS,), kind="memory").row_table(ROWS, ["id"])) == list(range(40_000))


def test_a_full_disk_is_told_by_its_name(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    backend = cluster.backend((ROWS,))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpaceError, match=r"'op'.*'rows'.*No space left"):
        append(backend, range(40_000), size=100).rows_of(keys_of([1]))


def test_an_idle_worker_merges(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "_WORK_PER_ROW", 0)
    backend = cluster.backend((ROWS,))
    for start in range(0, 16_000, 1_000):
        table = append(backend, range(start, start + 1_000))
        table.rows_of(keys_of(range(1_000)))
    assert (backend.writes_behind, table.has_work, table.run_count) == (True, True, 16)
    while backend.write_behind():
        pass
    assert (table.has_work, table.run_count) == (False, 1)
    assert numbers_in(table) == list(range(16_000))


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("asked", "written_again"), [(1_000, 65_536), (100, 32_768)])
def test_a_table_that_is_rarely_read_writes_its_rows_again_less_often(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, asked: int, written_again: int, by_rows: bool
) -> None:
    """`by_rows`: it is asked for rows that were found before, not for keys."""
    written = [0]
    finish = Merge.finish

    def counted(merge: Merge) -> Any:
        written[0] += merge.rows if len(merge.runs) > 1 else 0  # a run goes alone to a file
        return finish(merge)

    monkeypatch.setattr(Merge, "finish", counted)
    backend = cluster.backend((ROWS,))
    for start in range(0, 32_768, 1_024):
        table = append(backend, range(start, start + 1_024))
        if start == 0 or not by_rows:
            found = table.rows_of(keys_of(range(asked)))
        else:
            table.counterparts(found)
        while backend.write_behind():
            pass
    assert written[0] == written_again
    assert numbers_in(table) == list(range(32_768))


def test_dropped_rows_are_forgotten_without_a_merge(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "_WORK_PER_ROW", 0)
    backend = cluster.backend((ROWS,))
    for namespace in range(3):
        table = append(backend, range(1_000), namespace=namespace)
        table.rows_of(keys_of([1]))
    table.drop(1)
    assert (table.run_count, table.count(), table.has_work) == (2, 2_000, False)


# ----------------------------------------------------------------------------------------------------------- columns


def test_types_without_a_text_of_their_own_are_stored_as_they_are(cluster: Cluster) -> None:
    descriptor = RowTableStateDescriptor("rows", pa.schema([("month", pa.month_day_nano_interval())]))
    backend = cluster.backend((descriptor,))
    table = backend.row_table(descriptor, ["id"])
    table.append(keys_of([1]), 0, [pa.array([(1, 2, 3)], pa.month_day_nano_interval())])
    restored = cluster.restored(cluster.take(backend), (descriptor,)).row_table(descriptor, ["id"])
    assert restored.rows_of(keys_of([1])).take(["month"]).column(0).to_pylist() == [(1, 2, 3)]


def test_columns_have_names_of_their_own_in_a_stored_table(cluster: Cluster) -> None:
    names = ["key", "key_0", "key_group", "namespace", "order", "time", "tombstone", "row.", "row.key", "keys", "v"]
    descriptor = RowTableStateDescriptor("rows", pa.schema([(name, pa.int64()) for name in names]))
    assert len({stored_name(name) for name in names} | {"key", "key_group", "namespace", "order", "time"}) == len(names) + 5
    backend = cluster.backend((descriptor,))
    table = backend.row_table(descriptor, ["id"])
    table.append(keys_of([1]), 3, [pa.array([number]) for number in range(len(names))], np.array([9]))
    for canonical in (False, True):
        restored = cluster.restored(cluster.take(backend, canonical=canonical), (descriptor,)).row_table(descriptor, ["id"])
        found = restored.rows_of(keys_of([1]))
        assert found.take(names).to_pylist() == [{name: number for number, name in enumerate(names)}]
        assert (found.namespaces.tolist(), found.times.tolist(), found.orders.tolist()) == ([3], [9], [0])


# ----------------------------------------------------------------------------------------------------------------- tools


def test_an_edited_savepoint_has_what_the_edit_left(tmp_path: Path) -> None:
    before = hf.Snapshot(folder_of("v1-rows-savepoint"))

    def without_some(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pa.array([order % 4 != 0 for order in batch["order"].to_pylist()]))

    after = before.edit(tmp_path / "edited", uid="bids", state="bids", function=without_some)
    wanted = [row for row in before.table("bids", "bids").read_all().to_pylist() if row["order"] % 4]
    assert after.table("bids", "bids").read_all().to_pylist() == wanted
    assert before.diff(before).is_same
    assert not before.diff(after).is_same
    rescaled = hf.Savepoint.from_snapshot(after, max_parallelism=32, parallelism=3).write(tmp_path / "rescaled")
    found = rescaled.table("bids", "bids").read_all().drop_columns(["key_group"]).to_pylist()
    assert sorted(map(str, found)) == sorted(str({name: row[name] for name in row if name != "key_group"}) for row in wanted)


def test_a_savepoint_made_of_rows_restores(tmp_path: Path, cluster: Cluster) -> None:
    rows = [{"key": f"key-{number % 3}", "namespace": number % 2, "order": number, "time": None, "v": number, "text": ""}
            for number in range(9)]  # fmt: skip
    savepoint = hf.Savepoint.create(max_parallelism=MAX_PARALLELISM).with_state(
        "op", ROWS, pa.Table.from_pylist(rows), namespace="namespace"
    )
    made = savepoint.write(tmp_path / "state" / "made")
    handles = [handle for subtask in made._stored.metadata.operators[0].subtasks for handle in subtask.keyed]
    table = cluster.restored((handles, "made"), (ROWS,)).row_table(ROWS, ["id"])
    assert table.rows_of(keys_of([1])).orders.tolist() == [1, 4, 7]


# ----------------------------------------------------------------------------------------------------- what is not looked at


def test_runs_without_the_namespace_or_the_times_are_passed_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cluster.backend((ROWS,))
    table = backend.row_table(ROWS, ["id"])
    for namespace in range(3):
        times = np.array([NO_TIME, 10 * namespace, 10 * namespace + 5])
        table.append(keys_of([1, 1, 2]), namespace, [pa.array([namespace] * 3), pa.array(["a", "b", "c"])], times)
        table.rows_of(keys_of([]))
    asked: list[int] = []
    dead_among = Run.dead_among

    def noted(run: Run, rows: Any) -> Any:
        asked.append(int(run.namespaces[0]))
        return dead_among(run, rows)

    monkeypatch.setattr(Run, "dead_among", noted)
    assert table.rows_of(keys_of([1, 2]), 1).namespaces.tolist() == [1, 1, 1]
    assert table.rows_of(keys_of([1, 2]), None, (np.array([0, 20]), np.array([9, 21]))).times.tolist() == [0]
    assert table.rows_of(keys_of([1, 2]), None, (6, 9)).times.tolist() == []
    some = table.scan(2).next(10)
    assert some is not None
    assert some.namespaces.tolist() == [2, 2, 2]
    assert table.scan(7).next(10) is None
    assert asked == [1, 0, 1, 2, 2]
    some = table.scan(times=(5, 10)).next(10)
    assert some is not None
    assert sorted(some.times.tolist()) == [5, 10]
    assert asked[5:] == [0, 1]
    assert table.scan(0, (6, 30)).next(10) is None


SOME = RowTableStateDescriptor("some", pa.schema([]), by_time=True)


def test_rows_of_two_tables_are_found_in_each_other_by_key_and_order(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "filesystem")
    backend = cluster.backend((ROWS, SOME), key_type=KEY)
    rows, some = backend.row_table(ROWS, ["id"]), backend.row_table(SOME, ["id"])
    for first in (0, 100):
        numbers = np.arange(first, first + 100)
        keys = keys_of((numbers % 7).tolist())
        texts = pa.array([str(number) for number in numbers.tolist()])
        orders = rows.append(keys, 0, [pa.array(numbers), texts], numbers)
        picked = np.flatnonzero(numbers % 3 == 0)
        some.append(keys.take(picked), 0, [], numbers[picked], orders[picked])
    with pytest.raises(InvariantError, match="orders of rows ascend, and begin at 199"):
        some.append(keys_of([1]), 0, [], None, np.array([198]))
    snapshot = cluster.take(backend, canonical=True)
    for kind in KINDS:
        restored = cluster.restored(snapshot, (ROWS, SOME), kind=kind)
        whole, part = restored.row_table(ROWS, ["id"]), restored.row_table(SOME, ["id"])
        found = whole.counterparts(part.until(50, 1_000))
        assert found.take(["v"]).column(0).to_pylist() == list(range(0, 51, 3))
        assert found.queries.tolist() == list(range(17))
        matched = whole.rows_of(keys_of([3]))
        assert part.delete(part.counterparts(matched)) == len([n for n in range(200) if n % 7 == 3 and n % 3 == 0])
        assert len(part.counterparts(matched)) == 0
    cluster.close()


def test_the_first_row_behind_many_that_died_in_a_merge_is_found_in_few_reads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = cluster.backend((SOME,))
    table, count, dead = backend.row_table(SOME, ["id"]), 1 << 16, 3_000
    times = np.random.default_rng(7).permutation(count)
    for start in range(0, count, count // 8):
        some = times[start : start + count // 8]
        table.append(keys_of((some % 100).tolist()), 0, [], some)
        table.until(-1, 1)  # the rows become a run
    assert table.has_work
    early = table.until(dead - 1, dead)
    backend.write_behind()
    assert table.delete(early) == dead
    assert table.has_work, "the merge is under way"
    while backend.write_behind():
        pass
    assert table.run_count == 1
    reads, dead_among = [0], Run.dead_among

    def counted(run: Run, rows: Any) -> Any:
        reads[0] += 1
        return dead_among(run, rows)

    monkeypatch.setattr(Run, "dead_among", counted)
    assert len(table.until(dead - 1, 1)) == 0
    assert table.until(count, 1).times.tolist() == [dead]
    assert reads[0] <= 24


def test_a_key_of_many_rows_comes_in_slices_where_it_may(cluster: Cluster) -> None:
    backend = cluster.backend((ROWS,))
    table = backend.row_table(ROWS, ["id"])
    for start in range(0, 100_000, 20_000):
        numbers = np.arange(start, start + 20_000)
        table.append(keys_of(numbers % 200 == 0), 0, [pa.array(numbers), pa.nulls(len(numbers), pa.string())])
    scan = table.scan(splits_keys=True)
    found = []
    while (rows := scan.next(1_000)) is not None:
        assert len(rows) <= 1_000
        found.append(rows.take(["v"]).column(0).to_numpy())
    numbers = np.concatenate(found)
    assert len(found) >= 100
    assert np.array_equal(np.sort(numbers), np.arange(100_000))
    for is_rare in (False, True):
        of_key = numbers[(numbers % 200 == 0) == is_rare]
        assert np.array_equal(of_key, np.sort(of_key))


def test_a_table_that_is_not_by_time_is_not_asked_for_times(cluster: Cluster) -> None:
    table = cluster.backend((ROWS,)).row_table(ROWS, ["id"])
    with pytest.raises(InvariantError, match="not asked for by time"):
        table.until(50, 1_000)

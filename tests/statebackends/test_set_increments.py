"""Increments of columnar state with sets: a row has what its sets gained, and a reader adds that to what was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.columnar import counted, distinct
from holdfast.statebackends.columnar import state as columnar
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import DELTA_FORMAT, SET_DELTA_FORMAT, KeyedStateHandle
from holdfast.statebackends.snapshot import deltas
from holdfast.statebackends.snapshot import increments as tablechains
from holdfast.statebackends.snapshot.deltas import ADDED_METADATA, added_by, delta_table, merged_deltas, state_parts
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor
from holdfast.statebackends.state_processor.contents import check_contents
from holdfast.statebackends.state_processor.diff import diff_snapshots
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, KEY, MAX_PARALLELISM, TAGS, Cluster
from tests.statebackends.test_increments import Job, write

SETS = ColumnarStateDescriptor(
    "sets",
    (
        ColumnAggregate("count", None, "rows"),
        ColumnAggregate("count_distinct", "v", "numbers", pa.int64()),
        ColumnAggregate("count_distinct", "t", "texts", pa.string()),
    ),
)
POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Outlives its buffers."""
Model = dict[tuple[int, str], tuple[int, list[int], list[str]]]
"""(window, key) -> rows, and the different values in order of arrival."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    cluster = Cluster(tmp_path, "filesystem")
    yield Job(cluster)
    cluster.close()


def update(backend: Any, window: int, rows: Sequence[tuple[str, int]]) -> None:
    keys = KEY.column([pa.array([key for key, _ in rows], pa.string())], max_parallelism=MAX_PARALLELISM)
    numbers = pa.array([value for _, value in rows], pa.int64())
    backend.columnar_state(SETS, ["user"]).update(keys, window, [None, numbers, numbers.cast(pa.string())])


def contents(backend: Any) -> Model:
    frozen = backend.columnar_state(SETS, ["user"]).freeze()
    (keys,), namespaces, parts = frozen.columns()
    frozen.release()
    places = zip(namespaces.to_pylist(), keys.to_pylist(), strict=True)
    return dict(zip(places, zip(*(part.to_pylist() for part in parts), strict=True), strict=True))


def restored(job: Job, number: int, parallelism: int = 1, *, own: bool = True) -> list[Any]:
    backends = [job.cluster.backend((SETS,), parallelism=parallelism, subtask=subtask) for subtask in range(parallelism)]
    for backend in backends:
        checkpoint_id = number if own else None
        backend.restore(job.completed[number], job.cluster.storage, f"job/chk-{number}", checkpoint_id=checkpoint_id)
    return backends


def deltas_of(handles: Sequence[KeyedStateHandle]) -> int:
    return max(len(part.deltas) for part in state_parts(handles, operator="op"))


ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 1), ROWS),
        st.tuples(st.just("checkpoint"), st.booleans(), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 1), st.none()),
        st.tuples(st.just("drop"), st.integers(0, 1), st.none()),
        st.tuples(st.just("restart"), st.booleans(), st.none()),
    ),
    max_size=25,
)


class Run:
    """A backend beside its model, and what the coordinator keeps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.backend = job.cluster.backend((SETS,))
        self.model: Model = {}
        self.firing: set[int] = set()
        self.at_checkpoint: dict[int, Model] = {}
        self.number = 0
        self.base: int | None = None
        """The newest completed checkpoint."""

    def update(self, window: int, rows: list[tuple[str, int]]) -> None:
        if window in self.firing:  # a window that has begun to fire gets no more rows
            self.remove(window)
        update(self.backend, window, rows)
        for key, value in rows:
            count, numbers, texts = self.model.get((window, key), (0, [], []))
            new = [] if value in numbers else [value]
            self.model[window, key] = count + 1, numbers + new, texts + list(map(str, new))

    def remove(self, window: int, _: None = None) -> None:
        self.firing.discard(window)
        self.backend.columnar_state(SETS, ["user"]).remove(window)
        self.model = {place: row for place, row in self.model.items() if place[0] != window}

    def drop(self, window: int, _: None) -> None:
        state = self.backend.columnar_state(SETS, ["user"])
        if state.row_count(window):
            del self.model[window, state.read(window, 0, 1).column("user")[0].as_py()]
            state.drop_front(window, 1)
            self.firing.add(window)

    def checkpoint(self, completes: bool, _: None = None) -> None:
        self.number += 1
        if not completes:
            self.job.store([self.backend], self.number, self.base)
            self.backend.notify_checkpoint_aborted(self.number)
            return
        self.job.checkpoint([self.backend], self.number, self.base)
        self.base, self.at_checkpoint[self.number] = self.number, self.model.copy()
        for parallelism in (1, 2):
            found = [contents(part) for part in restored(self.job, self.number, parallelism, own=False)]
            assert {place: row for part in found for place, row in part.items()} == self.model
            assert sum(map(len, found)) == len(self.model)

    def restart(self, own: bool, _: None) -> None:
        if self.base is not None:
            (self.backend,) = restored(self.job, self.base, own=own)
            self.model, self.firing = self.at_checkpoint[self.base].copy(), set()
            if not own:
                self.base = None


@pytest.mark.parametrize("epochs", [64, 2])
def test_sets_are_what_was_there_whichever_checkpoints_complete(
    tmp_path_factory: pytest.TempPathFactory, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "_HELD_EPOCHS_MAX", epochs)
    most: list[int] = [0]

    @given(STEPS)
    @settings(max_examples=examples(12), deadline=None)
    def run(steps: list[tuple[str, Any, Any]]) -> None:
        cluster = Cluster(tmp_path_factory.mktemp("sets"), "filesystem")
        tried = Run(Job(cluster))
        for step, first, second in steps:
            getattr(tried, step)(first, second)
        tried.checkpoint(completes=True)
        most[0] = max(most[0], *(deltas_of(handles) for handles in tried.job.completed.values()))
        cluster.close()

    run()
    assert most[0], "no delta was ever written"


@pytest.mark.parametrize("epochs", [64, 2])
def test_an_increment_costs_what_the_sets_gained(job: Job, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them where many barriers lie between: the base may be older than what is known of them."""
    monkeypatch.setattr(columnar, "_HELD_EPOCHS_MAX", epochs)
    backend = job.cluster.backend((SETS,))
    rng = np.random.default_rng(1)
    update(backend, 0, [("a", int(value)) for value in rng.integers(0, 2**60, 20_000)])
    full = sum(handle.new_size for handle in job.checkpoint([backend], 1, None))
    for number in range(2, 6):
        update(backend, 0, [("a", int(value)) for value in rng.integers(0, 2**60, 20)])
        handles = job.store([backend], number, 1)
        size = sum(handle.new_size for handle in handles)
        assert (size < full // 50) == (number < 2 + epochs - 1 or epochs == 64)
    update(backend, 0, [("b", 1)])
    handles = job.checkpoint([backend], 6, 1)
    assert contents(restored(job, 6)[0]) == contents(backend)


def test_deltas_of_sets_are_in_a_format_of_their_own(job: Job) -> None:
    """A reader that takes a row for all of it refuses the snapshot; deltas of other states are as they were."""
    backend = job.cluster.backend((SETS, COUNT, TAGS))
    update(backend, 0, [("a", value) for value in range(2_000)])
    write([backend], range(300), 1)
    job.checkpoint([backend], 1, None)
    update(backend, 0, [("a", 2_000)])
    write([backend], range(2), 2)
    handles = job.checkpoint([backend], 2, 1)
    assert {handle.format for handle in handles} == {"arrow", DELTA_FORMAT, SET_DELTA_FORMAT}
    assert [meta.name for handle in handles if handle.format == SET_DELTA_FORMAT for meta in handle.states] == ["sets"]


def test_a_chain_of_an_older_version_goes_on_with_what_sets_gain(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = job.cluster.backend((SETS,))
    update(backend, 0, [("a", value) for value in range(9_000)])
    job.checkpoint([backend], 1, None)
    monkeypatch.setattr(columnar.NumpyColumnarState, "set_names", [])
    monkeypatch.setattr(tablechains, "DELTA_BYTES_MIN", 1 << 30)
    monkeypatch.setattr(columnar._FrozenTable, "knows", lambda _, __: True)
    monkeypatch.setattr(columnar._FrozenTable, "_parts", _whole_parts)
    update(backend, 0, [("a", 9_000), ("b", 1)])
    assert deltas_of(job.checkpoint([backend], 2, 1)) == 1
    monkeypatch.undo()
    monkeypatch.setattr(tablechains, "DELTA_BYTES_MIN", 1 << 30)
    (backend,) = restored(job, 2)
    update(backend, 0, [("b", 2), ("b", 1), ("c", 3)])
    assert deltas_of(job.checkpoint([backend], 3, 2)) == 2
    found = contents(restored(job, 3)[0])
    assert found == contents(backend)
    assert found[0, "b"] == (3, [1, 2], ["1", "2"])
    assert found[0, "a"] == (9_001, [*range(9_001)], [*map(str, range(9_001))])


def _whole_parts(table: Any, columns: list[Any], since: int | None) -> Iterator[pa.Array]:
    """As versions did that stored each changed row as a whole."""
    position = 0
    for count, frozen in table._frozen:
        parts = [column for column in columns[position : position + count] if column is not None]
        yield from frozen(parts, columns[position + count])
        position += count + 1


def test_tools_see_what_a_savepoint_has(job: Job) -> None:
    backend = job.cluster.backend((SETS,))
    update(backend, 0, [("a", value) for value in range(2_000)])
    job.checkpoint([backend], 1, None)
    update(backend, 0, [("a", 2_000), ("b", 1), ("b", 7)])
    update(backend, 5, [("c", 1)])
    job.checkpoint([backend], 2, 1)
    update(backend, 0, [("b", 2)])
    backend.columnar_state(SETS, ["user"]).remove(5)
    assert deltas_of(job.checkpoint([backend], 3, 2)) == 2
    job.completed[4] = tuple(job.store([backend], 4, None))
    increments, whole = _snapshot(job, 3), _snapshot(job, 4)
    check_contents(increments)
    assert diff_snapshots(increments, whole).is_same
    assert not diff_snapshots(_snapshot(job, 2), whole).is_same


def _snapshot(job: Job, number: int) -> Any:
    """All handles are of one subtask."""
    stored = job.snapshot(number)
    (first, *others) = stored.metadata.operators[0].subtasks
    keyed = tuple(handle for subtask in (first, *others) for handle in subtask.keyed)
    operator = msgspec.structs.replace(
        stored.metadata.operators[0], parallelism=1, subtasks=(msgspec.structs.replace(first, keyed=keyed),)
    )
    return type(stored)(msgspec.structs.replace(stored.metadata, operators=(operator,)), stored.storage, stored.folder)


def _table(rows: dict[str, tuple[int, list[int]]]) -> pa.Table:
    column = KEY.column([pa.array([*rows], pa.string())], max_parallelism=MAX_PARALLELISM)
    arrays = {"key_group": pa.array(column.key_groups), "key": column.arrays[0], "namespace": pa.array([0] * len(rows), pa.int64())}
    counts = pa.array([row[0] for row in rows.values()], pa.int64())
    lists = pa.array([row[1] for row in rows.values()], pa.list_(pa.int64()))
    return pa.table(arrays | {"n": counts, "numbers": lists})


def test_lists_grow_from_the_last_row_that_has_all() -> None:
    tables = [
        _table({"a": (1, [1]), "b": (1, [5]), "c": (1, [9])}),
        delta_table(_table({"a": (2, [2])}), [], [], ["numbers"]),
        delta_table(_table({"b": (3, [6, 7])}), []),
        delta_table(_table({"b": (4, [8]), "a": (3, [])}), [], [], ["numbers"]),
    ]
    for in_order in (True, False):
        merged = merged_deltas(tables[0], tables[1:], KEY, MAX_PARALLELISM, in_order=in_order)
        found = {row["key"]: (row["n"], row["numbers"]) for row in merged.to_pylist()}
        assert found == {"a": (3, [1, 2]), "b": (4, [6, 7, 8]), "c": (1, [9])}
    dropped = delta_table(_table({"b": (1, [4])}), [], [0], ["numbers"])
    merged = merged_deltas(tables[0], [*tables[1:], dropped], KEY, MAX_PARALLELISM)
    assert [(row["key"], row["numbers"]) for row in merged.to_pylist()] == [("b", [4])]
    gone = delta_table(_table({}), _table({"a": (0, [])}).columns[:3], [], ["numbers"])
    back = delta_table(_table({"a": (1, [3])}), [], [], ["numbers"])
    merged = merged_deltas(tables[0], [*tables[1:], gone, back], KEY, MAX_PARALLELISM)
    assert {row["key"]: row["numbers"] for row in merged.to_pylist()} == {"a": [3], "b": [6, 7, 8], "c": [9]}


@pytest.mark.parametrize("columns", [b"{}", b'["n"]', b'["nothing"]'])
def test_a_delta_that_adds_to_no_list_is_refused(columns: bytes) -> None:
    base = _table({"a": (1, [1])})
    delta = delta_table(base, [])
    delta = delta.replace_schema_metadata({ADDED_METADATA: columns})
    with pytest.raises((ValueError, KeyError, CorruptStateError)):
        merged_deltas(base, [delta], KEY, MAX_PARALLELISM)
    assert added_by(base.schema) == []


@pytest.mark.parametrize("lengths", [(5, 5), (4, 2)], ids=str)
def test_sets_that_began_anew_between_two_increments_do_not_come_back(
    job: Job, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of so many records: as one is full, the sets of its row begin anew."""
    monkeypatch.setattr(distinct, "_RENEWED_MIN", 4)
    renewed, original = [0], distinct.DistinctAccumulator.renewed

    def noted(accumulator: distinct.DistinctAccumulator, pairs: distinct.DistinctPairs) -> None:
        renewed[0] += 1
        original(accumulator, pairs)

    monkeypatch.setattr(distinct.DistinctAccumulator, "renewed", noted)
    monkeypatch.setattr(counted, "_EMPTY_MIN", 4)
    backend = job.cluster.backend((SETS,))
    for number in range(1, 7):
        windows = backend.columnar_state(SETS, ["user"]).count_windows(*lengths)
        rows = [("a", number * 10), ("a", 3), ("b", number), ("b", 3), ("a", number)] + [(f"k{key}", number) for key in range(30)]
        keys = KEY.column([pa.array([key for key, _ in rows], pa.string())], max_parallelism=MAX_PARALLELISM)
        values = pa.array([value for _, value in rows], pa.int64())
        windows.take(keys, [values, values.cast(pa.string())])
        job.checkpoint([backend], number, number - 1 if number > 1 else None)
        for own in (True, False):
            (found,) = restored(job, number, own=own)
            assert contents(found) == contents(backend)
    assert any(deltas_of(handles) for handles in job.completed.values())
    assert renewed[0]


def _grown(values: int, times: int, gained: int) -> list[pa.Table]:
    """A base with a set of so many values, and deltas that add to it."""
    added = [_table({"a": (number, list(range(gained)))}) for number in range(times)]
    return [_table({"a": (1, [*range(values)]), "b": (1, [5])}), *(delta_table(each, [], [], ["numbers"]) for each in added)]


def test_a_restore_makes_one_copy_of_a_set_however_many_deltas_have_it() -> None:
    tables = _grown(200_000, 20, 10)
    before = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        merged = merged_deltas(tables[0], tables[1:], KEY, MAX_PARALLELISM, in_order=False)
    finally:
        pa.set_memory_pool(before)
    assert {row["key"]: len(row["numbers"]) for row in merged.to_pylist()} == {"a": 200_200, "b": 1}
    assert 1_600_000 < POOL.max_memory() < 5 * 1_600_000


def test_no_array_of_a_restore_has_more_values_than_the_base_or_than_the_limit(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow can't number more than 2**31: what could be written could not be read."""
    monkeypatch.setattr(deltas, "LIST_VALUES_MAX", 100)
    monkeypatch.setattr(tablechains, "DELTA_BYTES_MIN", 1 << 30)
    backend = job.cluster.backend((SETS,))
    for number in range(1, 5):
        update(backend, 0, [(key, value) for key in "abcdefghij"[number - 1 :: number] for value in range(number, 50 + number)])
        job.checkpoint([backend], number, number - 1 or None)
    assert deltas_of(job.completed[4])
    assert contents(restored(job, 4)[0]) == contents(backend)
    base, *added = _grown(300, 3, 20)
    for number in range(40):
        added.append(delta_table(_table({f"k{number}": (1, [*range(30)])}), [], [], ["numbers"]))
    merged = merged_deltas(base, added, KEY, MAX_PARALLELISM, in_order=False)
    assert merged.num_rows == 42
    assert max(len(chunk.values) for chunk in merged.column("numbers").chunks) <= 360

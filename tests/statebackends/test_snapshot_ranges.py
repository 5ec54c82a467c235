"""A state of a new savepoint written by tasks: tasks that die, are repeated, run twice, live on, or see another disk (S06)."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.errors import (
    HoldfastError,
    InvalidConfigError,
    InvalidKeyError,
    InvariantError,
    StateValueError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import UNFINISHED_NAME
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ListStateDescriptor, StateDescriptor, ValueStateDescriptor
from holdfast.statebackends.state_processor import bootstrap as ranges
from holdfast.statebackends.state_processor.bootstrap import (
    SUBTASK_COLUMN,
    NewState,
    RangeTask,
    Shape,
    SpreadState,
    WrittenRange,
    layout_of_descriptor,
    write_savepoint,
)
from holdfast.statebackends.state_processor.contents import Place, StoredSnapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation, PutIfAbsent, Storage, run_flow
from tests.examples import examples
from tests.statebackends.snapshot_harness import files_below

COUNT = ValueStateDescriptor("count", int)
SEEN = ListStateDescriptor("seen", str)
ROWS = {f"key-{number}": number for number in range(200)}
SHAPE = Shape("job", 16, 3, 5)


def batches_of(rows: Any, size: int = 37) -> list[pa.RecordBatch]:
    return pa.table({"key": list(rows), "value": list(rows.values())}).to_batches(max_chunksize=size)


@dataclass
class Cluster:
    """What Spark does: rows of a subtask come to one task; of its tries one is heard."""

    batches: list[pa.RecordBatch]
    per_task: int = 1
    """Subtasks whose rows come to the same task."""
    meddle: Callable[[RangeTask, list[pa.RecordBatch]], None] = lambda task, rows: None
    """What other tries of a task do before the one that is heard."""
    tasks: list[RangeTask] = field(default_factory=list)
    tries: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, task: RangeTask) -> Iterable[WrittenRange]:
        task = pickle.loads(pickle.dumps(task))
        self.tasks.append(task)
        gathered: dict[int, list[pa.RecordBatch]] = {}
        for batch in self.batches:
            for numbered in task.numbered([batch]):
                for subtask in set(numbered.column(SUBTASK_COLUMN).to_pylist()):
                    own = numbered.filter(pc.equal(numbered.column(SUBTASK_COLUMN), subtask))
                    gathered.setdefault(subtask // self.per_task, []).append(own)
        for rows in gathered.values():
            self.meddle(task, rows)
            yield from task.write(rows, f"try-{next(self.tries)}")


def layout(descriptor: StateDescriptor = COUNT) -> Any:
    return layout_of_descriptor("op", descriptor, KeyType.of(str), SHAPE)


def write(root: Path, cluster: Any, descriptor: StateDescriptor = COUNT, storage: LocalStorage | None = None) -> StoredSnapshot:
    states = [SpreadState(layout(descriptor), cluster)]
    return write_savepoint(states, SHAPE, storage or LocalStorage(root), "made")


def expected(root: Path, batches: list[pa.RecordBatch], descriptor: StateDescriptor = COUNT) -> StoredSnapshot:
    """The same, by one process."""
    return write_savepoint([NewState(layout(descriptor), batches)], SHAPE, LocalStorage(root), "expected")


def assert_same(found: StoredSnapshot, wanted: StoredSnapshot) -> None:
    assert run_flow(verify_files(found), found.storage).is_sound
    assert diff_snapshots(wanted, found).is_same
    named = {
        part.path
        for state in found.metadata.operators[0].subtasks
        for handle in state.keyed
        for part in handle.parts
        if isinstance(part, FileHandle)
    }
    assert set(files_below(Path(found.location))) == {*named, "_metadata"}, "no other file is left"


@pytest.mark.parametrize("per_task", [1, 2, 3])
def test_tasks_write_what_one_process_writes(tmp_path: Path, per_task: int) -> None:
    cluster = Cluster(batches_of(ROWS), per_task)
    assert_same(write(tmp_path, cluster), expected(tmp_path, batches_of(ROWS)))
    assert len(cluster.tasks) == 1


def test_subtasks_without_rows_have_a_file_with_the_schema(tmp_path: Path) -> None:
    for number, rows in enumerate(({}, {"one": 1})):
        root = tmp_path / str(number)
        made = write(root, Cluster(batches_of(rows)))
        assert [len(state.keyed[0].parts) for state in made.metadata.operators[0].subtasks] == [1, 1, 1]
        assert_same(made, expected(root, batches_of(rows)))


def test_elements_of_a_list_keep_their_positions_whoever_brings_them(tmp_path: Path) -> None:
    rows = [("a", "x", 7), ("b", "u", 0), ("a", "y", 3), ("a", "z", 5)]
    table = pa.table({name: [row[index] for row in rows] for index, name in enumerate(("key", "value", "position"))})
    backwards = [table.slice(index, 1).to_batches()[0] for index in reversed(range(4))]
    assert_same(write(tmp_path, Cluster(backwards), SEEN), expected(tmp_path, table.to_batches(), SEEN))


class Death(BaseException):
    pass


class _Dying(LocalStorage):
    left = 1 << 30

    def execute(self, operation: Operation) -> Any:
        type(self).left -= 1
        if type(self).left < 0:
            raise Death
        return super().execute(operation)


def test_tries_that_die_run_twice_or_live_on_damage_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], Any]] = []

    def meddle(task: RangeTask, rows: list[pa.RecordBatch]) -> None:
        def dying() -> Iterator[pa.RecordBatch]:
            yield rows[0]
            raise Death

        with pytest.raises(Death):
            list(task.write(dying(), "killed while it read"))
        writing: Any = task.write(rows, "killed while it wrote")
        next(writing)
        writing.close()
        list(task.write(rows, "speculative, and not heard"))
        list(task.write(rows[:1], "of an older stage, with other rows"))
        late.append(lambda: list(task.write(rows, "lives on")))

    made = write(tmp_path, Cluster(batches_of(ROWS), meddle=meddle))
    wanted = expected(tmp_path, batches_of(ROWS))
    assert_same(made, wanted)
    before = files_below(Path(made.location))
    for write_late in late:
        write_late()
    after = files_below(Path(made.location))
    assert {name: after[name] for name in before} == before, "what lives on writes over nothing"
    assert len(after) == len(before) + len(late)
    assert run_flow(verify_files(made), made.storage).is_sound
    assert diff_snapshots(wanted, made).is_same


REFUSED: dict[str, tuple[pa.Table, type[HoldfastError], str]] = {
    "a null key": (pa.table({"key": ["a", None], "value": [1, 2]}), InvalidKeyError, r"row \d+: column 'key' is null"),
    "a key of another type": (pa.table({"key": [1], "value": [1]}), InvalidKeyError, "state 'count'"),
    "a key twice": (pa.table({"key": ["a", "a"], "value": [1, 2]}), InvalidKeyError, "two rows have {'key': 'a'"),
    "a text for a number": (pa.table({"key": ["a"], "value": ["1"]}), StateValueError, "column 'value' is string"),
    "another column": (pa.table({"key": ["a"], "value": [1], "more": [1]}), InvalidConfigError, "column 'more'"),
}


@pytest.mark.parametrize(("table", "kind", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_task_finds_wrong_is_raised_by_the_driver_and_nothing_is_left(
    tmp_path: Path, table: pa.Table, kind: type[HoldfastError], match: str
) -> None:
    rows = [*batches_of(ROWS), *table.to_batches()]
    if "more" in table.schema.names or not pa.types.is_string(table.schema.field("key").type):
        rows = table.to_batches()
    with pytest.raises(kind, match=match) as caught:
        write(tmp_path, Cluster(rows))
    assert "in the task of subtask" in caught.value.message
    assert (caught.value.fields["operator"], caught.value.fields["state"]) == ("op", "count")
    assert files_below(tmp_path) == {}


def test_a_folder_that_the_tasks_see_elsewhere_is_told(tmp_path: Path) -> None:
    def elsewhere(task: RangeTask) -> list[WrittenRange]:
        return [WrittenRange(0, f"op-0-{task.writer}-1-count.parquet", 10, "xxh3_128:0")]

    def shorter(task: RangeTask) -> Iterator[WrittenRange]:
        for written in Cluster(batches_of(ROWS))(task):
            (tmp_path / "made" / written.name).write_bytes(b"x")
            yield written

    for cluster, said in ((elsewhere, "is not there"), (shorter, "has 1 bytes instead of")):
        with pytest.raises(StorageUnavailableError, match=f"{said}.*do all processes that write see the same"):
            write(tmp_path, cluster)
        assert files_below(tmp_path) == {}


def test_answers_that_cant_be_are_a_bug(tmp_path: Path) -> None:
    def twice(task: RangeTask) -> list[WrittenRange]:
        return [*Cluster(batches_of(ROWS))(task)] * 2

    def foreign(task: RangeTask) -> list[WrittenRange]:
        return [WrittenRange(0, "op-0-1-count.parquet", 10, "")]

    for cluster in (twice, foreign):
        with pytest.raises(InvariantError):
            write(tmp_path, cluster)
        assert files_below(tmp_path) == {}


def test_storage_that_fails_in_a_task_is_raised_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is tried again, which mends it, unlike what is wrong with rows."""

    class Failing:
        root = str(tmp_path)

        def at(self, location: str) -> Storage:
            return self

        def execute(self, operation: Operation) -> Any:
            raise StorageUnavailableError("full", path="x")

    task = RangeTask.of(layout(), 3, str(tmp_path / "made"), "w")
    rows = list(task.numbered(batches_of(ROWS)))
    monkeypatch.setattr(ranges, "place_of", lambda location: Place(Failing(), "made"))
    with pytest.raises(StorageUnavailableError, match="full"):
        list(task.write(rows, "1"))


def test_a_driver_that_dies_anywhere_leaves_no_snapshot_or_the_whole_one(tmp_path: Path) -> None:
    """Its claim stays, too, so that nobody takes what is left for a place to write to."""
    rows = batches_of({"a": 1, "b": 2})
    for count in itertools.count():
        root = tmp_path / str(count)
        _Dying.left = count
        storage = _Dying(root)
        try:
            write(root, Cluster(rows), storage=storage)
        except Death:
            left = files_below(root)
            assert "made/_metadata" not in left or _is_whole(root)
            if left and f"made/{UNFINISHED_NAME}" in left:
                with pytest.raises(InvalidConfigError):
                    write(root, Cluster(rows))
        else:
            break
    assert count > 8


def _is_whole(root: Path) -> bool:
    from holdfast.statebackends.snapshot.metadata import decode_metadata

    storage = LocalStorage(root)
    metadata = decode_metadata((root / "made" / "_metadata").read_bytes(), "made")
    return run_flow(verify_files(StoredSnapshot(metadata, storage, "made")), storage).is_sound


def test_somebody_elses_files_are_not_swept(tmp_path: Path) -> None:
    def beside(task: RangeTask, rows: list[pa.RecordBatch]) -> None:
        LocalStorage(tmp_path).execute(PutIfAbsent("made/notes.txt", b"mine"))

    made = write(tmp_path, Cluster(batches_of(ROWS), meddle=beside))
    assert (Path(made.location) / "notes.txt").read_bytes() == b"mine"


@settings(max_examples=examples(6), deadline=None)
@given(keys=st.sets(st.text("abc", max_size=4), max_size=30), size=st.integers(1, 9), per_task=st.integers(1, 3), data=st.data())
def test_rows_in_any_order_and_any_split_give_the_same(
    tmp_path_factory: pytest.TempPathFactory, keys: set[str], size: int, per_task: int, data: Any
) -> None:
    root = tmp_path_factory.mktemp("ranges")
    rows = {key: len(key) for key in sorted(keys)}
    batches = data.draw(st.permutations(batches_of(rows, size)))
    assert_same(write(root, Cluster(list(batches), per_task)), expected(root, batches_of(rows)))

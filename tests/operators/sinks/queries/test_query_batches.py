"""Batches of a stock query at a target: each row once, whatever dies between any two operations, and whatever Spark runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.barriers.sinks.log import SinkPaths, StagedFile
from holdfast.barriers.sinks.staged import CommitPosition
from holdfast.operators.sinks.calls import Pause
from holdfast.operators.sinks.files.committer import decode_committable
from holdfast.operators.sinks.files.parquet import FileSink, read_committed
from holdfast.operators.sinks.queries import batches as query_batches
from holdfast.operators.sinks.queries.batches import BatchOutput, QueryBatches, QueryPaths, SealName
from holdfast.operators.sinks.queries.outputs import LogOutput, SinkPort, TargetOutput
from holdfast.operators.sinks.targets.port import TargetPort
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.operators.sources.materialised import schema_text
from holdfast.operators.spark.datasource.query_output import _Task, stage_rows
from holdfast.statebackends.errors import (
    CommitPositionLostError,
    FencedError,
    HoldfastError,
    InputChangedError,
    OutputMayRepeatError,
)
from holdfast.statebackends.storage import port as ops
from tests.examples import examples
from tests.operators.ports import DictStorage

SCHEMA = pa.schema([("i", pa.int64())])
QUERY = "7a3c"


class Crash(BaseException):
    """The driver died."""


class Outside(CommitTarget):
    """A table in memory, and its position."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.position: CommitPosition | None = None

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.position = owner.take(self.position)
        return self.position

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        found = [row for batch in batches for row in batch.column(0).to_pylist()]
        if self.position != expected:
            raise FencedError("taken", sink=expected.sink_id, owner="", job_id="", held=0, newer=0)
        self.rows += found
        self.position = position


class Files:
    """A folder of a file sink."""

    def __init__(self) -> None:
        self.disk = DictStorage()

    @property
    def rows(self) -> list[int]:
        if not self.disk.files:
            return []
        found: list[int] = read_committed("memory://", "out", open_storage=lambda path: self.disk).column("i").to_pylist()
        return found


class Disk(DictStorage):
    """A disk; its folders are reached by location, too."""

    def at(self, location: str) -> ops.Storage:
        return Folder(self, location.removeprefix(f"{self.root}/"))


class Folder(DictStorage):
    def __init__(self, disk: Disk, folder: str) -> None:
        super().__init__(disk.files, f"{disk.root}/{folder}")
        self._folder = folder

    def execute(self, operation: ops.Operation) -> Any:
        assert isinstance(operation, ops.ReadFile | ops.StatFile)
        return super().execute(msgspec.structs.replace(operation, path=f"{self._folder}/{operation.path}"))


class Driver:
    """One start of the query; dies before or behind the k-th operation of its flows."""

    def __init__(
        self,
        disk: Disk,
        outside: Outside | Files,
        dies_at: int | None = None,
        *,
        after: bool = False,
        rows_max: int | None = None,
        run: str = "",
    ) -> None:
        """run: of a process that commits one batch of this run of Spark's."""
        self.disk = disk
        self.paths = QueryPaths(QUERY, "out")
        self.dies_at, self.after, self.operations = dies_at, after, 0
        self.nonce = run or f"n{len(disk.files)}x{id(self)}"
        self.run_id = run
        if isinstance(outside, Files):
            folder = outside.disk
            self.sink: StagedSink | FileSink = FileSink("memory://", "json", "out", open_storage=lambda path: folder)
            self.port: Any = SinkPort(disk, folder)
            output: BatchOutput = LogOutput(self.paths, SinkPaths("out"), "memory://", schema_text(SCHEMA), lambda: 0)
        else:
            self.sink = StagedSink(outside, "out", rows_per_commit=rows_max)
            self.port = TargetPort(outside, disk)
            output = TargetOutput(self.paths, f"{disk.root}/{self.paths.staged_folder}", "table", rows_max)
        self.core = QueryBatches(self.paths, self.nonce, output, is_run=bool(run))

    def run(self, flow: ops.Flow[Any]) -> Any:
        def perform(wanted: Any) -> Any:
            if isinstance(wanted, Pause):
                return None
            if isinstance(wanted, ops.InParallel):
                return [ops.drive(each, perform) for each in wanted.flows]
            number, self.operations = self.operations, self.operations + 1
            if number == self.dies_at and not self.after:
                raise Crash
            result: Any = None
            error: Exception | None = None
            try:
                result = ops.perform(wanted, self.port)
            except Exception as raised:
                error = raised
            if number == self.dies_at:
                raise Crash
            if error is not None:
                raise error
            return result

        return ops.drive(flow, perform)

    def batch(self, number: int, *rows: int, plan: str = "") -> None:
        """As `foreachBatch` does, or the format's writer; the tasks' files differ from run to run."""
        self.run(self.flow(number, *rows, plan=plan))

    def flow(self, number: int, *rows: int, plan: str = "") -> ops.Flow[None]:
        plan = plan or f"plan {number}"
        files = staged(self, number, *rows) if self.run_id else None
        if not self.core.attempt:
            yield from self.core.begin(number, plan)
        if not (yield from self.core.look_up(number, plan)):
            yield from self.core.seal(number, plan, staged(self, number, *rows) if files is None else files)
        yield from self.core.commit(number)

    def steps(self, number: int, *rows: int) -> Iterator[None]:
        """A batch, stopped in front of each operation."""
        flow, given = ops.one_by_one(self.flow(number, *rows)), None
        while True:
            try:
                wanted: Any = flow.throw(given) if isinstance(given, Exception) else flow.send(given)
            except StopIteration:
                return
            given = None
            if not isinstance(wanted, Pause):
                yield
                try:
                    given = ops.perform(wanted, self.port)
                except Exception as error:
                    given = error


BATCHES: list[tuple[int, ...]] = [(0, 1, 2), (), (3,), (4, 5)]
ALL = [0, 1, 2, 3, 4, 5]


def run_query(driver: Driver, start: int) -> None:
    for number in range(start, len(BATCHES)):
        driver.batch(number, *BATCHES[number])
        driver.disk.files["spark"] = str(number + 1).encode()  # Spark's own commit


def left(disk: DictStorage) -> list[str]:
    return [path for path in disk.files if "/staged/" in path]


def recover(disk: Disk, outside: Outside | Files, kills: list[tuple[int, bool]], rows_max: int | None = None) -> None:
    for dies_at, after in kills:
        try:
            run_query(Driver(disk, outside, dies_at, after=after, rows_max=rows_max), int(disk.files.get("spark", b"0")))
        except Crash:
            assert outside.rows == ALL[: len(outside.rows)]
    run_query(Driver(disk, outside, rows_max=rows_max), int(disk.files.get("spark", b"0")))
    assert outside.rows == ALL
    assert left(outside.disk if isinstance(outside, Files) else disk) == []


@pytest.mark.parametrize(("make", "rows_max"), [(Outside, None), (Outside, 2), (Files, None)])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_repeats_and_loses_nothing(after: bool, make: type[Outside | Files], rows_max: int | None) -> None:
    disk, outside = Disk(), make()
    driver = Driver(disk, outside, rows_max=rows_max)
    run_query(driver, 0)
    assert outside.rows == ALL
    for dies_at in range(driver.operations):
        recover(Disk(), make(), [(dies_at, after)], rows_max)


@settings(max_examples=examples(60), deadline=None)
@given(
    make=st.sampled_from([Outside, Files]),
    kills=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=5),
    rows_max=st.sampled_from([None, 1, 2]),
)
def test_any_sequence_of_deaths_repeats_and_loses_nothing(
    make: type[Outside | Files], kills: list[tuple[int, bool]], rows_max: int | None
) -> None:
    recover(Disk(), make(), kills, rows_max)


def test_a_batch_that_spark_runs_again_is_committed_once_as_it_was_sealed() -> None:
    disk, outside = Disk(), Outside()
    Driver(disk, outside).batch(0, 1, 2)
    again = Driver(disk, outside)
    again.batch(0, 2, 1)
    again.batch(1, 3)
    assert outside.rows == [1, 2, 3]


def test_a_driver_that_wakes_late_is_fenced() -> None:
    disk, outside = Disk(), Outside()
    old, new = Driver(disk, outside), Driver(disk, outside)
    old.batch(0, 1)
    new.batch(1, 2)
    with pytest.raises(FencedError, match="taken over"):
        old.batch(1, 2)
    with pytest.raises(FencedError):
        old.batch(2, 3)
    new.batch(2, 3)
    assert outside.rows == [1, 2, 3]


def test_batches_that_come_again_with_other_records_are_refused() -> None:
    disk, outside = Disk(), Outside()
    first = Driver(disk, outside)
    first.batch(0, 1)
    first.batch(1, 2)
    for number, plan in ((0, "plan 0"), (0, "other"), (1, "other")):
        with pytest.raises(OutputMayRepeatError, match="other records"):
            Driver(disk, outside).batch(number, 7, plan=plan)
    assert outside.rows == [1, 2]
    Driver(disk, outside).batch(2, 3)
    assert outside.rows == [1, 2, 3]


def test_a_batch_that_was_planned_once_more_before_a_row_was_committed_is_taken_anew() -> None:
    disk, outside = Disk(), Outside()
    driver = Driver(disk, outside)
    driver.batch(0, 1)
    driver.dies_at = driver.operations + 1  # behind the seal, in front of the commit
    driver.after = False
    with pytest.raises(Crash):
        driver.batch(1, 2)
    sealed = disk.execute(ops.ListFolder(driver.paths.seals))
    assert sealed == ["000000000000-plan 0-000000000001.json", "000000000001-plan 1-000000000001.json"]
    Driver(disk, outside).batch(1, 2, 3, plan="other")
    assert outside.rows == [1, 2, 3]
    assert left(disk) == []


def test_a_checkpoint_folder_that_was_put_back_and_a_target_that_was_emptied_are_refused() -> None:
    disk, outside = Disk(), Outside()
    Driver(disk, outside).batch(0, 1)
    copy = Disk(dict(disk.files))
    Driver(disk, outside).batch(1, 2)
    with pytest.raises(FencedError, match="copies of each other"):
        Driver(copy, outside).batch(1, 2)
    with pytest.raises(OutputMayRepeatError):
        Driver(copy, outside).batch(1, 2)  # its next attempt is the newer one, and its records are not
    outside.position = None
    with pytest.raises(CommitPositionLostError):
        Driver(disk, outside).batch(2, 3)


def test_another_query_at_the_same_sink_is_refused() -> None:
    outside = Outside()
    Driver(Disk(), outside).batch(0, 1)
    other = Driver(Disk(), outside)
    other.paths = QueryPaths("other", "out")
    other.core = QueryBatches(other.paths, "m", TargetOutput(other.paths, "x", "table", None))
    with pytest.raises(FencedError, match=f"owned by job {QUERY}"):
        other.batch(0, 1)


def test_records_and_files_do_not_pile_up() -> None:
    disk, outside = Disk(), Outside()
    driver = Driver(disk, outside)
    for number in range(20):
        driver.batch(number, number)
    assert outside.rows == list(range(20))
    assert len(disk.files) == 4, sorted(disk.files)  # attempt, marker, a seal and a position


def staged(driver: Driver, number: int, *rows: int) -> tuple[StagedFile, ...]:
    """What tasks stage for a batch."""
    writer = driver.sink.create_writer(SCHEMA)
    attempt = 0 if driver.run_id else driver.core.attempt
    task = _Task(driver.disk, QUERY, attempt, 0, number + 1)
    stage_rows(writer, task, iter([pa.RecordBatch.from_pydict({"i": list(rows)}, schema=SCHEMA)]), number + 1)
    return tuple(file for each in task.committables for file in decode_committable(each, "out").files)


def test_a_late_driver_seals_a_batch_of_its_own_plan_alone() -> None:
    disk, outside = Disk(), Outside()
    old = Driver(disk, outside)
    old.batch(0, 1)
    new = Driver(disk, outside)
    new.run(new.core.begin(1, "its own plan"))
    assert not new.run(new.core.look_up(1, "its own plan"))
    files = staged(new, 1, 3)
    old.run(old.core.seal(1, "plan 1", staged(old, 1, 2)))  # it slept behind its tasks
    new.run(new.core.seal(1, "its own plan", files))
    with pytest.raises(FencedError):
        old.run(old.core.commit(1))
    new.run(new.core.commit(1))
    assert outside.rows == [1, 3]
    old.run(old.core.seal(1, "plan 1", staged(old, 1, 2)))  # once more, when its seal was cleared away
    with pytest.raises(OutputMayRepeatError):
        Driver(disk, outside).batch(1, 2)
    Driver(disk, outside).batch(2, 4)
    assert outside.rows == [1, 3, 4]
    assert left(disk) == []
    assert disk.execute(ops.ListFolder(new.paths.seals)) == ["000000000002-plan 2-000000000003.json"]


def test_rows_of_a_sealed_batch_stay_until_they_are_committed() -> None:
    disk, outside = Disk(), Outside()
    driver = Driver(disk, outside)
    driver.batch(0, 1)
    driver.dies_at = driver.operations + 1  # behind the seal of the next, in front of its commit
    with pytest.raises(Crash):
        driver.batch(1, 2)
    again = Driver(disk, outside)
    again.batch(0, 1)  # Spark lost the mark that it was done
    again.batch(1, 2)
    assert outside.rows == [1, 2]
    assert left(disk) == []


def test_a_late_seal_whose_rows_were_cleared_away_stops_nothing() -> None:
    disk, outside = Disk(), Outside()
    old, new = Driver(disk, outside), Driver(disk, outside)
    old.batch(0, 1)
    assert not old.run(old.core.look_up(1, "plan 1"))
    files = staged(old, 1, 2)
    new.batch(0, 1)  # Spark had not stored that it is done; the rows that no seal names go
    old.run(old.core.seal(1, "plan 1", files))
    with pytest.raises(FencedError):
        old.run(old.core.commit(1))
    Driver(disk, outside).batch(1, 2)
    assert outside.rows == [1, 2]
    assert left(disk) == []


def test_of_two_seals_the_one_that_was_begun_is_committed() -> None:
    disk, outside = Disk(), Outside()
    old, new = Driver(disk, outside), Driver(disk, outside, rows_max=2)
    old.batch(0, 1)
    old.run(old.core.look_up(1, "plan 1"))
    files = staged(old, 1, 4, 3, 2)
    new.run(new.core.begin(1, "plan 1"))
    new.dies_at = new.operations + 2  # behind its seal and two rows
    with pytest.raises(Crash):
        new.batch(1, 2, 3, 4)
    assert outside.rows == [1, 2, 3]
    old.run(old.core.seal(1, "plan 1", files))
    Driver(disk, outside).batch(1, 3, 2, 4)
    assert outside.rows == [1, 2, 3, 4]
    assert left(disk) == []


def test_a_batch_of_which_rows_are_committed_goes_on_as_it_was_sealed() -> None:
    disk, outside = Disk(), Outside()
    first = Driver(disk, outside, rows_max=2)
    first.run(first.core.begin(0, "plan 0"))
    first.dies_at = first.operations + len(["seal", "two rows"])
    with pytest.raises(Crash):
        first.batch(0, 1, 2, 3)
    assert outside.rows == [1, 2]
    Driver(disk, outside).batch(0, 3, 2, 1)
    assert outside.rows == [1, 2, 3]


def ends(steps: Iterator[None], most: int | None = None) -> bool:
    """Go on for so many steps, or to the end: whether it was not fenced."""
    try:
        for _ in islice(steps, most):
            pass
    except FencedError:
        return False
    return True


@settings(max_examples=examples(60), deadline=None)
@given(
    make=st.sampled_from([Outside, Files]),
    is_run=st.booleans(),
    old_sleeps=st.integers(0, 30),
    new_sleeps=st.integers(0, 30),
)
@example(Files, False, 14, 18)  # the older start has its number, and opens the log when its successor has
def test_of_two_drivers_at_once_one_goes_on_and_the_other_is_fenced(
    make: type[Outside | Files], is_run: bool, old_sleeps: int, new_sleeps: int
) -> None:
    disk, outside = Disk(), make()
    Driver(disk, outside, run="0" * is_run).batch(0, 0)
    old, new = Driver(disk, outside, run="a" * is_run), Driver(disk, outside, run="b" * is_run)
    olds, news = old.steps(1, 1, 2, 3), new.steps(1, 3, 2, 1)
    both = [ends(olds, old_sleeps), ends(news, new_sleeps)]
    both = [ends(olds) and both[0], ends(news) and both[1]]
    assert any(both)
    assert any([both[1] and ends(new.steps(2, 4)), both[0] and ends(old.steps(2, 4))])
    Driver(disk, outside, run="c" * is_run).batch(3, 5)
    assert sorted(outside.rows) == [0, 1, 2, 3, 4, 5]
    assert left(outside.disk if isinstance(outside, Files) else disk) == []


def test_a_start_that_slept_takes_nothing_from_one_that_is_behind_its_batch() -> None:
    for is_run in (False, True):
        disk, outside = Disk(), Outside()
        driver = Driver(disk, outside, run="a" * is_run)
        driver.batch(0, 1)
        driver.batch(1, 2)
        for number, plan in ((0, "plan 0"), (1, "other")):
            with pytest.raises(OutputMayRepeatError, match="does the query run elsewhere"):
                Driver(disk, outside, run="b" * is_run).batch(number, 1, plan=plan)
        driver.batch(2, 3)
        assert outside.rows == [1, 2, 3]


def test_rows_that_were_sealed_are_not_forgotten_behind_a_batch_that_is_left_out() -> None:
    for rows_max, committed in ((None, [1]), (1, [1, 2])):
        disk, outside = Disk(), Outside()
        driver = Driver(disk, outside, rows_max=rows_max)
        driver.batch(0, 1)
        driver.dies_at = driver.operations + len(committed)  # behind the seal, and a row of it or none
        with pytest.raises(Crash):
            driver.batch(1, 2, 3)
        assert outside.rows == committed
        with pytest.raises(InputChangedError, match="comes with batch 2, and batch 1 has rows that are not committed"):
            Driver(disk, outside).batch(2, 4)
        Driver(disk, outside).batch(1, 2, 3)
        assert outside.rows == [1, 2, 3]


def test_starts_do_not_pile_up_and_none_gets_a_number_twice() -> None:
    disk, outside = Disk(), Outside()
    late = Driver(disk, outside, run="late").steps(40, 40)
    for _ in islice(late, 4):  # it has listed the numbers, and takes the first
        pass
    for number in range(40):
        Driver(disk, outside, run=f"run{number}").batch(number, number)
    names = disk.execute(ops.ListFolder(QueryPaths(QUERY, "out").attempts))
    assert names == [f"{number:012d}.json" for number in range(25, 41)]
    with pytest.raises(FencedError, match="start 1 of query 7a3c was replaced by start 40"):
        list(late)
    Driver(disk, outside, run="run39").batch(40, 40)
    assert outside.rows == list(range(41))


def _seal_of_any_attempt(self: QueryPaths, name: SealName) -> str:
    return f"{self.seals}/{name.batch_id:012d}-{name.plan}-{1:012d}.json"


def _overwriting_flow(path: str, content: bytes) -> ops.Flow[bytes]:
    yield ops.WriteFile(path, [content])
    return content


def _stages_always(self: QueryBatches, batch_id: int, plan: str) -> ops.Flow[bool]:
    yield ops.ListFolder(self.paths.seals)
    self._at_hand = None
    return False


@pytest.mark.parametrize(
    ("sabotages", "check"),
    [
        (
            [(QueryPaths, "seal", _seal_of_any_attempt), (query_batches, "_put_flow", _overwriting_flow)],
            test_of_two_seals_the_one_that_was_begun_is_committed,
        ),
        ([(QueryBatches, "look_up", _stages_always)], test_a_batch_of_which_rows_are_committed_goes_on_as_it_was_sealed),
    ],
    ids=["a seal is overwritten", "a sealed batch is staged again"],
)
def test_broken_rules_are_seen(
    monkeypatch: pytest.MonkeyPatch, sabotages: list[tuple[Any, str, Any]], check: Callable[[], None]
) -> None:
    for owner, name, sabotage in sabotages:
        monkeypatch.setattr(owner, name, sabotage)
    with pytest.raises((AssertionError, HoldfastError)):
        check()


# ---------------------------------------------------------------------------- a process for each batch: the format's writer


def test_processes_of_one_run_follow_each_other_and_an_older_run_is_fenced() -> None:
    for outside in (Outside(), Files()):
        disk = Disk()
        for number in range(3):
            Driver(disk, outside, run="a").batch(number, number)
        assert disk.execute(ops.ListFolder(f"{QueryPaths(QUERY, 'out').folder}/attempts")) == ["000000000001.json"]
        late = Driver(disk, outside, run="a")
        late.run(late.core.begin(3, "plan 3"))
        late.run(late.core.look_up(3, "plan 3"))
        late.run(late.core.seal(3, "plan 3", staged(late, 3, 3)))
        Driver(disk, outside, run="b").batch(3, 3)
        with pytest.raises(FencedError):
            late.run(late.core.commit(3))
        with pytest.raises(FencedError, match="start 1 of query 7a3c was replaced by start 2"):
            Driver(disk, outside, run="a").batch(4, 4)
        Driver(disk, outside, run="b").batch(4, 4)
        assert outside.rows == [0, 1, 2, 3, 4]


def test_a_process_that_commits_knows_that_another_one_did_meanwhile() -> None:
    disk, outside = Disk(), Outside()
    one, two = Driver(disk, outside, run="a"), Driver(disk, outside, run="a")
    one.batch(0, 0)
    assert one.run(one.core.is_current())
    two.batch(1, 1)
    assert not one.run(one.core.is_current())


def test_an_older_run_clears_no_rows_away_that_its_successor_stages() -> None:
    for outside in (Outside(), Files()):
        disk = Disk()
        old, new = Driver(disk, outside, run="a"), Driver(disk, outside, run="b")
        old.run(old.core.begin(0, "plan 0"))
        old.run(old.core.look_up(0, "plan 0"))
        old.run(old.core.seal(0, "plan 0", staged(old, 0, 0)))
        files = staged(new, 1, 1)  # of a batch that Spark has begun there, before `old` comes to its end
        old.run(old.core.commit(0))
        new.run(new.core.begin(1, "plan 1"))
        assert not new.run(new.core.look_up(1, "plan 1"))
        new.run(new.core.seal(1, "plan 1", files))
        new.run(new.core.commit(1))
        assert outside.rows == [0, 1]


# ------------------------------------------------------------------------------------------------------------- file sinks


def test_a_late_driver_s_files_are_never_in_the_log_behind_its_successor_s_takeover() -> None:
    disk, outside = Disk(), Files()
    old, new = Driver(disk, outside), Driver(disk, outside)
    old.batch(0, 1)
    assert not old.run(old.core.look_up(1, "plan 1"))
    files = staged(old, 1, 2)
    new.run(new.core.begin(1, "plan 1"))
    old.run(old.core.seal(1, "plan 1", files))
    with pytest.raises(FencedError, match="attempt 2"):
        old.run(old.core.commit(1))
    new.batch(1, 2)
    assert outside.rows == [1, 2]


def test_a_log_of_another_owner_and_one_that_is_gone_are_refused() -> None:
    disk, outside = Disk(), Files()
    Driver(disk, outside).batch(0, 1)
    other = Driver(Disk(), outside)
    other.paths = QueryPaths("other", "out")
    log = LogOutput(other.paths, SinkPaths("out"), "memory://", schema_text(SCHEMA), lambda: 0)
    other.core = QueryBatches(other.paths, "m", log)
    with pytest.raises(FencedError, match=f"owned by job {QUERY}"):
        other.batch(0, 1)
    copy = Disk(dict(disk.files))
    Driver(disk, outside).batch(1, 2)
    with pytest.raises(OutputMayRepeatError):
        Driver(copy, outside).batch(1, 2)
    assert outside.rows == [1, 2]
    outside.disk.files.clear()
    with pytest.raises(CommitPositionLostError, match="its log there is another one, or gone"):
        Driver(disk, outside).batch(2, 3)

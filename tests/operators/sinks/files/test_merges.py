"""Committed small files are merged exactly once: whatever dies or races, readers see each row once, at any moment."""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.sinks.log import CommitEntry, LogEntry, MergeEntry, SinkPaths, StagedFile, decode_entry
from holdfast.barriers.sinks.reading import current_files
from holdfast.operators.sinks.files import merging
from holdfast.operators.sinks.files.log import MergeSettings
from holdfast.operators.sinks.files.merging import Runs
from holdfast.operators.sinks.files.parquet import read_log
from holdfast.statebackends.errors import AmbiguousWriteError, FencedError
from holdfast.statebackends.storage import port as ops
from tests.examples import examples
from tests.operators.ports import DictStorage, ManualContext
from tests.operators.sinks.files.minijob import Crash, MiniJob, MortalStorage

ROWS, EPOCHS = 3, 6
SINK = SinkPaths("out")


def merging_job(storage: MortalStorage, *, size: int = 1 << 16, roll_ms: int | None = 20, kept_ms: int = 15) -> MiniJob:
    job = MiniJob(storage, DictStorage())
    job.merging = MergeSettings(size, roll_ms, kept_ms)
    return job


@cache
def rows_of(content: bytes) -> list[int]:
    found: list[int] = pq.read_table(pa.BufferReader(content)).column("i").to_pylist()
    return found


@cache
def entry_of(content: bytes) -> LogEntry:
    return decode_entry(content, "")


def visible(storage: DictStorage) -> list[int]:
    """Rows that a reader of the log sees now."""
    entries = [entry_of(content) for path, content in sorted(storage.files.items()) if "/log/" in path]
    return [row for file in current_files(entries) for row in rows_of(storage.files[SINK.data(file.name)])]


def plainly(storage: DictStorage) -> list[int]:
    """Rows that a reader of the folder sees."""
    return [row for path, content in storage.files.items() if path.startswith("part-") for row in rows_of(content)]


class Watched(MortalStorage):
    """Storage whose log is read before and behind each change, as any reader may."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__({})
        self.copies_links = in_place

    def execute(self, operation: ops.Operation) -> Any:
        try:
            return super().execute(operation)
        finally:
            path = ops.path_of(operation)
            if isinstance(operation, (ops.PutIfAbsent, ops.DeleteFile)) and ("/log/" in path or "/data/" in path):
                rows = visible(self)
                assert rows == list(range(len(rows))), operation


def merges(storage: DictStorage) -> list[MergeEntry]:
    return [entry for entry in read_log(storage, "out") if isinstance(entry, MergeEntry)]


def run(job: MiniJob) -> None:
    """Run to the end of the input; every epoch is a checkpoint, 10 ms after the one before."""
    job.start()
    while job.position < ROWS * EPOCHS:
        job.emit(ROWS)
        job.checkpoint()
        job.wait(10)


def settle(job: MiniJob) -> None:
    """Time passes, and what is over is deleted, once the attempt has put an entry."""
    job.emit(1)
    job.checkpoint()
    for _ in range(2):
        job.wait(1_000)
        job.checkpoint()


def assert_settled(storage: DictStorage) -> None:
    """There is what the log names, once, and nothing else."""
    names = {path.rpartition("/data/")[2] for path in storage.files if "/data/" in path}
    assert names == {file.name for file in current_files(read_log(storage, "out"))}
    assert {path for path in storage.files if path.startswith("part-")} == names
    assert [path for path in storage.files if "/merges/" in path or "/staged/" in path] == []
    replaced = [file.name for entry in merges(storage) for file in entry.replaced]
    assert len(replaced) == len(set(replaced))


def recover(job: MiniJob, storage: MortalStorage, kills: list[tuple[int, bool]]) -> None:
    for dies_at, after in kills:
        storage.changes, storage.dies_at, storage.after = 0, dies_at, after
        job.abort_undecided()
        try:
            run(job)
            settle(job)
        except Crash:
            assert len(plainly(storage)) == len(set(plainly(storage)))
            job.time_ms += 10
    storage.dies_at = None
    job.abort_undecided()
    run(job)
    settle(job)
    assert job.committed() == list(range(job.position))
    assert sorted(plainly(storage)) == job.committed()
    assert_settled(storage)


@pytest.mark.parametrize("in_place", [False, True])
def test_small_files_are_merged_and_deleted_later(in_place: bool) -> None:
    storage = Watched(in_place=in_place)
    job = merging_job(storage)
    run(job)
    assert [len(entry.replaced) for entry in merges(storage)] == [3, 3]
    first = merges(storage)[0]
    assert (first.file.rows, first.checkpoint_id) == (9, 3)
    assert job.contexts[1].counters.named["merges"] == 2
    settle(job)
    assert job.committed() == sorted(plainly(storage)) == list(range(19))
    assert_settled(storage)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_is_recovered_exactly(after: bool, in_place: bool) -> None:
    whole = Watched(in_place=in_place)
    job = merging_job(whole)
    run(job)
    settle(job)
    for dies_at in range(int(after), whole.changes + 1, 2 if in_place else 1):
        storage = Watched(in_place=in_place)
        recover(merging_job(storage), storage, [(dies_at, after)])


@settings(max_examples=examples(40), deadline=None)
@given(
    kills=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=5),
    in_place=st.booleans(),
    kept_ms=st.sampled_from([0, 15, 10_000]),
)
def test_any_sequence_of_deaths_is_recovered_exactly(kills: list[tuple[int, bool]], in_place: bool, kept_ms: int) -> None:
    storage = Watched(in_place=in_place)
    job = merging_job(storage, kept_ms=min(kept_ms, 900))
    recover(job, storage, kills)


class Stepped(ManualContext):
    """A pool whose flows go on one operation at a time."""

    def submit_flow(self, flow: Any, storage: Any, done: Any) -> None:
        plain = ops.one_by_one(flow)
        answer: Any = None
        error: BaseException | None = None

        def step() -> None:
            nonlocal answer, error
            try:
                operation = plain.send(answer) if error is None else plain.throw(error)
            except StopIteration as end:
                done(end.value, None)
                return
            except BaseException as failed:
                done(None, failed)
                return
            answer = error = None
            try:
                answer = storage.execute(operation)
            except Exception as failed:
                error = failed
            self.tasks.insert(0, step)

        self.tasks.append(step)


class SteppedJob(MiniJob):
    def _context(self) -> ManualContext:
        made = super()._context()
        same = ("storage", "job_id", "attempt", "nonce", "restored_checkpoint_id", "time_ms")
        return Stepped(**{name: getattr(made, name) for name in same})

    def step(self) -> None:
        if self.contexts[1].tasks and not self.contexts[1].failures:
            self.contexts[1].tasks.pop(0)()


@settings(max_examples=examples(60), deadline=None)
@given(before=st.integers(0, 60), turns=st.lists(st.integers(0, 12), max_size=30), kept_ms=st.sampled_from([0, 30]))
def test_an_attempt_that_wakes_late_and_its_successor_merge_each_file_once(before: int, turns: list[int], kept_ms: int) -> None:
    """The old one stands still anywhere within its steps, and goes on between those of the new one."""
    storage = Watched()
    old = SteppedJob(storage, DictStorage())
    old.merging = MergeSettings(1 << 16, 20, kept_ms)
    old.start()
    for _ in range(EPOCHS // 2 - 1):
        old.emit(ROWS)
        old.checkpoint()
        old.wait(10)
    old.emit(ROWS)
    old.decide(old.snapshot())
    old.committer.notify_checkpoint_complete(old.checkpoint_id)
    for _ in range(before):
        old.step()
    new = SteppedJob(storage, old.state, restored=old.completed)
    new.merging, new.attempt, new.time_ms = old.merging, 1, old.time_ms
    new.start(0)
    for index, steps in enumerate(turns):
        for _ in range(steps):
            (old if index % 2 else new).step()
        if index % 6 == 4 and new.position < ROWS * EPOCHS and not new.contexts[1].failures:
            new.emit(ROWS)
            new.decide(new.snapshot())
            new.committer.notify_checkpoint_complete(new.checkpoint_id)
            new.wait(10)
    while old.contexts[1].tasks and not old.contexts[1].failures:
        old.step()
    assert all(isinstance(error, FencedError) for error in old.contexts[1].failures)
    assert new.contexts[1].failures == []
    new.run_pool()
    while new.position < ROWS * EPOCHS:
        new.emit(ROWS)
        new.checkpoint()
    settle(new)
    assert new.committed() == list(range(new.position))
    replaced = [file.name for entry in merges(storage) for file in entry.replaced]
    assert len(replaced) == len(set(replaced))
    if not old.contexts[1].failures:
        assert_settled(storage)


def test_a_broken_plan_and_one_of_another_file_neither_stop_merges_nor_delete_rows() -> None:
    storage = Watched()
    job = merging_job(storage)
    run(job)
    victim = current_files(read_log(storage, "out"))[-1].name
    storage.files[f"{SINK.merges_folder}/stray"] = b"x"
    storage.files[SINK.merge(victim)] = b'{"version":2,"name":"%s","first_sequence":0}' % victim.encode()
    done = len(merges(storage))
    job.start()
    for _ in range(7):
        job.emit(ROWS)
        job.checkpoint()
        job.wait(10)
    assert job.committed() == list(range(job.position))
    assert len(merges(storage)) >= done + 2


def test_a_merged_file_that_its_owner_deleted_does_not_stop_later_merges() -> None:
    storage = MortalStorage({})
    job = merging_job(storage, kept_ms=900)
    run(job)
    for entry in merges(storage):
        del storage.files[SINK.data(entry.file.name)]
        storage.files.pop(entry.file.name, None)
    done = len(merges(storage))
    job.start()  # finds their plans, and publishes once more
    for _ in range(7):
        job.emit(ROWS)
        job.checkpoint()
        job.wait(10)
    assert len(merges(storage)) > done


class Silent(Watched):
    """The log does not say whether it took a merge."""

    merged = 0

    def execute(self, operation: ops.Operation) -> Any:
        if isinstance(operation, ops.PutIfAbsent) and "/log/" in operation.path and b'"merge"' in operation.data:
            raise AmbiguousWriteError(operation.path, path=operation.path)
        if isinstance(operation, ops.WriteFile) and "/data/" in operation.path:
            self.merged += 1
            assert self.merged == 1
        return super().execute(operation)


def test_an_entry_without_an_answer_is_tried_again_later() -> None:
    storage = Silent()
    job = merging_job(storage)
    job.start()
    for _ in range(3):
        job.emit(ROWS)
        job.checkpoint()
        job.wait(10)
    assert storage.merged == 1
    assert job.committed() == list(range(3 * ROWS))


def test_memory_does_not_grow_with_the_files_that_were_merged() -> None:
    storage = Watched()
    job = merging_job(storage)
    run(job)
    assert merges(storage)
    assert job.committer._log is not None
    assert job.committer._log.replaced == job.committer._log.committed == frozenset()


def test_small_files_of_many_partitions_are_bounded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FILES_TRACKED_MAX", 1_000)
    monkeypatch.setattr(merging, "FILES_LEFT", 900)
    looked = 0
    real = merging._age

    def age(runs: Any) -> int:
        nonlocal looked
        looked += 1
        return real(runs)

    monkeypatch.setattr(merging, "_age", age)
    runs = Runs(MergeSettings(1 << 20, None, 0))
    for number in range(30):
        files = tuple(StagedFile(f"k={number}-{each}/a.parquet", 1) for each in range(100))
        entry = CommitEntry(1, number, 1, "n", "job", 1, number, 100, files, "w", number)
        runs.follow(entry, {file.name: 10 for file in files})
        assert runs.count <= 1_000
    assert runs.count >= 900
    assert looked < 30_000

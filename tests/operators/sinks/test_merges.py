"""Committed small files are merged exactly once: whatever dies or races, readers see each row once, at any moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.sinklog import MergeEntry
from holdfast.operators.sinks import merging
from holdfast.operators.sinks.log import MergeSettings
from holdfast.operators.sinks.parquet import read_log
from holdfast.statebackends.storage import port as ops
from tests.examples import examples
from tests.operators.ports import DictStorage
from tests.operators.sinks.minijob import Crash, MiniJob, MortalStorage, committed, published

ROWS, EPOCHS = 3, 6
SMALL = 1_000
"""Bytes; a file of three rows has some 700."""


def merging_job(storage: MortalStorage, *, size: int = 1 << 16, roll_ms: int | None = 20, kept_ms: int = 15) -> MiniJob:
    job = MiniJob(storage, DictStorage())
    job.merging = MergeSettings(size, roll_ms, kept_ms)
    return job


class Watched(MortalStorage):
    """Storage whose log is read before and behind each change, as any reader may."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__({})
        self.copies_links = in_place
        self.dirty = True

    def execute(self, operation: ops.Operation) -> Any:
        try:
            return super().execute(operation)
        finally:
            if isinstance(operation, (ops.PutIfAbsent, ops.DeleteFile)) and self.changes:
                rows = committed(self)
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
    """Time passes, and what is over is deleted."""
    for _ in range(2):
        job.wait(1_000)
        job.checkpoint()


def assert_settled(storage: DictStorage) -> None:
    """There is what the log names, once, and nothing else."""
    names = {path.rpartition("/data/")[2] for path in storage.files if "/data/" in path}
    from holdfast.barriers.sinkreading import current_files

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
            visible = committed(storage)
            assert visible == list(range(len(visible)))
            assert len(published(storage)) == len(set(published(storage)))
            job.time_ms += 10
    storage.dies_at = None
    job.abort_undecided()
    run(job)
    settle(job)
    assert job.committed() == list(range(ROWS * EPOCHS))
    assert published(storage) == job.committed()
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
    assert job.committed() == published(storage) == list(range(18))
    assert_settled(storage)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_is_recovered_exactly(after: bool, in_place: bool) -> None:
    whole = Watched(in_place=in_place)
    job = merging_job(whole)
    run(job)
    settle(job)
    for dies_at in range(whole.changes + 1):
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

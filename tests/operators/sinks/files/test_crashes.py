"""Exactly once by a ledger, whatever the operation between which the process dies, also when it dies again while recovering."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.sinks.log import CommitEntry
from holdfast.operators.sinks.files.parquet import read_log
from tests.examples import examples
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import Crash, MiniJob, MortalStorage, committed, published

ROWS, EPOCHS = 3, 4


def run(job: MiniJob) -> None:
    """Run to the end of the input; every epoch is a checkpoint."""
    job.start()
    while job.position < ROWS * EPOCHS:
        job.emit(ROWS)
        job.checkpoint()


def recover(job: MiniJob, storage: MortalStorage, kills: list[tuple[int, bool]]) -> None:
    """Run until the input ends, dying at the given change of each attempt, and check the output after every death."""
    for dies_at, after in kills:
        storage.changes, storage.dies_at, storage.after = 0, dies_at, after
        job.abort_undecided()
        try:
            run(job)
        except Crash:
            visible = committed(storage)
            assert visible == list(range(len(visible)))
            assert len(visible) % ROWS == 0
            assert len(visible) <= job.completed.position
            assert set(published(storage)) <= set(visible)
    storage.dies_at = None
    job.abort_undecided()
    run(job)
    assert job.committed() == list(range(ROWS * EPOCHS))
    assert published(storage) == job.committed()
    assert [path for path in storage.files if "/staged/" in path] == []
    names = {file.name for entry in read_log(storage, "out") if isinstance(entry, CommitEntry) for file in entry.files}
    assert {path.rpartition("/")[2] for path in storage.files if "/data/" in path} == names


def mortal(*, in_place: bool) -> MortalStorage:
    storage = MortalStorage({})
    storage.copies_links = in_place
    return storage


def changes_of_a_whole_run(prepare: Callable[[MiniJob], None] = lambda job: None, *, in_place: bool = False) -> int:
    storage = mortal(in_place=in_place)
    job = MiniJob(storage, DictStorage())
    prepare(job)
    run(job)
    return storage.changes


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_is_recovered_exactly(after: bool, in_place: bool) -> None:
    for dies_at in range(changes_of_a_whole_run(in_place=in_place) + 1):
        storage = mortal(in_place=in_place)
        recover(MiniJob(storage, DictStorage()), storage, [(dies_at, after)])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_death_while_recovering_changes_nothing(in_place: bool) -> None:
    for first in range(0, changes_of_a_whole_run(in_place=in_place), 3 if in_place else 1):
        for second in range(8):
            storage = mortal(in_place=in_place)
            recover(MiniJob(storage, DictStorage()), storage, [(first, True), (second, second % 2 == 0)])


@settings(max_examples=examples(40), deadline=None)
@given(kills=st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=6), roll=st.booleans(), in_place=st.booleans())
def test_any_sequence_of_deaths_is_recovered_exactly(kills: list[tuple[int, bool]], roll: bool, in_place: bool) -> None:
    storage = mortal(in_place=in_place)
    job = MiniJob(storage, DictStorage())
    job.file_size_max = 1 if roll else 1 << 20
    recover(job, storage, kills)


@pytest.mark.parametrize("flows", range(5))
def test_a_snapshot_between_two_repeated_commits_knows_both(flows: int) -> None:
    """Two checkpoints were committed by an attempt that died; the next one forgot the first when it had found it in the log, and
    still had to look for the second: restored from there, it took the first for output beyond its own, and never ran again."""
    storage = MortalStorage({})
    job = MiniJob(storage, DictStorage())
    job.start()
    for _ in range(2):
        job.emit(ROWS)
        job.decide(job.snapshot())
    job.notify(2)
    job.start(flows)
    job.emit(ROWS)
    job.decide(job.snapshot())
    job.start()
    assert job.committed() == list(range(3 * ROWS))
    assert published(storage) == job.committed()


STEPS = ("emit", "checkpoint", "abort", "lost notice", "savepoint", "late notice", "fail", "fail soon", "die")


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_notices_lost_late_and_aborted_lose_and_repeat_nothing(data: st.DataObject) -> None:
    storage = mortal(in_place=data.draw(st.booleans()))
    job = MiniJob(storage, DictStorage())
    job.file_size_max = data.draw(st.sampled_from([1, 1 << 20]))
    job.start()
    savepoints = []
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=25)):
        match step:
            case "emit":
                job.emit(data.draw(st.integers(1, 3)))
            case "checkpoint":
                job.checkpoint()
            case "abort":
                job.abort(job.snapshot())
            case "lost notice":
                job.decide(job.snapshot())
            case "savepoint":
                snapshot = job.snapshot()
                job.decide(snapshot, savepoint=True)
                savepoints.append(snapshot)
            case "late notice":
                job.notify(job.completed.checkpoint_id)
            case "fail":
                job.abort_undecided()
                job.start()
            case "fail soon":
                job.abort_undecided()
                job.start(data.draw(st.integers(0, 3)))
            case "die":
                storage.changes, storage.dies_at = 0, data.draw(st.integers(0, 4))
                try:
                    job.emit(1)
                    job.checkpoint()
                except Crash:
                    storage.dies_at = None
                    job.abort_undecided()
                    job.start()
                storage.dies_at = None
        visible = job.committed()
        assert visible == list(range(len(visible)))
        assert len(visible) <= job.completed.position
        # Every savepoint still has what it would have to commit.
        for savepoint in savepoints:
            for name in _pending_names(savepoint.committer):
                assert any(path.endswith((f"staged/{name}", f"data/{name}")) for path in storage.files)
    job.checkpoint()
    assert job.committed() == list(range(job.position))
    assert published(storage) == job.committed()


def _pending_names(entries: list[bytes]) -> list[str]:
    import msgspec

    from holdfast.barriers.sinks.log import CommitterState, PendingCheckpoint

    states = [msgspec.msgpack.decode(entry, type=CommitterState) for entry in entries]
    return [file.name for state in states if isinstance(state, PendingCheckpoint) for file in state.files]

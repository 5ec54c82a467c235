"""When a subtask keeps copies of its checkpoints' files, and when it gives them up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.barriers.messages import CheckpointKind, NotifyCheckpointAborted, NotifyCheckpointComplete
from holdfast.operators.task.context import CancelSubtask
from holdfast.statebackends.local_recovery.copies import LocalCopies, LocalRecovery, is_dead, name_of
from tests.operators.runtime import Bench, DictStorage, Recording
from tests.operators.task.test_subtask import barrier


def kept(number: int) -> str:
    return f"chk-{number}/op0-0-1-n0-keyed"


@pytest.fixture
def copies(tmp_path: Path) -> LocalCopies:
    copies = LocalRecovery(str(tmp_path), job_id="job", state_directory="d", storage=DictStorage()).copies("v", 0, 1, "n")
    copies.open()
    return copies


@pytest.fixture
def bench(copies: LocalCopies) -> Bench:
    log: list[str] = []
    return Bench([Recording("a", log)], 1, log=log, copies=copies).started()


def test_what_a_checkpoint_stores_is_kept_until_a_later_one_completes(bench: Bench, copies: LocalCopies) -> None:
    bench.events(0, barrier(1))
    bench.settle()
    assert copies.held == (kept(1),), "state, and nothing of the operator's own work"
    bench.mailbox.put(NotifyCheckpointComplete(1, 1, 0))
    bench.events(0, barrier(2))
    bench.settle()
    assert copies.held == (kept(1), kept(2))
    bench.mailbox.put(NotifyCheckpointComplete(1, 2, 0))
    bench.settle()
    assert copies.held == (kept(2),)
    assert name_of(kept(2)) in os.listdir(copies.folder)


def test_aborted_and_failed_checkpoints_keep_nothing(bench: Bench, copies: LocalCopies) -> None:
    bench.events(0, barrier(1))
    bench.settle()
    bench.mailbox.put(NotifyCheckpointAborted(1, 1))  # after the acknowledgement
    bench.settle()
    assert copies.held == ()
    bench.events(0, barrier(2))
    bench.run()
    bench.mailbox.put(NotifyCheckpointAborted(1, 2))  # during the asynchronous part
    bench.settle()
    assert copies.held == ()
    assert os.listdir(copies.folder) == ["lock"]


def test_savepoints_are_not_kept_and_keep_the_checkpoint_before_them(bench: Bench, copies: LocalCopies) -> None:
    bench.events(0, barrier(1))
    bench.settle()
    bench.events(0, barrier(2, kind=CheckpointKind.SAVEPOINT.value))
    bench.settle()
    bench.mailbox.put(NotifyCheckpointComplete(1, 2, 0))
    bench.settle()
    assert copies.held == (kept(1),)


def test_a_subtask_that_ends_leaves_its_copies_to_its_successor(bench: Bench, copies: LocalCopies) -> None:
    bench.events(0, barrier(1))
    bench.settle()
    assert not is_dead(copies.folder)
    bench.mailbox.put(CancelSubtask())
    bench.settle()
    assert bench.subtask.is_disposed
    assert is_dead(copies.folder)
    assert name_of(kept(1)) in os.listdir(copies.folder)

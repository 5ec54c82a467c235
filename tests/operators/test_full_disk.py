"""A worker's own disk that is full, and then is not: a job that waits for room, and ends as if there had been enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.jobmaster.failover import is_final
from holdfast.statebackends.errors import OutOfSpaceError
from holdfast.statebackends.storage.directory import LocalStorage
from tests.harness.disks import SmallDisk, small_disk
from tests.harness.mini import MiniCluster
from tests.operators.worker.test_loop import committed, count_job, expected

ROWS = 6_000
ROCKSDB: dict[str, Any] = {"state_backend": "rocksdb", "inline_threshold": 0}
REFUSED = "OutOfSpaceError: .*No space left on device"


def checkpoint(cluster: MiniCluster) -> None:
    """Ask for one, and let it be decided."""
    coordinator = cluster.coordinator
    decided = len(coordinator.completed) + len(coordinator.declined)
    coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
    cluster.run_until(lambda: len(coordinator.completed) + len(coordinator.declined) > decided)


def until_it_fails(cluster: MiniCluster) -> str:
    with pytest.raises(AssertionError, match=REFUSED):
        cluster.run_until(lambda: False)
    return cluster.coordinator.failure


def running_job(disk: SmallDisk, path: str) -> MiniCluster:
    storage = LocalStorage(disk.folder.parent / "state")
    cluster = MiniCluster(count_job(ROWS, path, **ROCKSDB), storage, local_directory=str(disk.folder / "work"))
    cluster.deploy()
    cluster.run_until(lambda: cluster.coordinator.all_running)
    for _ in range(60):
        cluster.step()
    checkpoint(cluster)
    assert (len(cluster.coordinator.completed), cluster.coordinator.declined) == (1, [])
    return cluster


def test_a_restore_on_a_full_disk_fails_by_name_until_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        cluster = running_job(disk, "mem://full-restore")
        cluster.crash()
        disk.fill()
        for _ in range(3):
            cluster.deploy()
            failure = until_it_fails(cluster)
            assert not is_final(failure), "it is restarted under the strategy"
        disk.free()
        cluster.deploy()
        cluster.run_until(lambda: cluster.coordinator.all_running or cluster.coordinator.all_drained)
        cluster.run_to_end()
    assert committed("mem://full-restore") == expected(ROWS)


def test_a_disk_that_is_full_while_the_job_runs_costs_checkpoints_and_no_record(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        cluster = running_job(disk, "mem://full-running")
        coordinator = cluster.coordinator
        for _ in range(20):
            disk.fill()
            for _ in range(20):
                cluster.step()
            if coordinator.failure:
                break
            checkpoint(cluster)
        assert coordinator.declined
        assert {each.reason for each in coordinator.declined} == {FailureReason.ASYNC_EXCEPTION}
        assert all(each.message.startswith("OutOfSpaceError: ") for each in coordinator.declined)
        if coordinator.failure:  # it was RocksDB's background work that the disk refused
            assert coordinator.failure.startswith("OutOfSpaceError: ")
            assert not is_final(coordinator.failure)
        disk.free()
        if coordinator.failure:
            cluster.deploy()  # to the same workers
            cluster.run_until(lambda: not coordinator.failure)
        cluster.run_to_end()
    assert committed("mem://full-running") == expected(ROWS)


def test_a_database_that_stopped_fails_its_attempt_though_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        cluster = running_job(disk, "mem://full-stopped")
        cluster.run_until(lambda: cluster.coordinator.all_drained)
        stopped = store_of(cluster)
        monkeypatch.setattr(stopped, "_refusal", OutOfSpaceError("No space left on device", path=stopped.folder))
        failure = until_it_fails(cluster)
        assert failure == "OutOfSpaceError: No space left on device"
        cluster.deploy()
        cluster.run_until(lambda: not cluster.coordinator.failure)
        cluster.run_to_end()
    assert committed("mem://full-stopped") == expected(ROWS)


def store_of(cluster: MiniCluster) -> Any:
    """One of its databases."""
    nodes = [node for worker in cluster.workers for each in worker._attempt.subtasks for node in each.subtask.chain.nodes]  # type: ignore[union-attr]
    return next(node.context.keyed_backend.write_buffer.store for node in nodes if node.context.keyed_backend is not None)  # type: ignore[union-attr]

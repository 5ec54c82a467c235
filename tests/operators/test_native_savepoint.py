"""A native savepoint on the real task runtime: what the format of a trigger becomes in the tasks of every backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.barriers.messages import CheckpointKind
from holdfast.statebackends.snapshot.parts import file_handles
from holdfast.statebackends.storage.directory import LocalStorage
from tests.harness.mini import MiniCluster
from tests.operators.test_flights_job import committed, expected, job


@pytest.mark.parametrize(
    ("backend", "native", "allowed"),
    [("rocksdb", True, {"rocksdb", "arrow"}), ("rocksdb", False, {"parquet"}), ("filesystem", True, {"arrow"})],
)
def test_the_format_that_was_asked_for_is_written_into_one_folder_and_the_job_goes_on_from_it(
    tmp_path: Path, backend: str, native: bool, allowed: set[str]
) -> None:
    cluster = MiniCluster(
        job(parallelism=1, state_backend=backend), LocalStorage(tmp_path / "state"), local_directory=str(tmp_path / "local"), seed=5
    )
    coordinator = cluster.coordinator
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    for kind in (CheckpointKind.CHECKPOINT, CheckpointKind.SAVEPOINT):
        for _ in range(60):
            cluster.step()
        coordinator.trigger(kind, cluster.clock.now_ms, native=native)
        taken = len(coordinator.completed) + 1
        cluster.run_until(lambda taken=taken: len(coordinator.completed) == taken or coordinator.declined)  # type: ignore[misc,arg-type]
        assert coordinator.declined == []
    savepoint = coordinator.completed[-1]
    states = [state for task in savepoint.states.values() for state in task.values()]
    formats = {handle.format for state in states for handle in state.keyed}
    assert formats
    assert formats <= allowed
    assert ("rocksdb" in formats) == (native and backend == "rocksdb")
    paths = [handle.path for state in states for handle in file_handles(state)]
    assert not any(".." in path for path in paths), "it shares nothing with checkpoints"
    assert all((tmp_path / "state" / savepoint.folder / path).is_file() for path in paths)
    cluster.crash()
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    cluster.run_to_end()
    assert committed() == expected()

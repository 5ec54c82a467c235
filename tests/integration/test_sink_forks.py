"""Real coordinator and worker processes: a job is stopped, and another one goes on from its savepoint with the sink elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.barriers.jobgraph import SinkMode, Submission
from holdfast.statebackends.errors import CheckpointFailedError, CommittablesLeftError, SinkMovedError
from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected

ROWS = 6_000
FORK = "ef" * 16


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def started(cluster: Cluster, out: Path) -> str:
    job = cluster.submit(counting_plan(ROWS, 20.0, out, "memory")).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    return job


def is_checkpointed(cluster: Cluster, job: str) -> bool:
    """Take one, if all tasks run already."""
    try:
        return cluster.client.trigger_checkpoint(job) > 0
    except CheckpointFailedError:
        return False


def finished(cluster: Cluster, job: str) -> None:
    cluster.wait_finished(job)
    assert cluster.slots is not None
    assert cluster.slots.wait(10), "workers leave when the job is over"
    cluster.slots.close()


@pytest.mark.slow
@pytest.mark.parametrize("job_id", [pytest.param(None, marks=pytest.mark.endurance), FORK], ids=["the job itself", "another job"])
def test_a_stopped_job_goes_on_elsewhere_and_both_outputs_together_are_exact(
    cluster: Cluster, tmp_path: Path, job_id: str | None
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    job = started(cluster, old)
    savepoint = cluster.client.stop(job, str(tmp_path / "savepoints"))
    finished(cluster, job)
    before = committed(old)
    plan = counting_plan(ROWS, 1.0, new, "memory")
    with pytest.raises(SinkMovedError, match=f"writes to {new}, and the snapshot's writes to {old}"):
        cluster.client.submit(cluster.submission(plan, restore=savepoint, job_id=job_id))
    accepted = cluster.submit(plan, restore=savepoint, job_id=job_id, sinks=SinkMode.FORK)
    finished(cluster, accepted.job_id)
    assert any("begins a new log" in note for note in accepted.notes)
    assert committed(old) == before
    assert before + committed(new) == expected(ROWS)


@pytest.mark.slow
def test_rows_of_a_cancelled_job_are_committed_by_itself_and_given_up_by_nobody_unasked(cluster: Cluster, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    plan = counting_plan(ROWS, 20.0, old, "memory")
    config = msgspec.structs.replace(plan.graph.config, checkpoint_interval_ms=None)
    job = cluster.submit(replace(plan, graph=msgspec.structs.replace(plan.graph, config=config))).job_id
    eventually(lambda: is_checkpointed(cluster, job), "a checkpoint")
    savepoint = cluster.client.savepoint(job, str(tmp_path / "savepoints"))
    plan = counting_plan(ROWS, 1.0, new, "memory")

    def asked(job_id: str | None) -> Submission:
        return cluster.submission(plan, restore=savepoint, job_id=job_id, sinks=SinkMode.FORK)

    running = cluster.client.preflight(asked(FORK))
    assert running.fits, running.refusals
    assert any("are left to job" in note for note in running.notes)
    cluster.client.cancel(job)
    assert cluster.slots is not None
    assert cluster.slots.wait(20)
    cluster.slots.close()
    with pytest.raises(CommittablesLeftError, match="would be lost") as caught:
        cluster.client.submit(asked(FORK))
    assert caught.value.rows > 0
    before = committed(old)
    accepted = cluster.submit(plan, restore=savepoint, sinks=SinkMode.FORK)
    finished(cluster, accepted.job_id)
    assert any("are committed there first" in note for note in accepted.notes)
    assert committed(old).total() == before.total() + caught.value.rows
    assert committed(old) + committed(new) == expected(ROWS)

"""The mode of checkpoints, changed while a real job has its queues full, over REST; killed with records in flight, and while more
are collected, and exact."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import CheckpointFailedError
from tests.integration.counting import (
    COUNTS,
    KEYS,
    NUMBERED,
    OTHER_IDS,
    SCHEMA,
    CountPerKey,
    HeldUp,
    NumberedCountPerKey,
    WaitingSource,
    make_batch,
    make_other_batch,
)
from tests.integration.test_two_processes import Cluster, committed, eventually, expected

ROWS = 20_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def held_up(file: Path, output: Path) -> JobPlan:
    """Counts, and a last step that holds them up while the file exists. Only a checkpoint by hand is taken."""
    env = Environment(
        "held up",
        parallelism=2,
        checkpoint_interval_ms=None,
        tolerable_failed_checkpoints=100,
        buffer_debloat=False,
        channel_credit_bytes=32_768,
        restart=RestartStrategy(),
    )
    counts = env.from_source(GeneratorSource(make_batch, ROWS, SCHEMA)).uid("source").key_by("key").process(CountPerKey())
    slow = counts.uid("count").rebalance().map(HeldUp(file), returns=COUNTS).uid("slow")
    slow.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def pressed(parallelism: int, file: Path, output: Path) -> JobPlan:
    """As `held_up`, with barriers that overtake by the job's own setting, and queues that are bounded by time."""
    env = Environment(
        "pressed",
        parallelism=parallelism,
        checkpoint_interval_ms=None,
        unaligned_checkpoints=True,
        channel_credit_bytes_start=8_192,
    )
    counts = env.from_source(GeneratorSource(make_batch, ROWS, SCHEMA)).uid("source").key_by("key").process(NumberedCountPerKey())
    slow = counts.uid("count").rebalance().map(HeldUp(file, 0.002), returns=NUMBERED).uid("slow")
    slow.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def version_of(snapshot: str) -> int:
    """2: there are records in flight in it."""
    return int(json.loads((Path(snapshot.removeprefix("file://")) / "_metadata").read_bytes())["version"])


@pytest.mark.slow
def test_a_savepoint_behind_an_unaligned_checkpoint_of_full_queues_holds_nothing_in_flight(
    cluster: Cluster, tmp_path: Path
) -> None:
    file, output = tmp_path / "slow", tmp_path / "out"
    file.touch()
    client = cluster.client
    job = cluster.submit(pressed(2, file, output)).job_id
    eventually(lambda: client.totals()[job]["backpressure"] == "high", "full queues")

    number = client.trigger_checkpoint(job, timeout_s=30)
    assert version_of(client.checkpoint(job, number)["external_path"]) == 2
    savepoint = client.savepoint(job, str(tmp_path / "savepoints"), timeout_s=30)
    assert version_of(savepoint) == 1
    assert client.totals()[job]["backpressure"] == "high", "the savepoint was taken with its queues full"
    client.cancel(job)
    assert cluster.slots is not None
    assert cluster.slots.wait(20)
    cluster.slots.close()
    written = read_committed(output, "out").num_rows
    file.unlink()
    again = cluster.submit(pressed(3, file, output), restore=savepoint)
    cluster.wait_finished(again.job_id)
    rows = read_committed(output, "out").to_pylist()
    assert written < ROWS, "there was something left to do"
    assert Counter((row["key"], row["count"]) for row in rows) == expected(ROWS)
    assert sorted(row["id"] for row in rows) == list(range(ROWS))


def newest(cluster: Cluster, job: str) -> dict[str, Any]:
    return dict(cluster.client.checkpoints(job)["latest"]["completed"] or {"id": 0})


@pytest.mark.endurance
@pytest.mark.slow
def test_modes_by_hand_and_by_settings_and_a_kill_with_records_in_flight(cluster: Cluster, tmp_path: Path) -> None:
    file, output = tmp_path / "slow", tmp_path / "out"
    file.touch()
    client = cluster.client
    job = cluster.submit(held_up(file, output)).job_id
    eventually(lambda: client.totals()[job]["backpressure"] == "high", "full queues")
    began = time.monotonic()
    number = client.trigger_checkpoint(job, unaligned=True, timeout_s=30)
    assert time.monotonic() - began < 10, "rows in front of the barrier take longer"
    found = client.checkpoint(job, number)
    assert (found["checkpoint_type"], found["persisted_data"] > 0) == ("UNALIGNED_CHECKPOINT", True)
    with pytest.raises(TimeoutError):
        client.trigger_checkpoint(job, timeout_s=1)  # in the job's own mode: it waits, and so do those behind it
    changed = client.change_settings(job, {"unaligned_checkpoints": True, "checkpoint_timeout_ms": 5_000})
    assert changed["settings"]["unaligned_checkpoints"] is True
    assert newest(cluster, job)["id"] == number
    attempt = client.workers(job)["attempt"]
    cluster.kill_worker(0)
    eventually(lambda: client.workers(job)["attempt"] > attempt and cluster.state_of(job) == "RUNNING", "the next attempt")
    assert client.checkpoints(job)["latest"]["restored"]["id"] == number
    client.change_settings(job, {"checkpoint_interval_ms": 300})
    eventually(lambda: newest(cluster, job)["id"] > number, "a checkpoint of the job's own")
    assert newest(cluster, job)["checkpoint_type"] == "UNALIGNED_CHECKPOINT"
    cluster.kill_worker(1)
    file.unlink()
    cluster.wait_finished(job)
    assert committed(output) == expected(ROWS)


# --------------------------------------------------------------------------------------------------- killed while collecting

FAST, LATE = 6_000, 1_000
"""Rows of the two sources of `collecting`."""


def collecting(parallelism: int, slow: Path, begins: Path, output: Path) -> JobPlan:
    """W4's job: counts behind a shuffle, and a last step that holds them up while a file exists. Beside its source another, which
    begins when a file is there. Behind that a step, on an edge that nothing may overtake, is so slow that barriers are long in
    coming."""
    env = Environment(
        "collecting",
        parallelism=parallelism,
        checkpoint_interval_ms=None,
        unaligned_checkpoints=True,
        tolerable_failed_checkpoints=100,
        inline_threshold=0,
        buffer_debloat=False,
        channel_credit_bytes=8_192,
        restart=RestartStrategy(),
    )
    fast = env.from_source(GeneratorSource(make_batch, FAST, SCHEMA)).uid("fast")
    late = env.from_source(WaitingSource(make_other_batch, LATE, SCHEMA, file=begins)).uid("late")
    held = late.rescale().map(HeldUp(slow, 0.02), returns=SCHEMA).uid("held")
    counts = fast.union(held).key_by("key").process(NumberedCountPerKey()).uid("count")
    steps = counts.rebalance().map(HeldUp(slow), returns=NUMBERED).uid("slow")
    steps.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def vertex_of(plan: JobPlan, uid: str) -> str:
    return next(vertex.vertex_id for vertex in plan.graph.vertices if vertex.operators[0].uid == uid)


class Triggered(threading.Thread):
    """A checkpoint by hand, while the test looks on."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        super().__init__(daemon=True)
        self.cluster, self.job = cluster, job
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.cluster.client.trigger_checkpoint(self.job, timeout_s=60)
        except Exception as error:
            self.failure = error


def is_collecting(cluster: Cluster, job: str, plan: JobPlan, number: int) -> bool:
    """Whether counts have taken their snapshots for a barrier that overtook, and wait for the one behind the step that holds it up:
    those behind them have acknowledged, they have not, nor has that step, to which the barrier has not come."""
    told = cluster.client.checkpoint(job, number)
    answered = [told["tasks"][vertex_of(plan, uid)]["num_acknowledged_subtasks"] for uid in ("slow", "count", "held")]
    return told["status"] == "IN_PROGRESS" and answered == [plan.graph.slots_required, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_while_it_collects_it_goes_on_from_the_unaligned_checkpoint_before(
    cluster: Cluster, tmp_path: Path, workers: int
) -> None:
    slow, begins, output = tmp_path / "slow", tmp_path / "begins", tmp_path / "out"
    slow.touch()
    client, plan = cluster.client, collecting(workers, slow, begins, output)
    job = cluster.submit(plan).job_id
    eventually(lambda: client.totals()[job]["backpressure"] == "high", "full queues")
    before = client.trigger_checkpoint(job, timeout_s=30)
    found = client.checkpoint(job, before)
    assert (found["checkpoint_type"], found["persisted_data"] > 0) == ("UNALIGNED_CHECKPOINT", True)
    begins.touch()
    late = vertex_of(plan, "late")
    eventually(lambda: written(cluster, job, late) > 0, "rows in front of the slow step")
    triggered = Triggered(cluster, job)
    eventually(lambda: client.checkpoints(job)["counts"]["in_progress"] == 1, "the next checkpoint")
    eventually(lambda: is_collecting(cluster, job, plan, before + 1), "a snapshot that collects")
    attempt = client.workers(job)["attempt"]
    cluster.kill_worker(0)
    triggered.join(timeout=60)
    assert isinstance(triggered.failure, CheckpointFailedError)
    assert client.checkpoint(job, before + 1)["status"] == "FAILED"
    eventually(lambda: client.workers(job)["attempt"] > attempt and cluster.state_of(job) == "RUNNING", "the next attempt")
    assert client.checkpoints(job)["latest"]["restored"]["id"] == before
    slow.unlink()
    cluster.wait_finished(job)
    check_numbered(output, workers)
    left = cluster.state / job / f"chk-{before + 1}"
    eventually(lambda: not left.exists(), "nothing of what was aborted is left")


def written(cluster: Cluster, job: str, vertex: str) -> int:
    """Records that the subtasks of a vertex have sent."""
    vertices = cluster.client.job(job)["vertices"]
    return int(next(each["metrics"]["write-records"] for each in vertices if each["id"] == vertex))


def check_numbered(output: Path, parallelism: int) -> None:
    """Each row of either source once, each key counted from 1 on, and what came over one channel in its order."""
    rows = read_committed(output, "out").to_pylist()
    ids = [*range(FAST), *range(OTHER_IDS, OTHER_IDS + LATE)]
    assert Counter(row["id"] for row in rows) == Counter(ids)
    assert all(row["key"] == row["id"] % OTHER_IDS % KEYS for row in rows)
    places: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        places.setdefault(row["key"], []).append((row["count"], row["id"]))
    for mine in map(sorted, places.values()):
        assert [count for count, _ in mine] == list(range(1, len(mine) + 1))
        for source in (0, 1):
            for producer in range(parallelism):
                came = [each for _, each in mine if each // OTHER_IDS == source and each % parallelism == producer]
                assert came == sorted(came)

"""The mode of checkpoints, changed while a real job has its queues full, over REST; killed with records in flight, and exact."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource
from tests.integration.counting import COUNTS, SCHEMA, CountPerKey, HeldUp, make_batch
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

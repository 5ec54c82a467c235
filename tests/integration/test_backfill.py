"""A backfill whose final checkpoint is retained, and a live run with another source that goes on from it: counts as if one job had
read both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import JobExistsError, UnclaimedStateError
from holdfast.statebackends.factory import BackendKind
from tests.integration.counting import KEYS, SCHEMA, CountPerKey, PaddedCountPerKey, make_batch
from tests.integration.test_two_processes import Cluster, cluster, committed, expected

__all__ = ["cluster"]

pytestmark = pytest.mark.slow

BACKFILL, LIVE = 130, 260


def plan_of(source_uid: str, rows: int, output: Path, backend: BackendKind, *, retain: bool = True) -> JobPlan:
    env = Environment("spend", parallelism=2, checkpoint_interval_ms=150, state_backend=backend, retain_on_finish=retain)
    source = GeneratorSource(make_batch, rows, SCHEMA, rows_per_second=rows / 0.5)
    counts = env.from_source(source).uid(source_uid).key_by("key").process(PaddedCountPerKey()).uid("count")
    counts.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def run(cluster: Cluster, plan: JobPlan, **options: Any) -> str:
    job = cluster.submit(plan, **options).job_id
    cluster.wait_finished(job)
    assert cluster.slots is not None
    assert cluster.slots.wait(10), "workers leave when the job is over"
    cluster.slots.close()
    return job


@pytest.mark.parametrize("backend", [pytest.param("filesystem", marks=pytest.mark.endurance), "rocksdb"])
def test_a_live_run_goes_on_from_the_final_checkpoint_of_a_backfill(cluster: Cluster, tmp_path: Path, backend: BackendKind) -> None:
    out = tmp_path / "out"
    job = run(cluster, plan_of("backfill", BACKFILL, out, backend))
    assert committed(out) == expected(BACKFILL)
    [final] = (cluster.state / job).glob("chk-*/_metadata")
    snapshot = hf.Snapshot(final.parent)
    assert snapshot.verify().is_sound
    rows = [row for batch in snapshot.table("count", CountPerKey.count.name) for row in batch.to_pylist()]
    assert {row["key"]: row["value"] for row in rows} == {key: len(range(key, BACKFILL, KEYS)) for key in range(KEYS)}

    live = plan_of("live", LIVE, out, backend, retain=False)
    with pytest.raises(JobExistsError, match=r"has ended \(FINISHED\). Give restore='latest'"):
        cluster.submit(live)
    with pytest.raises(UnclaimedStateError, match="backfill"):
        cluster.submit(live, restore="latest")
    assert run(cluster, live, restore="latest", allow_non_restored_state=True) == job
    assert committed(out) == Counter(
        (key, count + 1) for key in range(KEYS) for count in range(sum(len(range(key, rows, KEYS)) for rows in (BACKFILL, LIVE)))
    )
    assert not list((cluster.state / job).glob("chk-*/_metadata")), "it belonged to the job, which dropped it with its own"
    assert not list((cluster.state / job).glob("shared/*"))

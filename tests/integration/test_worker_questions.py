"""Real worker processes that are asked where they are, while one of them hangs in a function of its user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.coordinator.explain.records import CauseKind
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource
from tests.integration.counting import SCHEMA, HangingCountPerKey, make_batch
from tests.integration.test_two_processes import TOKEN, Cluster, committed, eventually, expected

ROWS = 1_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def hanging_plan(file: Path, output: Path, checkpoint_timeout_ms: int = 60_000) -> JobPlan:
    env = Environment(
        "count",
        parallelism=2,
        checkpoint_interval_ms=150,
        checkpoint_timeout_ms=checkpoint_timeout_ms,
        restart=RestartStrategy(),
    )
    source = GeneratorSource(make_batch, ROWS, SCHEMA, rows_per_second=ROWS / 3)
    counts = env.from_source(source).uid("source").key_by("key").process(HangingCountPerKey(str(file))).uid("count")
    counts.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


@pytest.mark.slow
def test_the_function_in_which_a_subtask_hangs_is_named(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "hang"
    job = cluster.submit(hanging_plan(file, tmp_path / "out")).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    file.touch()
    try:
        check_what_is_said(cluster, job)
    finally:
        file.unlink()
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(ROWS), "questions change nothing"
    assert cluster.client.workers(job)["attempt"] == 1


@pytest.mark.slow
def test_of_a_checkpoint_that_expired_for_it_the_function_is_named_when_the_job_runs_well_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "hang"
    job = cluster.submit(hanging_plan(file, tmp_path / "out", checkpoint_timeout_ms=4_000)).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    file.touch()
    try:
        eventually(lambda: cluster.client.checkpoints(job)["counts"]["failed"] >= 1, "an expired checkpoint")
    finally:
        file.unlink()
    number = cluster.client.checkpoints(job)["latest"]["failed"]["id"]
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(ROWS)
    found = cluster.client.explain(job, number)
    assert (found.subject, found.explained_ms >= 0) == ("failed", True)
    assert [cause.kind for cause in found.causes][:2] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS]
    assert found.first_cause.kind is CauseKind.IN_FUNCTION
    assert "wait_for_the_end_of (" in found.first_cause.text
    assert cluster.client.workers(job)["attempt"] == 2, "no failure is tolerated: its end fenced the attempt"


def check_what_is_said(cluster: Cluster, job: str) -> None:
    def get(path: str) -> tuple[int, str]:
        answer = urllib3.request("GET", f"{cluster.coordinator.url}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        return answer.status, answer.data.decode()

    def hanging() -> str:
        cause = cluster.client.explain(job).first_cause
        return cause.text if cause.kind is CauseKind.IN_FUNCTION else ""

    eventually(hanging, "an explanation that names a function")
    text = hanging()
    assert "wait_for_the_end_of (" in text
    assert "tests/integration/counting.py:" in text
    assert "uid count" in text
    vertex = next(each["id"] for each in cluster.client.job(job)["vertices"] if "process" in each["name"])
    seen = [get(f"/v1/jobs/{job}/vertices/{vertex}/flamegraph?type={kind}") for kind in ("full", "off_cpu")]
    assert [(status, "wait_for_the_end_of" in body) for status, body in seen] == [(200, True)] * 2
    dumps = [get(f"/v1/taskmanagers/{job}_slot-{slot}/thread-dump") for slot in range(2)]
    assert any("wait_for_the_end_of" in body for _, body in dumps)
    assert all("holdfast-watch" in body for _, body in dumps)
    printed = [get(f"/v1/taskmanagers/{job}_slot-{slot}/stdout") for slot in range(2)]
    assert sorted(printed) == [(200, ""), (200, "waits for the end of a file\n")]
    status, log = get(f"/v1/taskmanagers/{job}_slot-0/log")
    assert status == 200
    assert all("a-row-of-customer" not in body for _, body in [*seen, *dumps, (status, log), (0, text)])

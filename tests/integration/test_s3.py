"""Two worker processes and a coordinator whose state is on S3: killed, stopped, restored from there, and the count is exact."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.operators.base import JobPlan
from holdfast.operators.task.timers import EVENT_TIMERS, PROCESSING_TIMERS
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import S3Connection
from tests.api.test_serve import ROOT, Process
from tests.integration.counting import KEYS, TimedCountPerKey
from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected
from tests.s3_server import S3Server
from tests.s3_server import connection as connection
from tests.s3_server import server as server

pytestmark = pytest.mark.slow

ROWS = 3_000


@pytest.fixture
def storage(server: S3Server, connection: S3Connection) -> S3Storage:
    return S3Storage(f"s3://{server.new_bucket(connection)}/jobs", connection)


@pytest.fixture
def cluster(storage: S3Storage, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, storage.root)
    yield cluster
    cluster.close()


def timers(snapshot: Snapshot) -> list[int]:
    return [snapshot.table("count", name).read_all().num_rows for name in (EVENT_TIMERS, PROCESSING_TIMERS)]


def plan_with_files(seconds: float, output: str) -> JobPlan:
    """Its states are files, however small they are."""
    plan = counting_plan(ROWS, seconds, output, "rocksdb", TimedCountPerKey)
    config = msgspec.structs.replace(plan.graph.config, inline_threshold=0, checkpoint_interval_ms=400)
    return dataclasses.replace(plan, graph=msgspec.structs.replace(plan.graph, config=config))


def test_count_is_exact_through_kill_9_and_a_move_to_another_prefix(cluster: Cluster, storage: S3Storage, tmp_path: Path) -> None:
    output = f"{storage.root}-out"
    job = cluster.submit(plan_with_files(12.0, output)).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    eventually(lambda: any("-pack-" in path for path in storage.execute(ops.ListFiles(job))), "a checkpoint with a pack")
    assert cluster.slots is not None
    victim = cluster.kill_worker(0)
    eventually(lambda: cluster.slots is not None and cluster.slots.pid(0) not in (None, victim), "the successor")
    eventually(lambda: cluster.client.checkpoints(job)["latest"]["restored"] is not None, "a restore from S3")
    assert cluster.client.checkpoints(job)["latest"]["restored"]["id"] > 0
    before = cluster.completed(job)
    eventually(lambda: cluster.completed(job) > before, "a checkpoint after it")

    location = cluster.client.stop(job, f"{storage.root}-savepoints")
    assert location.startswith(f"{storage.root}-savepoints/savepoint-")
    savepoints = storage.at(f"{storage.root}-savepoints")
    files = savepoints.execute(ops.ListFiles(""))
    assert any(path.endswith("/_metadata") for path in files)
    assert any(not path.endswith("/_metadata") for path in files)
    assert cluster.slots.wait(10)

    assert timers(Snapshot(location)) == [KEYS, KEYS], "as restored from a pack: nobody has set them again"

    # to another kind of storage and back: the copy is as good
    local = Snapshot(location).copy(tmp_path / "copied")
    assert local.verify().problems == ()
    moved = local.copy(f"{storage.root}-copies/savepoint")
    assert moved.verify().problems == ()

    again = cluster.submit(plan_with_files(1.0, output), restore=moved.location)
    cluster.wait_finished(again.job_id)
    assert committed(output) == expected(ROWS)
    assert not any(path.is_dir() for path in cluster.state.iterdir()), "no state on the local disk"


@pytest.mark.endurance
def test_the_command_line_takes_a_state_directory_on_s3(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_DIR", str(tmp_path))
    served = Process(f"{storage.root}/")
    try:
        assert served.facts["state_dir"] == storage.root
        command = [sys.executable, "-m", "holdfast", "jobs", "--json", "--state-dir", storage.root]
        jobs = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(jobs.stdout) == []
        code, errors = Process(storage.root).end()
        assert (code, f"another coordinator runs on {storage.root} (pid" in errors) == (2, True)
    finally:
        assert served.end()[0] == 0
    assert storage.execute(ops.ListFiles("")) == ["_holdfast"]

    code, errors = Process("s3://no-such-bucket/state").end()
    assert code != 0
    assert "there is no bucket 'no-such-bucket'" in errors
    assert "Traceback" not in errors

"""Two worker processes, a coordinator over real HTTP, ZeroMQ between them: killed, restarted, and the count is exact."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.api.client import RestClient
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import ServerSettings
from holdfast.barriers.jobgraph import RestartStrategy, Submission, SubmissionAccepted
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.worker.main import WorkerSpec, pickle_plan
from holdfast.statebackends.factory import BackendKind
from tests.harness.nursery import start_worker
from tests.harness.slots import LocalProcessSlots
from tests.integration.counting import KEYS, SCHEMA, CountPerKey, PaddedCountPerKey, make_batch

TOKEN = "integration-token-0123456789"
DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def counting_plan(
    rows: int, seconds: float, output: Path | str, backend: BackendKind, count: type[CountPerKey] = CountPerKey
) -> JobPlan:
    env = Environment(
        "count",
        parallelism=2,
        checkpoint_interval_ms=150,
        tolerable_failed_checkpoints=100,
        state_backend=backend,
        restart=RestartStrategy(),
    )
    source = GeneratorSource(make_batch, rows, SCHEMA, rows_per_second=rows / seconds)
    counts = env.from_source(source).uid("source").key_by("key").process(count()).uid("count")
    counts.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def expected(rows: int) -> Counter[tuple[int, int]]:
    return Counter((key, count + 1) for key in range(KEYS) for count in range(len(range(key, rows, KEYS))))


def committed(output: Path | str) -> Counter[tuple[int, int]]:
    table = read_committed(output, "out")
    return Counter(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True))


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.03)  # each look is a request to a coordinator that has other things to do


class Cluster:
    """A coordinator in this process and worker processes of one job."""

    def __init__(self, folder: Path, state_url: str | None = None) -> None:
        """`state_url`: of a state directory that is not a folder."""
        self.state = folder / "state"
        self.logs = folder / "logs"
        self.local = folder / "local"
        for path in (self.state, self.logs, self.local):
            path.mkdir()
        self.settings = ServerSettings(self.state, token=TOKEN, state_url=state_url)
        self.coordinator = EmbeddedCoordinator(self.settings)
        self.coordinator.start()
        self.client = RestClient(self.coordinator.url, TOKEN)
        self.slots: LocalProcessSlots | None = None

    def submit(
        self, plan: JobPlan, host: str | None = None, *, unix_sockets: bool = True, standbys: int = 0, **options: Any
    ) -> SubmissionAccepted:
        accepted = self.client.submit(self.submission(plan, **options))
        self.slots = LocalProcessSlots(
            replace(self.spec(accepted, plan, host), unix_sockets=unix_sockets),
            accepted.slots,
            standbys=standbys,
            log_directory=str(self.logs),
        )
        self.slots.start()
        return accepted

    def submission(self, plan: JobPlan, **options: Any) -> Submission:
        return Submission(plan.graph, driver_nonce=os.urandom(8).hex(), **options)

    def spec(self, accepted: SubmissionAccepted, plan: JobPlan, host: str | None = None) -> WorkerSpec:
        """A template: a launcher sets slot and task attempt."""
        return WorkerSpec(
            job_id=accepted.job_id,
            slot=0,
            submission=accepted.submission,
            task_attempt=0,
            coordinator_url=self.coordinator.url,
            token=accepted.worker_token,
            state_directory=accepted.directory,
            plan=pickle_plan(plan),
            local_directory=str(self.local),
            advertised_host=host,
        )

    def restart_coordinator(self) -> None:
        self.coordinator.stop()
        self.coordinator = EmbeddedCoordinator(self.settings)
        self.coordinator.start()
        self.client = RestClient(self.coordinator.url, TOKEN)

    def kill_worker(self, slot: int) -> int:
        assert self.slots is not None
        pid = self.slots.pid(slot)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def state_of(self, job_id: str) -> str:
        return self.client.job_state(job_id)

    def completed(self, job_id: str) -> int:
        return int(self.client.checkpoints(job_id)["counts"]["completed"])

    def wait_finished(self, job_id: str) -> None:
        eventually(lambda: self.state_of(job_id) in ("FINISHED", "FAILED", "CANCELED"), "the end of the job")
        assert self.state_of(job_id) == "FINISHED", self.client.exceptions(job_id)["root-exception"]

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        self.coordinator.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("memory", marks=pytest.mark.endurance), "rocksdb"])
def test_count_is_exact_through_kill_9_of_a_worker(cluster: Cluster, tmp_path: Path, backend: BackendKind) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 3.0, tmp_path / "out", backend)).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    assert cluster.slots is not None
    survivor = cluster.slots.pid(1)
    victim = cluster.kill_worker(0)
    eventually(lambda: cluster.slots is not None and cluster.slots.pid(0) not in (None, victim), "the successor")
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert cluster.slots.starts(0) == 2
    assert cluster.slots.starts(1) == 1, f"worker {survivor} keeps its process"
    assert cluster.client.checkpoints(job)["latest"]["restored"]["id"] > 0
    assert cluster.slots.wait(10), "workers leave when the job is over"


def _spoil_storage(shared: Path, local: Path) -> None:
    """Who reads one of these files fails; their lengths are what the coordinator looks at before it restarts a job."""
    shared.rename(shared.with_name("away"))
    shared.mkdir()
    for path in shared.with_name("away").iterdir():
        (shared / path.name).write_bytes(bytes(path.stat().st_size))


def _damage_copies(shared: Path, local: Path) -> None:
    for path in local.glob("recovery/*/*/*"):
        if path.name != "lock":  # not in place: it is another name of a file of the survivor's database
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("harm", [pytest.param(_spoil_storage, marks=pytest.mark.endurance), _damage_copies])
def test_a_restart_reads_this_hosts_copies_and_storage_where_they_are_damaged(
    cluster: Cluster, tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    rows = 3_000
    plan = counting_plan(rows, 3.0, tmp_path / "out", "rocksdb", PaddedCountPerKey)
    job = cluster.submit(plan).job_id
    shared = cluster.state / job / "shared"
    eventually(lambda: cluster.completed(job) >= 2 and len(list(shared.glob("*.sst"))) >= 2, "stored tables")
    assert cluster.slots is not None
    pids = [pid for pid in (cluster.slots.pid(0), cluster.slots.pid(1)) if pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    completed = cluster.completed(job)
    harm(shared, cluster.local)
    cluster.kill_worker(0)
    os.kill(pids[1], signal.SIGCONT)
    workers = cluster.client.workers
    restored = ("restored_local_bytes", "restored_remote_bytes")
    eventually(lambda: any(workers(job)[name] for name in restored) or cluster.state_of(job) == "FAILED", "the restore")
    if harm is _spoil_storage:
        away = shared.with_name("away")
        eventually(lambda: workers(job)["restored_local_bytes"] >= 13 * 20_000 or cluster.state_of(job) == "FAILED", "all of it")
        assert workers(job)["restored_remote_bytes"] == 0
        for path in away.iterdir():
            path.replace(shared / path.name)
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert cluster.completed(job) > completed
    if harm is _damage_copies:
        assert workers(job)["restored_remote_bytes"] > 0
    assert cluster.slots.wait(10), "workers leave when the job is over"
    assert not list(cluster.local.glob("recovery/*/*")), "and take their copies with them"


@pytest.mark.slow
def test_coordinator_restart_leaves_workers_alone(cluster: Cluster, tmp_path: Path) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 4.0, tmp_path / "out", "memory")).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    attempt = cluster.client.workers(job)["attempt"]
    cluster.restart_coordinator()
    eventually(lambda: cluster.state_of(job) == "RUNNING", "the job led on")
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert cluster.slots is not None
    assert [cluster.slots.starts(slot) for slot in range(2)] == [1, 1]
    assert cluster.client.workers(job)["attempt"] == attempt


def own_address() -> str:
    """An address of this machine beyond loopback; loopback where it has no other."""
    addresses = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family is socket.AF_INET]
    return next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")


@pytest.mark.slow
def test_workers_beyond_loopback_talk_encrypted(cluster: Cluster, tmp_path: Path) -> None:
    rows, host = 2_000, own_address()
    job = cluster.submit(counting_plan(rows, 2.0, tmp_path / "out", "memory"), host=host, unix_sockets=False).job_id
    eventually(lambda: cluster.completed(job) >= 1, "a checkpoint")
    assert {worker["host"] for worker in cluster.client.workers(job)["workers"]} == {host}
    victim = cluster.kill_worker(0)
    eventually(lambda: cluster.slots is not None and cluster.slots.pid(0) not in (None, victim), "the successor")
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)


@pytest.mark.endurance
@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_leave_no_more_than_one_folder(cluster: Cluster, tmp_path: Path) -> None:
    """Of each slot: the living worker's, and at most its predecessor's, which might not have been dead when the sweep came by."""
    rows, kills = 3_000, 3
    job = cluster.submit(counting_plan(rows, 4.0, tmp_path / "out", "rocksdb", PaddedCountPerKey)).job_id
    assert cluster.slots is not None
    eventually(lambda: cluster.completed(job) >= 1, "a checkpoint")
    for _ in range(kills):
        victim = cluster.kill_worker(0)
        eventually(lambda victim=victim: cluster.slots.pid(0) not in (None, victim), "the successor")  # type: ignore[misc]
        before = cluster.completed(job)
        eventually(lambda before=before: cluster.completed(job) > before, "a checkpoint of the next attempt")  # type: ignore[misc]
        folders = [path.name for path in cluster.local.iterdir() if path.name != "recovery"]
        assert len(folders) <= 3, folders
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == expected(rows)
    assert cluster.slots.wait(10), "workers leave when the job is over"
    assert [path.name for path in cluster.local.iterdir() if path.name != "recovery"] == []


def test_a_worker_that_fails_or_is_killed_says_so(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    failed = start_worker(str(tmp_path / "no-spec"), str(log))
    assert failed.wait() == failed.poll() == 1
    assert "FileNotFoundError" in log.read_text()
    os.mkfifo(tmp_path / "spec")
    waiting = start_worker(str(tmp_path / "spec"), str(log))
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL

"""The whole worker protocol over real HTTP against the real coordinator: deploy, checkpoint, savepoint, restart, end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import urllib3

from holdfast.api.client import RestClient
from holdfast.api.errors import decode_error
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import server_settings
from holdfast.barriers import codec
from holdfast.barriers.jobgraph import JobConfig, Submission, SubmissionAccepted
from holdfast.barriers.latency import LatencyStats
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointMetrics,
    Deploy,
    FinishTasks,
    Heartbeat,
    NotifyCheckpointComplete,
    NumberedCommand,
    OperatorMetrics,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    SplitMetrics,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.coordinator.checkpoints.stats import CheckpointStats
from holdfast.coordinator.jobmaster.execution import Execution
from holdfast.statebackends.errors import FencedError, JobExistsError, NotFoundError, NotLeaderError, StateDirectoryNotSharedError
from holdfast.statebackends.handles import OperatorSubtaskState
from tests.api.fakes import NAME, SINK, SOURCE, make_graph

DEADLINE_S = 20.0
UIDS = {SOURCE: "in", SINK: "out"}

T = TypeVar("T")
C = TypeVar("C")


def eventually(what: str, look: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"not within {DEADLINE_S} s: {what}")


class Worker:
    """A worker that does nothing but speak."""

    def __init__(self, coordinator: EmbeddedCoordinator, accepted: SubmissionAccepted, slot: int = 0, attempt: int = 1) -> None:
        self.coordinator = coordinator
        self.accepted = accepted
        self.slot = slot
        self.task_attempt = attempt
        self.http = urllib3.PoolManager(retries=False, timeout=DEADLINE_S)
        self.base = f"/v1/jobs/{accepted.job_id}/workers"
        self.registered: Registered | None = None
        self.running: dict[tuple[str, int], SubtaskStatus] = {}
        self.attempt = 0
        self.nonce = f"nonce-{slot}-{attempt}"
        self.stream: urllib3.BaseHTTPResponse | None = None
        self.lines: Iterator[NumberedCommand] = iter(())
        self.last_number = 0

    def post(self, path: str, message: Any, kind: type[T]) -> T:
        headers = {"Authorization": f"Bearer {self.coordinator.token}"}
        url = f"{self.coordinator.url}{self.base}{path}"
        answer = self.http.request("POST", url, body=codec.encode(message), headers=headers)
        if answer.status != 200:
            raise decode_error(answer.status, answer.data, answer.headers)
        return codec.decode(answer.data, kind)

    def register(self, **changes: Any) -> Registered:
        fields: dict[str, Any] = {
            "job_id": self.accepted.job_id,
            "slot": self.slot,
            "submission": self.accepted.submission,
            "task_attempt": self.task_attempt,
            "nonce": self.nonce,
            "pid": 1,
            "host": "here",
            "data_address": f"tcp://127.0.0.1:{9000 + self.slot}",
            "directory_nonce": self.accepted.directory_nonce,
            "attempt": self.attempt,
            "subtasks": tuple(self.running.values()),
        }
        self.registered = self.post("/register", RegisterWorker(**{**fields, **changes}), Registered)
        self.last_number = 0
        return self.registered

    @property
    def session(self) -> str:
        assert self.registered is not None
        return self.registered.session

    @property
    def epoch(self) -> int:
        assert self.registered is not None
        return self.registered.epoch

    def listen(self) -> None:
        """Open the command stream, resuming behind the last command."""
        self.hang_up()
        path = f"{self.base}/{self.slot}/commands?session={self.session}&after={self.last_number}"
        headers = {"Authorization": f"Bearer {self.coordinator.token}"}
        self.stream = self.http.request("GET", self.coordinator.url + path, headers=headers, preload_content=False)
        if self.stream.status != 200:
            data = self.stream.read()
            raise decode_error(self.stream.status, data, self.stream.headers)
        self.lines = self._split(self.stream)

    @staticmethod
    def _split(stream: urllib3.BaseHTTPResponse) -> Iterator[NumberedCommand]:
        rest = b""
        for chunk in stream.stream(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (codec.decode(line, NumberedCommand) for line in lines)

    def command(self, kind: type[C]) -> C:
        """The next command of a kind; others are skipped."""
        for line in self.lines:
            if line.command is not None:
                self.last_number = line.number
                if isinstance(line.command, kind):
                    return line.command
        pytest.fail(f"the stream ended before a {kind}")

    def deploy(self) -> None:
        """Take the deployment from the registration or the stream, and report that all runs."""
        assert self.registered is not None
        deployment = self.registered.deployment or self.command(Deploy).deployment
        self.attempt = deployment.attempt
        self.report({(task.vertex, task.subtask): TaskState.RUNNING for task in deployment.subtasks})

    def report(self, states: dict[tuple[str, int], TaskState], *, drained: bool = False) -> None:
        statuses = tuple(SubtaskStatus(self.attempt, vertex, n, state, drained) for (vertex, n), state in states.items())
        self.running.update({(status.vertex, status.subtask): status for status in statuses})
        self.post(f"/{self.slot}/states", StatusBatch(self.epoch, self.slot, self.session, statuses), dict)

    def ack(self, trigger: TriggerCheckpoint, *, attempt: int = -1) -> tuple[AckStatus, ...]:
        metrics = CheckpointMetrics(sync_duration_ms=1.5, async_duration_ms=2.5, checkpointed_size=10, state_size=20)
        number = trigger.attempt if attempt < 0 else attempt
        items = tuple(
            AcknowledgeCheckpoint(number, trigger.checkpoint_id, vertex, n, {UIDS[vertex]: OperatorSubtaskState()}, metrics)
            for (vertex, n) in self.running
        )
        batch = AckBatch(self.epoch, self.slot, self.session, items)
        return self.post(f"/{self.slot}/acks", batch, AckAnswers).answers

    def hang_up(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        self.hang_up()
        self.http.clear()


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(cleanup: contextlib.ExitStack, state_dir: Path, **flags: Any) -> EmbeddedCoordinator:
    return cleanup.enter_context(EmbeddedCoordinator(server_settings({}, state_dir=state_dir, **flags)))


def connect(cleanup: contextlib.ExitStack, coordinator: EmbeddedCoordinator) -> RestClient:
    return cleanup.enter_context(contextlib.closing(RestClient(coordinator.url, coordinator.token)))


def hire(cleanup: contextlib.ExitStack, coordinator: EmbeddedCoordinator, accepted: SubmissionAccepted, attempt: int = 1) -> Worker:
    return cleanup.enter_context(contextlib.closing(Worker(coordinator, accepted, attempt=attempt)))


@pytest.fixture
def coordinator(cleanup: contextlib.ExitStack, tmp_path: Path) -> EmbeddedCoordinator:
    return start(cleanup, tmp_path / "state")


@pytest.fixture
def client(cleanup: contextlib.ExitStack, coordinator: EmbeddedCoordinator) -> RestClient:
    return connect(cleanup, coordinator)


@pytest.fixture
def accepted(client: RestClient, tmp_path: Path) -> SubmissionAccepted:
    config = JobConfig(savepoint_directory=str(tmp_path / "savepoints"), retained_checkpoints=2, checkpoint_interval_ms=None)
    return client.submit(Submission(make_graph(config=config)))


@pytest.fixture
def worker(cleanup: contextlib.ExitStack, coordinator: EmbeddedCoordinator, accepted: SubmissionAccepted) -> Worker:
    return hire(cleanup, coordinator, accepted)


def run_job(worker: Worker, client: RestClient) -> None:
    worker.register()
    worker.listen()
    worker.deploy()
    eventually("running", lambda: client.job_state(worker.accepted.job_id) == "RUNNING")


def request(client: RestClient, path: str, body: dict[str, Any]) -> str:
    return str(json.loads(client._call("POST", path, json.dumps(body).encode()))["request-id"])


def test_register_deploy_trigger_ack_complete(worker: Worker, client: RestClient) -> None:
    job_id = worker.accepted.job_id
    run_job(worker, client)
    trigger_id = request(client, f"/v1/jobs/{job_id}/checkpoints", {})
    trigger = worker.command(TriggerCheckpoint)
    assert (trigger.checkpoint_id, trigger.attempt) == (1, worker.attempt)
    (pending,) = client.checkpoints(job_id)["history"]
    assert (pending["status"], pending["num_acknowledged_subtasks"], pending["num_subtasks"]) == ("IN_PROGRESS", 0, 2)
    assert worker.ack(trigger) == (AckStatus.SUCCESS, AckStatus.SUCCESS)
    assert worker.command(NotifyCheckpointComplete).checkpoint_id == 1
    outcome = client._get(f"/v1/jobs/{job_id}/checkpoints/{trigger_id}")
    assert outcome == {"status": {"id": "COMPLETED"}, "operation": {"checkpointId": 1}}
    shown = client.checkpoints(job_id)
    assert shown["counts"] == {"restored": 0, "total": 1, "in_progress": 0, "completed": 1, "failed": 0}
    assert shown["latest"]["completed"]["external_path"] == f"{worker.accepted.directory}/{job_id}/chk-1"
    assert [each["tasks"] for each in (shown["latest"]["completed"], *shown["history"])] == [{}, {}]
    assert set(client.checkpoint(job_id, 1)["tasks"]) == {SOURCE, SINK}
    details = client._get(f"/v1/jobs/{job_id}/checkpoints/details/1/subtasks/{SOURCE}")
    assert (details["subtasks"][0]["className"], details["subtasks"][0]["state_size"]) == ("completed", 20)
    assert set(worker.ack(trigger)) <= {AckStatus.DUPLICATE, AckStatus.UNKNOWN, AckStatus.SUCCESS}, "a late repeat is answered"


def test_heartbeats_and_what_they_show(worker: Worker, client: RestClient) -> None:
    run_job(worker, client)
    metrics = (SubtaskMetrics(SOURCE, 0, records_out=7), SubtaskMetrics(SINK, 0, records_in=7))
    answer = worker.post("/0/heartbeat", Heartbeat(0, worker.session, worker.attempt, metrics), dict)
    assert answer == {"epoch": worker.epoch, "members": []}

    def written() -> list[int]:
        return [vertex["metrics"]["write-records"] for vertex in client.job(worker.accepted.job_id)["vertices"]]

    eventually("a view with the counts", lambda: written() == [7, 0] or None)
    shown = client.workers(worker.accepted.job_id)
    assert [(each["slot"], each["registered"], each["nonce"]) for each in shown["workers"]] == [(0, True, worker.nonce)]


def test_a_stream_resumes_behind_the_last_command(worker: Worker, client: RestClient) -> None:
    job_id = worker.accepted.job_id
    run_job(worker, client)
    worker.hang_up()
    request(client, f"/v1/jobs/{job_id}/checkpoints", {})
    worker.listen()
    first = worker.command(TriggerCheckpoint)
    worker.last_number -= 1
    worker.listen()
    assert worker.command(TriggerCheckpoint) == first


def test_the_newest_stream_wins(worker: Worker, client: RestClient) -> None:
    run_job(worker, client)
    older, worker.stream = worker.lines, None
    worker.listen()
    assert not any(isinstance(line.command, TriggerCheckpoint) for line in older), "the older stream ends"
    request(client, f"/v1/jobs/{worker.accepted.job_id}/checkpoints", {})
    assert worker.command(TriggerCheckpoint).checkpoint_id == 1


def test_strangers_are_refused(worker: Worker, client: RestClient, coordinator: EmbeddedCoordinator) -> None:
    with pytest.raises(NotFoundError):
        client.job("d" * 32)
    with pytest.raises(NotFoundError):
        worker.register(slot=7)
    with pytest.raises(StateDirectoryNotSharedError):
        worker.register(directory_nonce="another directory's")
    run_job(worker, client)
    with pytest.raises(FencedError):
        worker.post("/0/heartbeat", Heartbeat(0, "another session", worker.attempt), dict)
    with pytest.raises(FencedError):
        worker.register(task_attempt=0, nonce="older")
    assert worker.register().attempt == worker.attempt, "the same process may come back at any time"


def test_acks_of_a_stale_attempt_are_409(worker: Worker, client: RestClient) -> None:
    run_job(worker, client)
    request(client, f"/v1/jobs/{worker.accepted.job_id}/checkpoints", {})
    trigger = worker.command(TriggerCheckpoint)
    with pytest.raises(FencedError):
        worker.ack(trigger, attempt=trigger.attempt - 1)


def test_a_successor_supersedes_and_the_old_process_is_sent_home(
    cleanup: contextlib.ExitStack, worker: Worker, client: RestClient, coordinator: EmbeddedCoordinator
) -> None:
    run_job(worker, client)
    successor = hire(cleanup, coordinator, worker.accepted, attempt=2)
    successor.register()
    assert isinstance(worker.command(ShutdownWorker), ShutdownWorker)
    with pytest.raises(FencedError):
        worker.register()
    successor.listen()
    successor.deploy()
    assert successor.attempt > worker.attempt
    eventually("running again", lambda: client.job_state(worker.accepted.job_id) == "RUNNING")
    assert client.workers(worker.accepted.job_id)["restarts"] == 1


def test_a_dead_worker_is_seen_through_its_stream(worker: Worker, client: RestClient) -> None:
    run_job(worker, client)
    assert client.workers(worker.accepted.job_id)["workers"][0]["connected"] is True
    worker.hang_up()
    eventually("disconnected", lambda: not client.workers(worker.accepted.job_id)["workers"][0]["connected"])


def test_savepoint_stop_and_the_end(worker: Worker, client: RestClient, tmp_path: Path) -> None:
    job_id = worker.accepted.job_id
    run_job(worker, client)
    stop_id = "e" * 32
    for _ in range(2):
        assert request(client, f"/v1/jobs/{job_id}/stop", {"drain": False, "triggerId": stop_id}) == stop_id
    trigger = worker.command(TriggerCheckpoint)
    worker.ack(trigger)
    worker.command(FinishTasks)
    worker.report(dict.fromkeys(worker.running, TaskState.FINISHED))
    eventually("finished", lambda: client.job_state(job_id) == "FINISHED")
    outcome = client._get(f"/v1/jobs/{job_id}/savepoints/{stop_id}")
    assert outcome["status"] == {"id": "COMPLETED"}
    location = outcome["operation"]["location"]
    assert location.startswith(str(tmp_path / "savepoints"))
    assert (Path(location) / "_metadata").exists()
    with pytest.raises(JobExistsError):
        client.submit(Submission(make_graph()))
    restored = client.submit(Submission(make_graph(), restore=location))
    assert (restored.submission, restored.restored_checkpoint_id) == (2, 1)


def test_a_restart_leaves_the_worker_alone(
    cleanup: contextlib.ExitStack, worker: Worker, client: RestClient, coordinator: EmbeddedCoordinator, tmp_path: Path
) -> None:
    job_id = worker.accepted.job_id
    run_job(worker, client)
    attempt, epoch = worker.attempt, worker.epoch
    worker.hang_up()
    coordinator.stop()
    again = start(cleanup, tmp_path / "state")
    assert (again.url, again.token) == (coordinator.url, coordinator.token)
    with pytest.raises(FencedError):
        worker.post("/0/heartbeat", Heartbeat(0, worker.session, attempt), dict)
    registered = worker.register()
    assert registered.epoch > epoch
    assert (registered.attempt, registered.deployment) == (attempt, None)
    eventually("running again", lambda: client.job_state(job_id) == "RUNNING")
    worker.listen()
    request(client, f"/v1/jobs/{job_id}/checkpoints", {})
    worker.ack(worker.command(TriggerCheckpoint))
    worker.command(NotifyCheckpointComplete)
    assert client.workers(job_id)["attempt"] == attempt


def test_clients_of_a_coordinator_that_was_taken_over_from_are_sent_to_its_successor(
    cleanup: contextlib.ExitStack,
    worker: Worker,
    client: RestClient,
    coordinator: EmbeddedCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both live, each at its own port: whoever asks the older one is told where the job is led, by epoch and URL."""
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    job_id = worker.accepted.job_id
    run_job(worker, client)
    epoch = worker.epoch
    second = start(cleanup, tmp_path / "state", takeover=True)
    assert second.url != coordinator.url

    def named() -> dict[str, Any] | None:
        try:
            worker.post("/0/heartbeat", Heartbeat(0, worker.session, worker.attempt), dict)
        except NotLeaderError as error:
            return error.fields if "url" in error.fields else None
        return None

    assert eventually("the referral", named) == {"job": job_id, "epoch": epoch + 1, "url": second.url}
    with pytest.raises(NotLeaderError):
        worker.register()
    assert client.workers(job_id)["epoch"] == epoch + 1, "the client that was made for the older one follows"
    worker.hang_up()
    worker.coordinator = second
    assert worker.register().epoch == epoch + 1
    eventually("running again", lambda: client.job_state(job_id) == "RUNNING")
    client.cancel(job_id)
    worker.report(dict.fromkeys(worker.running, TaskState.CANCELED))
    eventually("canceled", lambda: client.job_state(job_id) == "CANCELED")


def test_cancel(worker: Worker, client: RestClient) -> None:
    run_job(worker, client)
    client.cancel(worker.accepted.job_id)
    command: WorkerCommand = worker.command(object)  # type: ignore[assignment]
    assert command is not None
    worker.report(dict.fromkeys(worker.running, TaskState.CANCELED))
    eventually("canceled", lambda: client.job_state(worker.accepted.job_id) == "CANCELED")
    assert client.overview()["jobs-cancelled"] == 1


def _counters() -> tuple[SubtaskMetrics, ...]:
    late = OperatorMetrics("out", 7, 0, 3, 4_500, {"shop.refunds": 2}, 4, "no number")
    stats = LatencyStats()
    for source in (SOURCE, "forged"):
        stats.record(source, 3)
        stats.record(source, 600_000)
    return (
        SubtaskMetrics(
            SOURCE, 0, operators=(OperatorMetrics("in", records_out=7),), watermark_lag_ms=1_500, emit_lag_ms=-250,
            source_idle_ms=4_000, idle=True, splits=40, pending_records=900,
            slowest_splits=(SplitMetrics("t-0", 7, 1_500, pending_records=300), SplitMetrics("t-1", idle=True)),
        ),
        SubtaskMetrics(
            SINK, 0, operators=(late, OperatorMetrics("nobody's", counters={"forged": 1})), latencies=stats.histograms(),
            uncommitted_checkpoints=3, uncommitted_rows=60, pending_committables=5, commit_lag_ms=2_500,
        ),
    )  # fmt: skip


def test_metrics_show_a_job_from_its_counters(worker: Worker, client: RestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(worker, client)
    job_id = worker.accepted.job_id
    request(client, f"/v1/jobs/{job_id}/checkpoints", {})
    worker.ack(worker.command(TriggerCheckpoint))
    worker.command(NotifyCheckpointComplete)
    worker.post("/0/heartbeat", Heartbeat(0, worker.session, 1, _counters()), dict)

    def walk(*_: object) -> None:
        pytest.fail("a scrape walks over the tasks or the history of a job")

    for kind, name in ((Execution, "views"), (Execution, "take_states"), (Execution, "metrics"), (CheckpointStats, "view")):
        monkeypatch.setattr(kind, name, walk)
    shown = client._call("GET", "/metrics").decode()
    label = f'job_id="{job_id}",job_name="{NAME}"'
    for line in (
        f'holdfast_job_tasks{{{label},state="running"}} 2.0',
        f"holdfast_job_source_records_total{{{label}}} 7.0",
        f"holdfast_job_sink_records_total{{{label}}} 0.0",
        f'holdfast_operator_late_records_dropped_total{{{label},operator="out"}} 3.0',
        f'holdfast_operator_rows_skipped_total{{{label},operator="out"}} 4.0',
        f'holdfast_user_counter_total{{counter="shop.refunds",{label},operator="out"}} 2.0',
        f'holdfast_checkpoints_total{{{label},outcome="completed"}} 1.0',
        f"holdfast_last_checkpoint_id{{{label}}} 1.0",
        f'holdfast_subtask_watermark_lag_seconds{{{label},subtask="0",vertex="{SOURCE}"}} 1.5',
        f'holdfast_source_emit_event_time_lag_seconds{{{label},subtask="0",vertex="{SOURCE}"}} -0.25',
        f'holdfast_source_idle_seconds{{{label},subtask="0",vertex="{SOURCE}"}} 4.0',
        f'holdfast_source_idle{{{label},subtask="0",vertex="{SOURCE}"}} 1.0',
        f'holdfast_source_splits{{{label},subtask="0",vertex="{SOURCE}"}} 40.0',
        f'holdfast_source_pending_records{{{label},subtask="0",vertex="{SOURCE}"}} 900.0',
        f'holdfast_sink_uncommitted_checkpoints{{{label},subtask="0",vertex="{SINK}"}} 3.0',
        f'holdfast_sink_uncommitted_rows{{{label},subtask="0",vertex="{SINK}"}} 60.0',
        f'holdfast_sink_pending_committables{{{label},subtask="0",vertex="{SINK}"}} 5.0',
        f'holdfast_sink_commit_lag_seconds{{{label},subtask="0",vertex="{SINK}"}} 2.5',
        f'holdfast_split_watermark_lag_seconds{{{label},split="t-0",subtask="0",vertex="{SOURCE}"}} 1.5',
        f'holdfast_split_pending_records{{{label},split="t-0",subtask="0",vertex="{SOURCE}"}} 300.0',
        f'holdfast_split_idle{{{label},split="t-1",subtask="0",vertex="{SOURCE}"}} 1.0',
        f'holdfast_latency_seconds_bucket{{{label},le="0.002",source="{SOURCE}",vertex="{SINK}"}} 0.0',
        f'holdfast_latency_seconds_bucket{{{label},le="0.005",source="{SOURCE}",vertex="{SINK}"}} 1.0',
        f'holdfast_latency_seconds_bucket{{{label},le="+Inf",source="{SOURCE}",vertex="{SINK}"}} 2.0',
        f'holdfast_latency_seconds_sum{{{label},source="{SOURCE}",vertex="{SINK}"}} 600.003',
        f"holdfast_last_checkpoint_state_bytes{{{label}}} 40.0",
        f"holdfast_job_workers{{{label}}} 1.0",
        'holdfast_jobs{state="RUNNING"} 1.0',
        'holdfast_connections{standing="worker"} 2.0',
    ):
        assert line in shown.splitlines()
    assert "forged" not in shown

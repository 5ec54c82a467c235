"""Flink's dialect: exact key sets of every endpoint, triggers and their idempotence. Source: semantics, section 3."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.api.flink import checkpoint_schemas, render_checkpoints
from holdfast.api.flink.render_jobs import job_exceptions
from holdfast.api.flink.schemas import RequestBody
from holdfast.api.flink.serialized_throwable import serialize_throwable
from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.latency import LatencyStats
from holdfast.barriers.messages import CheckpointKind, OperatorMetrics, SplitMetrics, SubtaskMetrics, TaskState
from holdfast.barriers.tunable import CheckpointMode
from holdfast.coordinator.views import RestoredView, SubtaskView, TriggerView
from tests.api.fakes import (
    JOB,
    NAME,
    SINK,
    SOURCE,
    TRIGGER,
    FakeCoordinator,
    Served,
    make_checkpoint,
    make_graph,
    make_job,
    make_overview,
)

SIZES = {
    "checkpointed_size",
    "state_size",
    "end_to_end_duration",
    "alignment_buffered",
    "processed_data",
    "persisted_data",
}
TASK_CHECKPOINT = SIZES | {"id", "status", "latest_ack_timestamp", "num_subtasks", "num_acknowledged_subtasks"}
CHECKPOINT = TASK_CHECKPOINT | {
    "className",
    "is_savepoint",
    "savepointFormat",
    "trigger_timestamp",
    "checkpoint_type",
    "tasks",
}
MIN_MAX_AVG = {"min", "max", "avg", "p50", "p90", "p95", "p99", "p999"}
TASK_STATES = {
    "CREATED",
    "SCHEDULED",
    "DEPLOYING",
    "INITIALIZING",
    "RUNNING",
    "FINISHED",
    "CANCELING",
    "CANCELED",
    "FAILED",
    "RECONCILING",
}
JOB_STATES = {
    "INITIALIZING",
    "CREATED",
    "RUNNING",
    "FAILING",
    "FAILED",
    "CANCELLING",
    "CANCELED",
    "FINISHED",
    "RESTARTING",
    "SUSPENDED",
    "RECONCILING",
}

ALWAYS_TOLD = (
    "numRecordsIn",
    "numRecordsOut",
    "numBytesIn",
    "numBytesOut",
    "accumulateBusyTimeMs",
    "accumulateIdleTimeMs",
    "accumulateBackPressuredTimeMs",
)


@pytest.fixture(params=["", "/v1"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_overview(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/overview")
    assert set(body) == {
        "taskmanagers",
        "taskmanagers-blocked",
        "slots-total",
        "slots-available",
        "slots-free-and-blocked",
        "jobs-running",
        "jobs-finished",
        "jobs-cancelled",
        "jobs-failed",
        "flink-version",
        "flink-commit",
    }
    assert body["slots-total"] == 2


def test_config(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/config")
    assert set(body) == {
        "refresh-interval",
        "timezone-name",
        "timezone-offset",
        "flink-version",
        "flink-revision",
        "features",
    }
    assert set(body["features"]) == {"web-submit", "web-cancel", "web-rescale", "web-history"}


def test_jobs(served: Served, prefix: str) -> None:
    assert served.json("GET", f"{prefix}/jobs") == {"jobs": [{"id": JOB, "status": "RUNNING"}]}


def test_jobs_overview(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/overview")
    assert set(body) == {"jobs"}
    job = body["jobs"][0]
    times = {"start-time", "end-time", "duration", "last-modification"}
    assert set(job) == times | {"jid", "name", "jobType", "schedulerType", "state", "tasks", "pending-operators"}
    assert (job["jobType"], job["schedulerType"], job["pending-operators"]) == ("STREAMING", "Default", 0)
    assert set(job["tasks"]) == {"total"} | {state.lower() for state in TASK_STATES}
    assert (job["name"], job["end-time"], job["tasks"]["total"], job["tasks"]["running"]) == (NAME, -1, 2, 2)


def test_job(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}")
    assert set(body) == {
        "jid",
        "application-id",
        "name",
        "isStoppable",
        "state",
        "job-type",
        "schedulerType",
        "start-time",
        "end-time",
        "duration",
        "maxParallelism",
        "now",
        "timestamps",
        "vertices",
        "status-counts",
        "plan",
        "pending-operators",
    }
    assert (body["job-type"], body["schedulerType"], body["pending-operators"]) == ("STREAMING", "Default", 0)
    assert set(body["timestamps"]) == JOB_STATES
    assert (body["timestamps"]["RUNNING"], body["timestamps"]["FAILED"]) == (1_100, -1)
    assert set(body["status-counts"]) == TASK_STATES
    assert (body["duration"], body["maxParallelism"], body["status-counts"]["RUNNING"]) == (5_000, 128, 2)
    vertex = body["vertices"][0]
    assert vertex["slotSharingGroupId"] == JOB, "a slot holds a subtask of each vertex"
    assert set(vertex) == {
        "id",
        "slotSharingGroupId",
        "name",
        "maxParallelism",
        "parallelism",
        "status",
        "start-time",
        "end-time",
        "duration",
        "tasks",
        "metrics",
    }
    assert set(vertex["tasks"]) == TASK_STATES
    metrics = {f"{way}-{unit}" for way in ("read", "write") for unit in ("bytes", "records")}
    metrics |= {f"{name}-complete" for name in metrics}
    metrics |= {f"accumulated-{name}-time" for name in ("backpressured", "idle", "busy")}
    assert set(vertex["metrics"]) == metrics
    assert (vertex["metrics"]["read-records"], vertex["metrics"]["write-bytes"]) == (5, 70)


def test_job_plan_names_inputs(served: Served) -> None:
    plan = served.json("GET", f"/jobs/{JOB}")["plan"]
    assert set(plan) == {"jid", "name", "type", "nodes"}
    assert plan["nodes"][0]["inputs"] == [{"num": 0, "id": SOURCE, "ship_strategy": "HASH", "exchange": "pipelined_bounded"}]


def test_the_plan_of_a_job_alone(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/plan")
    assert set(body) == {"plan"}
    assert body["plan"] == served.json("GET", f"{prefix}/jobs/{JOB}")["plan"]
    sink, source = body["plan"]["nodes"]
    assert set(sink) == {"id", "parallelism", "operator", "operator_strategy", "description", "inputs", "optimizer_properties"}
    assert (sink["id"], source["id"], source["inputs"]) == (SINK, SOURCE, [])
    served.json("GET", f"{prefix}/jobs/{'0' * 32}/plan", status=404)


def test_metrics_of_a_vertex(
    served: Served, coordinator: FakeCoordinator, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{prefix}/jobs/{JOB}/vertices/{SINK}/metrics"
    names = [each["id"] for each in served.json("GET", path)]
    assert names == [f"0.{name}" for name in ALWAYS_TOLD], "names alone"
    view = coordinator.job(JOB)
    vertex = view.vertices[1]
    stats = LatencyStats()
    for latency_ms in (0, 4, 4, 90):
        stats.record(SOURCE, latency_ms)
    metrics = SubtaskMetrics(
        SINK, 0, records_in=5, watermark_ms=7, output_watermark_ms=6, watermark_lag_ms=12, emit_lag_ms=-3, source_idle_ms=40,
        idle=True, splits=2, pending_records=7, slowest_splits=(SplitMetrics("t-0", 5, 14, True, 7), SplitMetrics("t-1")),
        operators=(OperatorMetrics("out", 5, 4, 3),), latencies=stats.histograms(),
        uncommitted_checkpoints=3, uncommitted_rows=60, pending_committables=5, commit_lag_ms=2_500,
    )  # fmt: skip
    other = replace(vertex.subtasks[0], subtask=1, drained=True)
    told = replace(vertex, subtasks=(other, replace(vertex.subtasks[0], metrics=metrics)))
    monkeypatch.setattr(coordinator, "job", lambda job_id: replace(view, vertices=(view.vertices[0], told)))
    latency = f"0.latency.source_id.{SOURCE}.operator_id.{SINK}.operator_subtask_index.0.latency"
    expected = {
        "0.currentInputWatermark": "7",
        "0.currentOutputWatermark": "6",
        "0.watermarkLag": "12",
        "0.currentEmitEventTimeLag": "-3",
        "0.sourceIdleTime": "40",
        "0.isIdle": "1",
        "0.assignedSplits": "2",
        "0.pendingRecords": "7",
        "0.uncommittedCheckpoints": "3",
        "0.uncommittedRows": "60",
        "0.pendingCommittables": "5",
        "0.commitLag": "2500",
        "0.split.t-0.watermark.currentWatermark": "5",
        "0.split.t-0.watermarkLag": "14",
        "0.split.t-0.isIdle": "1",
        "0.split.t-0.pendingRecords": "7",
        "0.split.t-1.isIdle": "0",
        "0.out.numLateRecordsDropped": "3",
        "0.out.numRecordsOut": "4",
        f"{latency}_count": "4",
        f"{latency}_max": "90",
        f"{latency}_mean": "24.500",
        f"{latency}_p99": "90.000",
        "1.numRecordsIn": "5",
        "1.isDrained": "1",
    }
    assert set(expected) <= {each["id"] for each in served.json("GET", path)}
    asked = f"{path}?get={','.join([*expected, 'nothing', '1.watermarkLag', '1.numRecordsIn'])}"
    assert served.json("GET", asked) == [{"id": name, "value": value} for name, value in expected.items()]
    assert served.json("GET", f"{path}?get=") == []
    served.json("GET", f"{prefix}/jobs/{JOB}/vertices/{'f' * 32}/metrics", status=404)
    served.json("GET", f"{path}?get={'x' * 20_000}", status=431)


def test_backpressure_of_a_vertex(
    served: Served, coordinator: FakeCoordinator, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{prefix}/jobs/{JOB}/vertices/{SINK}/backpressure"
    assert served.json("GET", path) == {"status": "deprecated"}, "none has told it"
    served.json("GET", path.replace(JOB, "0" * 32), status=404)
    view = coordinator.job(JOB)
    vertex = view.vertices[1]

    def subtask(number: int, busy_ms: int, full_ms: int, state: TaskState = TaskState.RUNNING) -> SubtaskView:
        idle_ms = 1_000 - busy_ms - full_ms
        told = SubtaskMetrics(
            SINK, number, busy_ms_per_second=busy_ms, idle_ms_per_second=idle_ms, backpressured_ms_per_second=full_ms
        )
        return replace(vertex.subtasks[0], subtask=number, state=state, metrics=told)

    told = replace(
        vertex, subtasks=(subtask(2, 300, 500), subtask(0, 100, 100), subtask(1, 0, 101), subtask(3, 0, 900, TaskState.CANCELED))
    )
    monkeypatch.setattr(coordinator, "job", lambda job_id: replace(view, vertices=(view.vertices[0], told)))
    attempt = vertex.subtasks[0].attempt
    assert served.json("GET", path) == {
        "status": "ok",
        "backpressureLevel": "low",
        "backpressure-level": "low",
        "end-timestamp": view.now_ms,
        "subtasks": [
            {
                "subtask": number, "attempt-number": attempt, "backpressureLevel": found, "backpressure-level": found,
                "ratio": ratio, "idleRatio": idle, "busyRatio": busy,
            }
            for number, found, ratio, idle, busy in (
                (0, "ok", 0.1, 0.8, 0.1), (1, "low", 0.101, 0.899, 0), (2, "low", 0.5, 0.2, 0.3),
            )
        ],
    }  # fmt: skip
    told = replace(told, subtasks=(*told.subtasks, subtask(4, 0, 501)))
    assert served.json("GET", path)["backpressureLevel"] == "high", "that of the worst"
    names = {each["id"] for each in served.json("GET", path.replace("backpressure", "metrics"))}
    assert {"4.busyTimeMsPerSecond", "4.idleTimeMsPerSecond", "4.backPressuredTimeMsPerSecond"} <= names
    refused = served.json("GET", f"{prefix}/jobs/{JOB}/vertices/{'f' * 32}/backpressure", status=404)
    assert "has no vertex" in refused["errors"][0]


def test_watermarks_of_a_vertex(
    served: Served, coordinator: FakeCoordinator, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{prefix}/jobs/{JOB}/vertices/{SINK}/watermarks"
    assert served.json("GET", path) == [], "none has told one"
    view = coordinator.job(JOB)
    vertex = view.vertices[1]
    subtasks = tuple(
        replace(vertex.subtasks[0], subtask=subtask, metrics=replace(vertex.subtasks[0].metrics, watermark_ms=watermark_ms))
        for subtask, watermark_ms in ((1, None), (2, 1_700_000_000_000), (0, -(2**63)))
    )
    told = replace(view, vertices=(view.vertices[0], replace(vertex, subtasks=subtasks)))
    monkeypatch.setattr(coordinator, "job", lambda job_id: told)
    assert served.json("GET", path) == [
        {"id": "0.currentInputWatermark", "value": "-9223372036854775808"},
        {"id": "2.currentInputWatermark", "value": "1700000000000"},
    ]
    refused = served.json("GET", f"{prefix}/jobs/{JOB}/vertices/{'f' * 32}/watermarks", status=404)
    assert "has no vertex" in refused["errors"][0]
    served.json("GET", f"{prefix}/jobs/{JOB}/vertices/none/watermarks", status=400)


def test_job_status(served: Served, prefix: str) -> None:
    assert served.json("GET", f"{prefix}/jobs/{JOB}/status") == {"status": "RUNNING"}


def test_job_exceptions(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/exceptions?maxExceptions=1")
    assert set(body) == {"root-exception", "timestamp", "all-exceptions", "truncated", "exceptionHistory"}
    assert body["exceptionHistory"]["truncated"] is True
    (entry,) = body["exceptionHistory"]["entries"]
    assert set(entry) == {
        "exceptionName",
        "stacktrace",
        "timestamp",
        "taskName",
        "location",
        "endpoint",
        "taskManagerId",
        "failureLabels",
        "concurrentExceptions",
    }
    assert (entry["exceptionName"], entry["taskName"], entry["timestamp"]) == ("UserFunctionError", "v (1/1)", 4_000)


def test_why_a_job_failed_that_is_only_on_record_is_an_exception_of_it() -> None:
    """A coordinator that did not lead it knows the end alone: clients of Flink ask here for its cause."""
    ended = replace(make_overview("FAILED"), end_ms=9_000)
    view = replace(make_job("FAILED"), overview=ended, exceptions=(), failure="UserFunctionError: boom: bang")
    found = job_exceptions(view, 20)
    assert (found.root_exception, found.timestamp, found.all_exceptions) == ("UserFunctionError: boom: bang", 9_000, [])
    (entry,) = found.exceptionHistory.entries
    assert (entry.exceptionName, entry.taskName, entry.location) == ("UserFunctionError", None, None)
    assert job_exceptions(view, 0).truncated
    for state, failure in (("CANCELED", "x"), ("RUNNING", None), ("FAILED", None)):
        other = replace(view, overview=make_overview(state), failure=failure)
        assert job_exceptions(other, 20).root_exception is None


@pytest.mark.parametrize("path", ["", "/taskmanagers", "/subtasks/0", "/subtasktimes", "/subtasks/metrics", "/accumulators"])
def test_a_vertex_of_which_no_time_is_known_is_shown(
    served: Served, monkeypatch: pytest.MonkeyPatch, prefix: str, path: str
) -> None:
    """Of a job that is only on record, or that no worker has been given yet."""
    job = make_job("FAILED")
    untold = tuple(replace(each, timestamps={}, start_ms=-1) for each in job.vertices[0].subtasks)
    view = replace(job, vertices=(replace(job.vertices[0], subtasks=untold), job.vertices[1]))
    monkeypatch.setattr(FakeCoordinator, "job", lambda self, job_id: view)
    found = served.json("GET", f"{prefix}/jobs/{JOB}/vertices/{SOURCE}{path}")
    if path == "/subtasks/0":
        assert set(found["status-duration"].values()) == {-1}


def test_job_exceptions_without_a_task(served: Served) -> None:
    entries = served.json("GET", f"/jobs/{JOB}/exceptions")["exceptionHistory"]["entries"]
    assert (entries[1]["taskName"], entries[1]["stacktrace"]) == (None, "WorkerLost: slot 0")


@pytest.mark.parametrize("query", ["", "?mode=cancel"])
def test_cancel(served: Served, coordinator: FakeCoordinator, prefix: str, query: str) -> None:
    assert served.json("PATCH", f"{prefix}/jobs/{JOB}{query}", status=202) == {}
    assert coordinator.calls == [("cancel", JOB)]


def test_cancel_refuses_another_mode(served: Served, coordinator: FakeCoordinator) -> None:
    assert "mode" in served.json("PATCH", f"/jobs/{JOB}?mode=stop", status=400)["errors"][0]
    assert coordinator.calls == []


# -------------------------------------------------------------------------------------------------------- checkpoints


def assert_checkpoint(body: dict[str, Any]) -> None:
    extra = {
        "completed": {"external_path", "discarded"},
        "failed": {"failure_timestamp", "failure_message"},
        "in_progress": set[str](),
    }[body["className"]]
    assert set(body) == CHECKPOINT | extra
    for task in body["tasks"].values():
        assert set(task) == TASK_CHECKPOINT


def test_checkpoints(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/checkpoints")
    assert set(body) == {"counts", "summary", "latest", "history"}
    assert body["counts"] == {"restored": 1, "total": 4, "in_progress": 1, "completed": 2, "failed": 1}
    assert set(body["summary"]) == SIZES
    assert all(set(numbers) == MIN_MAX_AVG for numbers in body["summary"].values())
    assert body["summary"]["state_size"]["max"] == 2
    assert body["summary"]["processed_data"]["min"] == -1
    assert set(body["latest"]) == {"completed", "savepoint", "failed", "restored"}
    assert set(body["latest"]["restored"]) == {"id", "restore_timestamp", "is_savepoint", "external_path"}
    for checkpoint in (*body["history"], *(body["latest"][kind] for kind in ("completed", "savepoint", "failed"))):
        assert_checkpoint(checkpoint)
        assert checkpoint["tasks"] == {}, "only the details have them, as with Flink"
    shown = [(each["id"], each["status"], each["className"], each["checkpoint_type"]) for each in body["history"]]
    assert shown == [
        (4, "IN_PROGRESS", "in_progress", "CHECKPOINT"),
        (3, "FAILED", "failed", "CHECKPOINT"),
        (2, "COMPLETED", "completed", "SAVEPOINT"),
        (1, "COMPLETED", "completed", "CHECKPOINT"),
    ]
    assert body["latest"]["failed"]["failure_message"] == "expired: took too long"


def test_checkpoint_config(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/checkpoints/config")
    assert set(body) == {
        "mode",
        "interval",
        "timeout",
        "min_pause",
        "max_concurrent",
        "externalization",
        "state_backend",
        "checkpoint_storage",
        "unaligned_checkpoints",
        "tolerable_failed_checkpoints",
        "aligned_checkpoint_timeout",
        "checkpoints_after_tasks_finish",
        "state_changelog_enabled",
        "changelog_periodic_materialization_interval",
        "changelog_storage",
    }
    assert body["externalization"] == {"enabled": True, "delete_on_cancellation": True}
    assert (body["mode"], body["interval"]) == ("exactly_once", 1_000)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_checkpoint_details(served: Served, prefix: str, number: int) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/checkpoints/details/{number}")
    assert body["id"] == number
    assert_checkpoint(body)


@pytest.mark.parametrize(("number", "acknowledged"), [(1, 1), (3, 1), (4, 1)])
def test_a_checkpoint_has_a_task_for_each_vertex_of_the_job(served: Served, prefix: str, number: int, acknowledged: int) -> None:
    """Flink's UI looks for each, and showed nothing at all where one was missing: of one that had finished before."""
    path = f"{prefix}/jobs/{JOB}/checkpoints/details/{number}"
    tasks = served.json("GET", path)["tasks"]
    assert set(tasks) == {SOURCE, SINK}
    assert set(tasks[SINK]) == set(tasks[SOURCE]) == TASK_CHECKPOINT
    told = [tasks[SINK][name] for name in ("status", "num_subtasks", "num_acknowledged_subtasks", "state_size")]
    assert told == ["COMPLETED", 1, acknowledged, 0]
    details = served.json("GET", f"{path}/subtasks/{SINK}")
    assert ({name: details[name] for name in tasks[SINK]}, details["subtasks"]) == (tasks[SINK], [])


def test_a_checkpoint_that_is_only_on_record_has_its_vertices_too() -> None:
    for status, expected in (("COMPLETED", ("COMPLETED", 1)), ("FAILED", ("FAILED", 0)), ("IN_PROGRESS", ("IN_PROGRESS", 0))):
        view = replace(make_checkpoint(7, status), vertices={})
        found = render_checkpoints.with_all_vertices(view, make_graph())
        assert {(each.status, each.num_acknowledged_subtasks) for each in found.vertices.values()} == {expected}
        assert set(found.vertices) == {SOURCE, SINK}


def test_checkpoint_subtasks(served: Served, prefix: str) -> None:
    body = served.json("GET", f"{prefix}/jobs/{JOB}/checkpoints/details/1/subtasks/{SOURCE}")
    assert set(body) == TASK_CHECKPOINT | {"summary", "subtasks"}
    summary = body["summary"]
    assert set(summary) == {
        "checkpointed_size",
        "state_size",
        "end_to_end_duration",
        "checkpoint_duration",
        "alignment",
        "start_delay",
    }
    assert set(summary["checkpoint_duration"]) == {"sync", "async"}
    assert set(summary["alignment"]) == {"buffered", "processed", "persisted", "duration"}
    assert set(summary["start_delay"]) == MIN_MAX_AVG
    completed, pending = body["subtasks"]
    assert set(completed) == {
        "className",
        "index",
        "status",
        "ack_timestamp",
        "end_to_end_duration",
        "checkpointed_size",
        "state_size",
        "checkpoint",
        "alignment",
        "start_delay",
        "unaligned_checkpoint",
        "aborted",
    }
    assert (completed["className"], completed["checkpoint"]) == ("completed", {"sync": 1, "async": 2})
    assert completed["alignment"] == {"buffered": 0, "processed": 4, "persisted": 0, "duration": 3}
    assert pending == {"className": "pending", "index": 1, "status": "pending_or_failed"}


@pytest.mark.parametrize(
    "path",
    [
        f"/jobs/{'d' * 32}",
        f"/jobs/{'d' * 32}/status",
        f"/jobs/{'d' * 32}/checkpoints",
        f"/jobs/{'d' * 32}/checkpoints/config",
        f"/jobs/{JOB}/checkpoints/details/99",
        f"/jobs/{JOB}/checkpoints/details/1/subtasks/{'d' * 32}",
        f"/jobs/{JOB}/nothing",
        "/nothing",
    ],
)
def test_unknown_is_404_with_a_flink_body(served: Served, prefix: str, path: str) -> None:
    body = served.json("GET", prefix + path, status=404)
    assert set(body) == {"errors"}
    assert isinstance(body["errors"][0], str)


@pytest.mark.parametrize(
    "path", ["/jobs/xyz", f"/jobs/{JOB.upper()}", f"/jobs/{JOB}/checkpoints/details/one", f"/jobs/{JOB}/checkpoints/details/-1"]
)
def test_malformed_path_is_400(served: Served, path: str) -> None:
    assert set(served.json("GET", path, status=400)) == {"errors"}


# ----------------------------------------------------------------------------------------------------------- triggers


def test_trigger_checkpoint(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    body = {"checkpointType": "FULL", "triggerId": "e" * 32}
    assert served.json("POST", f"{prefix}/jobs/{JOB}/checkpoints", body, status=202) == {"request-id": "e" * 32}
    assert coordinator.calls == [("request_checkpoint", JOB, "e" * 32)]


def test_a_checkpoint_names_its_own_mode(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    body = {"unaligned": True, "alignedCheckpointTimeout": 250}
    assert served.json("POST", f"{prefix}/jobs/{JOB}/checkpoints", body, status=202) == {"request-id": TRIGGER}
    assert coordinator.calls == [("request_checkpoint", JOB, None, CheckpointMode(unaligned=True, aligned_timeout_ms=250))]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"unaligned": "true"}, "unaligned"),
        ({"unaligned": 1}, "unaligned"),
        ({"unaligned": True, "alignedCheckpointTimeout": -1}, "alignedCheckpointTimeout"),
        ({"unaligned": True, "alignedCheckpointTimeout": 2**63}, "alignedCheckpointTimeout"),
        ({"unaligned": True, "alignedCheckpointTimeout": 1.5}, "alignedCheckpointTimeout"),
        ({"unaligned": True, "alignedCheckpointTimeout": True}, "alignedCheckpointTimeout"),
        ({"unaligned": True, "alignedCheckpointTimeout": "5"}, "alignedCheckpointTimeout"),
        (b'{"unaligned": true, "alignedCheckpointTimeout": NaN}', "alignedCheckpointTimeout"),
        (b'{"unaligned": true, "alignedCheckpointTimeout": Infinity}', "alignedCheckpointTimeout"),
        (b'{"unaligned": true, "unaligned": false}', "'unaligned' more than once"),
        ({"alignedCheckpointTimeout": 5}, "alignedCheckpointTimeout"),
        ({"alignedTimeout": 5}, "alignedTimeout"),
    ],
)
def test_a_mode_that_can_t_be_is_refused_by_name(served: Served, body: object, named: str) -> None:
    assert named in served.json("POST", f"/v1/jobs/{JOB}/checkpoints", body, status=400)["errors"][0]


@pytest.mark.parametrize("fixed", [JobConfig(checkpointing_mode="at_least_once"), JobConfig(max_concurrent_checkpoints=2)])
def test_a_job_that_can_t_overtake_refuses_to_for_one_checkpoint(
    served: Served, coordinator: FakeCoordinator, fixed: JobConfig
) -> None:
    coordinator.config = fixed
    answer = served.json("POST", f"/v1/jobs/{JOB}/checkpoints", {"unaligned": True}, status=400)
    assert "unaligned_checkpoints needs" in answer["errors"][0]
    served.json("POST", f"/v1/jobs/{'d' * 32}/checkpoints", {"unaligned": True}, status=404)


def test_trigger_without_a_body_or_content_type(served: Served, coordinator: FakeCoordinator) -> None:
    assert served.json("POST", f"/jobs/{JOB}/checkpoints", status=202) == {"request-id": TRIGGER}
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = served.request("POST", f"/jobs/{JOB}/savepoints", b'{"cancel-job": true}', headers=headers)
    assert response.status == 202
    assert coordinator.calls[-1] == ("request_savepoint", JOB, None, "CANONICAL", True, None)


def assert_cause(cause: dict[str, str], kind: str, text: str) -> None:
    """Flink's clients read the Java object alone, and hang without it."""
    assert (cause["class"], cause["stack-trace"]) == (kind, text)
    assert cause.keys() == {"class", "stack-trace", "serialized-throwable"}
    assert base64.b64decode(cause["serialized-throwable"], validate=True) == serialize_throwable(kind, text)


def test_checkpoint_trigger_in_progress_completed_and_failed(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    path = f"{prefix}/jobs/{JOB}/checkpoints/{TRIGGER}"
    assert served.json("GET", path) == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, False, checkpoint_id=7)
    assert served.json("GET", path) == {"status": {"id": "COMPLETED"}, "operation": {"checkpointId": 7}}
    coordinator.trigger = TriggerView(
        TRIGGER, CheckpointKind.CHECKPOINT, False, checkpoint_id=8, failure="a task declined", failure_reason="declined"
    )
    failed = served.json("GET", path)
    assert (failed["status"], failed["operation"].keys()) == ({"id": "COMPLETED"}, {"failureCause"})
    assert_cause(failed["operation"]["failureCause"], "declined", "a task declined")


def test_savepoint_trigger_in_progress_completed_and_failed(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    path = f"{prefix}/jobs/{JOB}/savepoints/{TRIGGER}"
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.STOP_SAVEPOINT, True)
    assert served.json("GET", path) == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.SAVEPOINT, False, checkpoint_id=7, location="/sp/savepoint-7")
    assert served.json("GET", path) == {"status": {"id": "COMPLETED"}, "operation": {"location": "/sp/savepoint-7"}}
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.SAVEPOINT, False, failure_reason="expired")
    operation = served.json("GET", path)["operation"]
    assert operation.keys() == {"failure-cause"}
    assert_cause(operation["failure-cause"], "expired", "it took longer than checkpoint_timeout_ms")


def test_a_trigger_is_found_among_its_own_kind(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    """Where a checkpoint is that retention deletes is no answer to who asked for a savepoint."""
    for kind, own, other in (
        (CheckpointKind.CHECKPOINT, "checkpoints", "savepoints"),
        (CheckpointKind.SAVEPOINT, "savepoints", "checkpoints"),
        (CheckpointKind.STOP_SAVEPOINT, "savepoints", "checkpoints"),
    ):
        coordinator.trigger = TriggerView(TRIGGER, kind, False, checkpoint_id=7, location=f"{JOB}/chk-7")
        assert served.json("GET", f"{prefix}/jobs/{JOB}/{own}/{TRIGGER}")["status"] == {"id": "COMPLETED"}
        assert "is that of a" in served.json("GET", f"{prefix}/jobs/{JOB}/{other}/{TRIGGER}", status=404)["errors"][0]


@pytest.mark.parametrize("location", [f"{JOB}/chk-1", f"/state/{JOB}/chk-1"])
def test_the_external_path_is_one_that_a_restore_takes(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    stats = coordinator.checkpoints(JOB)
    assert stats.latest_completed is not None
    view = msgspec.structs.replace(stats.latest_completed, location=location)
    restored = RestoredView(1, 5, False, location)
    shown = msgspec.structs.replace(stats, latest_completed=view, history=(view,), latest_restored=restored)
    monkeypatch.setattr(coordinator, "checkpoints", lambda job_id: shown)
    monkeypatch.setattr(coordinator, "checkpoint", lambda job_id, number: view)
    body = served.json("GET", f"/jobs/{JOB}/checkpoints")
    one = served.json("GET", f"/jobs/{JOB}/checkpoints/details/1")
    for found in (one, body["history"][0], body["latest"]["completed"], body["latest"]["restored"]):
        assert found["external_path"] == f"/state/{JOB}/chk-1"


def test_a_native_savepoint_is_called_so(served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    view = coordinator.checkpoint(JOB, 2)
    for savepoint_format in ("NATIVE", "CANONICAL", None):
        shown = msgspec.structs.replace(view, savepoint_format=savepoint_format)
        monkeypatch.setattr(coordinator, "checkpoint", lambda job_id, number, shown=shown: shown)
        assert served.json("GET", f"/jobs/{JOB}/checkpoints/details/2")["savepointFormat"] == savepoint_format


def test_savepoint_and_stop_pass_their_own_spelling(served: Served, coordinator: FakeCoordinator, prefix: str) -> None:
    savepoint = {"target-directory": "/sp", "cancel-job": False, "formatType": "CANONICAL", "triggerId": "e" * 32}
    served.json("POST", f"{prefix}/jobs/{JOB}/savepoints", savepoint, status=202)
    stop = {"targetDirectory": "/sp", "drain": True, "formatType": "NATIVE", "triggerId": "f" * 32}
    served.json("POST", f"{prefix}/jobs/{JOB}/stop", stop, status=202)
    assert coordinator.calls == [
        ("request_savepoint", JOB, "/sp", "CANONICAL", False, "e" * 32),
        ("stop", JOB, "/sp", True, "NATIVE", "f" * 32),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("savepoints", {"targetDirectory": "/sp"}),
        ("stop", {"target-directory": "/sp"}),
        ("savepoints", {"cancel-job": "yes"}),
        ("savepoints", {"target-directory": " "}),
        ("savepoints", {"formatType": "native"}),
        ("savepoints", {"triggerId": "short"}),
        ("checkpoints", {"checkpointType": "ALL"}),
        ("checkpoints", []),
        ("stop", b"{"),
        ("stop", b"\xff\xfe"),
        ("stop", b"null"),
    ],
)
def test_malformed_trigger_is_400_and_triggers_nothing(served: Served, coordinator: FakeCoordinator, path: str, body: Any) -> None:
    answer = served.json("POST", f"/jobs/{JOB}/{path}", body, status=400)
    assert set(answer) == {"errors"}
    assert coordinator.calls == []


@pytest.mark.parametrize(
    "model", [each for each in vars(checkpoint_schemas).values() if isinstance(each, type) and issubclass(each, RequestBody)]
)
def test_null_in_a_field_that_may_be_left_out_is_its_default(model: type[RequestBody]) -> None:
    """Flink's clients write every field that they know."""
    required = {field.alias or name: "/sp" for name, field in model.model_fields.items() if field.is_required()}
    optional = {field.alias or name: None for name, field in model.model_fields.items() if not field.is_required()}
    assert "triggerId" in optional or not optional
    assert model.model_validate(required | optional) == model.model_validate(required)


def test_the_bodies_of_flinks_command_line_are_taken(served: Served, coordinator: FakeCoordinator) -> None:
    """Word for word what Flink 2.3 sends; `null` for all else that there is."""
    savepoint = {"target-directory": None, "cancel-job": None, "formatType": None, "triggerId": None}
    served.json("POST", f"/v1/jobs/{JOB}/savepoints", savepoint, status=202)
    stop = {"targetDirectory": None, "drain": None, "formatType": None, "triggerId": None}
    served.json("POST", f"/v1/jobs/{JOB}/stop", stop, status=202)
    served.json("POST", f"/v1/jobs/{JOB}/checkpoints", {"checkpointType": None, "triggerId": None}, status=202)
    assert coordinator.calls == [
        ("request_savepoint", JOB, None, "CANONICAL", False, None),
        ("stop", JOB, None, False, "CANONICAL", None),
        ("request_checkpoint", JOB, None),
    ]


def test_wrong_method_is_405(served: Served) -> None:
    answer = served.request("DELETE", f"/jobs/{JOB}")
    assert (answer.status, set(answer.json())) == (405, {"errors"})
    assert (answer.headers["X-Holdfast-Error"], answer.headers["Allow"]) == ("MethodNotAllowedError", "GET")


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (f"/v1/jobs/{JOB}/history?limit=0", 400, "InvalidConfigError"),
        (f"/v1/jobs/{JOB}/checkpoints/details/abc", 400, "InvalidConfigError"),
        (f"/v1/jobs/{JOB}/vertices/{JOB}/flamegraph?type=zzz", 400, "InvalidConfigError"),
        (f"/v1/jobs/{JOB}/series", 400, "InvalidConfigError"),
        (f"/v1/jobs/{JOB}/savepoints/nope", 400, "InvalidConfigError"),
        ("/v1/jobs/nope", 400, "InvalidConfigError"),
        ("/v1/nowhere", 404, "NotFoundError"),
        ("/docs/nowhere.js", 404, "NotFoundError"),
        ("/ui/nowhere.js", 404, "NotFoundError"),
        ("/v1/jobs/metrics?get=numRestarts&jobs=zzz", 404, "NotFoundError"),
    ],
)
def test_each_refusal_has_a_class(path: str, status: int, kind: str, served: Served) -> None:
    answer = served.request("GET", path)
    assert (answer.status, answer.headers["X-Holdfast-Error"]) == (status, kind)
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["errors"][0]

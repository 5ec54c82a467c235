"""Flink's dialect beyond jobs and checkpoints: vertices, metrics, workers, the coordinator itself, applications, and what is
refused. Which keys there are is in test_flink_answers.py."""

from __future__ import annotations

import base64
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.api import logs
from holdfast.api.flink import aggregates, process
from holdfast.api.flink.render_metrics import job_metrics
from holdfast.barriers.messages import OperatorMetrics, TaskState
from tests.api.fakes import JOB, NAME, SINK, SOURCE, TOKEN, FakeCoordinator, Served, serving

WORKER = f"{JOB}_slot-0"
VERTEX = f"/v1/jobs/{JOB}/vertices/{SINK}"
OTHER = "0" * 32


def basic(token: str = TOKEN, user: str = "anybody") -> str:
    return "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()


def ask(served: Served, method: str, path: str, **headers: str) -> Any:
    return served.http.request(method, served.url + path, headers=headers)


# ----------------------------------------------------------------------------------------------------------- vertices


def test_a_vertex_has_its_subtasks_and_statistics_over_them(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = coordinator.job(JOB)
    vertex = view.vertices[1]
    first = vertex.subtasks[0]
    timestamps = {TaskState.SCHEDULED: 900, TaskState.DEPLOYING: 1_000, TaskState.INITIALIZING: 1_500, TaskState.RUNNING: 2_000}
    first = replace(first, timestamps=timestamps)
    second = replace(first, subtask=1, metrics=replace(first.metrics, subtask=1, records_in=15, busy_ms=7))
    told = replace(view, vertices=(view.vertices[0], replace(vertex, subtasks=(first, second), parallelism=2)))
    monkeypatch.setattr(coordinator, "job", lambda job_id: told)
    body = served.json("GET", VERTEX)
    assert [(each["subtask"], each["taskmanager-id"], each["endpoint"]) for each in body["subtasks"]] == [
        (0, WORKER, "127.0.0.1:1"),
        (1, "(unassigned)", "here"),
    ], "no worker has slot 1"
    assert body["subtasks"][0]["status-duration"] == {
        "CREATED": -1,
        "SCHEDULED": 100,
        "DEPLOYING": 500,
        "INITIALIZING": 500,
        "RUNNING": told.now_ms - 2_000,
    }
    numbers = body["aggregated"]["metrics"]["read-records"]
    assert numbers == {"min": 5, "max": 15, "avg": 10, "sum": 20, "median": 10, "p25": 5, "p75": 15, "p95": 15}
    durations = body["aggregated"]["status-duration"]
    assert (durations["DEPLOYING"]["sum"], durations["CREATED"]["max"]) == (1_000, -1)
    times = served.json("GET", f"{VERTEX}/subtasktimes")["subtasks"][0]
    assert (times["timestamps"]["DEPLOYING"], times["timestamps"]["FAILED"], times["duration"]) == (1_000, 0, 5_000)
    workers = served.json("GET", f"{VERTEX}/taskmanagers")["taskmanagers"]
    assert [(each["taskmanager-id"], each["status-counts"]["RUNNING"]) for each in workers] == [(WORKER, 1), ("(unassigned)", 1)]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"/v1/jobs/{JOB}/vertices/{OTHER}", "has no vertex"),
        (f"{VERTEX}/subtasks/5", "has no subtask 5"),
        (f"{VERTEX}/subtasks/0/attempts/2", "only the current one is, 1"),
        (f"/v1/jobs/{OTHER}/vertices/{SINK}/subtasktimes", "no job"),
        (f"/v1/jobs/{OTHER}/metrics", "no job"),
        (f"/v1/jobs/{OTHER}/config", "no job"),
        (f"/v1/taskmanagers/{JOB}_slot-7", "no worker holds slot 7"),
        ("/v1/taskmanagers/nobody", "no task manager 'nobody'"),
        (f"/v1/taskmanagers/{WORKER}/logs/a", "there is no log 'a'"),
        ("/v1/jobmanager/stdout", "not kept"),
        ("/v1/jobmanager/logs/..%2F..%2Fetc%2Fpasswd", "Not Found"),
        ("/v1/jobmanager/logs/other", "there is no log"),
        (f"/v1/applications/{OTHER}", "no job"),
    ],
)
def test_what_there_is_not_is_404_and_says_what(served: Served, path: str, words: str) -> None:
    assert words in served.json("GET", path, status=404)["errors"][0]


def test_a_subtasks_numbers_and_those_over_subtasks(served: Served) -> None:
    assert served.json("GET", f"{VERTEX}/subtasks/0/metrics?get=numRecordsIn,nothing") == [{"id": "numRecordsIn", "value": "5"}]
    assert {"id": "numRecordsIn"} in served.json("GET", f"{VERTEX}/subtasks/metrics")
    path = f"{VERTEX}/subtasks/metrics?get=numRecordsIn"
    assert served.json("GET", path) == [{"id": "numRecordsIn", "min": 5, "max": 5, "avg": 5, "sum": 5, "skew": 0}]
    assert served.json("GET", f"{path}&agg=max,min&subtasks=0-3") == [{"id": "numRecordsIn", "min": 5, "max": 5}]
    assert served.json("GET", f"{path}&subtasks=1-3") == []
    for wrong in ("agg=median", "subtasks=a", "subtasks=1-", "subtasks=-1"):
        served.json("GET", f"{path}&{wrong}", status=400)


def test_aggregates_are_those_of_flink() -> None:
    """Numbers that a real Flink 2.3 gave: `numRecordsIn` of two subtasks, and times of two."""
    (found,) = aggregates.aggregate(
        [{"n": "1625"}, {"n": "2075"}, {"other": "1"}, {"n": "a path"}], ["n", "n", "none"], ["skew", "avg"]
    )
    assert (found.avg, found.skew, found.min) == (1_850, pytest.approx(12.162162162162163), None)
    told = aggregates.statistics([1_499, 1_436])
    assert (told.min, told.max, told.avg, told.median, told.p25, told.p75, told.p95) == (
        1_436,
        1_499,
        1_467,
        1_467,
        1_436,
        1_499,
        1_499,
    )
    assert aggregates.percentile([1, 2, 3, 4, 5], 0.5) == 3


def test_accumulators_are_the_counters_of_users_functions(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = coordinator.job(JOB)
    vertex = view.vertices[1]
    counted = replace(vertex.subtasks[0].metrics, operators=(OperatorMetrics("out", counters={"refunds": 2, "<b>": 1}),))
    told = replace(view, vertices=(view.vertices[0], replace(vertex, subtasks=(replace(vertex.subtasks[0], metrics=counted),))))
    monkeypatch.setattr(coordinator, "job", lambda job_id: told)
    expected = [
        {"name": "<b>", "type": "LongCounter", "value": "1"},
        {"name": "refunds", "type": "LongCounter", "value": "2"},
    ]
    assert served.json("GET", f"{VERTEX}/accumulators")["user-accumulators"] == expected
    assert served.json("GET", f"{VERTEX}/subtasks/accumulators")["subtasks"][0]["user-accumulators"] == expected
    assert served.json("GET", f"{VERTEX}/subtasks/0/attempts/1/accumulators")["user-accumulators"] == expected
    of_job = served.json("GET", f"/v1/jobs/{JOB}/accumulators?includeSerializedValue=true")
    assert of_job["user-task-accumulators"] == [{"name": "refunds", "type": "LongCounter", "value": "2"}]


# --------------------------------------------------------------------------------------------------------------- jobs


def test_metrics_of_a_job(served: Served, coordinator: FakeCoordinator) -> None:
    names = [each["id"] for each in served.json("GET", f"/v1/jobs/{JOB}/metrics")]
    assert {"uptime", "numRestarts", "lastCheckpointDuration", "lastCheckpointRestoreTimestamp"} <= set(names)
    asked = served.json("GET", f"/v1/jobs/{JOB}/metrics?get=numRestarts,numberOfFailedCheckpoints,lastCompletedCheckpointId")
    assert asked == [
        {"id": "numRestarts", "value": "1"},
        {"id": "numberOfFailedCheckpoints", "value": "1"},
        {"id": "lastCompletedCheckpointId", "value": "1"},
    ]
    over = served.json("GET", f"/v1/jobs/metrics?get=numRestarts,lastCheckpointExternalPath&jobs={JOB}&agg=sum")
    assert over == [{"id": "numRestarts", "sum": 1}], "no sum of paths"
    refused = served.json("GET", f"/v1/jobs/metrics?get=numRestarts&jobs={JOB},{OTHER}", status=404)
    assert refused["errors"] == [f"jobs: there is no job '{OTHER}' here"]
    view, stats = coordinator.job(JOB), coordinator.checkpoints(JOB)
    running = job_metrics(view, stats, "/state")
    times = ("uptime", "downtime", "runningTime", "restartingTime", "allSubTasksRunningOrFinishedTime")
    assert [running[name] for name in times] == ["4900", "0", "4900", "0", "5000"]
    down = {"CREATED": 1_000, "RUNNING": 1_100, "FAILING": 900, "RESTARTING": 2_000}
    restarting = job_metrics(replace(view, overview=replace(view.overview, state="RESTARTING"), timestamps=down), stats, "/state")
    assert [restarting[name] for name in times[:4]] == ["0", "4000", "0", "4000"]
    ended = job_metrics(replace(view, overview=replace(view.overview, state="FINISHED")), stats, "/state")
    assert (ended["uptime"], ended["downtime"]) == ("-1", "-1")


def test_the_configuration_of_a_job(served: Served) -> None:
    config = served.json("GET", f"/v1/jobs/{JOB}/config")["execution-config"]
    assert config["job-parallelism"] == 1
    assert config["user-config"]["checkpoint_interval_ms"] == "1000"
    assert config["restart-strategy"].startswith("exponential_delay")


@pytest.mark.parametrize(("state", "told"), [("FINISHED", "SUCCEEDED"), ("CANCELED", "CANCELED"), ("FAILED", "FAILED")])
def test_the_result_of_a_job(served: Served, coordinator: FakeCoordinator, state: str, told: str) -> None:
    path = f"/v1/jobs/{JOB}/execution-result"
    assert served.json("GET", path) == {"status": {"id": "IN_PROGRESS"}}
    coordinator.state = state
    body = served.json("GET", path)
    result = body["job-execution-result"]
    assert (body["status"]["id"], result["application-status"], result["id"]) == ("COMPLETED", told, JOB)
    assert result.get("failure-cause", {}).get("class") == ("UserFunctionError" if state == "FAILED" else None)


def test_a_job_keeps_its_parallelism_while_it_runs(served: Served) -> None:
    path = f"/v1/jobs/{JOB}/resource-requirements"
    bounds = {"parallelism": {"lowerBound": 1, "upperBound": 1}}
    assert served.json("GET", path) == {SOURCE: bounds, SINK: bounds}
    assert "stop it with a savepoint" in served.json("PUT", path, {}, status=400)["errors"][0]
    for what in ("config", "overview", "history", "summary", f"details/{OTHER}"):
        assert "has no rescales" in served.json("GET", f"/v1/jobs/{JOB}/rescales/{what}", status=404)["errors"][0]


# ------------------------------------------------------------------------------------------------------------ workers


def test_workers_are_task_managers(served: Served, coordinator: FakeCoordinator) -> None:
    (worker,) = served.json("GET", "/v1/taskmanagers")["taskmanagers"]
    told = (worker["id"], worker["dataPort"], worker["freeSlots"], worker["assignedTasks"], worker["timeSinceLastHeartbeat"])
    assert told == (WORKER, 1, 0, 2, 5_000)
    assert worker["hardware"]["physicalMemory"] == -1, "not known"
    details = served.json("GET", f"/v1/taskmanagers/{WORKER}")
    assert [(each["jobId"], each["assignedTasks"]) for each in details["allocatedSlots"]] == [(JOB, 2)]
    assert served.json("GET", f"/v1/taskmanagers/{WORKER}/metrics?get=assignedTasks") == [{"id": "assignedTasks", "value": "2"}]
    assert served.json("GET", f"/v1/taskmanagers/metrics?get=assignedTasks&agg=max&taskmanagers={WORKER}") == [
        {"id": "assignedTasks", "max": 2}
    ]
    assert served.json("GET", "/v1/taskmanagers/metrics?get=assignedTasks&taskmanagers=x") == []
    url = served.json("GET", f"/v1/jobs/{JOB}/taskmanagers/{WORKER}/log-url")["url"]
    assert url == f"{served.url}/v1/taskmanagers/{WORKER}/log"
    entries = served.json("GET", f"/v1/jobs/{JOB}/exceptions")["exceptionHistory"]["entries"]
    assert entries[0]["taskManagerId"] == WORKER, "the same id"
    coordinator.state = "FINISHED"
    coordinator.overviews = tuple(replace(each, state="FINISHED") for each in coordinator.jobs())
    assert served.json("GET", "/v1/taskmanagers") == {"taskmanagers": []}


# ---------------------------------------------------------------------------------------------------- the coordinator


def test_no_secret_is_among_settings_process_and_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CANARY", "a-canary-in-the-environment")
    monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, "--password=a-canary-in-the-environment"])
    for path in ("config", "environment", "metrics", "thread-dump", "logs"):
        text = json.dumps(served.json("GET", f"/v1/jobmanager/{path}"))
        assert TOKEN not in text
        assert "canary" not in text
    entries = {each["key"]: each["value"] for each in served.json("GET", "/v1/jobmanager/config")}
    assert (entries["token"], entries["connections_max"], entries["takeover"]) == ("***", "8192", "false")
    assert served.json("GET", f"/v1/jobs/{JOB}/jobmanager/config") == served.json("GET", "/v1/jobmanager/config")
    assert served.json("GET", f"/v1/jobs/{JOB}/jobmanager/log-url")["url"] == f"{served.url}/v1/jobmanager/log"


def test_a_thread_dump_names_what_each_thread_does() -> None:
    held, begun = threading.Event(), threading.Event()

    def a_function_that_waits() -> None:
        begun.set()
        held.wait(10)

    thread = threading.Thread(target=a_function_that_waits, name="a thread\nof \x1b ours" + "x" * 300)
    thread.start()
    begun.wait(10)
    try:
        (found,) = [each for each in process.thread_dump().threadInfos if each.threadName.startswith("a thread")]
    finally:
        held.set()
        thread.join()
    assert "a_function_that_waits" in found.stringifiedThreadInfo
    assert found.stringifiedThreadInfo.splitlines()[0].startswith('"a thread\\nof \\x1b ours'), "one line"
    assert len(found.threadName) == process.NAME_CHARACTERS_MAX


def test_numbers_of_the_coordinator(served: Served) -> None:
    asked = "taskSlotsTotal,numRunningJobs,numRegisteredTaskManagers,Status.JVM.Memory.Heap.Used,Status.JVM.Threads.Count"
    found = {each["id"]: each["value"] for each in served.json("GET", f"/v1/jobmanager/metrics?get={asked}")}
    assert (found["taskSlotsTotal"], found["numRunningJobs"], found["numRegisteredTaskManagers"]) == ("2", "1", "1")
    assert int(found["Status.JVM.Threads.Count"]) >= 1
    assert "Status.JVM.Memory.Heap.Used" not in found, "there is no heap as Flink means it"


def test_the_newest_lines_of_the_log(served: Served) -> None:
    assert served.json("GET", "/v1/jobmanager/logs") == {"logs": []}, "a driver's own logging"
    served.json("GET", "/v1/jobmanager/log", status=404)
    logger = logging.getLogger("holdfast.test")
    with logs.writing_log("info", "text", secrets=("a-secret",), stream=_Nothing(), everything=False):  # type: ignore[arg-type]
        for number in range(20):
            logger.warning("line %s %s with a-secret", number, "x" * 4_000)
        for number in range(400):
            logger.warning("later %s %s", number, "x" * 4_000)
        logger.warning("the last\nline")
        (entry,) = served.json("GET", "/v1/jobmanager/logs")["logs"]
        text = served.request("GET", "/v1/jobmanager/log").data.decode()
        named = served.request("GET", f"/v1/jobmanager/logs/{entry['name']}")
    assert text.splitlines()[-1].endswith("the last\\nline")
    assert named.headers["content-type"] == "text/plain; charset=utf-8"
    assert "line 0 " not in text
    assert "a-secret" not in text
    assert len(text) <= logs.TAIL_CHARACTERS_MAX + 4_096
    served.json("GET", "/v1/jobmanager/log", status=404)


class _Nothing:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------ changes and refusals


def test_each_job_is_an_application(served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    (found,) = served.json("GET", "/v1/applications/overview")["applications"]
    assert (found["id"], found["name"], found["status"], found["jobs"]) == (JOB, NAME, "RUNNING", {"RUNNING": 1})
    details = served.json("GET", f"/v1/applications/{JOB}")
    assert (details["timestamps"]["CREATED"], details["timestamps"]["RUNNING"]) == (1_000, 1_100)
    assert details["jobs"][0]["jid"] == JOB
    assert served.json("GET", f"/v1/applications/{JOB}/exceptions") == {"exceptionHistory": {"entries": []}}
    with caplog.at_level(logging.INFO, "holdfast.requests"):
        assert served.json("POST", f"/v1/applications/{JOB}/cancel", status=202) == {}
    assert ("cancel", JOB) in coordinator.calls
    assert f"cancel of job {JOB} by" in caplog.text
    coordinator.state = "FAILED"
    (failure,) = served.json("GET", f"/v1/applications/{JOB}/exceptions")["exceptionHistory"]["entries"]
    assert (failure["exceptionName"], failure["jobId"], failure["stacktrace"]) == ("UserFunctionError", JOB, "Traceback ...")


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_cancellation_by_get_is_recorded_as_a_change(
    served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    with caplog.at_level(logging.INFO, "holdfast.requests"):
        assert served.json("GET", f"{prefix}/jobs/{JOB}/yarn-cancel", status=202) == {}
    assert coordinator.calls == [("cancel", JOB)]
    (line,) = [each.getMessage() for each in caplog.records if each.name == "holdfast.requests"]
    assert line.startswith(f"cancel of job {JOB} by 127.0.0.1")


HERE = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", f"/v1/jobs/{JOB}", {}, 200),
        ("GET", f"/v1/jobs/{JOB}", {"Sec-Fetch-Site": "cross-site"}, 200),
        ("PATCH", f"/v1/jobs/{JOB}", {}, 202),
        ("PATCH", f"/v1/jobs/{JOB}", HERE, 202),
        ("PATCH", f"/v1/jobs/{JOB}", {"Sec-Fetch-Site": "same-site"}, 403),
        ("PATCH", f"/v1/jobs/{JOB}", {"Origin": "http://evil.example"}, 403),
        ("PATCH", f"/v1/jobs/{JOB}", {"Origin": "null"}, 403),
        ("POST", f"/v1/applications/{JOB}/cancel", {"Referer": "http://evil.example/127.0.0.1"}, 403),
        ("GET", f"/v1/jobs/{JOB}/yarn-cancel", {}, 403),
        ("GET", f"/v1/jobs/{JOB}/yarn-cancel", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", f"/v1/jobs/{JOB}/yarn-cancel", {"Referer": "http://evil.example/"}, 403),
        ("GET", f"/v1/jobs/{JOB}/yarn-cancel", HERE, 202),
    ],
)
def test_changes_with_a_password_come_from_pages_of_this_service(
    served: Served, coordinator: FakeCoordinator, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """A browser sends it along, whichever page asks."""
    response = ask(served, method, path, Authorization=basic(), **headers)
    assert response.status == status, response.data
    assert (("cancel", JOB) in coordinator.calls) is (status == 202)


def test_a_page_is_told_from_others_by_its_own_address(served: Served, coordinator: FakeCoordinator) -> None:
    headers = {"Authorization": basic(), "Referer": f"{served.url}/flink/"}
    assert ask(served, "GET", f"/v1/jobs/{JOB}/yarn-cancel", **headers).status == 202
    assert ask(served, "PATCH", f"/v1/jobs/{JOB}", Authorization=basic(), Origin=served.url).status == 202
    assert coordinator.calls == [("cancel", JOB)] * 2


@pytest.mark.parametrize(
    "told", [basic("wrong"), basic(""), "Basic", "Basic !", "Basic " + base64.b64encode(TOKEN.encode()).decode()]
)
def test_a_wrong_password_is_401(served: Served, told: str) -> None:
    assert ask(served, "GET", "/v1/overview", Authorization=told).status == 401


def test_without_tokens_a_page_elsewhere_cancels_nothing(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator, tmp_path, token=None) as served:
        path = f"/v1/jobs/{JOB}/yarn-cancel"
        assert [ask(served, "GET", path).status, ask(served, "GET", path, **{"Sec-Fetch-Site": "cross-site"}).status] == [403, 403]
        assert coordinator.calls == []
        assert ask(served, "GET", path, **HERE).status == 202


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "jars", "jars"),
        ("POST", "jars/upload", "jars"),
        ("POST", "jars/a.jar/run", "jars"),
        ("DELETE", "jars/a.jar", "jars"),
        ("GET", "datasets", "datasets"),
        ("DELETE", "datasets/x", "datasets"),
        ("GET", "jobmanager/profiler", "profiler"),
        ("POST", f"taskmanagers/{WORKER}/profiler", "profiler"),
        ("DELETE", "cluster", "cluster"),
        ("PATCH", f"jobs/{JOB}/rescaling", "rescaling"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_what_holdfast_has_no_counterpart_for_is_refused(served: Served, prefix: str, method: str, path: str, name: str) -> None:
    response = served.request(method, f"{prefix}/{path}")
    assert response.status == 404
    assert response.headers["X-Holdfast-Error"] == "NoCounterpartError"
    (text,) = response.json()["errors"]
    assert f"Holdfast has no {name} as Flink does: " in text

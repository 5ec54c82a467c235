"""flink-rest-client 1.0.8, as it is, with the token as the password in its host: each of its queries is answered, and what there is
no counterpart for is refused with a text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.views import TriggerView
from tests.api.fakes import JOB, SOURCE, TOKEN, TRIGGER, FakeCoordinator, Served, serving
from tests.compat.flink import FLINK

pytestmark = pytest.mark.compat

WORKER = f"{JOB}_slot-0"


@pytest.fixture(scope="module")
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture(scope="module")
def served(coordinator: FakeCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(coordinator, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FLINK.parent)])  # behind ours: it brings a package `tests`
    return importlib.import_module("flink_rest_client")


@pytest.fixture
def client(library: Any, served: Served) -> Any:
    host, _, port = served.url.removeprefix("http://").partition(":")
    return library.FlinkRestClient.get(host=f"anybody:{TOKEN}@{host}", port=int(port))


def test_queries_are_answered(client: Any) -> None:
    assert client.overview()["slots-total"] == 2
    assert client.config()["flink-version"].startswith("2.3.0")
    jobs = client.jobs
    assert [each["id"] for each in jobs.all()] == [JOB] == [each["jid"] for each in jobs.overview()]
    assert "numRestarts" in jobs.metric_names()
    assert jobs.metrics(metric_names=["numRestarts"], agg_modes=["max"], job_ids=[JOB])["numRestarts"] == {"max": 1}
    assert jobs.get(JOB)["jid"] == jobs.get_config(JOB)["jid"] == jobs.get_plan(JOB)["jid"] == JOB
    assert jobs.get_exceptions(JOB)["exceptionHistory"]["entries"]
    assert jobs.get_execution_result(JOB)["status"]["id"] == "IN_PROGRESS"
    assert jobs.get_metrics(JOB, metric_names=["numRestarts"]) == {"numRestarts": "1"}
    assert jobs.get_accumulators(JOB, include_serialized_value=True)["user-task-accumulators"]
    assert jobs.get_checkpointing_configuration(JOB)["mode"] == "exactly_once"
    assert jobs.get_checkpoint_ids(JOB)
    assert jobs.get_checkpoint_details(JOB, 1)["id"] == 1


def test_queries_about_a_vertex_are_answered(client: Any) -> None:
    assert client.jobs.get_vertex_ids(JOB)[0] == SOURCE
    vertex = client.jobs.get_vertex(JOB, SOURCE)
    assert vertex.details()["id"] == SOURCE
    assert vertex.backpressure()["status"] in ("ok", "deprecated")
    assert vertex.metrics(metric_names=["0.numRecordsIn"])
    assert (vertex.subtasktimes()["id"], vertex.taskmanagers()["id"]) == (SOURCE, SOURCE)
    assert vertex.watermarks() == []
    subtasks = vertex.subtasks
    assert subtasks.subtask_ids() == [0]
    assert subtasks.accumulators()["id"] == SOURCE
    assert subtasks.metrics(metric_names=["numRecordsIn"], agg_modes=["sum"])["numRecordsIn"] == {"sum": 5}
    assert subtasks.get(0)["subtask"] == subtasks.get_attempt(0, 1)["subtask"] == 0
    assert subtasks.get_attempt_accumulators(0, 1)["user-accumulators"] == []


def test_queries_about_processes_are_answered(client: Any) -> None:
    managers = client.taskmanagers
    assert [each["id"] for each in managers.all()] == [WORKER]
    assert managers.metrics(metric_names=["assignedTasks"], agg_modes=["sum"])["assignedTasks"] == {"sum": 2}
    assert managers.get(WORKER)["id"] == WORKER
    assert managers.get_metrics(WORKER, metric_names=["assignedTasks"])
    assert [each["name"] for each in managers.get_logs(WORKER)] == ["worker.log"]
    assert "MainThread" in managers.get_thread_dump(WORKER)
    assert client.jobmanager.config()["token"] == "***"
    assert client.jobmanager.logs() == []
    assert client.jobmanager.metrics()["taskSlotsTotal"] == "2"


def test_changes_are_made(client: Any, coordinator: FakeCoordinator) -> None:
    coordinator.calls.clear()
    trigger = client.jobs.create_savepoint(JOB, "/sp")
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.SAVEPOINT, True)
    assert trigger.status["status"]["id"] == "IN_PROGRESS"
    assert client.jobs.stop(JOB, "/sp", drain=True).trigger_id == TRIGGER
    assert client.jobs.terminate(JOB)
    made = [each[0] for each in coordinator.calls if each[0] in ("request_savepoint", "stop", "cancel")]
    assert made == ["request_savepoint", "stop", "cancel"]


def test_what_there_is_not_is_refused_with_a_text(client: Any) -> None:
    for ask, words in (
        (client.jars.all, "no jars"),
        (lambda: client.jars.delete("a.jar"), "no jars"),
        (lambda: client.jars.run("a.jar"), "no jars"),
        (client.datasets, "no datasets"),
        (client.delete_cluster, "no cluster"),
        (lambda: client.jobs.rescale(JOB, 3), "no rescaling"),
    ):
        with pytest.raises(Exception, match=words):
            ask()

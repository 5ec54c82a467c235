"""Every answer of Flink's dialect, read by the classes that Flink's clients read it with; and failures, by Java itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from py4j.java_gateway import get_field
from py4j.protocol import Py4JJavaError

from holdfast.api.flink.render_jobs import JOB_STATES
from holdfast.api.flink.serialized_throwable import CHARACTERS_MAX, modified_utf8, serialize_throwable
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.views import TriggerView
from tests.api.fakes import JOB, SOURCE, TRIGGER, FakeCoordinator, Served, serving
from tests.api.test_serialized_throwable import golden
from tests.compat.flink import flink_classes

pytestmark = pytest.mark.compat

MESSAGES = "org.apache.flink.runtime.rest.messages."
VERTEX = f"jobs/{JOB}/vertices/{SOURCE}"
STRICT, FLEXIBLE = "getStrictObjectMapper", "getFlexibleObjectMapper"


@pytest.fixture(scope="module")
def flink() -> Iterator[Any]:
    with flink_classes() as gateway:
        yield gateway


@pytest.fixture(scope="module")
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture(scope="module")
def served(coordinator: FakeCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(coordinator, tmp_path_factory.mktemp("state")) as running:
        yield running


def headers_of(flink: Any, name: str) -> Any:
    """Flink's description of an endpoint."""
    java = flink.jvm.java.lang
    kind = java.Class.forName(MESSAGES + name)
    if not any(method.getName() == "getInstance" for method in kind.getMethods()):
        return kind.getConstructor(flink.new_array(java.Class, 0)).newInstance(flink.new_array(java.Object, 0))
    return invoke(flink, kind, "getInstance", None)


def invoke(flink: Any, kind: Any, method: str, target: Any) -> Any:
    """A method without arguments, through Java's reflection: py4j knows neither static ones of a class that it holds, nor default
    ones of interfaces."""
    java = flink.jvm.java.lang
    return kind.getMethod(method, flink.new_array(java.Class, 0)).invoke(target, flink.new_array(java.Object, 0))


def read(flink: Any, body: str, headers: Any, mapper: str = STRICT) -> Any:
    """As `RestClient` does: also a class with parameters, such as the result of an operation."""
    reader = getattr(flink.jvm.org.apache.flink.runtime.rest.util.RestMapperUtils, mapper)()
    parameters = list(invoke(flink, headers.getClass(), "getResponseTypeParameters", headers))
    kinds = flink.new_array(flink.jvm.java.lang.Class, len(parameters))
    for index, parameter in enumerate(parameters):
        kinds[index] = parameter
    factory = reader.getTypeFactory()
    kind = headers.getResponseClass()
    whole = factory.constructParametricType(kind, kinds) if parameters else factory.constructType(kind)
    return reader.readValue(body, whole)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("overview", "ClusterOverviewHeaders"),
        ("config", "DashboardConfigurationHeaders"),
        ("jobs", "JobIdsWithStatusesOverviewHeaders"),
        ("jobs/overview", "JobsOverviewHeaders"),
        (f"jobs/{JOB}", "job.JobDetailsHeaders"),
        (f"jobs/{JOB}/status", "job.JobStatusInfoHeaders"),
        (f"jobs/{JOB}/vertices/{SOURCE}/backpressure", "JobVertexBackPressureHeaders"),
        (f"jobs/{JOB}/exceptions", "JobExceptionsHeaders"),
        (f"jobs/{JOB}/checkpoints", "checkpoints.CheckpointingStatisticsHeaders"),
        (f"jobs/{JOB}/checkpoints/config", "checkpoints.CheckpointConfigHeaders"),
        *((f"jobs/{JOB}/checkpoints/details/{number}", "checkpoints.CheckpointStatisticDetailsHeaders") for number in range(1, 5)),
        (f"jobs/{JOB}/checkpoints/details/1/subtasks/{SOURCE}", "checkpoints.TaskCheckpointStatisticsHeaders"),
        (f"jobs/{JOB}/plan", "JobPlanHeaders"),
        (f"jobs/{JOB}/config", "JobConfigHeaders"),
        (f"jobs/{JOB}/accumulators", "JobAccumulatorsHeaders"),
        (f"jobs/{JOB}/execution-result", "job.JobExecutionResultHeaders"),
        (f"jobs/{JOB}/resource-requirements", "job.JobResourceRequirementsHeaders"),
        (f"jobs/{JOB}/metrics", "job.metrics.JobMetricsHeaders"),
        (f"jobs/{JOB}/metrics?get=numRestarts", "job.metrics.JobMetricsHeaders"),
        ("jobs/metrics?get=numRestarts", "job.metrics.AggregatedJobMetricsHeaders"),
        (f"jobs/{JOB}/jobmanager/log-url", "JobManagerLogUrlHeaders"),
        (VERTEX, "JobVertexDetailsHeaders"),
        (f"{VERTEX}/metrics", "job.metrics.JobVertexMetricsHeaders"),
        (f"{VERTEX}/backpressure", "JobVertexBackPressureHeaders"),
        (f"{VERTEX}/subtasktimes", "SubtasksTimesHeaders"),
        (f"{VERTEX}/taskmanagers", "JobVertexTaskManagersHeaders"),
        (f"{VERTEX}/accumulators", "JobVertexAccumulatorsHeaders"),
        (f"{VERTEX}/subtasks/accumulators", "SubtasksAllAccumulatorsHeaders"),
        (f"{VERTEX}/subtasks/metrics?get=numRecordsIn&agg=min,skew", "job.metrics.AggregatedSubtaskMetricsHeaders"),
        (f"{VERTEX}/subtasks/0", "job.SubtaskCurrentAttemptDetailsHeaders"),
        (f"{VERTEX}/subtasks/0/metrics?get=numRecordsIn", "job.metrics.SubtaskMetricsHeaders"),
        (f"{VERTEX}/subtasks/0/attempts/1", "job.SubtaskExecutionAttemptDetailsHeaders"),
        (f"{VERTEX}/subtasks/0/attempts/1/accumulators", "job.SubtaskExecutionAttemptAccumulatorsHeaders"),
        ("taskmanagers", "taskmanager.TaskManagersHeaders"),
        (f"taskmanagers/{JOB}_slot-0", "taskmanager.TaskManagerDetailsHeaders"),
        (f"taskmanagers/{JOB}_slot-0/metrics", "job.metrics.TaskManagerMetricsHeaders"),
        (f"taskmanagers/{JOB}_slot-0/logs", "taskmanager.TaskManagerLogsHeaders"),
        (f"taskmanagers/{JOB}_slot-0/thread-dump", "taskmanager.TaskManagerThreadDumpHeaders"),
        (f"{VERTEX}/flamegraph?type=on_cpu", "JobVertexFlameGraphHeaders"),
        ("taskmanagers/metrics?get=assignedTasks", "job.metrics.AggregatedTaskManagerMetricsHeaders"),
        ("jobmanager/config", "ClusterConfigurationInfoHeaders"),
        ("jobmanager/environment", "JobManagerEnvironmentHeaders"),
        ("jobmanager/metrics", "job.metrics.JobManagerMetricsHeaders"),
        ("jobmanager/logs", "cluster.JobManagerLogListHeaders"),
        ("jobmanager/thread-dump", "cluster.JobManagerThreadDumpHeaders"),
        ("applications/overview", "ApplicationsOverviewHeaders"),
        (f"applications/{JOB}", "application.ApplicationDetailsHeaders"),
        (f"applications/{JOB}/exceptions", "application.ApplicationExceptionsHeaders"),
        (f"applications/{JOB}/jobmanager/config", "application.JobManagerApplicationConfigurationHeaders"),
    ],
)
def test_an_answer_is_read(flink: Any, served: Served, path: str, headers: str) -> None:
    """Strictly: Flink's clients pass over what they don't know, and there is nothing of that but for Flink 1's exceptions."""
    described = headers_of(flink, headers)
    wanted = described.getTargetRestEndpointURL()
    for given, name in ((JOB, ":jobid"), (SOURCE, ":vertexid")):
        wanted = wanted.replace(name, given)
    assert wanted.split("/:")[0] in f"/{path}"
    mapper = FLEXIBLE if path.endswith("exceptions") else STRICT
    assert read(flink, json.dumps(served.json("GET", f"/v1/{path}")), described, mapper) is not None


def test_the_job_is_the_one(flink: Any, served: Served) -> None:
    (job,) = read(flink, json.dumps(served.json("GET", "/v1/jobs/overview")), headers_of(flink, "JobsOverviewHeaders")).getJobs()
    assert (job.getJobId().toString(), job.getJobName(), job.getStatus().toString()) == (JOB, "flights", "RUNNING")
    assert (job.getJobType().toString(), job.getSchedulerType().toString()) == ("STREAMING", "Default")


@pytest.mark.parametrize("state", ["FINISHED", "CANCELED", "FAILED"])
def test_the_result_of_a_job_is_read(flink: Any, served: Served, coordinator: FakeCoordinator, state: str) -> None:
    coordinator.state = state
    body = json.dumps(served.json("GET", f"/v1/jobs/{JOB}/execution-result"))
    result = read(flink, body, headers_of(flink, "job.JobExecutionResultHeaders")).getJobExecutionResult()
    assert result.getJobId().toString() == JOB
    assert (result.getSerializedThrowable().isPresent()) is (state == "FAILED")
    exceptions = served.json("GET", f"/v1/applications/{JOB}/exceptions")
    read(flink, json.dumps(exceptions), headers_of(flink, "application.ApplicationExceptionsHeaders"))
    coordinator.state = "RUNNING"


@pytest.mark.parametrize("state", JOB_STATES)
def test_every_state_of_a_job_is_known(flink: Any, served: Served, coordinator: FakeCoordinator, state: str) -> None:
    coordinator.state = state
    for path, headers in (("jobs/overview", "JobsOverviewHeaders"), (f"jobs/{JOB}", "job.JobDetailsHeaders")):
        read(flink, json.dumps(served.json("GET", f"/v1/{path}")), headers_of(flink, headers))


@pytest.mark.parametrize(
    ("kind", "path", "headers"),
    [
        (CheckpointKind.CHECKPOINT, "checkpoints", "checkpoints.CheckpointStatusHeaders"),
        (CheckpointKind.SAVEPOINT, "savepoints", "job.savepoints.SavepointStatusHeaders"),
        (CheckpointKind.STOP_SAVEPOINT, "savepoints", "job.savepoints.SavepointStatusHeaders"),
    ],
)
def test_an_operation_is_read_under_way_done_and_failed(
    flink: Any, served: Served, coordinator: FakeCoordinator, kind: CheckpointKind, path: str, headers: str
) -> None:
    described = headers_of(flink, headers)

    def ask(view: TriggerView) -> Any:
        coordinator.trigger = view
        return read(flink, json.dumps(served.json("GET", f"/v1/jobs/{JOB}/{path}/{TRIGGER}")), described)

    under_way = TriggerView(TRIGGER, kind, True)
    assert ask(under_way).queueStatus().getId().toString() == "IN_PROGRESS"
    done = msgspec.structs.replace(under_way, in_progress=False, checkpoint_id=7, location="/sp/a")
    found = ask(done).resource()
    assert found.getFailureCause() is None
    assert (found.getCheckpointId() if path == "checkpoints" else found.getLocation()) == (7 if path == "checkpoints" else "/sp/a")
    failed = msgspec.structs.replace(done, failure="a task declined: é \U0001f600", failure_reason="declined")
    cause = ask(failed).resource().getFailureCause()
    assert cause.toString() == "declined: a task declined: é \U0001f600"
    assert cause.getOriginalErrorClassName() == "declined"


def test_an_accepted_request_and_an_error_are_read(flink: Any, served: Served) -> None:
    accepted = json.dumps(served.json("POST", f"/v1/jobs/{JOB}/savepoints", {"target-directory": "/sp"}, status=202))
    described = headers_of(flink, "job.savepoints.SavepointTriggerHeaders")
    assert read(flink, accepted, described).getTriggerId().toString() == TRIGGER
    body = json.dumps(served.json("GET", f"/v1/jobs/{'d' * 32}", status=404))
    mapper = flink.jvm.org.apache.flink.runtime.rest.util.RestMapperUtils.getStrictObjectMapper()
    error = mapper.readValue(body, flink.jvm.java.lang.Class.forName(f"{MESSAGES}ErrorResponseBody"))
    assert list(get_field(error, "errors")) == [f"no job {'d' * 32}"]


def deserialize(flink: Any, stream: bytes) -> Any:
    loader = flink.jvm.java.lang.ClassLoader.getSystemClassLoader()
    return flink.jvm.org.apache.flink.util.InstantiationUtil.deserializeObject(stream, loader)


def test_java_reads_the_golden_bytes(flink: Any) -> None:
    for kind, (text, stream) in golden().items():
        thrown = deserialize(flink, stream)
        assert thrown.getClass().getName() == "org.apache.flink.util.SerializedThrowable"
        assert thrown.getOriginalErrorClassName() == kind
        assert thrown.getMessage() == text.encode("utf-8", "replace").decode(), "py4j sends no half of a pair"
        assert thrown.toString() == thrown.getFullStringifiedStackTrace()
        assert (thrown.getCause(), len(thrown.getStackTrace()), len(thrown.getSuppressed())) == (None, 0, 0)
        assert thrown.deserializeError(flink.jvm.java.lang.ClassLoader.getSystemClassLoader()).equals(thrown)


def test_java_reads_long_texts_and_writes_what_we_write(flink: Any) -> None:
    """But for the stack trace, which Java has as an empty array where we have none."""
    text = "\U0001f600" * CHARACTERS_MAX
    stream = serialize_throwable("declined", text)
    thrown = deserialize(flink, stream)
    assert thrown.getMessage() == text
    again = bytes(flink.jvm.org.apache.flink.util.InstantiationUtil.serializeObject(thrown))
    common = next(index for index, (ours, javas) in enumerate(zip(stream, again, strict=False)) if ours != javas)
    assert stream[:common].endswith(modified_utf8("\U0001f600"))
    assert again.endswith(stream[common + 1 :])


def test_a_stream_that_was_cut_is_none(flink: Any) -> None:
    """The check can fail."""
    with pytest.raises(Py4JJavaError, match="EOFException"):
        deserialize(flink, serialize_throwable("declined", "text")[:-1])


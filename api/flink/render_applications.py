"""A job's configuration, accumulators and result, and applications, in Flink's dialect: pure functions from views to records.

Each job is an application of its own, with the job's id."""

from __future__ import annotations

import msgspec

from holdfast.api.flink import job_schemas as shapes
from holdfast.api.flink import schemas
from holdfast.api.flink.checkpoint_schemas import OperationStatus
from holdfast.api.flink.render_checkpoints import failure_cause
from holdfast.api.flink.render_jobs import duration, job_overview
from holdfast.api.flink.render_vertices import user_accumulators
from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.coordinator.views import JobOverviewView, JobView
from holdfast.statebackends.secrets import HIDDEN, has_login, is_secret_name


def job_configuration(view: JobView, config: JobConfig) -> shapes.JobConfiguration:
    """`config`: the settings that hold."""
    return shapes.JobConfiguration(
        jid=view.overview.job_id,
        name=view.overview.name,
        execution_config=shapes.ExecutionConfig(
            restart_strategy=config.restart.describe(),
            job_parallelism=_parallelism(view.graph),
            user_config={name: shown(name, value) for name, value in msgspec.to_builtins(config).items()},
        ),
    )


def _parallelism(graph: JobGraph) -> int:
    return max((vertex.parallelism for vertex in graph.vertices), default=schemas.UNKNOWN)


def shown(name: str, value: object) -> str:
    """A setting as text; one that holds a secret is hidden."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return HIDDEN if (value is not None and is_secret_name(name)) or has_login(text) else text


def job_accumulators(view: JobView) -> shapes.JobAccumulators:
    """Counters of users' functions, of the submission."""
    found = user_accumulators(totals.counters for totals in view.totals.values())
    return shapes.JobAccumulators(user_task_accumulators=found)


_RESULTS = {"FINISHED": "SUCCEEDED", "CANCELED": "CANCELED", "FAILED": "FAILED"}


def execution_result(view: JobView) -> shapes.ExecutionResult:
    overview = view.overview
    if not overview.is_terminal:
        return shapes.ExecutionResult(status=OperationStatus(id="IN_PROGRESS"))
    kind, _, _ = (view.failure or "").partition(":")
    failed = overview.state == "FAILED"
    result = shapes.JobResult(
        id=overview.job_id,
        name=overview.name,
        application_status=_RESULTS[overview.state],
        net_runtime=duration(overview.start_ms, overview.end_ms, view.now_ms),
        failure_cause=failure_cause(kind or "JobFailed", view.failure or "the job failed") if failed else None,
        application_id=overview.job_id,
        start_time=overview.start_ms,
        end_time=overview.end_ms,
    )
    return shapes.ExecutionResult(status=OperationStatus(id="COMPLETED"), job_execution_result=result)


def resource_requirements(view: JobView) -> shapes.ResourceRequirements:
    """A job runs at the parallelism that it was submitted with: both bounds are that."""
    return shapes.ResourceRequirements(
        {
            vertex.vertex_id: shapes.VertexRequirements(
                parallelism=shapes.ParallelismBounds(lowerBound=vertex.parallelism, upperBound=vertex.parallelism)
            )
            for vertex in view.graph.vertices
        }
    )


# ------------------------------------------------------------------------------------------------------- applications

_STATES = {"INITIALIZING": "CREATED", "CREATED": "CREATED", "CANCELLING": "CANCELING"} | {
    state: state for state in ("FAILING", "FAILED", "CANCELED", "FINISHED")
}
"""State of a job -> that of its application; RUNNING for all others."""
_APPLICATION_STATES = ("CREATED", "RUNNING", "FAILING", "FAILED", "CANCELING", "CANCELED", "FINISHED")


def application_overview(view: JobOverviewView, *, now_ms: int) -> shapes.ApplicationOverview:
    return shapes.ApplicationOverview(
        id=view.job_id,
        name=view.name,
        start_time=view.start_ms,
        end_time=view.end_ms,
        duration=duration(view.start_ms, view.end_ms, now_ms),
        status=_STATES.get(view.state, "RUNNING"),
        jobs={view.state: 1},
    )


def application_details(view: JobView) -> shapes.ApplicationDetails:
    overview = application_overview(view.overview, now_ms=view.now_ms)
    entered: dict[str, int] = dict.fromkeys(_APPLICATION_STATES, 0)
    for state, at_ms in view.timestamps.items():
        name = _STATES.get(state, "RUNNING")
        entered[name] = min(entered[name] or at_ms, at_ms)
    return shapes.ApplicationDetails(
        id=overview.id,
        name=overview.name,
        status=overview.status,
        start_time=overview.start_time,
        end_time=overview.end_time,
        duration=overview.duration,
        timestamps=entered,
        jobs=[job_overview(view.overview, now_ms=view.now_ms)],
    )


def application_exceptions(view: JobView) -> shapes.ApplicationExceptions:
    """The failure that ended the job, as Flink has it; those that it survived are the job's."""
    entries = []
    if view.overview.state == "FAILED" and view.failure:
        newest = next((each for each in view.exceptions if each.error == view.failure), None)
        entries.append(
            shapes.ApplicationException(
                exceptionName=view.failure.partition(":")[0],
                stacktrace=(newest.traceback if newest else "") or view.failure,
                timestamp=newest.timestamp_ms if newest else view.overview.end_ms,
                jobId=view.overview.job_id,
            )
        )
    return shapes.ApplicationExceptions(exceptionHistory=shapes.ApplicationExceptionHistory(entries=entries))

"""Vertices and their subtasks in Flink's dialect: pure functions from the coordinator's views to response records.

A subtask runs in the slot of its own number, so that its worker is known; the worker's id names job and slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holdfast.api.flink import schemas
from holdfast.api.flink import vertex_schemas as shapes
from holdfast.api.flink.aggregates import statistics
from holdfast.api.flink.render_jobs import TASK_STATES, count_tasks, duration, sum_metrics, vertex_metrics, vertex_of
from holdfast.barriers.messages import TaskState
from holdfast.coordinator.views import JobView, SubtaskView, WorkerView
from holdfast.statebackends.errors import NotFoundError

_NEVER = 0
"""Flink's time of a state that was not entered."""


def worker_id(job_id: str, slot: int) -> str:
    """Of the process in a slot, over all jobs: Flink's task manager id."""
    return f"{job_id}_slot-{slot}"


def endpoint_of(worker: WorkerView | None) -> str:
    """`host:port` where the worker takes records, its host alone, or Flink's word for no place."""
    if worker is None:
        return shapes.NOWHERE
    return worker.data_address.partition("://")[2] or worker.host or shapes.NOWHERE


class _Places:
    """Workers of a job by slot."""

    def __init__(self, view: JobView) -> None:
        self._job_id = view.overview.job_id
        self._workers = {worker.slot: worker for worker in view.workers if worker.nonce}

    def endpoint(self, subtask: SubtaskView) -> str:
        found = endpoint_of(self._workers.get(subtask.subtask))
        return found if found != shapes.NOWHERE else subtask.host or found

    def worker(self, subtask: SubtaskView) -> str:
        return worker_id(self._job_id, subtask.subtask) if subtask.subtask in self._workers else shapes.NOWHERE


def vertex_details(view: JobView, vertex_id: str) -> shapes.VertexDetails:
    """Raises NotFoundError for a vertex that the job doesn't have, as the others."""
    vertex, places = vertex_of(view, vertex_id), _Places(view)
    return shapes.VertexDetails(
        id=vertex.vertex_id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        maxParallelism=vertex.max_parallelism,
        now=view.now_ms,
        subtasks=[_attempt(each, places, view.now_ms) for each in vertex.subtasks],
        aggregated=_aggregated(vertex.subtasks, view.now_ms),
    )


def subtask_of(view: JobView, vertex_id: str, subtask: int, attempt: int | None = None) -> SubtaskView:
    """One subtask of the current attempt. Raises NotFoundError (vertex, subtask, attempt): earlier attempts are not kept."""
    vertex = vertex_of(view, vertex_id)
    found = next((each for each in vertex.subtasks if each.subtask == subtask), None)
    if found is None:
        text = f"vertex {vertex_id} has no subtask {subtask}: it has {vertex.parallelism}"
        raise NotFoundError(text, job=view.overview.job_id, vertex=vertex_id)
    if attempt is not None and attempt != found.attempt:
        text = f"attempt {attempt} of subtask {subtask} is not known: only the current one is, {found.attempt}"
        raise NotFoundError(text, job=view.overview.job_id, vertex=vertex_id)
    return found


def subtask_attempt(view: JobView, subtask: SubtaskView) -> shapes.SubtaskAttempt:
    return _attempt(subtask, _Places(view), view.now_ms)


def _attempt(view: SubtaskView, places: _Places, now_ms: int) -> shapes.SubtaskAttempt:
    return shapes.SubtaskAttempt(
        subtask=view.subtask,
        status=view.state,
        attempt=view.attempt,
        endpoint=places.endpoint(view),
        started=view.start_ms,
        started_again=view.start_ms,
        end_time=view.end_ms,
        duration=duration(view.start_ms, view.end_ms, now_ms),
        metrics=sum_metrics([view.metrics]),
        taskmanager_id=places.worker(view),
        status_duration=_time_in_states(view, now_ms),
    )


_BEFORE_THE_END = (TaskState.CREATED, TaskState.SCHEDULED, TaskState.DEPLOYING, TaskState.INITIALIZING, TaskState.RUNNING)


def _time_in_states(view: SubtaskView, now_ms: int) -> dict[str, int]:
    entered = sorted((at_ms, str(state)) for state, at_ms in view.timestamps.items() if at_ms >= 0)
    ends = [at_ms for at_ms, _ in entered[1:]] + [view.end_ms if view.end_ms >= 0 else now_ms]
    spent = {state: max(0, until - since) for (since, state), until in zip(entered, ends, strict=False)}  # none entered: one end
    return {str(state): spent.get(str(state), schemas.UNKNOWN) for state in _BEFORE_THE_END}


def _aggregated(subtasks: Sequence[SubtaskView], now_ms: int) -> shapes.Aggregated:
    numbers: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for each in subtasks:
        for name, value in sum_metrics([each.metrics]).model_dump(by_alias=True).items():
            if not isinstance(value, bool):
                numbers.setdefault(name, []).append(value)
        for state, spent in _time_in_states(each, now_ms).items():
            times.setdefault(state, []).extend([spent] if spent >= 0 else [])
    return shapes.Aggregated(
        metrics={name: statistics(values) for name, values in numbers.items()},
        status_duration={state: statistics(values or [schemas.UNKNOWN]) for state, values in times.items()},
    )


def subtask_times(view: JobView, vertex_id: str) -> shapes.VertexTimes:
    vertex, places = vertex_of(view, vertex_id), _Places(view)
    times = [
        shapes.SubtaskTimes(
            subtask=each.subtask,
            endpoint=places.endpoint(each),
            duration=duration(each.start_ms, each.end_ms, view.now_ms),
            timestamps={str(state): _entered(each, str(state)) for state in TASK_STATES},
        )
        for each in vertex.subtasks
    ]
    return shapes.VertexTimes(id=vertex.vertex_id, name=vertex.name, now=view.now_ms, subtasks=times)


def _entered(view: SubtaskView, state: str) -> int:
    return next((at_ms for each, at_ms in view.timestamps.items() if str(each) == state and at_ms >= 0), _NEVER)


def vertex_workers(view: JobView, vertex_id: str) -> shapes.VertexWorkers:
    """The subtasks of a vertex, by the worker that has them."""
    vertex, places = vertex_of(view, vertex_id), _Places(view)
    groups: dict[tuple[str, str], list[SubtaskView]] = {}
    for each in vertex.subtasks:
        groups.setdefault((places.worker(each), places.endpoint(each)), []).append(each)
    workers = [_vertex_worker(worker, endpoint, each, view.now_ms) for (worker, endpoint), each in groups.items()]
    return shapes.VertexWorkers(id=vertex.vertex_id, name=vertex.name, now=view.now_ms, taskmanagers=workers)


_PROGRESS = (*_BEFORE_THE_END, TaskState.CANCELING, TaskState.CANCELED, TaskState.FINISHED)


def _vertex_worker(worker: str, endpoint: str, subtasks: Sequence[SubtaskView], now_ms: int) -> shapes.VertexWorker:
    states = [each.state for each in subtasks]
    state = TaskState.FAILED if TaskState.FAILED in states else min(states, key=_PROGRESS.index)
    start_ms = min((each.start_ms for each in subtasks if each.start_ms >= 0), default=schemas.UNKNOWN)
    ended = all(each.end_ms >= 0 for each in subtasks)
    end_ms = max(each.end_ms for each in subtasks) if ended else schemas.UNKNOWN
    return shapes.VertexWorker(
        endpoint=endpoint,
        status=state,
        start_time=start_ms,
        end_time=end_ms,
        duration=duration(start_ms, end_ms, now_ms),
        metrics=sum_metrics([each.metrics for each in subtasks]),
        status_counts=count_tasks(Counter(states)),
        taskmanager_id=worker,
        aggregated=_aggregated(subtasks, now_ms),
    )


# ------------------------------------------------------------------------------------------------------- accumulators


def user_accumulators(counters: Iterable[Mapping[str, int]]) -> list[shapes.UserAccumulator]:
    """Counters of users' functions, added up by name."""
    found: Counter[str] = Counter()
    for each in counters:
        found.update(each)
    return [shapes.UserAccumulator(name=name, value=str(count)) for name, count in sorted(found.items())]


def _accumulators_of(subtasks: Iterable[SubtaskView]) -> list[shapes.UserAccumulator]:
    return user_accumulators(operator.counters for each in subtasks for operator in each.metrics.operators)


def vertex_accumulators(view: JobView, vertex_id: str) -> shapes.VertexAccumulators:
    """Since the attempt began."""
    vertex = vertex_of(view, vertex_id)
    return shapes.VertexAccumulators(id=vertex.vertex_id, user_accumulators=_accumulators_of(vertex.subtasks))


def subtasks_accumulators(view: JobView, vertex_id: str) -> shapes.SubtasksAccumulators:
    vertex, places = vertex_of(view, vertex_id), _Places(view)
    subtasks = [
        shapes.SubtaskAccumulators(
            subtask=each.subtask,
            attempt=each.attempt,
            endpoint=places.endpoint(each),
            user_accumulators=_accumulators_of([each]),
        )
        for each in vertex.subtasks
    ]
    return shapes.SubtasksAccumulators(id=vertex.vertex_id, parallelism=vertex.parallelism, subtasks=subtasks)


def attempt_accumulators(view: JobView, subtask: SubtaskView) -> shapes.AttemptAccumulators:
    return shapes.AttemptAccumulators(
        subtask=subtask.subtask,
        attempt=subtask.attempt,
        id=f"{view.overview.job_id}_{subtask.vertex}_{subtask.subtask}_{subtask.attempt}",
        user_accumulators=_accumulators_of([subtask]),
    )


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics_by_subtask(view: JobView, vertex_id: str) -> dict[int, dict[str, str]]:
    """The numbers of `vertex_metrics` by subtask, without its number before the name."""
    found: dict[int, dict[str, str]] = {each.subtask: {} for each in vertex_of(view, vertex_id).subtasks}
    for name, value in vertex_metrics(view, vertex_id).items():
        subtask, _, metric = name.partition(".")
        found[int(subtask)][metric] = value
    return found

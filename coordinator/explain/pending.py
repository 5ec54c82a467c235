"""Why a checkpoint has not all of its acknowledgements: who is missing, in what state, and what they wait for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.barriers.messages import SubtaskKey, TaskState
from holdfast.coordinator.explain.bottleneck import find_bottleneck, longest_call
from holdfast.coordinator.explain.facts import Facts, silence_text
from holdfast.coordinator.explain.master_hooks import explain_awaited_hooks
from holdfast.coordinator.explain.records import Cause, CauseKind, Place
from holdfast.coordinator.explain.slow import Chain, explain_slow, follow_barrier
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import CheckpointView, WorkerView
from holdfast.statebackends.layout import METADATA_NAME

NAMED_MAX = 5
"""Missing subtasks that are named."""
MOST = 0.5


def explain_pending(facts: Facts, checkpoint: CheckpointView) -> Chain:
    """Of a checkpoint that is in progress, and late."""
    awaited = explain_awaited_hooks(facts, checkpoint)
    if awaited is not None:
        return awaited
    missing = missing_subtasks(checkpoint)
    if not missing and checkpoint.vertices:
        waited_ms = facts.job.now_ms - checkpoint.latest_ack_ms
        text = f"all subtasks have acknowledged; its {METADATA_NAME} has been under way for {duration_text(waited_ms)}"
        return Chain([Cause(CauseKind.DECIDING, f"{text}: the storage of the state directory is slow or not there")])
    return explain_missing_acks(facts, checkpoint, missing)


def place_of_wait(facts: Facts, checkpoint: CheckpointView) -> list[SubtaskKey]:
    """Missing subtasks of live workers, most likely ones first; empty if the cause is seen without asking them."""
    if checkpoint.hooks is not None and checkpoint.hooks.missing:
        return []  # no task knows of it yet
    missing = missing_subtasks(checkpoint)
    frontier = _frontier(facts, missing) if missing else []
    if not frontier or _worker_cause(facts, missing, -1) or _task_cause(facts, frontier):
        return []
    call = longest_call(facts)
    in_call = [each for each in frontier if call is not None and each.subtask == call.subtask]  # subtask i runs in slot i
    first = _busiest(facts, in_call or frontier)
    return [first, *(each for each in frontier if each != first)]


def missing_subtasks(checkpoint: CheckpointView) -> list[SubtaskKey]:
    return [
        SubtaskKey(vertex.vertex, subtask.subtask)
        for vertex in checkpoint.vertices.values()
        for subtask in vertex.subtasks
        if subtask.ack_ms < 0
    ]


def explain_missing_acks(facts: Facts, checkpoint: CheckpointView, missing: Sequence[SubtaskKey], *, ended_ms: int = -1) -> Chain:
    """`ended_ms`: when the checkpoint failed; -1: it is in progress."""
    if not missing:
        return Chain([Cause(CauseKind.NOT_KNOWN, "which acknowledgements were missing is not known any more")])
    frontier = _frontier(facts, missing)
    named = ", ".join(f"{facts.place(each.vertex, each.subtask)} ({_state(facts, each)})" for each in frontier[:NAMED_MAX])
    more = f" and {len(frontier) - NAMED_MAX} more" if len(frontier) > NAMED_MAX else ""
    first = "" if len(frontier) == len(missing) else "first in line: "
    text = f"{len(missing)} of {checkpoint.num_subtasks} acknowledgements are missing; {first}{named}{more}"
    key = frontier[0]
    chain = Chain([Cause(CauseKind.MISSING_ACKS, text, facts.place(key.vertex, key.subtask))], key.vertex)
    if (unwell := _worker_cause(facts, missing, ended_ms)) or (unwell := _task_cause(facts, frontier)):
        return chain.add(unwell)
    return _barrier_or_work(facts, checkpoint, missing, frontier, chain, ended_ms)


def _frontier(facts: Facts, missing: Sequence[SubtaskKey]) -> list[SubtaskKey]:
    """Those of vertices in front of which nobody is missing: the others may wait for them."""
    vertices = {each.vertex for each in missing}
    behind: set[str] = set()
    for vertex in facts.order:  # those in front of a vertex come first
        if any(each in vertices or each in behind for each in facts.inputs[vertex]):
            behind.add(vertex)
    return [each for each in missing if each.vertex not in behind] or list(missing)


def _state(facts: Facts, key: SubtaskKey) -> str:
    found = facts.subtask(key.vertex, key.subtask)
    return found.state.value if found is not None else "unknown"


def _worker_cause(facts: Facts, missing: Sequence[SubtaskKey], ended_ms: int) -> Cause | None:
    """A process of the missing ones is gone, or is silent."""
    config = facts.config
    for slot in dict.fromkeys(each.subtask for each in missing):
        worker = facts.workers.get(slot)
        if worker is None:
            continue
        if not worker.registered or worker.timed_out:
            text = f"no worker is in slot {slot}: its process is gone, or its host is"
            return Cause(CauseKind.LOST_WORKER, text, _first_in(facts, missing, slot))
        silent_ms = facts.job.now_ms - worker.last_seen_ms
        if ended_ms < 0 and _is_silent(worker, silent_ms, config.heartbeat_interval_ms):
            text = f"{silence_text(slot, silent_ms)}: its process hangs, or the network to it is cut"
            return Cause(CauseKind.HUNG_WORKER, text, _first_in(facts, missing, slot))
    return None


def _first_in(facts: Facts, missing: Sequence[SubtaskKey], slot: int) -> Place:
    key = next(each for each in missing if each.subtask == slot)
    return facts.place(key.vertex, key.subtask)


def _is_silent(worker: WorkerView, silent_ms: int, interval_ms: int) -> bool:
    return not worker.connected or (worker.last_seen_ms >= 0 and silent_ms > max(3 * interval_ms, 3_000))


def _task_cause(facts: Facts, frontier: Sequence[SubtaskKey]) -> Cause | None:
    for key in frontier:
        found = facts.subtask(key.vertex, key.subtask)
        if found is not None and found.state not in (TaskState.RUNNING, TaskState.FINISHED):
            place = facts.place(key.vertex, key.subtask)
            return Cause(CauseKind.TASK_NOT_RUNNING, f"{place} is {found.state.value}, and takes no part in a checkpoint", place)
    return None


def _barrier_or_work(
    facts: Facts,
    checkpoint: CheckpointView,
    missing: Sequence[SubtaskKey],
    frontier: Sequence[SubtaskKey],
    chain: Chain,
    ended_ms: int,
) -> Chain:
    """They wait for their barrier, or have it and store."""
    key = _busiest(facts, frontier)
    found = find_bottleneck(facts, key.vertex)
    is_held_up = found is not None and (bool(found.path) or found.kind is not CauseKind.OUTSIDE)
    if is_held_up or longest_call(facts) is not None or _has_queue(facts, key):
        return follow_barrier(facts, key.vertex, chain, ended_ms=ended_ms)
    if len(missing) < checkpoint.num_subtasks:
        others = explain_slow(facts, checkpoint)
        if others.causes[-1].kind is CauseKind.SLOW_STORAGE:
            others.causes[:1] = chain.causes
            return others
    place = facts.place(key.vertex, key.subtask)
    text = f"{place} is neither busy nor backpressured: it stores its state, or its barrier was held up before"
    return chain.add(Cause(CauseKind.NOT_KNOWN, text, place))


def _busiest(facts: Facts, frontier: Sequence[SubtaskKey]) -> SubtaskKey:
    busy = {(vertex, each.view.subtask): each.busy for vertex in {key.vertex for key in frontier} for each in facts.loads(vertex)}
    return max(frontier, key=lambda key: busy.get((key.vertex, key.subtask), 0.0))


def _has_queue(facts: Facts, key: SubtaskKey) -> bool:
    """What waits in front of it takes it longer than a second."""
    found = facts.subtask(key.vertex, key.subtask)
    return found is not None and (found.metrics.time_to_consume_ms or 0) > 1_000

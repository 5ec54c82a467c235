"""Why a checkpoint took long: the phase that took it, and from there to the first cause. Pure.

The last subtask to acknowledge is followed: its phases add up to the time that all waited for. A barrier that came late is
followed upstream to where it was held up, and from there backpressure downstream to its busy end."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.explain.bottleneck import LOW_ABOVE, LongCall, find_bottleneck, longest_call, worst_backpressure
from holdfast.coordinator.explain.facts import Facts, median_of, phase_of, phases_of, shown
from holdfast.coordinator.explain.records import Cause, CauseKind, Phase
from holdfast.coordinator.figures import duration_text, share_text, size_text
from holdfast.coordinator.views import CheckpointView, SubtaskCheckpointView
from holdfast.statebackends.layout import METADATA_NAME

STALE_MS = 30_000
"""A checkpoint that ended longer ago was held up by what the last second may not show any more."""
STATE_SKEW_FACTOR = 3
STATE_SKEW_BYTES_MIN = 1024 * 1024
GROWN_FACTOR = 2
REWRITTEN_SHARE = 0.7
"""Of a subtask's state, written anew: its base, not what changed."""
SLOW_RATE = 0.5
"""A writer below this part of the usual bytes/s is slow."""
MOST = 0.5
SMALL_FILES_MIN = 64
SMALL_FILE_BYTES = 64 * 1024
STORED_MS_MIN = 20
"""Writers of less time say nothing of the storage's speed."""


class Chain(msgspec.Struct):
    """A chain of causes as it is found; `vertex_id`: where the first cause is."""

    causes: list[Cause]
    vertex_id: str = ""

    def add(self, *causes: Cause) -> Chain:
        self.causes.extend(causes)
        return self


class _Acked(msgspec.Struct, frozen=True):
    vertex_id: str
    view: SubtaskCheckpointView

    @property
    def barrier_ms(self) -> int:
        """From the trigger to the last barrier."""
        return self.view.start_delay_ms + self.view.alignment_ms

    @property
    def passed_ms(self) -> int:
        """From the trigger until the barrier was passed on and the synchronous part ended."""
        return self.barrier_ms + self.view.sync_ms


def explain_slow(facts: Facts, checkpoint: CheckpointView) -> Chain:
    """The chain behind a checkpoint that took long, or has so far; of those that acknowledged."""
    last = _last(facts, checkpoint)
    if last is None:
        return Chain([Cause(CauseKind.NOT_KNOWN, "no subtask is known to have acknowledged it, so its phases are not known")])
    excess = _excess(facts, checkpoint, last.view)
    if checkpoint.decide_ms >= 0:
        excess[Phase.DECIDE] = checkpoint.decide_ms - _usual(facts, checkpoint, Phase.DECIDE)
    phase = max(excess, key=lambda each: excess[each])
    place = facts.place(last.vertex_id, last.view.subtask)
    if phase is Phase.DECIDE:
        return Chain([_decide(facts, checkpoint)])
    value_ms = phases_of(last.view)[phase]
    text = f"{place} acknowledged last; {phase.value.replace('_', ' ')} took most of its time, {duration_text(value_ms)}"
    chain = Chain([Cause(CauseKind.SLOW, text + _beside(facts, checkpoint, phase), place)], last.vertex_id)
    if phase in (Phase.START_DELAY, Phase.ALIGNMENT):
        return _barrier(facts, checkpoint, last, excess[phase], chain)
    return _work(facts, checkpoint, last, phase, chain)


def _last(facts: Facts, checkpoint: CheckpointView) -> _Acked | None:
    found = [
        _Acked(vertex, max(subtasks, key=attrgetter("ack_ms"))) for vertex, subtasks in facts.acked(checkpoint).items() if subtasks
    ]
    return max(found, key=lambda each: each.view.ack_ms, default=None)


def last_acknowledged(facts: Facts, checkpoint: CheckpointView) -> SubtaskKey | None:
    """Whom a completed checkpoint waited for."""
    last = _last(facts, checkpoint)
    return SubtaskKey(last.vertex_id, last.view.subtask) if last is not None else None


def _usual(facts: Facts, checkpoint: CheckpointView, phase: Phase) -> float:
    """What is taken off a phase's time; nothing where the usual times are themselves too long."""
    duration_ms = checkpoint.end_to_end_ms
    median_ms = facts.median(checkpoint.checkpoint_id, lambda phases: phases.end_to_end_ms)
    if facts.is_chronic(duration_ms) and duration_ms <= 2 * median_ms:
        return 0
    return max(0, facts.phase_median(checkpoint.checkpoint_id, phase))


def _excess(facts: Facts, checkpoint: CheckpointView, view: SubtaskCheckpointView) -> dict[Phase, float]:
    return {phase: value - _usual(facts, checkpoint, phase) for phase, value in phases_of(view).items()}


def _beside(facts: Facts, checkpoint: CheckpointView, phase: Phase) -> str:
    median_ms = facts.phase_median(checkpoint.checkpoint_id, phase)
    return f" (usually {duration_text(median_ms)})" if median_ms >= 0 else ""


def _decide(facts: Facts, checkpoint: CheckpointView) -> Cause:
    text = f"the write of its {METADATA_NAME} took {duration_text(checkpoint.decide_ms)} behind the last acknowledgement"
    usual = _beside(facts, checkpoint, Phase.DECIDE)
    return Cause(CauseKind.SLOW_DECIDE, f"{text}{usual}: the storage of the state directory is slow, or the coordinator is")


# ------------------------------------------------------------------------------------------------------------- barrier


def _barrier(facts: Facts, checkpoint: CheckpointView, late: _Acked, excess_ms: float, chain: Chain) -> Chain:
    """A barrier was late at a subtask: was it passed on late, or did it wait on its way?"""
    seen = {late.vertex_id}
    while True:
        acked = facts.acked(checkpoint)
        before = [_slowest(each, acked[each]) for each in facts.inputs.get(late.vertex_id, ()) if each in acked]
        known = [each for each in before if each is not None and each.vertex_id not in seen]
        source = max(known, key=lambda each: each.passed_ms, default=None)
        if source is None or source.passed_ms < late.barrier_ms - excess_ms / 2:
            if facts.record is not None:  # those in front of it may not be among the subtasks on record
                text = f"the barrier came late to {facts.place(late.vertex_id)}; what held it up is not on record"
                return chain.add(Cause(CauseKind.NO_LONGER_SEEN, text, facts.place(late.vertex_id)))
            return follow_barrier(facts, late.vertex_id, chain, ended_ms=_ended_ms(checkpoint))
        seen.add(source.vertex_id)
        place = facts.place(source.vertex_id, source.view.subtask)
        own = _excess(facts, checkpoint, source.view)
        text = f"{place} in front of it passed its barrier on {duration_text(source.passed_ms)} behind the trigger"
        chain.add(Cause(CauseKind.LATE_BARRIER, text, place))
        chain.vertex_id = source.vertex_id
        if own[Phase.SYNC] >= excess_ms / 2:
            return _work(facts, checkpoint, source, Phase.SYNC, chain)
        late = source


def _slowest(vertex_id: str, acked: list[SubtaskCheckpointView]) -> _Acked | None:
    if not acked:
        return None
    return _Acked(vertex_id, max(acked, key=lambda each: each.start_delay_ms + each.alignment_ms + each.sync_ms))


def _ended_ms(checkpoint: CheckpointView) -> int:
    return checkpoint.latest_ack_ms if checkpoint.status != "IN_PROGRESS" else -1


def follow_barrier(facts: Facts, vertex_id: str, chain: Chain, *, ended_ms: int = -1) -> Chain:
    """Barriers wait in front of a vertex, or in a source: follow backpressure from there. `ended_ms`: when the wait was over, wall
    clock; -1: it is not."""
    place = facts.place(vertex_id)
    where = "the source took it late" if not facts.inputs.get(vertex_id) else f"it waited behind records in front of {place}"
    call = longest_call(facts)
    if call is not None:
        return _follow_call(facts, call, chain, Cause(CauseKind.LATE_BARRIER, where, place), ended_ms)
    found = find_bottleneck(facts, vertex_id)
    chain.vertex_id = vertex_id
    if found is None:
        text = f"{where}; no figures tell who is busy"
        return chain.add(Cause(CauseKind.NO_LONGER_SEEN, text, place))
    is_old = ended_ms >= 0 and facts.job.now_ms - ended_ms > STALE_MS
    if found.kind is CauseKind.OUTSIDE and not found.path and not _waits_for(facts, vertex_id):
        ago = f", {duration_text(facts.job.now_ms - ended_ms)} later" if is_old else ""
        text = f"{where}; now{ago} nothing there is backpressured or busy any more"
        return chain.add(Cause(CauseKind.NO_LONGER_SEEN, text, place))
    chain.vertex_id = found.vertex_id
    chain.add(Cause(CauseKind.LATE_BARRIER, where, place))
    return chain.add(*found.causes())


def _follow_call(facts: Facts, call: LongCall, chain: Chain, late: Cause, ended_ms: int) -> Chain:
    """A worker's loop has not come back: barriers wait for it, whoever else is busy. Not those of a checkpoint that was over first,
    of whose time the figures of now say nothing then."""
    if ended_ms >= 0 and facts.job.now_ms - call.lasts_ms >= ended_ms:
        return chain.add(Cause(CauseKind.NO_LONGER_SEEN, f"{late.text}; since then, {call.cause.text}", late.place))
    chain.vertex_id = call.vertex_id
    return chain.add(late, call.cause)


def _waits_for(facts: Facts, vertex_id: str) -> bool:
    """Whether those in front of a vertex are backpressured."""
    worst = [worst_backpressure(facts, each) for each in facts.inputs.get(vertex_id, ())]
    return any(each is not None and each.backpressured > LOW_ABOVE for each in worst)


# ---------------------------------------------------------------------------------------------------------------- work


def _work(facts: Facts, checkpoint: CheckpointView, slow: _Acked, phase: Phase, chain: Chain) -> Chain:
    """A subtask's own work took long: its state, its storage or its host."""
    chain.vertex_id = slow.vertex_id
    place = facts.place(slow.vertex_id, slow.view.subtask)
    if phase is Phase.ACKNOWLEDGE:
        text = f"the acknowledgement of {place} took {duration_text(slow.view.acknowledge_ms)} to the coordinator: "
        return chain.add(
            Cause(CauseKind.SLOW_ACKNOWLEDGE, text + "the worker's loop, the network or the coordinator is slow", place)
        )
    if phase is Phase.ENCODE and slow.view.stalled_ms > MOST * max(0, slow.view.encode_ms):
        return chain.add(_stalled(facts, checkpoint, slow))
    found = _of_state(facts, checkpoint, slow) or _of_host(facts, checkpoint, slow, phase)
    if found is not None:
        return chain.add(found)
    if phase is Phase.SYNC:
        text = f"the synchronous part of {place} took {duration_text(slow.view.sync_ms)}: "
        return chain.add(Cause(CauseKind.SLOW_SYNC, text + "hooks of its operators, or the freezing of its state", place))
    if phase is Phase.ENCODE:
        text = f"{place} encoded its state for {duration_text(max(0, slow.view.encode_ms))}: "
        return chain.add(Cause(CauseKind.SLOW_ENCODE, text + "its host has too few CPUs, or its threads were busy", place))
    return chain.add(_of_storage(facts, checkpoint, slow))


def _stalled(facts: Facts, checkpoint: CheckpointView, slow: _Acked) -> Cause:
    """Whatever else is amiss with the subtask, its time went by in front of a database that took no writes."""
    place, stalled = facts.place(slow.vertex_id, slow.view.subtask), slow.view.stalled_ms
    acked = [each for subtasks in facts.acked(checkpoint).values() for each in subtasks]
    others = sum(each.stalled_ms > MOST * stalled for each in acked) - 1
    beside = f", and that of {others} other subtasks as long" if others > 0 else ""
    text = f"RocksDB of {place} had no room for {duration_text(stalled)} while its flushes and compactions caught up{beside}"
    return Cause(CauseKind.STORE_STALLED, text, place)


def _of_state(facts: Facts, checkpoint: CheckpointView, slow: _Acked) -> Cause | None:
    """More was written than usual, or than by the siblings."""
    number, place, written = checkpoint.checkpoint_id, facts.place(slow.vertex_id, slow.view.subtask), slow.view.checkpointed_size
    usual = facts.median(number, lambda phases: phases.checkpointed_size)
    usual_state = facts.median(number, lambda phases: phases.state_size)
    total = checkpoint.checkpointed_size
    more = usual >= 0 and total > GROWN_FACTOR * usual and total - usual > STATE_SKEW_BYTES_MIN
    is_whole = facts.record is None
    is_rewritten = is_whole and facts.config.is_incremental and written >= REWRITTEN_SHARE * slow.view.state_size
    if more and is_rewritten and checkpoint.state_size <= GROWN_FACTOR * usual_state:
        text = f"{place} wrote its state anew ({size_text(written)}), as an increment does from time to time"
        return Cause(CauseKind.BASE_REWRITE, f"{text}; usually all write {size_text(usual)} together", place)
    siblings = [each.checkpointed_size for each in facts.acked(checkpoint)[slow.vertex_id]] if is_whole else [written]
    siblings.remove(written)
    median = median_of(siblings)
    if siblings and written > STATE_SKEW_FACTOR * median and written - median > STATE_SKEW_BYTES_MIN:
        text = f"{place} wrote {size_text(written)}, the median of its siblings {size_text(median)}: its keys are skewed"
        return Cause(CauseKind.STATE_SKEW, text, place)
    if more:
        return Cause(
            CauseKind.MORE_STATE, f"{size_text(total)} were written; usually it is {size_text(usual)}", facts.place(slow.vertex_id)
        )
    return None


def _of_host(facts: Facts, checkpoint: CheckpointView, slow: _Acked, phase: Phase) -> Cause | None:
    """Only subtasks of one host were so slow."""
    hosts = [facts.workers[slot].host if slot in facts.workers else "" for slot in range(len(facts.workers))]
    number = slow.view.subtask
    own = hosts[number] if number < len(hosts) else ""
    if len(set(hosts)) < 2 or not own:
        return None
    value = phase_of(slow.view, phase)
    here, elsewhere = list[int](), 0
    for subtasks in facts.acked(checkpoint).values():
        for subtask in subtasks:
            took = phase_of(subtask, phase)
            if subtask.subtask < len(hosts) and hosts[subtask.subtask] == own:
                here.append(took)
            elif took > elsewhere:
                elsewhere = took
                if took > MOST * value:
                    return None
    if len(here) < 2 or min(here) < MOST * value:
        return None
    times = f"{duration_text(min(here))} and more; those elsewhere took {duration_text(elsewhere)} at most"
    text = f"all {len(here)} subtasks on host {shown(own)} were slow, {times}"
    return Cause(CauseKind.SLOW_HOST, text, facts.place(slow.vertex_id, slow.view.subtask))


def _of_storage(facts: Facts, checkpoint: CheckpointView, slow: _Acked) -> Cause:
    place, view = facts.place(slow.vertex_id, slow.view.subtask), slow.view
    if view.new_files >= SMALL_FILES_MIN and view.checkpointed_size < SMALL_FILE_BYTES * view.new_files:
        mean = size_text(view.checkpointed_size / view.new_files)
        return Cause(
            CauseKind.SMALL_FILES, f"{place} wrote {view.new_files} files of {mean} on average: each one costs a request", place
        )
    if facts.record is not None:
        took = duration_text(max(view.store_ms, 0) or view.async_ms)
        text = f"the storing of {place} took {took}, of {size_text(view.checkpointed_size)}"
        return Cause(CauseKind.SLOW_STORE, f"{text}; how fast the others stored is not on record", place)
    usual_rate = facts.median(checkpoint.checkpoint_id, lambda phases: phases.store_rate)
    writers = [
        subtask
        for subtasks in facts.acked(checkpoint).values()
        for subtask in subtasks
        if subtask.store_ms >= STORED_MS_MIN and subtask.checkpointed_size > 0
    ]
    rates = [subtask.checkpointed_size * 1000 / subtask.store_ms for subtask in writers]
    slow_writers = sum(rate < SLOW_RATE * usual_rate for rate in rates)
    if usual_rate > 0 and writers and slow_writers > MOST * len(writers) and (len(writers) > 1 or _writes_alone(facts, checkpoint)):
        share = share_text(slow_writers / len(writers))
        speed = f"{size_text(median_of(rates))}/s a writer, usually {size_text(usual_rate)}/s"
        text = f"storage is slow: {speed}; {share} of the writers are slow"
        return Cause(CauseKind.SLOW_STORAGE, text)
    in_storage = sum(each.store_ms > MOST * each.async_ms and each.store_ms > MOST * view.store_ms for each in writers)
    is_compared = usual_rate >= 0 and not facts.is_chronic(checkpoint.end_to_end_ms)
    if not is_compared and len(writers) > 1 and in_storage > MOST * len(writers):
        text = f"{in_storage} of {len(writers)} writers spent their time in storage, at {size_text(median_of(rates))}/s each"
        return Cause(CauseKind.SLOW_STORAGE, text)
    stored_ms = max(view.store_ms, 0) or view.async_ms
    text = f"the storing of {place} alone took {duration_text(stored_ms)}, of {size_text(view.checkpointed_size)}"
    return Cause(CauseKind.SLOW_STORE, text, place)


def _writes_alone(facts: Facts, checkpoint: CheckpointView) -> bool:
    """No other subtask has written anything."""
    return sum(each.checkpointed_size > 0 for subtasks in facts.acked(checkpoint).values() for each in subtasks) == 1

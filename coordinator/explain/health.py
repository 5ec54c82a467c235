"""Health of a job: safe, slow, resume, each with a verdict. Pure: no I/O, clock or logger.

A verdict is about what a person would do: ok, nothing; at risk, look at it by day; bad, now."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.barriers.exchange.guarantee import COMMITTER_KIND, WRITER_KIND, behind_loose
from holdfast.barriers.jobgraph import OperatorDescription
from holdfast.barriers.sinks.log import DISCARDS_PROPERTY
from holdfast.coordinator.drills.records import DrillState, DrillView, Verification, drilled_ms, verified_ms
from holdfast.coordinator.explain.absent import explain_absent
from holdfast.coordinator.explain.bottleneck import LOW_ABOVE, STANDS_MS, busiest_start, find_bottleneck, longest_call
from holdfast.coordinator.explain.facts import TEXT_BYTES_MAX, Facts, shown, silence_text, snapshot_name
from holdfast.coordinator.explain.positions import SourcePlaces
from holdfast.coordinator.explain.records import (
    PLACES_SHOWN_MAX,
    SOURCES_SHOWN_MAX,
    VERTICES_SHOWN_MAX,
    CauseKind,
    CutView,
    HealthView,
    Place,
    ResumeView,
    SafeView,
    Situation,
    SlowView,
    SourceCut,
    Verdict,
    VertexShares,
)
from holdfast.coordinator.figures import duration_text, share_text

AT_RISK_INTERVALS, BAD_INTERVALS = 3, 10
"""Intervals without a completed checkpoint, beyond which a job is at risk, and in a bad way."""
GRACE_MS = 30_000
"""A checkpoint may be so much late in any case, and a job may run for so long before its first one."""
LOCATION_BYTES_MAX = 4_096
GONE = "which is not in storage any more"
HIGH_ABOVE = 0.5
"""A job with a subtask that is backpressured beyond this share falls behind."""


def derive_health(situation: Situation) -> HealthView:
    facts = Facts(situation)
    safe, slow, resume = _safe(facts), _slow(facts), _resume(facts)
    overview = facts.job.overview
    verdict = max((safe.verdict, slow.verdict, resume.verdict), key=lambda each: each.rank)
    name = shown(overview.name, 255)
    return HealthView(overview.job_id, name, overview.state, facts.job.now_ms, verdict, safe, slow, resume)


def _ended(facts: Facts) -> tuple[Verdict, str] | None:
    """Of a job that has ended, whatever is asked of it. Why it failed is said once, where it is asked whether the job is safe."""
    overview = facts.job.overview
    if not overview.is_terminal:
        return None
    if overview.state != "FAILED":
        return Verdict.OK, f"the job has ended: {overview.state}"
    return Verdict.BAD, "the job has FAILED"


# ---------------------------------------------------------------------------------------------------------------- safe


def _safe(facts: Facts) -> SafeView:
    ended, cut = _ended(facts), facts.situation.cut
    age_ms = max(0, facts.job.now_ms - cut.timestamp_ms) if cut is not None else -1
    if ended is not None:
        return _safe_at_its_end(facts, ended, cut, age_ms)
    verdict, why = _judge_age(facts, age_ms) if cut is not None else _judge_none(facts)
    failures, tolerable = _failures(facts), facts.config.tolerable_failed_checkpoints
    damage, earlier = _damage(facts, cut), _damage_before(facts, cut)
    if damage:
        verdict, why = Verdict.BAD, damage
    elif earlier and verdict is not Verdict.BAD:
        verdict, why = Verdict.AT_RISK, earlier
    if failures and verdict is Verdict.OK:
        one_more = "; one more fails the job over" if failures >= tolerable else f" of {tolerable} that are tolerable"
        verdict, why = Verdict.AT_RISK, f"{failures} checkpoints in a row have failed{one_more}"
    situation = facts.situation
    return SafeView(
        verdict=verdict,
        why=why,
        checkpoint_id=cut.checkpoint_id if cut is not None else -1,
        age_ms=age_ms,
        interval_ms=facts.interval_ms,
        replay_ms=age_ms if cut is not None else _running_ms(facts),
        replay_records=_replayed(facts, cut),
        verified_ms=verified_ms(situation.drills, situation.verifications),
        drilled_ms=drilled_ms(situation.drills),
        are_drills_known=situation.are_drills_known,
    )


def _safe_at_its_end(facts: Facts, ended: tuple[Verdict, str], cut: CutView | None, age_ms: int) -> SafeView:
    """Of a job that has ended: why, if it failed, and how old what it keeps is."""
    verdict, why = ended
    if facts.job.overview.state == "FAILED":
        why += f": {shown(facts.job.failure or 'no cause is on record', TEXT_BYTES_MAX)}"
    if cut is None:
        return SafeView(verdict, f"{why}; it keeps no checkpoint")
    if _is_gone(facts):
        return SafeView(verdict, f"{why}; it kept {snapshot_name(cut)}, {GONE}")
    drills, verifications = facts.situation.drills, facts.situation.verifications
    return SafeView(
        verdict=verdict,
        why=f"{why}; it keeps {snapshot_name(cut)}, which began {duration_text(age_ms)} ago",
        checkpoint_id=cut.checkpoint_id,
        age_ms=age_ms,
        verified_ms=verified_ms(drills, verifications),
        drilled_ms=drilled_ms(drills),
        are_drills_known=facts.situation.are_drills_known,
    )


def _is_gone(facts: Facts) -> bool:
    """Somebody has deleted what a job kept that has ended."""
    positions, cut = facts.situation.positions, facts.situation.cut
    return positions is not None and cut is not None and positions.is_gone and positions.checkpoint_id == cut.checkpoint_id


def _damage(facts: Facts, cut: CutView | None) -> str:
    """What the newest drill or verification that found something out says of the snapshot that a failure now goes back to; empty if
    nothing is wrong, or it was not read. A drill that runs, or ended in an error, takes nothing back of what one has found."""
    number = cut.checkpoint_id if cut is not None else -1
    found = next((drill for drill in _told(facts) if drill.checkpoint_id == number), None)
    if found is not None and found.state is DrillState.FAILED:
        return _failed_drill(found)
    return _unsound(facts, [each for each in facts.situation.verifications if each.checkpoint_id == number])


def _damage_before(facts: Facts, cut: CutView | None) -> str:
    """What the newest drill found of an earlier snapshot, if nothing has been read since: the next checkpoint ends no damage, since
    it may share files with that one, or be written by what damaged it."""
    last = max(_told(facts), key=lambda each: each.started_ms, default=None)
    if cut is None:
        return ""
    if last is None or last.state is not DrillState.FAILED or last.checkpoint_id == cut.checkpoint_id:
        found = _unsound(facts, facts.situation.verifications)
        return f"{found}; checkpoint {cut.checkpoint_id} has not been verified since" if found else ""
    return f"{_failed_drill(last)}; checkpoint {cut.checkpoint_id} has not been drilled since"


def _told(facts: Facts) -> Iterator[DrillView]:
    """Drills that found something out, newest first."""
    return (each for each in facts.situation.drills if each.state in (DrillState.PASSED, DrillState.FAILED))


def _unsound(facts: Facts, verifications: Sequence[Verification]) -> str:
    """What the newest of these found, if it found something, and no drill has passed since."""
    newest = max(verifications, key=lambda each: each.began_ms, default=None)
    if newest is None or not newest.problem_count or drilled_ms(facts.situation.drills) >= newest.began_ms:
        return ""
    more = f" and {newest.problem_count - 1} more" if newest.problem_count > 1 else ""
    first = shown(newest.first_problem, TEXT_BYTES_MAX)
    return f"a verification of checkpoint {newest.checkpoint_id} found damaged files: {first}{more}"


def _failed_drill(drill: DrillView) -> str:
    first = shown(drill.problems[0], TEXT_BYTES_MAX) if drill.problems else ""
    more = f" and {drill.problem_count - 1} more" if drill.problem_count > 1 else ""
    return f"a drill of {drill.kind.value.replace('_', '-')} {drill.checkpoint_id} found that it can't be restored: {first}{more}"


def _failures(facts: Facts) -> int:
    return facts.situation.schedule.failures if facts.situation.schedule is not None else 0


def _running_ms(facts: Facts) -> int:
    overview = facts.job.overview
    return max(0, facts.job.now_ms - overview.start_ms) if overview.start_ms >= 0 else -1


def _replayed(facts: Facts, cut: CutView | None) -> int:
    """Records that the sources have read behind the cut, without which from their beginning; -1: not known."""
    now, then = facts.situation.source_records, cut.source_records if cut is not None else {}
    if now is None or then is None:
        return -1
    return sum(max(0, count - then.get(uid, 0)) for uid, count in now.items())


def _allowed_ms(facts: Facts, interval_ms: int, intervals: int) -> float:
    """How old the newest checkpoint may be: so many intervals, or pauses and checkpoints that take long, and some grace."""
    usual_ms = max(0.0, facts.median(-1, lambda phases: phases.end_to_end_ms))
    return intervals * max(interval_ms, facts.config.min_pause_ms + usual_ms) + usual_ms + min(GRACE_MS, intervals * 1_000)


def _judge_age(facts: Facts, age_ms: int) -> tuple[Verdict, str]:
    interval_ms = facts.interval_ms
    text = f"the newest completed checkpoint began {duration_text(age_ms)} ago"
    if interval_ms is None:
        chain = explain_absent(facts)
        why = chain.causes[-1].text if chain is not None else "no periodic checkpoints are taken"
        return Verdict.AT_RISK, f"{text}; {why}"
    text += f", the interval is {duration_text(interval_ms)}"
    if age_ms <= _allowed_ms(facts, interval_ms, AT_RISK_INTERVALS):
        return Verdict.OK, text
    is_bad = age_ms > _allowed_ms(facts, interval_ms, BAD_INTERVALS)
    return Verdict.BAD if is_bad else Verdict.AT_RISK, f"{text}: `holdfast explain` says why"


def _judge_none(facts: Facts) -> tuple[Verdict, str]:
    interval_ms, running_ms = facts.interval_ms, _running_ms(facts)
    if interval_ms is None:
        return Verdict.AT_RISK, "there is no checkpoint, and no periodic ones are taken: a failure begins again from the start"
    if running_ms <= _allowed_ms(facts, interval_ms, AT_RISK_INTERVALS) + GRACE_MS:
        return Verdict.OK, "no checkpoint is complete yet; the job has just begun"
    text = f"no checkpoint has ever completed, in {duration_text(running_ms)}: `holdfast explain` says why"
    return Verdict.BAD, text


# ---------------------------------------------------------------------------------------------------------------- slow


def _slow(facts: Facts) -> SlowView:
    ended = _ended(facts)
    if ended is not None:
        return SlowView(*ended)
    judged = _judge_running(facts) if facts.job.overview.state == "RUNNING" else _judge_standing(facts)
    told = itertools.islice(_shares(facts), VERTICES_SHOWN_MAX)
    return replace(judged, watermark_lag_ms=_watermark_lag_ms(facts), vertices=tuple(told))


def _judge_standing(facts: Facts) -> SlowView:
    chain = explain_absent(facts)
    texts = [cause.text for cause in chain.causes] if chain is not None else [f"the job is {facts.job.overview.state}"]
    return SlowView(Verdict.AT_RISK, ", since ".join(texts))


def _judge_running(facts: Facts) -> SlowView:
    share = max((each.backpressured for each in _shares(facts)), default=0.0)
    silent = _silent(facts)
    if silent:
        return _judge_silent(facts, silent)
    call = longest_call(facts)
    if call is not None:
        return SlowView(Verdict.AT_RISK, call.cause.text, call.place, call.cause.kind, call.busy, share)
    start = busiest_start(facts)
    found = find_bottleneck(facts, start) if start is not None else None
    if found is None:
        return SlowView(Verdict.OK, "no subtask has told how it spends its time yet")
    if share <= LOW_ABOVE:
        text = f"nothing is backpressured; {found.place} works most, {share_text(found.busy)} of its time"
        return SlowView(Verdict.OK, text, found.place, None, found.busy, share)
    verdict = Verdict.AT_RISK if share > HIGH_ABOVE else Verdict.OK
    held = f"; {found.path[0]} waits for it {share_text(share)} of its time" if found.path else ""
    return SlowView(verdict, found.text + held, found.place, found.kind, found.busy, share)


def _judge_silent(facts: Facts, silent: Mapping[int, int]) -> SlowView:
    slot = max(silent, key=lambda each: silent[each])
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    text = f"{silence_text(slot, silent[slot])}{more}: its process hangs, or the network to it is cut"
    share = max((each.backpressured for each in _shares(facts)), default=-1.0)
    return SlowView(Verdict.AT_RISK, text, _in_slot(facts, slot), CauseKind.HUNG_WORKER, backpressured=share)


def _silent(facts: Facts) -> dict[int, int]:
    """Slots whose workers have not been heard of for so long that nothing may move in them -> how long, ms."""
    needed_ms = max(STANDS_MS, 3 * facts.config.heartbeat_interval_ms)
    told = {slot: facts.job.now_ms - worker.last_seen_ms for slot, worker in facts.workers.items() if worker.last_seen_ms >= 0}
    return {slot: silent_ms for slot, silent_ms in sorted(told.items()) if silent_ms >= needed_ms}


def _in_slot(facts: Facts, slot: int) -> Place | None:
    """The first subtask that a worker has."""
    first = next((vertex for vertex in facts.order if facts.subtask(vertex, slot) is not None), None)
    return facts.place(first, slot) if first is not None else None


def _shares(facts: Facts) -> Iterator[VertexShares]:
    """Of vertices with a running subtask that has told them. What a silent worker told last is not of now."""
    silent = _silent(facts)
    for vertex in facts.order:
        if loads := [each for each in facts.loads(vertex) if each.view.subtask not in silent]:
            yield VertexShares(vertex, max(each.busy for each in loads), max(each.backpressured for each in loads))


def _watermark_lag_ms(facts: Facts) -> int:
    told = (each.metrics.watermark_lag_ms for vertex in facts.order for each in facts.running(vertex))
    lags = [lag_ms for lag_ms in told if lag_ms is not UNSET]
    return max(lags, default=-1)


# -------------------------------------------------------------------------------------------------------------- resume


def _resume(facts: Facts) -> ResumeView:
    cut, ended = facts.situation.cut, _ended(facts)
    repeats = tuple(_repeating(facts))[:PLACES_SHOWN_MAX] if ended is None else ()
    verdict, why = ended or (Verdict.OK, _output(repeats))
    if cut is None:
        place = "it keeps no checkpoint" if ended is not None else "from the beginning of its sources"
        return ResumeView(verdict, f"{place}; {why}", may_repeat=repeats)
    if ended is not None and _is_gone(facts):
        return ResumeView(verdict, f"it kept {snapshot_name(cut)}, {GONE}; {why}")
    text = f"{'from' if ended is None else 'it keeps'} {snapshot_name(cut)}; {why}"
    found = facts.situation.positions
    return ResumeView(
        verdict,
        text,
        cut.checkpoint_id,
        shown(cut.location, LOCATION_BYTES_MAX),
        _sources(cut, found.sources if found is not None else {}),
        positions_of=found.checkpoint_id if found is not None else -1,
        may_repeat=repeats,
    )


def _output(repeats: tuple[Place, ...]) -> str:
    if not repeats:
        return "no output repeats"
    more = f" and {len(repeats) - 1} more" if len(repeats) > 1 else ""
    return f"output of {repeats[0]}{more} may repeat"


def _sources(cut: CutView, places: Mapping[str, SourcePlaces]) -> tuple[SourceCut, ...]:
    records = cut.source_records or {}
    return tuple(
        SourceCut(
            shown(uid),
            records.get(uid, -1),
            tuple(shown(text) for text in places[uid].shown) if uid in places else (),
            places[uid].splits if uid in places else 0,
        )
        for uid in sorted({*records, *places})[:SOURCES_SHOWN_MAX]
    )


def _repeating(facts: Facts) -> Iterator[Place]:
    """Vertices that write output of which a restore may bring some again: behind what an at-least-once job may process again, and
    those of sinks without commits, whose rows are seen at once."""
    loose = behind_loose(facts.graph)
    committed = {each.sink_id for each in _operators(facts) if each.kind == COMMITTER_KIND}
    for vertex in facts.graph.vertices:
        writers = [each for each in vertex.operators if each.kind == WRITER_KIND and not each.properties.get(DISCARDS_PROPERTY)]
        if any(vertex.vertex_id in loose or each.sink_id not in committed for each in writers):
            yield facts.place(vertex.vertex_id)


def _operators(facts: Facts) -> Iterator[OperatorDescription]:
    return (operator for vertex in facts.graph.vertices for operator in vertex.operators)

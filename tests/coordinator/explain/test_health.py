"""Health of a job: verdicts of safe, slow and resume, and what stands behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.drills.records import DrillState, DrillView, Verification
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.positions import SnapshotPositions, SourcePlaces
from holdfast.coordinator.explain.records import CauseKind, CutView, HealthView, SourceCut, Verdict
from holdfast.coordinator.views import ScheduleView
from tests.coordinator.explain.building import NOW, SINK, SOURCE, WINDOW, Built

OK, AT_RISK, BAD = Verdict.OK, Verdict.AT_RISK, Verdict.BAD


def health(change: Callable[[Built], None] = lambda it: None) -> HealthView:
    it = Built(status=None)
    change(it)
    return derive_health(it.made())


def aged(age_ms: int) -> CutView:
    return CutView(40, CheckpointKind.CHECKPOINT, "/state/j/chk-40", NOW - age_ms, {"orders": 1_000})


def test_a_healthy_job() -> None:
    found = health()
    assert (found.verdict, found.safe.verdict, found.slow.verdict, found.resume.verdict) == (OK, OK, OK, OK)
    assert (found.safe.checkpoint_id, found.safe.age_ms, found.safe.interval_ms) == (40, 5_000, 10_000)
    assert (found.safe.replay_ms, found.safe.replay_records) == (5_000, 500)
    assert (found.safe.verified_ms, found.safe.drilled_ms) == (-1, -1)
    assert (found.resume.checkpoint_id, found.resume.location) == (40, "/state/j/chk-40")
    assert found.resume.sources == (SourceCut("orders", 1_000),)
    assert found.resume.may_repeat == ()
    assert found.as_of_ms == NOW


def test_sources_are_told_with_the_positions_of_the_snapshot_that_they_were_read_from() -> None:
    found = derive_health(replace(Built(status=None).made(), positions=SnapshotPositions(39, {
        "orders": SourcePlaces(30, ("orders[0] at offset 7", "orders[1] at offset 9")),
        "rates": SourcePlaces(1, ("row 5",)),
    }))).resume  # fmt: skip
    assert (found.checkpoint_id, found.positions_of) == (40, 39)
    assert found.sources == (
        SourceCut("orders", 1_000, ("orders[0] at offset 7", "orders[1] at offset 9"), 30),
        SourceCut("rates", -1, ("row 5",), 1),
    )
    assert derive_health(Built(status=None).made()).resume.positions_of == -1


@pytest.mark.parametrize(
    ("age_ms", "verdict"),
    [(0, OK), (-5_000, OK), (12_000, OK), (30_000, OK), (40_000, AT_RISK), (100_000, AT_RISK), (140_000, BAD), (10**12, BAD)],
)
def test_the_age_of_the_newest_checkpoint_against_the_interval(age_ms: int, verdict: Verdict) -> None:
    found = health(lambda it: setattr(it, "cut", aged(age_ms)))
    assert (found.safe.verdict, found.verdict) == (verdict, verdict)
    assert found.safe.age_ms == max(0, age_ms), "a leader's clock that was ahead makes no checkpoint younger than now"


def test_pauses_and_slow_checkpoints_are_part_of_the_rhythm() -> None:
    def change(it: Built) -> None:
        it.tune(min_pause_ms=60_000)
        it.usual = {"end_to_end_ms": 30_000}
        it.cut = aged(150_000)

    assert health(change).safe.verdict is OK


def test_without_periodic_checkpoints_a_job_is_at_risk_and_is_told_why() -> None:
    def paused(it: Built) -> None:
        it.tune(checkpoint_interval_ms=None)
        it.schedule = ScheduleView(None)

    found = health(paused).safe
    assert found.verdict is AT_RISK
    assert "paused" in found.why
    assert found.interval_ms is None


@pytest.mark.parametrize(
    ("running_ms", "interval_ms", "verdict"),
    [(10_000, 10_000, OK), (60_000, 10_000, OK), (3_600_000, 10_000, BAD), (10_000, None, AT_RISK), (3_600_000, None, AT_RISK)],
)
def test_a_job_that_never_had_a_checkpoint(running_ms: int, interval_ms: int | None, verdict: Verdict) -> None:
    def change(it: Built) -> None:
        it.cut, it.recent = None, ()
        it.tune(checkpoint_interval_ms=interval_ms)
        it.schedule = ScheduleView(interval_ms)
        overview = it.made().job.overview
        it.changes = {"overview": replace(overview, start_ms=NOW - running_ms)}

    found = health(change)
    assert found.safe.verdict is verdict
    assert (found.safe.checkpoint_id, found.safe.replay_ms, found.safe.replay_records) == (-1, running_ms, 1_500)
    assert found.resume.verdict is OK
    assert "beginning of its sources" in found.resume.why


def drill(checkpoint_id: int, state: DrillState, ago_ms: int) -> DrillView:
    problems = ("part 3: its checksum does not match",) if state is DrillState.FAILED else ()
    folder = f"/state/j/chk-{checkpoint_id}"
    view = DrillView("d" * 32, checkpoint_id, CheckpointKind.CHECKPOINT, folder, state, "schedule", NOW - ago_ms)
    return replace(view, problem_count=len(problems), problems=problems)


PASSED, FAILED, ERROR, RUNNING = DrillState.PASSED, DrillState.FAILED, DrillState.ERROR, DrillState.RUNNING


@pytest.mark.parametrize(
    ("drills", "verdict", "why"),
    [
        (((40, PASSED, 1),), OK, "began"),
        (((40, FAILED, 1),), BAD, "a drill of checkpoint 40 found"),
        (((38, FAILED, 20_000),), AT_RISK, "checkpoint 40 has not been drilled since"),
        (((39, ERROR, 10_000), (38, FAILED, 20_000)), AT_RISK, "a drill of checkpoint 38 found"),
        (((40, RUNNING, 10), (38, FAILED, 20_000)), AT_RISK, "a drill of checkpoint 38 found"),
        (((39, PASSED, 10_000), (38, FAILED, 20_000)), OK, "began"),
        (((39, FAILED, 10_000), (38, PASSED, 20_000)), AT_RISK, "a drill of checkpoint 39 found"),
        (((39, ERROR, 10_000),), OK, "began"),
        (((40, RUNNING, 10), (40, FAILED, 20_000)), BAD, "a drill of checkpoint 40 found"),
        (((40, ERROR, 10), (40, FAILED, 20_000)), BAD, "a drill of checkpoint 40 found"),
        (((40, ERROR, 10), (40, PASSED, 100), (40, FAILED, 20_000)), OK, "began"),
    ],
)
def test_a_drill_that_failed_is_told_until_one_has_passed(
    drills: tuple[tuple[int, DrillState, int], ...], verdict: Verdict, why: str
) -> None:
    it = Built(status=None)
    found = derive_health(replace(it.made(), drills=tuple(drill(*each) for each in drills))).safe
    assert (found.verdict, why in found.why) == (verdict, True), found.why


def test_damage_of_an_earlier_snapshot_hides_nothing_that_is_worse() -> None:
    it = Built(status=None, cut=aged(10**9))
    assert derive_health(replace(it.made(), drills=(drill(38, FAILED, 10**9),))).safe.verdict is BAD


def test_failures_in_a_row_put_a_job_at_risk() -> None:
    def change(it: Built) -> None:
        it.tune(tolerable_failed_checkpoints=2)
        it.schedule = ScheduleView(10_000, 5_000, failures=2)

    found = health(change).safe
    assert found.verdict is AT_RISK
    assert "one more fails the job over" in found.why


def test_the_bottleneck_is_named_with_its_subtask_and_host() -> None:
    def change(it: Built) -> None:
        it.pressed(SOURCE)
        it.busy(WINDOW, [2])
        it.records[WINDOW, 2] = 90_000
        it.metrics[WINDOW, 1] = {"watermark_lag_ms": 4_200}
        it.metrics[WINDOW, 3] = {"watermark_lag_ms": 300}

    found = health(change)
    assert (found.slow.verdict, found.slow.cause) == (AT_RISK, CauseKind.SKEW)
    assert str(found.slow.bottleneck) == "count per carrier (uid counts) subtask 2 on h2"
    assert (found.slow.busy, found.slow.backpressured, found.slow.watermark_lag_ms) == (0.98, 0.9, 4_200)
    assert "waits for it 90 %" in found.slow.why


def test_each_vertex_has_the_shares_of_the_second_that_the_verdict_is_of() -> None:
    """A page beside the verdict shows them, and not those of another time."""

    def change(it: Built) -> None:
        it.pressed(SOURCE)
        it.shares[WINDOW, 2] = (625, 125)

    found = health(change).slow
    assert {each.vertex: (each.busy, each.backpressured) for each in found.vertices} == {
        SOURCE: (0.1, 0.9),
        WINDOW: (0.625, 0.125),
        SINK: (0.2, 0.0),
        "d" * 32: (0.01, 0.0),
    }
    assert (max(each.backpressured for each in found.vertices), found.backpressured) == (0.9, 0.9)
    assert health(lambda it: it.changes.update(vertices=())).slow.vertices == ()


@pytest.mark.parametrize(("share", "verdict"), [(80, OK), (300, OK), (700, AT_RISK)])
def test_little_backpressure_is_no_risk(share: int, verdict: Verdict) -> None:
    def change(it: Built) -> None:
        it.pressed(SOURCE, share=share)
        it.busy(WINDOW)

    assert health(change).slow.verdict is verdict


@pytest.mark.parametrize(("step_ms", "verdict"), [(9_900, OK), (10_000, AT_RISK), (45_000, AT_RISK)])
def test_a_loop_that_does_not_come_back_puts_a_job_at_risk(step_ms: int, verdict: Verdict) -> None:
    """No record moves, and nothing has to be backpressured for that."""

    def change(it: Built) -> None:
        it.shares[WINDOW, 1] = (1_000, 0)
        it.metrics[WINDOW, 1] = {"step_ms": step_ms, "watermark_lag_ms": 4_200}

    found = health(change).slow
    assert found.verdict is verdict
    if verdict is AT_RISK:
        assert (found.cause, found.busy, found.watermark_lag_ms) == (CauseKind.LONG_CALL, 1.0, 4_200)
        assert str(found.bottleneck) == "count per carrier (uid counts) subtask 1 on h1"
        assert found.why.startswith(f"{found.bottleneck} has not returned for {step_ms / 1000:.1f} s, and no record has been read")


@pytest.mark.parametrize(
    ("silent_ms", "interval_ms", "verdict"),
    [(9_900, 2_000, OK), (10_000, 2_000, AT_RISK), (15_300, 10_000, OK), (31_000, 10_000, AT_RISK)],
)
def test_a_worker_that_is_not_heard_of_puts_a_job_at_risk(silent_ms: int, interval_ms: int, verdict: Verdict) -> None:
    """What it told last is not of now: a worker that was stopped was "11 % busy" until its time was over."""

    def change(it: Built) -> None:
        it.tune(heartbeat_interval_ms=interval_ms)
        it.workers[2] = {"last_seen_ms": NOW - silent_ms}
        it.shares[WINDOW, 2] = (930, 70)

    found = health(change).slow
    assert found.verdict is verdict
    shown = {each.vertex: each.busy for each in found.vertices}
    if verdict is OK:
        assert (found.cause, shown[WINDOW]) == (None, 0.93)
    else:
        seconds = f"{silent_ms / 1000:.1f} s"
        assert found.why.startswith(f"nothing was heard from the worker in slot 2 for {seconds}: its process hangs")
        assert (found.cause, str(found.bottleneck)) == (CauseKind.HUNG_WORKER, "orders subtask 2 on h2")
        assert (found.busy, shown[WINDOW]) == (-1, 0.4)


def test_where_no_worker_is_heard_of_no_share_is_shown() -> None:
    found = health(lambda it: it.workers.update({slot: {"last_seen_ms": NOW - 48_000} for slot in range(4)})).slow
    assert (found.verdict, found.vertices, found.busy, found.backpressured) == (AT_RISK, (), -1, -1)
    assert found.why.startswith("nothing was heard from the worker in slot 0 for 48.0 s and 3 more: ")


def test_the_call_that_lasts_longest_is_named_though_another_vertex_is_backpressured() -> None:
    def change(it: Built) -> None:
        it.pressed(SOURCE)
        it.metrics[WINDOW, 1] = {"step_ms": 12_000}
        it.metrics[SINK, 2] = {"step_ms": 31_000}

    found = health(change).slow
    assert (found.verdict, found.cause, found.backpressured) == (AT_RISK, CauseKind.LONG_CALL, 0.9)
    assert str(found.bottleneck) == "table subtask 2 on h2"


def test_a_job_whose_workers_tell_nothing_yet() -> None:
    def change(it: Built) -> None:
        for vertex in (SOURCE, WINDOW, SINK):
            for subtask in range(4):
                it.shares[vertex, subtask] = None
        it.shares["d" * 32, 0] = None

    found = health(change).slow
    assert (found.verdict, found.bottleneck, found.busy) == (OK, None, -1)


@pytest.mark.parametrize("state", ["RESTARTING", "CREATED", "RECONCILING", "FAILING", "UNKNOWN"])
def test_a_job_that_does_not_run_is_at_risk(state: str) -> None:
    found = health(lambda it: setattr(it, "state", state))
    assert found.slow.verdict is AT_RISK
    assert found.verdict is AT_RISK


@pytest.mark.parametrize(("state", "verdict"), [("FINISHED", OK), ("CANCELED", OK), ("FAILED", BAD)])
def test_a_job_that_has_ended(state: str, verdict: Verdict) -> None:
    def change(it: Built) -> None:
        it.state, it.schedule, it.cut = state, None, None
        it.changes = {"failure": "ValueError: \x1b[31mno\nsuch carrier" if state == "FAILED" else None}

    found = health(change)
    assert {found.verdict, found.safe.verdict, found.slow.verdict, found.resume.verdict} == {verdict}
    assert state in found.safe.why
    assert found.safe.why.isprintable()
    assert "keeps no checkpoint" in found.resume.why
    assert "keeps no checkpoint" in found.safe.why
    assert [("no such carrier" in each.why) for each in (found.safe, found.slow, found.resume)].count(True) == (state == "FAILED")


def test_a_failed_job_tells_once_why_and_how_old_what_it_keeps_is() -> None:
    it = Built(status=None)
    it.state, it.schedule, it.changes = "FAILED", None, {"failure": "ValueError: no such carrier"}
    found = derive_health(replace(it.made(), drills=(drill(38, PASSED, 20_000),)))
    assert found.safe.why.startswith("the job has FAILED: ValueError: no such carrier; it keeps checkpoint 40, which began ")
    assert found.safe.why.endswith(" ago")
    assert (found.safe.checkpoint_id, found.safe.drilled_ms >= 0) == (40, True)
    assert found.slow.why == "the job has FAILED"
    assert found.resume.why == "it keeps checkpoint 40; the job has FAILED"


def test_of_an_ended_job_what_somebody_deleted_is_told_as_deleted() -> None:
    it = Built(status=None)
    it.state, it.schedule = "FINISHED", None
    situation = it.made()
    gone = replace(situation, positions=SnapshotPositions(40, {}, is_gone=True))
    found = derive_health(gone)
    assert found.safe.why == "the job has ended: FINISHED; it kept checkpoint 40, which is not in storage any more"
    assert found.resume.why == "it kept checkpoint 40, which is not in storage any more; the job has ended: FINISHED"
    assert (found.safe.checkpoint_id, found.resume.checkpoint_id, found.resume.location) == (-1, -1, "")
    earlier = derive_health(replace(situation, positions=SnapshotPositions(39, {}, is_gone=True)))
    assert earlier.resume.checkpoint_id == 40, "of another one it says nothing"


def test_an_ended_job_names_what_it_keeps() -> None:
    def change(it: Built) -> None:
        it.state, it.schedule = "FINISHED", None

    found = health(change).resume
    assert (found.checkpoint_id, found.location) == (40, "/state/j/chk-40")
    assert "keeps checkpoint 40" in found.why


def test_output_behind_what_may_be_processed_again_may_repeat() -> None:
    found = health(lambda it: it.tune(checkpointing_mode="at_least_once")).resume
    assert [str(place) for place in found.may_repeat] == ["table"]
    assert "may repeat" in found.why


def test_output_of_a_sink_without_commits_may_repeat() -> None:
    made = Built(status=None).made()
    graph = made.job.graph
    without = replace(graph, vertices=graph.vertices[:3], edges=graph.edges[:2])
    job = replace(made.job, graph=without, vertices=made.job.vertices[:3])
    found = derive_health(replace(made, job=job)).resume
    assert [str(place) for place in found.may_repeat] == ["table"]
    operator = replace(without.vertices[2].operators[0], properties={"discards": True})
    vertices = (*without.vertices[:2], replace(without.vertices[2], operators=(operator,)))
    dropped = derive_health(replace(made, job=replace(job, graph=replace(without, vertices=vertices)))).resume
    assert dropped.may_repeat == (), "what is never visible does not repeat"


def test_records_that_are_not_known_are_not_told() -> None:
    def change(it: Built) -> None:
        it.source_records = None

    assert health(change).safe.replay_records == -1


@pytest.mark.parametrize(
    ("verified", "drills", "verdict", "why", "ago_ms"),
    [
        (((40, 0, 500),), (), OK, "", 500),
        (((40, 0, 500),), ((39, PASSED, 100),), OK, "", 100),
        (((40, 2, 500), (39, 0, 900)), (), BAD, "checkpoint 40 found damaged files: x.parquet: length and 1 more", 900),
        (((40, 1, 500),), ((40, PASSED, 100),), OK, "", 100),
        (((40, 1, 500),), ((40, PASSED, 900),), BAD, "a verification of checkpoint 40", 900),
        (((39, 0, 100), (40, 1, 500)), (), BAD, "a verification of checkpoint 40", 100),
        (((40, 0, 100), (40, 1, 500)), (), OK, "", 100),
        (((38, 1, 500),), (), AT_RISK, "checkpoint 40 has not been verified since", None),
        (((40, 0, 100), (38, 1, 500)), (), OK, "", 100),
        (((40, 0, 100),), ((40, FAILED, 500),), BAD, "a drill of checkpoint 40 found", 100),
    ],
)
def test_a_verification_is_of_files_alone_and_ends_no_warning_of_a_drill(
    verified: tuple[tuple[int, int, int], ...],
    drills: tuple[tuple[int, DrillState, int], ...],
    verdict: Verdict,
    why: str,
    ago_ms: int | None,
) -> None:
    found = tuple(Verification(number, NOW - ago, count, "x.parquet: length" * bool(count)) for number, count, ago in verified)
    made = replace(Built(status=None).made(), drills=tuple(drill(*each) for each in drills), verifications=found)
    safe = derive_health(made).safe
    assert safe.verdict is verdict
    assert why in safe.why
    assert safe.verified_ms == (NOW - ago_ms if ago_ms is not None else -1)
    passed = [NOW - ago for _, state, ago in drills if state is PASSED]
    assert safe.drilled_ms == max(passed, default=-1), "a verification is no drill"

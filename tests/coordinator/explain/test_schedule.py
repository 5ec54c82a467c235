"""Which checkpoints are explained when they end, which are probed before, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.explain.schedule import (
    KEPT_INTERVAL_MS,
    PROBE_AHEAD_MS,
    Expiry,
    ExplanationSchedule,
    ProbeExpiring,
    has_failed,
)
from holdfast.coordinator.explain.usual import Usual
from holdfast.coordinator.views import CheckpointView
from tests.coordinator.explain.building import NUMBER, SINK, Built

TIMEOUT_MS = 60_000


def view(status: str = "COMPLETED", reason: str | None = None, number: int = NUMBER, *, missing: bool = True) -> CheckpointView:
    it = Built(status=status, reason=reason, failed_after_ms=4_000)
    if status == "FAILED" and missing:
        it.missing(SINK, 1)
    made = it.made().checkpoint
    assert made is not None
    return replace(made, checkpoint_id=number)


def usual(**settings: int) -> Usual:
    config = JobConfig(checkpoint_interval_ms=10_000, checkpoint_timeout_ms=TIMEOUT_MS)
    return Usual(replace(config, **settings), 10_000, Built().made().stats.recent)


def expired(number: int = NUMBER) -> CheckpointView:
    return view("FAILED", FailureReason.EXPIRED, number)


def slow(number: int = NUMBER) -> CheckpointView:
    return replace(view(number=number), end_to_end_ms=15_000)


# ----------------------------------------------------------------------------------------------------------- which ones


@pytest.mark.parametrize("reason", FailureReason)
def test_a_failure_with_acknowledgements_missing_is_explained_unless_it_is_no_fault(reason: FailureReason) -> None:
    no_fault = {"subsumed", "end_of_input", "suspended", "coordinator_shutdown", "job_finishing", "leader_changed"}
    assert has_failed(view("FAILED", reason)) is (reason.value not in no_fault)
    assert has_failed(view("FAILED", reason, missing=False)) is (reason is FailureReason.EXPIRED)


@pytest.mark.parametrize(
    ("ended", "is_explained"),
    [
        (view(), False),
        (slow(), True),
        (replace(view(), end_to_end_ms=840), True),
        (replace(view(), end_to_end_ms=830), False),
        (replace(slow(), kind=CheckpointKind.SAVEPOINT), False),
        (replace(slow(), kind=CheckpointKind.SAVEPOINT, end_to_end_ms=31_000), True),
        (replace(slow(), status="IN_PROGRESS"), False),
        (expired(), True),
        (view("FAILED", FailureReason.DECLINED), True),
        (view("FAILED", FailureReason.SUBSUMED), False),
    ],
)
def test_what_is_slow_is_what_explain_calls_slow(ended: CheckpointView, is_explained: bool) -> None:
    config = JobConfig(checkpoint_interval_ms=10_000, checkpoint_timeout_ms=TIMEOUT_MS)
    situation = replace(Built(config=config).made(), checkpoint=ended)
    from_recent = Usual(config, 10_000, situation.stats.recent)
    assert ExplanationSchedule().ended(ended, from_recent, 0) is is_explained


# ---------------------------------------------------------------------------------------------------------- how often


def test_a_job_that_fails_each_second_is_explained_once_a_minute() -> None:
    schedule = ExplanationSchedule()
    declined = [view("FAILED", FailureReason.DECLINED, second + 1) for second in range(300)]
    times = [second for second, ended in enumerate(declined) if schedule.ended(ended, usual(), 1_000 * second)]
    assert times == [0, 60, 120, 180, 240]


def test_one_that_expires_leaves_its_minute_to_one_that_can_be_probed() -> None:
    schedule = ExplanationSchedule()
    times = [second for second in range(300) if schedule.ended(expired(second + 1), usual(), 1_000 * second)]
    assert times == [0, 65, 130, 195, 260]


def test_slow_ones_do_not_use_up_what_a_failed_one_needs() -> None:
    schedule = ExplanationSchedule()
    assert [schedule.ended(slow(number), usual(), 1_000 * number) for number in (1, 2, 3)] == [True, False, False]
    assert schedule.ended(expired(4), usual(), 4_000)
    assert not schedule.ended(expired(5), usual(), 5_000)
    assert schedule.ended(slow(6), usual(), 1_000 + KEPT_INTERVAL_MS)


def test_healthy_ones_use_nothing_up() -> None:
    schedule = ExplanationSchedule()
    for number in range(1, 100):
        assert not schedule.ended(view(number=number), usual(), number)
    assert schedule.ended(expired(100), usual(), 100)


@pytest.mark.parametrize("ended", [expired, slow], ids=["failed", "slow"])
def test_one_that_is_not_explained_after_all_leaves_its_minute_to_the_next(ended: Callable[[int], CheckpointView]) -> None:
    schedule = ExplanationSchedule()
    assert schedule.ended(ended(1), usual(), 0)
    late_ms = KEPT_INTERVAL_MS + PROBE_AHEAD_MS
    assert schedule.ended(ended(2), usual(), late_ms)
    schedule.dropped(1, ended(1).status)
    assert not schedule.ended(ended(3), usual(), late_ms + 1_000), "the minute is that of another one"
    schedule.dropped(2, ended(2).status)
    schedule.dropped(2, ended(2).status)
    assert schedule.ended(ended(4), usual(), late_ms + 2_000)
    assert not schedule.ended(ended(5), usual(), late_ms + 3_000)


def test_one_that_was_probed_and_is_not_explained_leaves_its_minute_too() -> None:
    schedule = ExplanationSchedule()
    schedule.watch(Expiry(7, 2, 10_000), 10_000)
    assert schedule.advance(6_000) is not None
    assert schedule.ended(expired(7), usual(), 10_000)
    schedule.dropped(7, "FAILED")
    assert schedule.ended(expired(8), usual(), 11_000)
    schedule.watch(Expiry(9, 2, 90_000), 10_000)
    assert schedule.advance(86_000) is not None
    schedule.dropped(8, "FAILED")
    assert not schedule.ended(expired(10), usual(), 87_000), "another one was probed since"


# ------------------------------------------------------------------------------------------------------------- probe


@pytest.mark.parametrize(
    ("timeout_ms", "due_ms"), [(600_000, 600_000 - PROBE_AHEAD_MS), (10_000, 6_000), (1_000, 600), (0, None)]
)
def test_a_probe_is_due_before_a_checkpoint_expires(timeout_ms: int, due_ms: int | None) -> None:
    schedule = ExplanationSchedule()
    schedule.watch(Expiry(7, 2, timeout_ms), timeout_ms)
    assert schedule.next_deadline_ms() == due_ms
    if due_ms is not None:
        assert schedule.advance(due_ms - 1) is None
        assert schedule.advance(due_ms) == ProbeExpiring(7, 2, timeout_ms - due_ms)
        assert (schedule.next_deadline_ms(), schedule.advance(due_ms + 1)) == (None, None), "once"


def test_none_is_due_without_a_pending_checkpoint_nor_for_one_that_has_all_acknowledgements() -> None:
    schedule = ExplanationSchedule()
    assert (schedule.next_deadline_ms(), schedule.advance(10**9)) == (None, None)
    schedule.watch(Expiry(7, 2, 10_000), 10_000)
    schedule.watch(None, 10_000)
    assert (schedule.next_deadline_ms(), schedule.advance(10**9)) == (None, None)


def test_one_that_was_probed_is_explained_when_it_ends_however_it_does() -> None:
    for ended in (expired(7), slow(7)):
        schedule = ExplanationSchedule()
        assert schedule.ended(slow(5), usual(), 0)
        schedule.watch(Expiry(7, 2, 10_000), 10_000)
        assert schedule.advance(6_000) is not None
        assert not schedule.ended(expired(6), usual(), 6_500), "the probe counts as that minute's"
        assert schedule.ended(ended, usual(), 10_000)
        assert not schedule.ended(ended, usual(), 10_001), "once"


@pytest.mark.parametrize("ended", [slow(7), view(number=7), view("FAILED", FailureReason.SUBSUMED, 7)])
def test_a_probe_of_one_that_completes_after_all_leaves_its_minute_to_the_next_that_fails(ended: CheckpointView) -> None:
    """Checkpoints take longer and longer, until one expires."""
    schedule = ExplanationSchedule()
    schedule.watch(Expiry(7, 2, 20_000), 20_000)
    assert schedule.advance(15_000) is not None
    schedule.ended(ended, usual(), 17_000)
    schedule.watch(Expiry(8, 2, 38_000), 20_000)
    assert schedule.next_deadline_ms() is None, "probes have a bound of their own"
    assert schedule.ended(expired(8), usual(), 38_000)
    assert not schedule.ended(expired(9), usual(), 58_000)


def test_probes_are_bounded_as_explanations_are() -> None:
    schedule = ExplanationSchedule()
    probed = []
    for number in range(1, 181):  # each second one expires that had a second
        begun_ms = 1_000 * number
        schedule.watch(Expiry(number, 1, begun_ms + 1_000), 1_000)
        probed += [number] if schedule.advance(begun_ms + 600) is not None else []
        schedule.watch(None, 1_000)
        schedule.ended(expired(number), usual(), begun_ms + 1_000)
    assert probed == [1, 62, 123]


def test_a_probe_waits_for_its_minute_and_goes_without_if_the_checkpoint_expires_first() -> None:
    schedule = ExplanationSchedule()
    assert schedule.ended(expired(1), usual(), 0)
    schedule.watch(Expiry(2, 1, 62_000), 10_000)
    assert schedule.next_deadline_ms() == KEPT_INTERVAL_MS
    schedule.watch(Expiry(2, 1, KEPT_INTERVAL_MS), 10_000)
    assert schedule.next_deadline_ms() is None

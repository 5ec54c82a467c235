"""The election, event by event: when a member takes over, when it must not, and how it leaves."""

from __future__ import annotations

import pytest

from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Action, Election, ElectionConfig, Event, Role
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.statebackends.errors import InvalidConfigError

AFTER_MS = 3_000
ME, OTHER, THIRD = "aa", "bb", "cc"
LOCK = "the lock of this host"


def active(epoch: int, member: str = OTHER) -> ActiveRecord:
    return ActiveRecord(epoch, member, f"http://{member}")


def sign(beat: int, member: str = OTHER, epoch: int = 1, **facts: object) -> SignOfLife:
    return SignOfLife(member, beat, f"http://{member}", epoch=epoch, **facts)  # type: ignore[arg-type]


def seen(record: ActiveRecord | None, *signs: SignOfLife) -> on.Observed:
    return on.Observed(Observation(record, {each.member: each for each in signs}))


class Member:
    """An election with a clock; `do` leaves out the periodic actions that a test is not about."""

    def __init__(self, lock: str = LOCK) -> None:
        self.now_ms = 1_000_000
        self.election = Election(ME, ElectionConfig(AFTER_MS), lock=lock, now_ms=self.now_ms)

    def do(self, event: Event, after_ms: int = 0) -> list[Action]:
        self.now_ms += after_ms
        found = self.election.handle(event, now_ms=self.now_ms)
        return [each for each in found if not isinstance(each, on.Observe | on.GiveSign) or getattr(each, "is_leaving", False)]

    def lead(self, epoch: int = 1) -> None:
        record = active(epoch - 1) if epoch > 1 else None
        assert self.do(seen(record, sign(1, epoch=epoch - 1, is_leaving=True))) == [on.Claim(epoch)]
        assert self.do(on.ClaimAnswered(active(epoch, ME))) == [on.Lead(epoch)]


def test_first_member_claims_at_once_and_leads_when_storage_says_so() -> None:
    member = Member()
    assert member.do(seen(None)) == [on.Claim(1)]
    assert member.election.role is Role.CLAIMING
    assert member.do(on.ClaimAnswered(active(1, ME))) == [on.Lead(1)]
    assert member.election.role is Role.ACTIVE


def test_claim_that_another_one_won_leaves_a_standby() -> None:
    member = Member()
    member.do(seen(None))
    assert member.do(on.ClaimAnswered(active(1))) == [on.ReleaseLock()]
    assert (member.election.role, member.election.active) == (Role.STANDBY, active(1))


def test_sign_that_changes_is_never_probed() -> None:
    member = Member()
    for beat in range(1, 20):
        assert member.do(seen(active(1), sign(beat)), AFTER_MS - 1) == []


def test_sign_that_does_not_change_is_probed_and_an_answer_keeps_the_active_one() -> None:
    member = Member()
    member.do(seen(active(1), sign(1)))
    assert member.do(seen(active(1), sign(1)), AFTER_MS - 1) == []
    assert member.do(seen(active(1), sign(1)), 1) == [on.Probe(1, f"http://{OTHER}", OTHER)]
    assert member.do(seen(active(1), sign(1)), 100) == []
    assert member.do(on.ProbeAnswered(1, is_active=True)) == []
    assert member.do(seen(active(1), sign(1)), 999) == []
    assert member.do(seen(active(1), sign(1)), 1) == [on.Probe(2, f"http://{OTHER}", OTHER)]
    assert member.do(on.ProbeAnswered(2, is_active=False)) == [on.Claim(2)]


def test_look_comes_when_the_sign_is_old_enough_and_not_a_look_later() -> None:
    member = Member()
    member.do(on.DeadlineReached())  # its own sign is under way
    member.do(seen(active(1), sign(1)))
    member.do(seen(active(1), sign(1)), AFTER_MS - 10)
    assert member.election.next_deadline_ms() == member.now_ms + 10


def test_time_alone_says_nothing() -> None:
    """A member that was paused, or could not read storage, has not seen that the sign did not change."""
    member = Member()
    member.do(seen(active(1), sign(1)))
    assert member.do(on.DeadlineReached(), 60_000) == []
    assert member.do(on.ObservationFailed(), 60_000) == []
    assert member.do(seen(active(1), sign(2))) == []


def test_answer_to_a_probe_counts_only_while_the_sign_is_as_it_was() -> None:
    member = Member()
    member.do(seen(active(1), sign(1)))
    assert member.do(seen(active(1), sign(1)), AFTER_MS) == [on.Probe(1, f"http://{OTHER}", OTHER)]
    assert member.do(seen(active(1), sign(2)), 10) == []
    assert member.do(on.ProbeAnswered(1, is_active=False)) == []
    assert member.election.role is Role.STANDBY


def test_deleted_sign_is_none_that_changed() -> None:
    member = Member()
    member.do(seen(active(1), sign(1)))
    member.do(seen(active(1)), AFTER_MS // 2)
    assert member.do(seen(active(1)), AFTER_MS // 2) == [on.Probe(1, f"http://{OTHER}", OTHER)]


def test_hand_over_is_taken_at_once_and_a_standby_that_leaves_hands_nothing_over() -> None:
    member = Member()
    assert member.do(seen(active(1), sign(1), sign(4, THIRD, epoch=0, is_leaving=True))) == []
    assert member.do(seen(active(1), sign(2, is_leaving=True)), 10) == [on.Claim(2)]


def test_lock_counts_if_the_active_one_said_that_it_holds_it() -> None:
    member = Member()
    assert not member.election.wants_lock
    member.do(seen(active(1), sign(1, holds_lock=True, lock=LOCK)))
    assert member.election.wants_lock
    assert member.do(on.LockTaken(), 10) == [on.Claim(2)]


@pytest.mark.parametrize(
    "other",
    [
        sign(1, holds_lock=False, lock=LOCK),
        sign(1, holds_lock=True, lock="of another host"),
        sign(1, epoch=0, holds_lock=True, lock=LOCK),
    ],
    ids=["it holds none", "another lock", "said before it led"],
)
def test_lock_that_says_nothing_of_the_active_one_is_released(other: SignOfLife) -> None:
    member = Member()
    member.do(seen(active(1), other))
    assert not member.election.wants_lock
    assert member.do(on.LockTaken()) == [on.ReleaseLock()]
    assert member.election.role is Role.STANDBY


def test_member_without_a_lock_never_takes_one_for_news() -> None:
    member = Member(lock="")
    member.do(seen(active(1), sign(1, holds_lock=True, lock="")))
    assert not member.election.wants_lock


def test_superseded_member_steps_down_and_does_not_grab_back() -> None:
    member = Member()
    member.lead()
    assert member.do(seen(active(2))) == [on.StopLeading(1), on.ReleaseLock()]
    assert member.election.role is Role.STANDBY
    assert member.do(seen(active(2), sign(1, epoch=2))) == []
    assert member.do(seen(active(2), sign(1, epoch=2)), 2 * AFTER_MS - 1) == []
    assert member.do(seen(active(2), sign(1, epoch=2)), 1) == [on.Probe(1, f"http://{OTHER}", OTHER)]


def test_superseded_member_takes_over_at_once_what_is_handed_to_it() -> None:
    member = Member()
    member.lead()
    member.do(seen(active(2)))
    assert member.do(seen(active(2), sign(1, epoch=2, is_leaving=True))) == [on.Claim(3)]


def test_claim_without_an_answer_is_found_in_the_records() -> None:
    member = Member()
    member.do(seen(None))
    assert member.do(on.ClaimFailed(1)) == [on.ReleaseLock()]
    assert member.do(seen(active(1, ME))) == [on.Lead(1)]
    other = Member()
    other.do(seen(None))
    other.do(on.ClaimFailed(1))
    assert other.do(seen(None)) == [on.Claim(1)]


def test_late_observation_does_not_bring_an_older_active_one_back() -> None:
    member = Member()
    member.lead(3)
    assert member.do(seen(active(2), sign(9, is_leaving=True))) == []
    assert (member.election.role, member.election.epoch) == (Role.ACTIVE, 3)


def test_stop_of_the_active_one_hands_over_when_its_jobs_are_closed() -> None:
    member = Member()
    member.lead()
    assert member.do(on.StopRequested()) == [on.StopLeading(1), on.GiveSign(1, is_leaving=True), on.ReleaseLock()]
    assert member.do(on.StopRequested()) == []
    assert member.election.next_deadline_ms() is None
    assert member.do(seen(active(1, ME), sign(9, ME, is_leaving=True))) == []


def test_claim_that_is_answered_behind_a_stop_is_handed_over() -> None:
    member = Member()
    member.do(seen(None))
    assert member.do(on.StopRequested()) == [on.GiveSign(0, is_leaving=True), on.ReleaseLock()]
    assert member.do(on.ClaimAnswered(active(1, ME))) == [on.GiveSign(1, is_leaving=True), on.ReleaseLock()]


def test_signs_and_looks_come_at_their_intervals_one_at_a_time() -> None:
    member = Member()
    do = lambda event, after_ms=0: member.election.handle(event, now_ms=member.now_ms + after_ms)  # noqa: E731
    assert do(on.DeadlineReached()) == [on.GiveSign(0), on.Observe()]
    assert member.election.next_deadline_ms() is None
    assert do(on.DeadlineReached(), 60_000) == []
    do(on.SignGiven())
    do(seen(active(1), sign(1)))
    assert member.election.next_deadline_ms() == member.now_ms + AFTER_MS // 10
    assert do(on.DeadlineReached(), AFTER_MS // 3) == [on.GiveSign(0), on.Observe()]


def test_new_active_one_says_so_as_soon_as_the_sign_under_way_is_stored() -> None:
    member = Member()
    member.election.handle(on.DeadlineReached(), now_ms=member.now_ms)
    member.do(seen(None))
    assert member.election.handle(on.ClaimAnswered(active(1, ME)), now_ms=member.now_ms) == [on.Lead(1)]
    assert member.election.handle(on.SignGiven(), now_ms=member.now_ms) == [on.GiveSign(1)]


def tick(member: Member, ms: int, *, is_stored: bool = False) -> list[Action]:
    """Time that the process sees pass, with signs that can't be stored."""
    found: list[Action] = []
    for _ in range(0, ms, 500):
        found += member.do(on.DeadlineReached(), 500)
        found += member.do(on.SignGiven(is_stored))
    return found


def test_active_one_that_can_store_no_sign_gives_up_after_twice_the_time() -> None:
    member = Member()
    member.lead()
    assert tick(member, 2 * AFTER_MS - 500) == []
    assert member.election.role is Role.ACTIVE
    assert tick(member, 500) == [on.StopLeading(1, is_cut_off=True), on.ReleaseLock()]
    assert (member.election.role, member.election.epoch) == (Role.STANDBY, 0)
    assert tick(member, 5_000) == []


def test_active_one_whose_signs_hang_gives_up_without_an_answer() -> None:
    member = Member()
    member.lead()
    found: list[Action] = []
    while member.election.role is Role.ACTIVE:
        due = member.election.next_deadline_ms()
        assert due is not None
        found += member.do(on.DeadlineReached(), due - member.now_ms)
    assert found == [on.StopLeading(1, is_cut_off=True), on.ReleaseLock()]
    assert member.now_ms == 1_000_000 + 2 * AFTER_MS


def test_signs_that_are_stored_now_and_then_are_enough() -> None:
    member = Member()
    member.lead()
    for _ in range(6):
        assert tick(member, 2 * AFTER_MS - 1_000) == []
        assert tick(member, 1_000, is_stored=True) == []
    assert member.election.role is Role.ACTIVE


def test_pause_of_the_process_is_none_of_storage() -> None:
    member = Member()
    member.lead()
    tick(member, AFTER_MS)
    assert member.do(on.DeadlineReached(), 3_600_000) == []
    assert member.election.role is Role.ACTIVE


def test_one_that_gave_up_is_replaced_at_once_by_another_and_later_by_itself() -> None:
    other = Member()
    assert other.do(seen(active(1), sign(7, epoch=0))) == [], "of before it led"
    assert other.do(seen(active(1), sign(8, epoch=0, gave_up=1)), 10) == [on.Claim(2)]

    member = Member()
    member.lead()
    tick(member, 2 * AFTER_MS)
    own = seen(active(1, ME), sign(30, ME, epoch=0, gave_up=1))
    assert member.do(own, 10 * AFTER_MS) == [], "it can store no sign"
    assert member.election.handle(on.DeadlineReached(), now_ms=member.now_ms)[0] == on.GiveSign(0, gave_up=1)
    member.do(on.SignGiven())
    assert member.do(own) == [], "the others come first"
    assert member.do(own, AFTER_MS // 3) == [on.Claim(2)]


def test_member_that_can_store_no_sign_does_not_take_over() -> None:
    member = Member()
    member.do(on.SignGiven(is_stored=False))
    assert member.do(seen(None)) == []
    assert member.do(seen(active(1), sign(1, is_leaving=True))) == []
    assert member.do(seen(active(1), sign(2, holds_lock=True, lock=LOCK))) == []
    assert member.do(on.LockTaken()) == [on.ReleaseLock()]
    member.do(on.SignGiven())
    assert member.do(on.LockTaken()) == [on.Claim(2)]


@pytest.mark.parametrize("after_ms", [299, 600_001, 0, -1])
def test_times_out_of_bounds_are_refused(after_ms: int) -> None:
    with pytest.raises(InvalidConfigError, match="takeover_after_ms"):
        Election(ME, ElectionConfig(after_ms), now_ms=0)

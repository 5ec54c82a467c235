"""Followers of histories: every record of a job in order, from the feed or from files, and what is lost told as a gap."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.api.events.follower import Follower, Told
from holdfast.coordinator.history import feed as feeds
from holdfast.coordinator.history.feed import FedRecord, HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, HistoryGap, HistoryPage, Position, encode_line
from holdfast.coordinator.history.store import HistoryQuery

JOB, OTHER = "a" * 32, "b" * 32


def record(number: int, *, epoch: int = 1, job_id: str = JOB, at_ms: int | None = None) -> FedRecord:
    line = encode_line(number, at_ms if at_ms is not None else epoch * 1_000 + number, "state", {"state": "RUNNING"})
    return FedRecord(job_id, "flights", epoch, number, line)


def entry(number: int, *, epoch: int = 1, at_ms: int | None = None) -> HistoryEntry:
    return HistoryEntry(epoch, number, at_ms if at_ms is not None else epoch * 1_000 + number, "state", {"state": "RUNNING"})


def page(*entries: HistoryEntry, gaps: tuple[HistoryGap, ...] = (), more: bool = False) -> HistoryPage:
    where = f"{entries[-1].epoch}-{entries[-1].number}" if entries else ""
    return HistoryPage(entries, gaps, next=where, more=more)


def places(told: list[Told]) -> list[str]:
    return [f"{each.what.epoch}-{each.what.number}" if isinstance(each.what, HistoryEntry) else "gap" for each in told]


def test_a_new_follower_gets_what_comes_from_now_on() -> None:
    feed = HistoryFeed()
    feed.publish(record(1))
    follower = Follower(feed)
    assert (follower.take(), follower.wants()) == ([], None)
    feed.publish(record(2))
    feed.publish(record(1, job_id=OTHER))
    assert [(each.job_id, each.place) for each in follower.take()] == [(JOB, 1), (OTHER, 2)]


def test_of_one_job_others_are_left_out() -> None:
    feed = HistoryFeed()
    follower = Follower(feed, JOB)
    feed.publish(record(1, job_id=OTHER))
    feed.publish(record(1))
    assert [each.job_id for each in follower.take()] == [JOB]


def test_files_first_then_the_feed_and_nothing_twice() -> None:
    feed = HistoryFeed()
    for number in range(1, 7):
        feed.publish(record(number))
    follower = Follower(feed, JOB)
    follower.go_on({JOB: Position(1, 2)}, {JOB: "flights"})
    wanted = follower.wants()
    assert wanted is not None
    assert wanted.query.after == Position(1, 2)
    assert places(follower.read(page(entry(3), more=True))) == ["1-3"]
    again = follower.wants()
    assert again is not None
    assert again.query.after == Position(1, 3)
    assert places(follower.read(page(entry(4)))) == ["1-4"]
    assert follower.wants() is None
    assert places(follower.take()) == ["1-5", "1-6"]


def test_a_takeover_by_this_process_reads_what_the_other_leader_recorded() -> None:
    feed = HistoryFeed()
    follower = Follower(feed)
    feed.publish(record(1))
    assert places(follower.take()) == ["1-1"]
    feed.publish(record(1, epoch=3))
    assert follower.take() == []
    wanted = follower.wants()
    assert wanted is not None
    assert (wanted.job_id, wanted.query.after) == (JOB, Position(1, 1))
    assert places(follower.read(page(entry(2), entry(1, epoch=2)))) == ["1-2", "2-1"]
    assert places(follower.take()) == ["3-1"]


def test_what_neither_has_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "RECORDS_MAX", 2)
    feed = HistoryFeed()
    follower = Follower(feed)
    feed.publish(record(1))
    follower.take()
    for number in range(2, 8):
        feed.publish(record(number))
    assert follower.take() == []
    assert follower.wants() is not None
    follower.read(page(entry(2), entry(3)))
    told = follower.take()
    assert places(told) == ["gap", "1-6", "1-7"]
    assert told[0].what == HistoryGap(1, 3, 6, 2)


def test_gaps_of_a_page_are_in_their_place() -> None:
    follower = Follower(HistoryFeed(), JOB)
    follower.go_on({}, {JOB: "flights"})
    told = follower.read(page(entry(1), entry(4), entry(1, epoch=2), gaps=(HistoryGap(1, 1, 4, 2), HistoryGap(1, 4, None, None))))
    assert places(told) == ["1-1", "gap", "1-4", "gap", "2-1"]
    assert follower.positions == {JOB: Position(2, 1)}


def test_by_time_the_newest_are_told_and_what_is_older_is_not() -> None:
    feed = HistoryFeed()
    for number, at_ms in ((1, 100), (2, 205), (3, 300)):
        feed.publish(record(number, at_ms=at_ms))
    feed.publish(record(1, job_id=OTHER, at_ms=150))
    follower = Follower(feed)
    follower.go_back(200, {JOB: "flights"})
    wanted = follower.wants()
    assert wanted is not None
    assert wanted.query.newest
    assert places(follower.read(page(entry(1, at_ms=100), entry(2, at_ms=205)))) == ["1-2"]
    assert [(each.job_id, *places([each])) for each in follower.take()] == [(JOB, "1-3")]


def test_a_place_that_has_left_the_ring_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "RECORDS_MAX", 2)
    feed = HistoryFeed()
    for number in range(1, 6):
        feed.publish(record(number))
    assert [Follower(feed).resume(place) for place in (2, 3, 5, 6)] == [False, True, True, False]


def test_the_ring_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BYTES_MAX", 3 * len(record(1).line))
    feed = HistoryFeed()
    for number in range(1, 8):
        feed.publish(record(number))
    found = feed.read(0, 100)
    assert ([each.number for each in found.records], found.next, found.missed) == ([5, 6, 7], 7, True)


class FollowedJob(RuleBasedStateMachine):
    """A job whose leaders change, whose files are written late, some never, and a follower that reads when it likes."""

    @initialize(knows=st.booleans())
    def begin(self, *, knows: bool) -> None:
        self.feed = HistoryFeed()
        self.made: list[Position] = []
        self.unwritten: list[Position] = []
        self.files: list[Position] = []
        self.epoch, self.number, self.is_here = 1, 0, True
        self.told: list[Told] = []
        self.follower = Follower(self.feed, JOB)
        self.follower.go_on({}, {JOB: "flights"})

    @rule()
    def happens(self) -> None:
        self.number += 1
        at = Position(self.epoch, self.number)
        self.made.append(at)
        self.unwritten.append(at)
        if self.is_here:
            self.feed.publish(record(at.number, epoch=at.epoch))

    @rule()
    def is_written(self) -> None:
        self.files += self.unwritten
        self.unwritten.clear()

    @rule(is_here=st.booleans(), loses=st.booleans())
    def leader_changes(self, *, is_here: bool, loses: bool) -> None:
        """The next one leads once the other's files are written, or lost."""
        if not loses:
            self.files += self.unwritten
        self.unwritten.clear()
        self.epoch, self.number, self.is_here = self.epoch + 1, 0, is_here

    def _page(self, query: HistoryQuery) -> HistoryPage:
        found = [at for at in self.files if query.after is None or at > query.after]
        shown = found[: min(query.limit, 3)]
        more = len(shown) < len(found)
        where = str(shown[-1]) if shown else str(query.after) if query.after is not None else ""
        return HistoryPage(tuple(entry(at.number, epoch=at.epoch) for at in shown), next=where, more=more)

    @precondition(lambda self: hasattr(self, "follower"))
    @rule(limit=st.integers(1, 4))
    def reads(self, limit: int) -> None:
        wanted = self.follower.wants()
        self.told += self.follower.take(limit) if wanted is None else self.follower.read(self._page(wanted.query))

    @invariant()
    def is_in_order_and_nothing_is_told_twice(self) -> None:
        found = [Position(each.what.epoch, each.what.number) for each in self.told if isinstance(each.what, HistoryEntry)]
        assert found == sorted(set(found))
        assert set(found) <= set(self.made)

    def teardown(self) -> None:
        """Once all is written and read, only what was lost with a leader is missing: of this process's feed nothing is."""
        self.is_written()
        self.is_here = True
        self.leader_changes(is_here=True, loses=False)
        self.happens()
        for _ in range(3 * len(self.made) + 10):
            self.reads(4)
        found = {Position(each.what.epoch, each.what.number) for each in self.told if isinstance(each.what, HistoryEntry)}
        assert set(self.files) | {self.made[-1]} <= found


TestFollowedJob = FollowedJob.TestCase

"""CORE: what a follower of histories gets next. Records of the feed and pages of history files in, records in order out.

Of each job the records come in order, without a hole but for what its history has lost, which is told as a gap. Where the feed does
not go on from what the follower has had (another coordinator led the job meanwhile, or the follower was slow), the files are read
first. A record may come twice, and has the same place then."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.coordinator.history.feed import FedRecord, FeedPage, HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, HistoryGap, HistoryPage, Line, Position
from holdfast.coordinator.history.store import PAGE_RECORDS_MAX, HistoryQuery
from holdfast.statebackends.decoding import decode_json

BATCH_MAX = 100
"""Records that are told at one time."""

JOBS_MAX = 10_000
"""Jobs whose places a follower remembers; those that it heard of last."""


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that happened to a job, or records of it that are lost."""

    job_id: str
    job_name: str
    what: HistoryEntry | HistoryGap
    place: int = -1
    """In the feed; -1: it was read from a file."""


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read a page of a job's history, then call `read`."""

    job_id: str
    query: HistoryQuery


@dataclass(slots=True)
class _CatchUp:
    job_id: str
    job_name: str
    since_ms: int | None = None
    """The newest records, from this time on; None: all behind the place that the follower has had."""


class Follower:
    """Follows all jobs, or one. `start` says where."""

    def __init__(self, feed: HistoryFeed, job_id: str | None = None) -> None:
        self._feed = feed
        self._job_id = job_id
        self._place = feed.end
        self._positions: dict[str, Position] = {}
        self._waiting: deque[_CatchUp] = deque()
        self._caught: dict[str, Position] = {}
        """Job -> the record in front of which its files were read, though it does not follow what was had."""
        self._since_ms: int | None = None
        self._knows_all = False

    @property
    def positions(self) -> Mapping[str, Position]:
        """Job -> the last record that was told, or is known to need no telling."""
        return self._positions

    # ------------------------------------------------------------------------------------------------------------ start

    def go_on(self, positions: Mapping[str, Position], names: Mapping[str, str]) -> None:
        """Tell all behind these places, of the jobs in `names` (id -> name). A job without a place is told from its beginning."""
        self._positions.update(positions)
        self._waiting.extend(_CatchUp(job_id, name) for job_id, name in names.items())
        self._place, self._knows_all = self._feed.start, True

    def go_back(self, since_ms: int, names: Mapping[str, str]) -> None:
        """Tell what happened since then, wall clock, of the jobs in `names`."""
        self._waiting.extend(_CatchUp(job_id, name, since_ms) for job_id, name in names.items())
        self._place, self._since_ms = self._feed.start, since_ms

    def resume(self, place: int) -> bool:
        """Go on from a place in the feed; False if it has left the ring."""
        if not self._feed.start <= place <= self._feed.end:
            return False
        self._place = place
        return True

    # ------------------------------------------------------------------------------------------------------------- next

    def wants(self) -> ReadHistory | None:
        """The page to read before anything else is told; None: the feed is next."""
        if not self._waiting:
            return None
        job = self._waiting[0]
        if job.since_ms is not None:
            return ReadHistory(job.job_id, HistoryQuery(None, None, PAGE_RECORDS_MAX, newest=True))
        return ReadHistory(job.job_id, HistoryQuery(self._positions.get(job.job_id), None, BATCH_MAX))

    def read(self, page: HistoryPage | None) -> list[Told]:
        """The page that was wanted has come; None: the job has no history any more."""
        job = self._waiting[0]
        if page is None:
            self._waiting.popleft()
            return []
        told = self._since(job, page) if job.since_ms is not None else self._behind(job, page)
        if not page.more or job.since_ms is not None:
            self._waiting.popleft()
        return told

    def _behind(self, job: _CatchUp, page: HistoryPage) -> list[Told]:
        merged: list[HistoryEntry | HistoryGap] = [*page.entries, *page.gaps]
        merged.sort(key=_order)
        if page.next:
            epoch, _, number = page.next.partition("-")
            self._note(job.job_id, Position(int(epoch), int(number)))
        return [Told(job.job_id, job.job_name, what) for what in merged]

    def _since(self, job: _CatchUp, page: HistoryPage) -> list[Told]:
        assert job.since_ms is not None
        kept = [entry for entry in page.entries if entry.at_ms >= job.since_ms]
        told = [Told(job.job_id, job.job_name, entry) for entry in kept]
        if kept and len(kept) == len(page.entries) == PAGE_RECORDS_MAX:  # there may be more that are as new
            first = kept[0]
            told.insert(0, Told(job.job_id, job.job_name, HistoryGap(first.epoch, 0, first.number, None)))
        if page.entries:
            last = page.entries[-1]
            self._note(job.job_id, Position(last.epoch, last.number))
        return told

    def take(self, limit: int = BATCH_MAX) -> list[Told]:
        """Records of the feed, while nothing is wanted of a file. Empty: none has come, or `wants` is asked for first."""
        page: FeedPage = self._feed.read(self._place, limit)
        told: list[Told] = []
        for index, record in enumerate(page.records):
            at = Position(record.epoch, record.number)
            if self._job_id not in (None, record.job_id) or at <= self._positions.get(record.job_id, Position(0, 0)):
                continue
            if not self._follows(record, at):
                self._caught[record.job_id] = at
                self._waiting.append(_CatchUp(record.job_id, record.job_name))
                self._place = page.next - len(page.records) + index
                return told
            told += self._hole(record, at)
            self._caught.pop(record.job_id, None)
            self._note(record.job_id, at)
            entry = decode_fed(record)
            if self._since_ms is None or entry.at_ms >= self._since_ms:
                told.append(Told(record.job_id, record.job_name, entry, page.next - len(page.records) + index))
        self._place = page.next
        return told

    def _follows(self, record: FedRecord, at: Position) -> bool:
        """Whether nothing can lie between what was had of the job and this record."""
        last = self._positions.get(record.job_id)
        if last is None:
            return not self._knows_all or at == Position(1, 1) or self._caught.get(record.job_id) == at
        return (last.epoch, last.number + 1) == (at.epoch, at.number) or self._caught.get(record.job_id) == at

    def _hole(self, record: FedRecord, at: Position) -> list[Told]:
        """Records that neither the feed nor, so far, a file has."""
        last = self._positions.get(record.job_id)
        if last is None or last.epoch != at.epoch or last.number + 1 == at.number:
            return []
        gap = HistoryGap(at.epoch, last.number, at.number, at.number - last.number - 1)
        return [Told(record.job_id, record.job_name, gap)]

    def _note(self, job_id: str, at: Position) -> None:
        self._positions.pop(job_id, None)  # the one that was heard of last is at the end
        self._positions[job_id] = at
        while len(self._positions) > JOBS_MAX:
            del self._positions[next(iter(self._positions))]


def _order(what: HistoryEntry | HistoryGap) -> tuple[int, int, bool]:
    """A gap is behind the record that it names."""
    return (what.epoch, what.number, False) if isinstance(what, HistoryEntry) else (what.epoch, what.after, True)


def decode_fed(record: FedRecord) -> HistoryEntry:
    """The record of a line that this process made."""
    line = decode_json(record.line, Line)
    return HistoryEntry(record.epoch, record.number, line.at_ms, line.kind, line.facts)

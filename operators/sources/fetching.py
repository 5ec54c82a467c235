"""A reader that fetches from a blocking client on a thread of its own, a bounded number of fetches ahead. SHELL of `SplitReader`.

All that crosses threads are calls and their outcomes, which come back as mails, and two flags that a fetch looks at; so a schedule
that has no threads can drive it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic

from holdfast.operators.base import CallThread
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SourceReader,
    SplitReader,
    SplitRecords,
    SplitT,
    kind_of,
)
from holdfast.statebackends.errors import InvalidSplitError

log = logging.getLogger("holdfast.sources")

FETCHES_AHEAD_MAX = 4
"""Fetches that are under way or wait to be polled, at most."""
EMPTY_FETCH_MS = 5
"""A fetch that found nothing in less has not waited: the next one comes a while later."""
PAUSE_MS = 20
"""That while."""


class FetchingReader(SourceReader[SplitT], Generic[SplitT]):
    """Drives a SplitReader."""

    def __init__(self, reader: SplitReader[SplitT], *, splits_max: int) -> None:
        self.splits_max = splits_max
        self._reader = reader
        self._assigned: set[str] = set()
        """Splits on the thread's side: added, and not finished."""
        self._paused: set[str] = set()
        self._has_failed = False
        """On the thread's side. The client may have gone on behind what it did not give: it is not called again."""
        self._ready: deque[SplitRecords] = deque()
        self._waiting: dict[str, int] = {}
        """Split -> records that were last known to wait in it."""
        self._fetching = 0
        self._calls_begun = 0
        """Calls that are no fetches. The thread counts those that have ended: a fetch must not keep one waiting."""
        self._calls_ended = 0
        self._ends: deque[int] = deque()
        """Of each fetch that waits to be polled, the records of its own that are still to be."""
        self._next_fetch_ms = 0
        self._to_tell: dict[str, Position] = {}
        """Positions of complete checkpoints that the client does not know of."""
        self._is_telling = False
        self._error: BaseException | None = None
        self._closed = False
        self._thread: CallThread | None = None

    def open(self, context: ReaderContext) -> None:
        self._context = context
        self._thread = context.open_thread(f"holdfast-{context.uid}-{context.subtask}")
        self._call(self._reader.open)

    def add_splits(self, splits: Sequence[AssignedSplit[SplitT]]) -> None:
        def add() -> None:
            self._assigned.update(assigned.split_id for assigned in splits)
            self._reader.add_splits(splits)

        self._call(add)

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        def tell() -> None:
            resumed = [split_id for split_id in to_resume if split_id in self._assigned]
            paused = [split_id for split_id in to_pause if split_id in self._assigned]
            self._paused.update(paused)
            self._paused.difference_update(resumed)
            if paused or resumed:
                self._reader.pause_or_resume_splits(paused, resumed)

        self._call(tell)

    def _call(self, call: Callable[[], Any]) -> None:
        """Behind the fetch that is under way, which need not wait to its end."""
        def run() -> None:
            try:
                self._unless_failed(call)
            finally:
                self._calls_ended += 1

        self._calls_begun += 1
        self._on_thread(run, self._called)
        if self._fetching:
            self._reader.wake_up()

    def _on_thread(self, call: Callable[[], Any], done: Callable[..., None]) -> None:
        assert self._thread is not None
        self._thread.run(call, done)

    def _unless_failed(self, call: Callable[[], Any]) -> Any:
        """On the thread."""
        if self._has_failed or self._closed:
            return None
        try:
            return call()
        except BaseException:
            self._has_failed = True
            raise

    def _called(self, result: Any, error: BaseException | None) -> None:
        if self._closed:
            return
        self._error = self._error or error
        self._next_fetch_ms = 0
        self._context.source_is_ready()

    # ---------------------------------------------------------------------------------------------------------- fetching

    def _fetch_ahead(self) -> None:
        while self._error is None and self._fetching < 2 and self._fetching + len(self._ends) < FETCHES_AHEAD_MAX:
            self._fetching += 1
            began_ms = self._context.monotonic_ms()
            self._on_thread(partial(self._unless_failed, self._fetch), partial(self._fetched, began_ms=began_ms))

    def _fetch(self) -> Sequence[SplitRecords]:
        """On the thread."""
        if self._calls_begun > self._calls_ended or not self._assigned - self._paused:
            return ()
        found = self._reader.fetch()
        if not isinstance(found, Sequence) or not all(isinstance(records, SplitRecords) for records in found):
            uid, reason = self._context.uid, f"fetch() gave {kind_of(found)}, not a list of SplitRecords"
            raise InvalidSplitError(f"source {uid}: {reason}", operator=uid, split="", reason=reason)
        ended = [records.split_id for records in found if records.finished]
        self._assigned.difference_update(ended)
        self._paused.difference_update(ended)
        return found

    def _fetched(self, found: Sequence[SplitRecords] | None, error: BaseException | None, *, began_ms: int) -> None:
        self._fetching -= 1
        if self._closed:
            return
        now_ms = self._context.monotonic_ms()
        if error is not None:
            self._error = self._error or error
        elif found:
            self._ready += found
            self._ends.append(len(found))
        elif now_ms < began_ms + EMPTY_FETCH_MS:
            self._next_fetch_ms = now_ms + PAUSE_MS
        self._context.source_is_ready()

    def poll(self, rows_max: int) -> SplitRecords | int | None:
        if self._ready:
            records = self._ready.popleft()
            self._ends[0] -= 1
            if not self._ends[0]:
                self._ends.popleft()
            self._note(records)
            self._fetch_ahead()
            return records
        if self._error is not None:
            raise self._error
        wait_ms = self._next_fetch_ms - self._context.monotonic_ms()
        if wait_ms > 0:
            return wait_ms
        self._fetch_ahead()
        return None

    def _note(self, records: SplitRecords) -> None:
        if records.finished:
            self._waiting.pop(records.split_id, None)
        elif records.pending_records is not None:
            self._waiting[records.split_id] = records.pending_records

    def pending_records(self) -> int | None:
        """Those that were fetched, and not polled, are among those that waited behind what was polled last."""
        return sum(self._waiting.values()) if self._waiting else None

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def notify_checkpoint_complete(self, checkpoint_id: int, positions: Mapping[str, Position]) -> None:
        self._to_tell.update(positions)
        self._tell()

    def _tell(self) -> None:
        """At most one such call at a time, whatever the client takes for it."""
        if self._is_telling or not self._to_tell:
            return
        positions, self._to_tell = self._to_tell, {}
        self._is_telling = True
        self._on_thread(lambda: None if self._has_failed else self._reader.notify_checkpoint_complete(positions), self._told)

    def _told(self, result: Any, error: BaseException | None) -> None:
        self._is_telling = False
        if error is not None:
            log.warning("source %s: positions of a complete checkpoint are not told: %r", self._context.uid, error)
        if not self._closed:
            self._tell()

    def close(self) -> None:
        """What was read goes; what is to be told is."""
        if self._thread is None:
            self._closed = True
            return
        last, self._to_tell = self._to_tell, {}
        self._closed = True
        self._ready.clear()
        self._ends.clear()
        if last:
            self._on_thread(lambda: None if self._has_failed else self._reader.notify_checkpoint_complete(last), self._told)
        self._on_thread(self._reader.close, _closed)
        self._thread.close(awaited=True)
        self._reader.wake_up()


def make_reader(source: Source[SplitT], context: ReaderContext) -> SourceReader[SplitT]:
    """The reader of one subtask: the source's own, or one that fetches."""
    reader = source.create_reader(context)
    if reader is not None:
        return reader
    return FetchingReader(source.create_split_reader(context), splits_max=source.splits_per_reader)


def _closed(result: Any, error: BaseException | None) -> None:
    if error is not None:
        log.warning("a reader was not closed: %r", error)

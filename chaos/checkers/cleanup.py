"""What an operator keeps is gone once its watermark has passed the time of its cleanup (I35).

State is read in live subtasks, where nothing is under way: a firing in slices cleans up behind its last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.barriers.messages import TaskState
from holdfast.chaos.checkers.base import Checker
from holdfast.operators.functions.joins.temporal import TemporalJoinOperator
from holdfast.operators.functions.joins.windowed import CoGroupOperator, WindowedOperator, WindowJoinOperator
from holdfast.operators.functions.tables.window_top import WindowTopOperator
from holdfast.operators.functions.windows.assigners import Session
from holdfast.operators.functions.windows.bounds import cleanup_time, window_of
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.operators.functions.windows.merging import SESSIONS, decode_sessions
from holdfast.operators.functions.windows.row_functions import WindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.backends.heap import HeapKeyedBackend
from holdfast.statebackends.state import RowTable

Overdue = Iterator[tuple[str, int]]
"""(what is kept, the watermark at which it should have gone)"""


def _of_tumbling(operator: TumblingWindowOperator) -> Overdue:
    lateness_ms = getattr(operator, "lateness_ms", 0)
    for start in operator._state.namespaces():
        yield f"the window that starts at {start}", start + operator.windows.size_ms - 1 + lateness_ms


def _of_sliding(operator: SlidingWindowOperator) -> Overdue:
    """A pane goes with the last window that has it, results that wait with their window."""
    windows, lateness_ms = operator.windows, getattr(operator, "lateness_ms", 0)
    for pane in operator._state.namespaces():
        last = pane - (pane - windows.offset_ms) % windows.slide_ms
        yield f"the pane that starts at {pane}", last + windows.size_ms - 1 + lateness_ms
    for start in operator._waiting.namespaces():
        yield f"results of the window that starts at {start}", start + windows.size_ms - 1 + lateness_ms


def _of_row_windows(operator: WindowOperator) -> Overdue:
    """Contents of windows that are not merged, and sessions. Only in memory: what lies in a database is not read for this."""
    backend: Any = operator.context.keyed_state
    if not operator._is_event_time or operator._is_global or not isinstance(backend, HeapKeyedBackend):
        return
    lateness_ms = operator.settings.lateness_ms
    for name, namespace in list(backend._state_tables):
        if name == operator.contents_state.name and len(namespace) == 16 and any(True for _ in backend.keys(name, namespace)):
            window = window_of(namespace)
            yield f"the contents of {window}", cleanup_time(window, lateness_ms)
    table = backend._state_tables.get((SESSIONS.name, b""))
    if table is not None:
        for key in list(backend.keys(SESSIONS.name)):
            for session in decode_sessions(table.find(key)[0]):
                yield f"the session {session.window}", cleanup_time(session.window, lateness_ms)


def _of_window_joins(operator: WindowedOperator) -> Overdue:
    """Rows of windows, and the last rows of sessions, up to which their other rows stay."""
    left, right = operator._left, operator._right
    for end in sorted({*left.namespaces(), *right.namespaces()} - {MIN_WATERMARK}):
        yield f"rows of the window that ends at {end}", end - 1
    if isinstance(operator.windows, Session):
        gap_ms, passed = operator.windows.gap_ms, operator._reached.current
        if any(len(table.until(passed - gap_ms + 1, 1)) for table in (left, right)):
            yield from _of_joined_sessions((left, right), gap_ms)


def _of_joined_sessions(tables: tuple[RowTable, RowTable], gap_ms: int) -> Overdue:
    times: dict[tuple[Any, ...], list[int]] = {}
    for table in tables:
        rows = table.until(MAX_WATERMARK, table.count())
        columns = rows.keys()
        for key, time in zip(zip(*(key.to_pylist() for key in columns), strict=True), rows.times.tolist(), strict=True):
            times.setdefault(key, []).append(time)
    for key, some in times.items():
        some.sort()
        for time, behind in zip(some, [*some[1:], MAX_WATERMARK], strict=True):
            if behind - time > gap_ms:
                yield f"the session of {key} that has its last row at {time}", time + gap_ms - 1


def _of_temporal(operator: TemporalJoinOperator) -> Overdue:
    """Left rows go with their time; a version when the watermark reaches that of the next one of its key."""
    reached = operator._reached
    for time in operator._waiting.until(reached.current, 1).times.tolist():
        yield f"a left row of {time}", time
    rows = operator._versions.until(reached.kept, operator._versions.count())
    rows, _, keys = operator.right.by_key(rows, operator.context)
    order = np.lexsort((rows.times, keys))
    numbers, times = keys[order], rows.times[order]
    for place in np.flatnonzero(numbers[1:] == numbers[:-1]).tolist():
        yield f"the version of {times[place]}, behind which its key has another one", int(times[place + 1])


def _of_window_top(operator: WindowTopOperator) -> Overdue:
    for end in operator.rows.table.namespaces():
        yield f"rows of the window that ends at {end}", end - 1


KEPT: dict[type, Callable[[Any], Overdue]] = {
    TumblingWindowOperator: _of_tumbling,
    SlidingWindowOperator: _of_sliding,
    WindowOperator: _of_row_windows,
    WindowJoinOperator: _of_window_joins,
    CoGroupOperator: _of_window_joins,
    TemporalJoinOperator: _of_temporal,
    WindowTopOperator: _of_window_top,
}
"""Operator -> what it keeps, and until which watermark."""


class CleanupChecker(Checker):
    """Looks at the heads of chains: an operator with state of keys begins one."""

    invariants: ClassVar[tuple[str, ...]] = ("I35",)

    def look(self) -> None:
        for host in self.world.workers():
            for each in host.subtasks():
                subtask = each.subtask
                head, taken = subtask.chain.head, subtask._input
                kept = KEPT.get(type(head.operator))
                if kept is None or subtask.state is not TaskState.RUNNING or taken.has_work or taken.watermark_ms == MIN_WATERMARK:
                    continue
                for what, until_ms in kept(head.operator):
                    if until_ms <= taken.watermark_ms:
                        who = f"{head.uid} ({subtask.key.subtask}) of {host.process.name}"
                        self.report("I35", f"{who} keeps {what} until {until_ms}, and is at {taken.watermark_ms}")
                        return

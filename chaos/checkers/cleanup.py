"""What an operator keeps is gone once its watermark has passed the time of its cleanup (I35).

State is read in live subtasks, where nothing is under way: a firing in slices cleans up behind its last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from holdfast.barriers.elements import MIN_WATERMARK
from holdfast.barriers.messages import TaskState
from holdfast.chaos.checkers.base import Checker
from holdfast.operators.functions.windows.bounds import cleanup_time, window_of
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.operators.functions.windows.merging import SESSIONS, decode_sessions
from holdfast.operators.functions.windows.row_functions import WindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.backends.heap import HeapKeyedBackend

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


KEPT: dict[type, Callable[[Any], Overdue]] = {
    TumblingWindowOperator: _of_tumbling,
    SlidingWindowOperator: _of_sliding,
    WindowOperator: _of_row_windows,
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

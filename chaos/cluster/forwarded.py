"""What leaves a simulated subtask behind a watermark that it has passed on, and what explains it.

Rows that the subtask's watermark has passed may follow it only for a late record, for a timer that was set for a time that had
passed, or by the wall clock. From then on rows may lie as far back as that one did, and no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.process import KeyedFunctionOperator
from holdfast.operators.functions.windows.row_functions import WindowOperator
from holdfast.operators.task.chain import ChainNode
from holdfast.operators.task.subtask import Subtask

Found = Callable[[str, int, int], None]
"""(uid, event time of a row, watermark in front of it)"""


class _Excuse:
    """How far back the rows of one subtask may lie."""

    __slots__ = ("earliest_ms",)

    def __init__(self) -> None:
        self.earliest_ms = MAX_WATERMARK

    def of(self, batch: Batch, watermark_ms: int) -> None:
        """Of records that come behind a watermark, the earliest."""
        if batch.timestamps is not None and len(batch.timestamps):
            first_ms = int(batch.timestamps.min())
            if first_ms <= watermark_ms:
                self.earliest_ms = min(self.earliest_ms, first_ms)


class _Watched:
    """Implements `holdfast.operators.base.Output` in front of another output."""

    def __init__(self, output: Output, node: ChainNode, excuse: _Excuse, found: Found) -> None:
        self._output = output
        self._node = node
        self._excuse = excuse
        self._found = found

    def collect(self, batch: Batch) -> None:
        self._look(batch)
        self._output.collect(batch)

    def collect_side(self, tag: str, batch: Batch) -> None:
        self._look(batch)
        self._output.collect_side(tag, batch)

    def _look(self, batch: Batch) -> None:
        stamps, forwarded_ms = batch.timestamps, self._node.watermark_ms
        if stamps is not None and len(stamps):
            first_ms = int(stamps.min())
            if first_ms <= forwarded_ms and first_ms < self._excuse.earliest_ms:
                self._found(self._node.uid, first_ms, forwarded_ms)

    def has_readers(self, tag: str) -> bool:
        return self._output.has_readers(tag)

    def emit_watermark(self, timestamp_ms: int) -> None:
        self._output.emit_watermark(timestamp_ms)

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        self._output.emit_watermark_now(timestamp_ms)

    def emit_status(self, *, idle: bool) -> None:
        self._output.emit_status(idle=idle)


def watch_watermarks(subtask: Subtask, found: Found) -> None:
    """Watch what each operator of a subtask emits; before the subtask is started."""
    excuse = _Excuse()
    for node in subtask.chain.nodes:
        vars(node.operator)["setup"] = partial(_setup, node.operator.setup, node, excuse, found)
        _watch_operator(node, excuse)
    head = subtask.chain.head.operator
    take = head.process_batch

    def process_batch(batch: Batch, input_index: int) -> None:
        excuse.of(batch, subtask._input.watermark_ms)
        take(batch, input_index)

    vars(head)["process_batch"] = process_batch


def _setup(
    original: Callable[[OperatorContext, Output], None],
    node: ChainNode,
    excuse: _Excuse,
    found: Found,
    context: OperatorContext,
    output: Output,
) -> None:
    original(context, _Watched(output, node, excuse, found))


def _watch_operator(node: ChainNode, excuse: _Excuse) -> None:
    """Where rows may come from that lie behind the watermark."""
    operator = node.operator
    if isinstance(operator, TimestampsOperator):
        emit = operator.emit_records

        def emit_records(batch: Batch) -> None:
            excuse.of(batch, operator._emitted_ms)
            emit(batch)

        vars(operator)["emit_records"] = emit_records
    if isinstance(operator, WindowOperator) and not operator.settings.assigner.is_event_time:
        excuse.earliest_ms = MIN_WATERMARK  # what fires by the clock has the clock's times
    elif isinstance(operator, KeyedFunctionOperator):
        vars(operator)["process_processing_time"] = _by_the_clock(operator.process_processing_time, excuse)
        opened = operator.open

        def open_() -> None:
            opened()
            if node.context.timer_service is not None:
                _watch_timers(node.context.timer_service, excuse)

        vars(operator)["open"] = open_


def _by_the_clock(fire: Callable[[int], Iterator[None]], excuse: _Excuse) -> Callable[[int], Iterator[None]]:
    def process_processing_time(now_ms: int) -> Iterator[None]:
        excuse.earliest_ms = MIN_WATERMARK
        return fire(now_ms)

    return process_processing_time


def _watch_timers(timers: Any, excuse: _Excuse) -> None:
    register = timers.register_event_time_timer

    def register_event_time_timer(timestamp_ms: int, namespace: bytes = b"") -> None:
        if timestamp_ms <= timers.current_watermark:
            excuse.earliest_ms = min(excuse.earliest_ms, timestamp_ms)
        register(timestamp_ms, namespace)

    timers.register_event_time_timer = register_event_time_timer

"""Sabotages of silence and of watermark alignment."""

from __future__ import annotations

from typing import Any

from holdfast.barriers.alignment.valve import StatusWatermarkValve
from holdfast.barriers.elements import MAX_WATERMARK, Watermark, WatermarkStatus
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.coordinator.jobmaster.watermarks import WatermarkGroups
from holdfast.operators.functions.event_time.silence import Silence
from holdfast.operators.task.input import SourcePhase, TaskInput


def _listens_when_paused(original: Any) -> Any:
    def is_listening(self: TaskInput) -> bool:
        return self._phase is SourcePhase.READING if self._source is not None else bool(original.fget(self))

    return property(is_listening)


def _joins_at_once(original: Any) -> Any:
    def came_back(self: StatusWatermarkValve, channel: Any) -> list[Any]:
        channel.idle, channel.aligned = False, True
        was_idle, self._idle = self._idle, False
        return [*([WatermarkStatus(idle=False)] if was_idle else []), *self._advance_to_minimum()]

    return came_back


def _emits_anything(original: Any) -> Any:
    def emit(self: StatusWatermarkValve, timestamp_ms: int) -> list[Any]:
        self._output_ms = timestamp_ms
        return [Watermark(timestamp_ms)]

    return emit


def _takes_anything(original: Any) -> Any:
    def watermark(self: StatusWatermarkValve, channel: Any, timestamp_ms: int) -> list[Any]:
        if channel.idle:
            return []
        channel.watermark_ms = timestamp_ms
        return self._ended() if timestamp_ms == MAX_WATERMARK else self._advance_to_minimum()

    return watermark


def _keeps_reports(original: Any) -> Any:
    def begin(self: WatermarkGroups, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._said.clear()

    return begin


SABOTAGES = (
    Sabotage(
        "pause_is_silence",
        "a source that waits for its watermark group counts as idle",
        ("I33",),
        (Mutant(TaskInput, "is_listening", _listens_when_paused),),
        workloads=("idle",),
    ),
    Sabotage(
        "deaf_to_silence",
        "a source that gives nothing is never told to be idle",
        ("I33",),
        (Mutant(Silence, "due", constant([])),),
        workloads=("idle",),
    ),
    Sabotage(
        "returning_turns_time_back",
        "an input that returns from silence takes event time back to where it was",
        ("I10", "I33", "I7", "I2"),
        (
            Mutant(StatusWatermarkValve, "_came_back", _joins_at_once),
            Mutant(StatusWatermarkValve, "_emit", _emits_anything),
            Mutant(StatusWatermarkValve, "_watermark", _takes_anything),
        ),
        workloads=("idle",),
    ),
    Sabotage(
        "maximum_of_an_old_attempt",
        "how far a watermark group may go follows from reports of the attempt before",
        ("I33",),
        (Mutant(WatermarkGroups, "_begin", _keeps_reports),),
        workloads=("idle",),
        plan=tuple(Fault("kill_worker", "workers", at_ms=ms) for ms in (400, 800)),
    ),
)

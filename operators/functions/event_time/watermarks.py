"""Watermark strategies: how records get their event time, and how event time follows from them. CORE: no clock of its own.

A strategy is an immutable description, made and checked when the graph is built; each subtask makes a generator from it. A
generator sees records behind each other and says watermarks; what happens in silence is `Silence`'s. Source: Flink's
WatermarkStrategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.barriers.messages import TEXT_BYTES_MAX
from holdfast.barriers.watermark_alignment import UPDATE_INTERVAL_MS_MIN, WatermarkAlignment
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state import duration_ms

log = logging.getLogger("holdfast.functions")

CLOCK_STEP_MS = 200
"""How often a watermark follows the clock where `auto_watermark_interval_ms` is 0. Flink's default interval."""
ON_VIOLATION = ("ignore", "log", "fail")


@dataclass(slots=True)
class BoundedOutOfOrderness:
    """The watermark of one subtask whose records come at most `bound_ms` out of order. Never goes back."""

    bound_ms: int
    watermark_ms: int = MIN_WATERMARK

    def advance(self, latest_ms: int) -> int | None:
        """The watermark after records up to event time `latest_ms`; None when it does not rise."""
        watermark_ms = max(latest_ms - self.bound_ms - 1, MIN_WATERMARK)
        if watermark_ms <= self.watermark_ms:
            return None
        # the maximum says that the stream has ended, which no record can know
        self.watermark_ms = min(watermark_ms, MAX_WATERMARK - 1)
        return self.watermark_ms


class WatermarkOutput(Protocol):
    """Where a generator says its watermarks."""

    def emit_watermark(self, timestamp_ms: int) -> None:
        """No record at or before `timestamp_ms` follows. One that is not above the last changes nothing."""

    def mark_idle(self) -> None:
        """Event time does not wait for this subtask, until its next record or watermark."""


class WatermarkGenerator:
    """Base class of a generator of one's own: one instance for each subtask, made anew in each attempt. It keeps no state over
    restarts.

    Define `on_event` or `on_batch`, one of them."""

    def on_event(self, row: Any, timestamp_ms: int, output: WatermarkOutput) -> None:
        """Called behind each record, with its event time. A watermark emitted here takes its place right behind the record."""
        raise NotImplementedError

    def on_batch(self, columns: pa.RecordBatch, timestamps: npt.NDArray[np.int64], output: WatermarkOutput) -> None:
        """Called behind each batch, with the event times of its rows (int64, ms). Where a batch ends must not matter to the job."""
        raise NotImplementedError

    def on_periodic_emit(self, output: WatermarkOutput) -> None:
        """Called every `auto_watermark_interval_ms`; behind each batch where that is 0."""


class RecordOutput(WatermarkOutput, Protocol):
    """What a generator of the runtime emits to: records, too, so that a watermark may stand between two of them."""

    def emit_records(self, batch: Batch) -> None: ...

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        """As `emit_watermark`, in front of any record that is emitted next."""

    def rows_of(self, batch: Batch) -> Any: ...

    def call(self, function: Callable[..., Any], record: Any, *arguments: Any) -> Any:
        """Call the user's function with `arguments`; its errors name operator and record."""

    def watermark_of(self, function: Callable[[Any], Any], record: Any) -> int | None:
        """What the function says of a record, checked."""

    def violated(self, batch: Batch, row: int, before_ms: int) -> Exception:
        """The error for a record whose event time lies below that of one before it."""


class Generator(Protocol):
    """What the operator drives."""

    follows_clock: bool
    """Its watermark rises without records."""

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        """Emit the records of a batch, which have event times, and the watermarks among them."""

    def on_periodic_emit(self, output: RecordOutput) -> None: ...


class BoundedGenerator:
    """Records are at most `bound_ms` out of order."""

    follows_clock = False

    def __init__(self, bound_ms: int) -> None:
        self._watermarks = BoundedOutOfOrderness(bound_ms)
        self._latest_ms: int | None = None

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        output.emit_records(batch)
        latest_ms = batch.time_range()[1]
        if self._latest_ms is None or latest_ms > self._latest_ms:
            self._latest_ms = latest_ms

    def on_periodic_emit(self, output: RecordOutput) -> None:
        if self._latest_ms is not None:
            watermark_ms = self._watermarks.advance(self._latest_ms)
            if watermark_ms is not None:
                output.emit_watermark(watermark_ms)


class MonotonousGenerator(BoundedGenerator):
    """Event times never fall; equal ones may follow each other."""

    def __init__(self, on_violation: str) -> None:
        super().__init__(0)
        self._on_violation = on_violation
        self._violations = 0

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        if self._on_violation != "ignore":
            self._check(batch, output)
        super().on_records(batch, output)

    def _check(self, batch: Batch, output: RecordOutput) -> None:
        assert batch.timestamps is not None
        times = batch.timestamps
        before = MIN_WATERMARK if self._latest_ms is None else self._latest_ms
        highest = np.maximum.accumulate(np.concatenate((np.array([before], np.int64), times)))[:-1]
        falling = np.flatnonzero(times < highest)
        if not len(falling):
            return
        first = int(falling[0])
        error = output.violated(batch, first, int(highest[first]))
        if self._on_violation == "fail":
            raise error
        known, self._violations = self._violations, self._violations + len(falling)
        if len(str(self._violations)) > len(str(known)) or not known:  # the 1st, about the 10th, 100th ...
            log.warning("event times fell, %d times by now: %s", self._violations, error)


class PunctuatedGenerator:
    """A function says of a row, or of a batch, whether a watermark follows it."""

    follows_clock = False

    def __init__(self, function: Callable[[Any], int | None], *, batches: bool) -> None:
        self._function = function
        self._batches = batches

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        function = self._function
        if self._batches:
            output.emit_records(batch)
            watermark_ms = output.watermark_of(function, batch.columns())
            if watermark_ms is not None:
                output.emit_watermark(watermark_ms)
            return

        def each(row: Any, time_ms: int, emit: Callable[[int], None]) -> None:
            watermark_ms = output.watermark_of(function, row)
            if watermark_ms is not None:
                emit(watermark_ms)

        in_order(batch, output, each)

    def on_periodic_emit(self, output: RecordOutput) -> None:
        return


class IngestionTimeGenerator:
    """Event time is the time of arrival: records up to the watermark have come. The operator gives records their times."""

    follows_clock = True

    def __init__(self) -> None:
        self.now_ms: Callable[[], int] = lambda: MIN_WATERMARK

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        output.emit_records(batch)

    def on_periodic_emit(self, output: RecordOutput) -> None:
        output.emit_watermark(self.now_ms() - 1)


class NoWatermarks:
    """Event times without event time: nothing that waits for it ever fires, but at the end."""

    follows_clock = False

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        output.emit_records(batch)

    def on_periodic_emit(self, output: RecordOutput) -> None:
        return


class UserGenerator:
    """A WatermarkGenerator of the user's."""

    follows_clock = False

    def __init__(self, generator: WatermarkGenerator) -> None:
        self._generator = generator
        self._by_event = _defines(generator, "on_event")

    def on_records(self, batch: Batch, output: RecordOutput) -> None:
        generator = self._generator
        if not self._by_event:
            output.emit_records(batch)
            columns = batch.columns()
            output.call(generator.on_batch, columns, columns, batch.timestamps, output)
            return

        is_idle: list[bool] = []  # said behind the newest record: a further one makes the input active again

        def each(row: Any, time_ms: int, emit: Callable[[int], None]) -> None:
            is_idle.clear()
            output.call(generator.on_event, row, row, time_ms, _Between(emit, lambda: is_idle.append(True)))

        in_order(batch, output, each)
        if is_idle:
            output.mark_idle()

    def on_periodic_emit(self, output: RecordOutput) -> None:
        output.call(self._generator.on_periodic_emit, None, output)


@dataclass(frozen=True, slots=True)
class _Between:
    """WatermarkOutput of `on_event`: what is said takes its place behind the record."""

    emit_watermark: Callable[[int], None]
    mark_idle: Callable[[], None]


def in_order(batch: Batch, output: RecordOutput, each: Callable[[Any, int, Callable[[int], None]], None]) -> None:
    """Call `each(row, time, emit)` behind each record. The batch is cut behind a record that a watermark follows, so that the
    watermark is in front of the next record wherever batches end."""
    assert batch.timestamps is not None
    said: list[int] = []
    start, last = 0, batch.num_rows - 1
    for index, (row, time_ms) in enumerate(zip(output.rows_of(batch), batch.timestamps.tolist(), strict=True)):
        each(row, time_ms, said.append)
        if said and index < last:
            output.emit_records(batch.slice(start, index + 1 - start))
            output.emit_watermark_now(max(said))
            said.clear()
            start = index + 1
    output.emit_records(batch if start == 0 else batch.slice(start))
    if said:
        output.emit_watermark(max(said))


def _defines(generator: WatermarkGenerator, method: str) -> bool:
    return getattr(type(generator), method, None) is not getattr(WatermarkGenerator, method)


# ------------------------------------------------------------------------------------------------------------- strategy


@dataclass(frozen=True, slots=True)
class _Bounded:
    bound_ms: int

    def __call__(self) -> Generator:
        return BoundedGenerator(self.bound_ms)


@dataclass(frozen=True, slots=True)
class _Monotonous:
    on_violation: str

    def __call__(self) -> Generator:
        return MonotonousGenerator(self.on_violation)


@dataclass(frozen=True, slots=True)
class _Punctuated:
    function: Callable[[Any], int | None]
    batches: bool

    def __call__(self) -> Generator:
        return PunctuatedGenerator(self.function, batches=self.batches)


@dataclass(frozen=True, slots=True)
class _FromFactory:
    factory: Callable[[], WatermarkGenerator]

    def __call__(self) -> Generator:
        return UserGenerator(_made(self.factory))


def _made(factory: Callable[[], WatermarkGenerator]) -> WatermarkGenerator:
    """Raises InvalidConfigError for a factory of something else."""
    generator = factory()
    if not isinstance(generator, WatermarkGenerator):
        raise InvalidConfigError(f"for_generator needs a function that makes a WatermarkGenerator, not {generator!r}")
    if _defines(generator, "on_event") == _defines(generator, "on_batch"):
        raise InvalidConfigError(f"{type(generator).__name__} must define on_event or on_batch, one of them")
    return generator


TimestampAssigner = str | Callable[[Any], Any]
"""A column, or a function of the row."""


@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """Where event times come from and how event time follows them, for `Stream.assign_timestamps_and_watermarks`.

    Begin with one of the `for_...` functions; each `with_...` gives a new strategy. Durations are timedeltas, or ms. A value out of
    bounds raises InvalidConfigError at once."""

    make_generator: Callable[[], Generator]
    kind: str
    bound_ms: int = 0
    assigner: TimestampAssigner | None = None
    """None: records have event times already."""
    idle_after_ms: int | None = None
    advance_after_ms: int | None = None
    alignment: WatermarkAlignment | None = None

    @classmethod
    def for_bounded_out_of_orderness(cls, max_out_of_orderness: timedelta | int) -> WatermarkStrategy:
        """A record is at most this far behind the latest one: the watermark is the latest event time - bound - 1."""
        bound_ms = _duration(max_out_of_orderness, "max_out_of_orderness", least_ms=0)
        return cls(_Bounded(bound_ms), "bounded_out_of_orderness", bound_ms)

    @classmethod
    def for_monotonous_timestamps(cls, on_violation: str = "ignore") -> WatermarkStrategy:
        """Event times of a subtask never fall. `on_violation`: what happens when one does: "ignore", "log" (a warning), or "fail"
        (InvalidTimestampError). The record keeps its event time, and is late."""
        if on_violation not in ON_VIOLATION:
            choices = ", ".join(map(repr, ON_VIOLATION))
            raise InvalidConfigError(f"on_violation is {on_violation!r}, must be one of {choices}", setting="on_violation")
        return cls(_Monotonous(on_violation), "monotonous_timestamps")

    @classmethod
    def for_punctuated(cls, function: Callable[[Any], int | None], *, batches: bool = False) -> WatermarkStrategy:
        """`function(row)` says the watermark (ms) that follows a row, or None. `batches`: it is called with the columns of a
        batch."""
        if not callable(function):
            raise InvalidConfigError(f"for_punctuated needs a function, not {function!r}")
        return cls(_Punctuated(function, batches), "punctuated")

    @classmethod
    def for_ingestion_time(cls) -> WatermarkStrategy:
        """Event time is the wall clock of the subtask at arrival, and never falls. A record that is replayed gets another one."""
        return cls(IngestionTimeGenerator, "ingestion_time")

    @classmethod
    def no_watermarks(cls) -> WatermarkStrategy:
        """Records have event times, and no watermark follows: what waits for event time fires when the input ends."""
        return cls(NoWatermarks, "no_watermarks")

    @classmethod
    def for_generator(cls, factory: Callable[[], WatermarkGenerator]) -> WatermarkStrategy:
        """`factory` makes a WatermarkGenerator for each subtask, and one here, to check it. It travels with the job."""
        if not callable(factory):
            raise InvalidConfigError(f"for_generator needs a function that makes a WatermarkGenerator, not {factory!r}")
        _made(factory)
        return cls(_FromFactory(factory), "generator")

    def with_timestamp_assigner(self, assigner: TimestampAssigner) -> WatermarkStrategy:
        """Event times come from a column (int64 ms, or a timestamp with a zone), or a function of the row (ms, or an aware
        datetime)."""
        if self.kind == "ingestion_time":
            raise InvalidConfigError("for_ingestion_time takes event times from the clock: it has no timestamp assigner")
        if not callable(assigner) and not (isinstance(assigner, str) and assigner):
            raise InvalidConfigError(f"a timestamp assigner is a column's name or a function, not {assigner!r}")
        return replace(self, assigner=assigner)

    def with_idleness(self, timeout: timedelta | int) -> WatermarkStrategy:
        """A subtask from which no record came for this long goes idle: event time does not wait for it. Its next record makes it
        active.

        Time in which it could not read is no silence. At least 1 ms; it goes idle exactly one timeout after its last record."""
        return replace(self, idle_after_ms=_duration(timeout, "the timeout of with_idleness", least_ms=1))

    def advance_when_idle(self, after: timedelta | int) -> WatermarkStrategy:
        """In a silence longer than `after` (at least 1 ms) the watermark follows the clock, so that the last windows close.

        It rises by no more than has passed since the last record; a record that then comes behind it is late, as any other."""
        return replace(self, advance_after_ms=_duration(after, "the time of advance_when_idle", least_ms=1))

    def with_watermark_alignment(
        self, group: str, max_drift_ms: timedelta | int, update_interval_ms: timedelta | int = 1_000
    ) -> WatermarkStrategy:
        """A source whose watermark is more than `max_drift_ms` ahead of the least of its group waits, over all sources and workers.

        The least is over subtasks that are neither idle nor ended; watermarks are compared every `update_interval_ms` (at least 10
        ms), so that a source may run ahead for about one. All of a group say the same. The strategy stands right behind its
        source."""
        if not isinstance(group, str) or not 0 < len(group) <= TEXT_BYTES_MAX:
            raise InvalidConfigError(f"a watermark group has 1..{TEXT_BYTES_MAX} characters, not {group!r}", setting="group")
        drift_ms = _duration(max_drift_ms, "max_drift_ms", least_ms=0)
        interval_ms = _duration(update_interval_ms, "update_interval_ms", least_ms=UPDATE_INTERVAL_MS_MIN)
        return replace(self, alignment=WatermarkAlignment(group, drift_ms, interval_ms))


def _duration(value: timedelta | int, what: str, *, least_ms: int) -> int:
    number_ms = duration_ms(value, what)
    if number_ms < least_ms:
        raise InvalidConfigError(f"{what} must be at least {least_ms} ms, got {number_ms}", setting=what)
    if number_ms > MAX_WATERMARK // 4:
        raise InvalidConfigError(f"{what} is beyond all event times: {number_ms} ms", setting=what)
    return number_ms

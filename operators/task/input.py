"""CORE: what a subtask takes in, in order: slices of work, rows, events, polls of a source.

The cut at a barrier, exactly. What a checkpoint reflects is every element read from a channel before that channel's barrier:
- A batch that is taken in slices keeps its remainder here, and the gate is not asked again before the remainder is empty, so a
  barrier can't be met with rows in hand.
- A watermark is consumed when it leaves the valve. Its firing is work in slices; between two slices the gate is asked for one
  element ahead. A barrier that completes there is taken at once: state holds the timers that have not fired, what they would
  emit lies behind the barrier, and a restored job fires them at its next watermark. Any other element is held until the work
  is done. Operators must therefore leave their state consistent at every `yield`.
- A draining barrier (stop with drain) waits for the work in front of it: maximum watermark, finish().
- A source has no channels: its trigger is a mail, so it falls between two polls, or between two slices of work. One with an
  enumerator has a channel from it, which brings splits and barriers; splits in front of a barrier are the reader's.

How many rows a slice may have follows from the measured cost of a row: a step must end in about its time budget whatever a row
costs, and a cheap row must not pay for that. So a slice starts at one row, grows eightfold while it stays cheap, and shrinks at
once when its rows are not. Nor has it more rows than the outputs have room for, by the bytes that came out for each row so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, assert_never

import msgspec

from holdfast.barriers.alignment.gate import BarrierOutput, Delivered, GateOutput
from holdfast.barriers.alignment.handler import AbortCheckpoint, InFlightCollected, TriggerSnapshot
from holdfast.barriers.alignment.valve import MultiInputValve
from holdfast.barriers.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Batch,
    CheckpointBarrier,
    Element,
    ElementEvent,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from holdfast.barriers.exchange.credits import ReceiverCredit
from holdfast.barriers.latency import LatencyStats
from holdfast.operators.base import NEVER_MS
from holdfast.operators.task.chain import OperatorChain, ResultPort, overrides
from holdfast.operators.task.context import Clock
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.statebackends.errors import InvariantError

GROWTH = 8
"""Bound on how much larger a slice may be than the largest one that is known to fit."""

SMOOTHING = 0.5
"""Weight of the newest measurement."""
REST_BELOW = 1.5
"""So many times the rows of a slice are not cut in two."""
PROBE_EVERY = 32
"""Slices cut short by their cost, behind which one has twice as many rows, or half as many."""
PROBE_FIRST = 2
"""As `PROBE_EVERY`, behind the first probe that did not pay; with each further one twice as many, up to `PROBE_EVERY`."""
LONG = 4
"""So many budgets are a long slice."""
GROWN_PAYS_BELOW = 1.45
"""Twice the rows in less than so many times the time: most of it was not theirs, and slices stay so large."""
LONG_PAYS_BELOW = 1.3
"""As `GROWN_PAYS_BELOW`, of a long slice."""
SUSPECT = 1.5
"""So many times the expected time, above which a slice may have waited for a CPU, or done what is not of its rows alone."""
SHRUNK_PAYS_ABOVE = 1.7
"""Half the rows in a time that so many times is still less than before: most of it was theirs, and slices stay so small."""


def never_delayed() -> float:
    """Of a clock that only work moves."""
    return 0.0


class RowBudget:
    """Rows per slice for one subtask: at least 1, at most `rows_max`.

    A slice costs something by itself, whatever it has: a columnar operator makes a hundred calls for one row or for a thousand.
    Where that alone is about the budget, fewer rows would not make a slice shorter, only more of them. So now and then a slice has
    twice as many rows; while these take hardly longer, slices grow beyond the budget, until a good part of their time is the rows'
    own: about half of it where that is not long, a third where it is.

    A single slice may have done what is not of its rows: merged what others had left, written a buffer. While it was not long,
    it counts as one of many.

    Time in which others had the CPU is no cost: fewer rows would not bring it back. On a machine with more to do than it has CPUs
    slices would shrink to the few rows that fit between two such waits."""

    __slots__ = (
        "_budget_s", "_cost_s", "_delayed_s", "_floor", "_is_upwards", "_known_delay_s", "_pause", "_proven", "_reference_s",
        "_rows_max", "_until_probe",
    )  # fmt: skip

    def __init__(self, budget_ms: int, rows_max: int, *, proven: int = 0, delayed_s: Callable[[], float] = never_delayed) -> None:
        """`proven`: rows that are taken to fit before any slice was measured. `delayed_s`: seconds that the thread has waited for a
        CPU so far."""
        self._budget_s = budget_ms / 1000
        self._rows_max = rows_max
        self._delayed_s = delayed_s
        self._known_delay_s = 0.0
        self._cost_s = 0.0
        self._proven = proven
        self._begin_probing()

    def _begin_probing(self) -> None:
        """Nothing is known of what slices cost by themselves."""
        self._floor = 1
        """Rows below which slices would not be much shorter."""
        self._reference_s = 0.0
        """Time of the last slices that had as many rows as they might have, and were no probes; 0: none."""
        self._until_probe = 0
        self._pause = PROBE_FIRST
        """Slices between this probe and the next one, unless it pays."""
        self._is_upwards = True
        """Whether the next probe has more rows, not fewer."""

    def rows(self) -> int:
        """Rows that the next slice may have."""
        rows, is_probe = self._wanted()
        if not is_probe:
            return rows
        return min(2 * rows, self._ceiling) if self._is_upwards or rows < 2 else rows // 2

    def rows_of(self, left: int) -> int:
        """Rows of the next slice, of a batch with so many left. Where a slice costs much by itself a small rest is none of its
        own."""
        rows = self.rows()
        return left if self._floor > 1 and left < REST_BELOW * rows else min(rows, left)

    @property
    def rows_min(self) -> int:
        """Rows below which a slice would hardly take less time; 0: it costs nothing by itself, as far as is known."""
        return self._floor if self._floor > 1 else 0

    @property
    def _ceiling(self) -> int:
        return min(self._rows_max, self._proven * GROWTH)

    @property
    def _long_s(self) -> float:
        return LONG * self._budget_s

    def _wanted(self) -> tuple[int, bool]:
        """(rows of a slice, whether the next one is a probe instead)."""
        if self._proven == 0:
            return 1, False
        ceiling = self._ceiling
        if self._cost_s * ceiling <= self._budget_s:
            return ceiling, False
        rows = max(1, int(self._budget_s / self._cost_s), min(self._floor, ceiling))
        return rows, rows < ceiling and self._reference_s > 0 and self._until_probe <= 0

    def measured(self, rows: int, seconds: float) -> None:
        """A slice of `rows` took this long."""
        if rows < 1:
            return
        expected_s = self._cost_s * rows
        if seconds > SUSPECT * expected_s:
            seconds = self._undelayed(seconds, expected_s)
        cost = seconds / rows
        wanted, is_probe = self._wanted()
        expected = self.rows()
        if rows < expected:
            if cost > self._cost_s and seconds <= max(self._budget_s, SUSPECT * self._reference_s):
                return  # of the little that was left of a batch the rows' part is not known
        elif rows == expected and is_probe:
            self._compare(wanted, rows, seconds)
        elif rows == expected:
            known_s = self._reference_s or seconds
            self._reference_s = known_s + SMOOTHING * (min(seconds, SUSPECT * known_s) - known_s)
            self._until_probe -= 1
        if not self._cost_s:
            self._cost_s = cost
        elif cost > 4 * self._cost_s and seconds > self._long_s:
            self._cost_s = cost
            self._begin_probing()
        else:
            self._cost_s += SMOOTHING * (cost - self._cost_s)
        if seconds > 2 * self._budget_s and rows > self._floor:
            self._proven = max(1, rows // 2)
        elif rows > self._proven:
            self._proven = rows

    def _undelayed(self, seconds: float, expected_s: float) -> float:
        """The time of a slice without what the thread waited for a CPU.

        To ask costs a system call, and is done for some slices alone: what those before it waited is taken off, too. Where that is
        more than the slice took, its own part is not known, and it took what was expected."""
        known_s, self._known_delay_s = self._known_delay_s, self._delayed_s()
        waited_s = self._known_delay_s - known_s
        return seconds - waited_s if waited_s < seconds else min(seconds, expected_s)

    def _compare(self, wanted: int, rows: int, seconds: float) -> None:
        """A probe was measured. One that pays is followed by another one at once."""
        has_more = rows > wanted
        grown_pays_below = GROWN_PAYS_BELOW if seconds <= self._long_s else LONG_PAYS_BELOW
        pays_below = grown_pays_below if has_more else 1 / SHRUNK_PAYS_ABOVE
        if seconds < pays_below * self._reference_s:
            self._floor, self._reference_s = rows, seconds
            return
        self._until_probe, self._pause = self._pause, min(2 * self._pause, PROBE_EVERY)
        self._is_upwards = not has_more or wanted > self._floor  # with fewer rows where the floor is what keeps them many


class OutputRoom:
    """Room of a subtask's outputs, in rows that it reads: what it emits for them fits in front of their marks."""

    __slots__ = ("_bytes_per_row", "_dealt_bytes", "_outputs", "_room_bytes")

    def __init__(self, outputs: Sequence[ResultPort]) -> None:
        self._outputs = outputs
        self._dealt_bytes = [0] * len(outputs)
        self._bytes_per_row = [0.0] * len(outputs)
        """Of each output, for its fullest channel; 0: not known, or nothing comes out."""
        self._room_bytes = [0] * len(outputs)

    def look(self) -> bool:
        """Whether there is any, in all of the outputs. `rows` goes by what was seen here."""
        for index, output in enumerate(self._outputs):
            room_bytes = output.room_bytes
            if room_bytes <= 0:
                return False
            self._room_bytes[index] = room_bytes
            self._dealt_bytes[index] = output.dealt_bytes_max
        return True

    def rows(self, wanted: int) -> int:
        """So many of the wanted rows have room, at least one."""
        for room_bytes, bytes_per_row in zip(self._room_bytes, self._bytes_per_row, strict=True):
            if wanted * bytes_per_row > room_bytes:
                wanted = max(1, int(room_bytes / bytes_per_row))
        return wanted

    def measured(self, rows: int) -> None:
        """So many rows were processed since `look`. What came out since then came of them."""
        if rows < 1:
            return
        for index, output in enumerate(self._outputs):
            newest = (output.dealt_bytes_max - self._dealt_bytes[index]) / rows
            known = self._bytes_per_row[index]
            self._bytes_per_row[index] = known + SMOOTHING * (newest - known) if known else newest


def goes_on(signal: Watermark | WatermarkStatus) -> bool:
    """Whether the sender of a signal is not merely at its end."""
    return not signal.idle if isinstance(signal, WatermarkStatus) else signal.timestamp_ms < MAX_WATERMARK


class InputPort(Protocol):
    """A subtask's input gate."""

    def poll(self, *, now_ms: int, wall_ms: int | None = None) -> GateOutput | None: ...
    def next_urgent(self, *, now_ms: int, wall_ms: int) -> int | None: ...
    def take_urgent(self, *, now_ms: int, wall_ms: int) -> list[BarrierOutput]: ...

    @property
    def in_flight_bytes(self) -> int:
        """Referred to for a checkpoint that is collected."""

    @property
    def queued_bytes(self) -> int:
        """What waits to be taken, on all channels."""

    @property
    def credits(self) -> Sequence[ReceiverCredit]:
        """Of each channel; empty where nothing bounds it."""

    def notify_aborted(self, checkpoint_id: int, *, now_ms: int) -> None: ...
    def processed(self, rows: int, *, rows_min: int = 0) -> None: ...
    def close(self) -> None: ...
    def request_splits(self, total: int) -> None: ...

    @property
    def blocked(self) -> frozenset[int]:
        """Channels that wait for the barriers of others."""


@dataclass(frozen=True, slots=True)
class GateInputs:
    """The channels of a subtask: all that it reads, or what the enumerator of its source says."""

    gate: InputPort
    valve: MultiInputValve
    indexes: tuple[int, ...]
    """Channel -> logical input of the head."""


class SourcePhase(Enum):
    READING = auto()
    ENDED = auto()
    """The reader is finished, or the job was told to stop: it is not polled again."""


class _Remainder(msgspec.Struct):
    """Rows of a batch that are still to be processed; they count as in flight."""

    batch: Batch
    offset: int
    channel: int


class TaskInput:
    """Order of one subtask's input. `on_barrier` performs or abandons a checkpoint; `on_drained` follows the end of data."""

    def __init__(
        self,
        chain: OperatorChain,
        inputs: GateInputs | None,
        clock: Clock,
        rows: RowBudget,
        room: OutputRoom,
        *,
        on_barrier: Callable[[BarrierOutput], None],
        on_drained: Callable[[], None],
        begins_finished: bool = False,
    ) -> None:
        head = chain.head.operator
        self._chain = chain
        self._inputs = inputs
        self._clock = clock
        self._rows = rows
        self._room = room
        self._on_barrier = on_barrier
        self._on_drained = on_drained
        self._source = head if isinstance(head, SourceOperator) else None
        if self._source is None and inputs is None:
            raise InvariantError(f"{chain.head.uid}: a subtask has a source or input channels")
        self._phase = SourcePhase.READING
        self._ready_at_ms = 0
        self._maximum_ms: dict[str, int] = {}
        """Watermark group -> the greatest watermark that the source goes on at."""
        self._work: deque[Iterator[None]] = deque()
        self._remainder: _Remainder | None = None
        self._held: GateOutput | None = None
        self._urgent_id: int | None = None
        """Checkpoint whose barriers overtake now."""
        self._ended_channels: set[int] = set()
        self._unended_inputs: set[int] = set() if inputs is None else set(inputs.indexes)
        """Inputs of a head with several that `end_input` was not called for yet."""
        if len(self._unended_inputs) == 1:
            self._unended_inputs.clear()  # of a single one the end is `finish`
        self._holds_requests = overrides(head, "has_requests")
        self._takers = tuple(node.operator for node in chain.nodes if overrides(node.operator, "takes_input"))
        """Operators that may be full."""
        self._leaves_output = overrides(head, "remaining_output")
        self._settling = False
        """The oldest work waits for answers."""
        self._drains = True
        self._stopped = False
        self._rests = begins_finished
        """Nothing but the end has come since the restore, and nothing is expected: timers by the clock stay as they were."""
        self.is_drained = False
        self.is_finished = False
        self.watermark_ms = MIN_WATERMARK
        self.bytes_in = 0
        self.latencies = LatencyStats()

    @property
    def has_work(self) -> bool:
        """Slices are left of something that has begun."""
        return bool(self._work) or self._remainder is not None

    @property
    def has_ended(self) -> bool:
        """A source is not polled any more."""
        return self._phase is SourcePhase.ENDED

    @property
    def is_full(self) -> bool:
        """An operator takes no further batch before something is answered: it holds up those before it."""
        return bool(self._takers) and not all(operator.takes_input() for operator in self._takers)

    def add_work(self, work: Iterator[None]) -> None:
        """Queue work behind what is queued; it runs before any further input."""
        self._work.append(work)

    def in_hand(self) -> list[tuple[int, Element]]:
        """What was taken from the gate and is not processed, in its order, each with its channel: (a) of what is in flight."""
        found: list[tuple[int, Element]] = []
        if self._remainder is not None:
            found.append((self._remainder.channel, self._remainder.batch.slice(self._remainder.offset)))
        if isinstance(self._held, Delivered) and isinstance(self._held.element, Batch | Watermark | WatermarkStatus):
            found.append((self._held.channel, self._held.element))
        return found

    def serve_urgent(self, now_ms: int) -> bool:
        """Let the barriers of one checkpoint in that overtake what waits, also what is in hand. Whether another one waits, too:
        alarms, mail and input get their turn in between (`end_urgent`)."""
        if self._inputs is None:
            return False
        if self._source is not None:
            self._take_splits(now_ms)
            return False
        gate = self._inputs.gate
        while (checkpoint_id := gate.next_urgent(now_ms=now_ms, wall_ms=self._clock.wall_ms())) is not None:
            if self._urgent_id not in (None, checkpoint_id):
                return True
            self._urgent_id = checkpoint_id
            for output in gate.take_urgent(now_ms=now_ms, wall_ms=self._clock.wall_ms()):
                self._on_barrier(output)
        return False

    def end_urgent(self) -> None:
        """Others have had their turn: barriers of another checkpoint may be served."""
        self._urgent_id = None

    def _take_splits(self, now_ms: int) -> None:
        """All that the enumerator has sent: its barriers are in line behind splits, which are taken at no cost."""
        assert self._inputs is not None
        while (item := self._held or self._inputs.gate.poll(now_ms=now_ms, wall_ms=self._clock.wall_ms())) is not None:
            self._held = None
            self._take(item)

    def clear(self) -> None:
        """Forget everything in hand: the attempt is over."""
        self._work.clear()
        self._settling = False
        self._remainder = self._held = None

    # ---------------------------------------------------------------------------------------------------------- step

    def advance(self, now_ms: int) -> bool:
        """One unit: a slice of work or of rows, an event, or a poll of the source. False: nothing to do."""
        if self._work:
            looked = self._look_ahead(now_ms)
            if self._settling and not self._is_answered():
                return looked
            self._run_work()
            return True
        if self._remainder is not None:
            self._process_slice(self._remainder)
            return True
        full = self.is_full
        if self._held is not None and not full:
            item, self._held = self._held, None
            self._take(item)
            return True
        wall_ms = self._clock.wall_ms()
        timer_ms = self._next_processing_time_ms()
        if timer_ms is not None and timer_ms <= wall_ms:
            self._work.append(self._chain.fire_processing_time_timers(wall_ms))
            return True
        if self._inputs is None:
            return not full and self._poll_source(now_ms)
        polled = None if self._held is not None else self._inputs.gate.poll(now_ms=now_ms, wall_ms=wall_ms)
        if polled is None:
            return self._source is not None and not full and self._poll_source(now_ms)
        if full and isinstance(polled, Delivered) and isinstance(polled.element, Batch):
            self._held = polled
            return False
        self._take(polled)
        return True

    @property
    def is_listening(self) -> bool:
        """Whether what comes would be read: nothing but the lack of it keeps the subtask from reading."""
        if self._source is not None:
            return self._phase is SourcePhase.READING and not self.is_paused
        assert self._inputs is not None
        if self._holds_requests and self._chain.head.operator.has_requests():
            return False  # what is under way is not silence
        return not self.is_drained and not self._inputs.gate.blocked

    @property
    def is_paused(self) -> bool:
        """A source that is too far ahead of its watermark group; barriers, a stop and what is under way go on."""
        for group, node in self._chain.aligned:
            if node.watermark_ms > self._maximum_ms.get(group, MAX_WATERMARK):
                return self._phase is SourcePhase.READING
        return False

    def align(self, maximum_ms: Mapping[str, int]) -> None:
        """How far each watermark group may go."""
        self._maximum_ms = dict(maximum_ms)
        if self._source is not None and self._phase is SourcePhase.READING:
            for group, _ in self._chain.aligned:
                self._source.align_splits(self._maximum_ms.get(group, MAX_WATERMARK))

    def aligned_watermarks(self) -> dict[str, int | None]:
        """Operator in a watermark group -> its watermark; None for one that holds nobody."""
        found: dict[str, int | None] = {}
        for _, node in self._chain.aligned:
            holds = not node.idle and self._phase is SourcePhase.READING and node.watermark_ms > MIN_WATERMARK
            found[node.uid] = node.watermark_ms if holds else None
        return found

    def process_silence(self, reading_ms: int) -> bool:
        """Nothing was there to be read up to this reading time. False: nothing follows."""
        if not self._chain.watches_silence or not self.is_listening or not self._chain.process_silence(reading_ms):
            return False
        self.collect_own_watermarks()
        return True

    def next_wakeup_ms(self, reading_ms: int = 0) -> int | None:
        """Monotonic time at which there is something to do although nothing arrives."""
        wakeups: list[int] = []
        if self._chain.watches_silence and self.is_listening:
            silence_ms = self._chain.next_silence_ms()
            if silence_ms is not None:
                wakeups.append(self._clock.monotonic_ms() + max(1, silence_ms - reading_ms))
        polls = self._source is not None and self._phase is SourcePhase.READING and not self.is_paused and not self.is_full
        if polls and self._ready_at_ms < NEVER_MS:
            wakeups.append(self._ready_at_ms)
        timer_ms = self._next_processing_time_ms()
        if timer_ms is not None:
            wakeups.append(self._clock.monotonic_ms() + max(0, timer_ms - self._clock.wall_ms()) + 1)
        return min(wakeups, default=None)

    def _next_processing_time_ms(self) -> int | None:
        """Nothing may be emitted behind the end of data, so processing-time timers end with it, also over a restore."""
        return None if self.is_drained or self._rests else self._chain.next_processing_time_ms()

    def _look_ahead(self, now_ms: int) -> bool:
        """Between two slices of work: let a barrier in, hold anything else. Whether there was something."""
        if self._inputs is None or self._held is not None or self._remainder is not None:
            return False
        polled = self._inputs.gate.poll(now_ms=now_ms, wall_ms=self._clock.wall_ms())
        if polled is None:
            return False
        if self._source is not None and isinstance(polled, Delivered):
            self._take(polled)  # a barrier behind splits need not wait for the work either
        elif isinstance(polled, Delivered) and isinstance(polled.element, EndOfData):
            self._event(polled.channel, polled.element)  # its work comes behind this one, and barriers behind it need not wait
        elif isinstance(polled, Delivered) or (isinstance(polled, TriggerSnapshot) and _waits_for_work(polled.barrier)):
            self._held = polled
        else:
            self._take(polled)
        return True

    # ---------------------------------------------------------------------------------------------- requests of the head

    def _is_answered(self) -> bool:
        """Whether work that waits for answers can go on."""
        due_ms = self._chain.next_processing_time_ms()
        return not self._chain.head.operator.has_requests() or (due_ms is not None and due_ms <= self._clock.wall_ms())

    def _settled(self) -> Iterator[None]:
        """What the head waits for comes first: its answers, with the watermarks between them, each before the next answers."""
        while self._holds_requests and self._chain.head.operator.has_requests():
            if self._is_answered():
                yield from self._chain.fire_processing_time_timers(self._clock.wall_ms())
                yield from self._chain.own_watermarks()
            else:
                self._settling = True
                yield
                self._settling = False

    def _maximum(self) -> Iterator[None]:
        yield from self._settled()
        yield from self._chain.advance_watermark(MAX_WATERMARK)

    def _run_work(self) -> None:
        """One slice of the oldest work; the next work begins when it has ended."""
        try:
            next(self._work[0])
        except StopIteration:
            self._work.popleft()
        self.collect_own_watermarks()

    def collect_own_watermarks(self) -> None:
        """Operators may have emitted watermarks of their own: they are passed on as the next work."""
        if self._chain.has_own_watermarks:
            self._work.append(self._chain.own_watermarks())

    # -------------------------------------------------------------------------------------------------------- channels

    def _wake(self) -> None:
        """The input goes on behind its end. All that read from this subtask learn so, also those that none of its records reach:
        their event time and their timers would stand still."""
        if not self._rests:
            return
        self._rests = False
        for node in self._chain.nodes:
            for partition in node.partitions:
                partition.broadcast(WatermarkStatus(idle=False))
                if node.idle:
                    partition.broadcast(WatermarkStatus(idle=True))

    def _take(self, item: GateOutput) -> None:
        match item:
            case Delivered(element=Batch() as batch) if self._source is not None:
                self._source.process_batch(batch, 0)
                self._processed(batch.num_rows)
                self._ready_at_ms = 0
            case Delivered(channel=channel, element=element) if self._source is not None:
                self._enumerator_event(channel, element)
            case Delivered(channel=channel, element=Batch() as batch):
                assert self._inputs is not None
                self._wake()
                self.bytes_in += batch.size
                self._process_slice(_Remainder(batch, 0, channel))
            case Delivered(channel=channel, element=element):
                assert not isinstance(element, Batch)
                self._event(channel, element)
            case TriggerSnapshot() | AbortCheckpoint() | InFlightCollected():
                self._on_barrier(item)
            case _:
                assert_never(item)

    def _process_slice(self, remainder: _Remainder) -> None:
        batch, offset = remainder.batch, remainder.offset
        total = batch.num_rows
        count = self._room.rows(self._rows.rows_of(total - offset))
        part = batch if count == total else batch.slice(offset, count)
        remainder.offset = offset + count
        self._remainder = None if remainder.offset >= total else remainder
        began = self._clock.seconds()
        self._chain.process(part, self._index_of(remainder))
        self._rows.measured(count, self._clock.seconds() - began)
        self._room.measured(count)
        self._processed(count)
        if self._leaves_output:
            self._queue_remaining_output()
        self.collect_own_watermarks()

    def _processed(self, rows: int) -> None:
        """Their credit may go back."""
        assert self._inputs is not None
        self._inputs.gate.processed(rows, rows_min=self._rows.rows_min)

    def _index_of(self, remainder: _Remainder) -> int:
        """Logical input of the head that it came on."""
        assert self._inputs is not None
        return self._inputs.indexes[remainder.channel]

    def _queue_remaining_output(self) -> None:
        """What the head did not get to is work; it takes over the rest of the batch, which would keep barriers out."""
        slices = self._chain.head.operator.remaining_output()
        if slices is None:
            return
        if self._remainder is not None:
            rest, self._remainder = self._remainder, None
            self._chain.process(rest.batch.slice(rest.offset), self._index_of(rest))
            self._processed(rest.batch.num_rows - rest.offset)
        self._work.append(slices)

    def _event(self, channel: int, event: ElementEvent) -> None:
        assert self._inputs is not None
        match event:
            case Watermark() | WatermarkStatus():
                if self._rests and goes_on(event):
                    self._wake()
                for signal in self._inputs.valve.handle(channel, event):
                    self._work.append(self._time_signal(signal))
            case EndOfData(drain=drain, stopped=stopped):
                self._ended_channels.add(channel)
                self._drains = self._drains and drain
                self._stopped = self._stopped or stopped
                if len(self._ended_channels) == len(self._inputs.indexes):
                    self._work.append(self._end_of_data(drain=self._drains, stopped=self._stopped))
                elif self._unended_inputs and self._drains and not self._stopped:
                    self._end_input_of(channel)
            case LatencyMarker():
                self.latencies.record(event.vertex, self._clock.wall_ms() - event.marked_ms)
                self._chain.forward_marker(event)
            case EndOfPartition():
                if channel not in self._ended_channels:
                    raise InvariantError(f"channel {channel} of {self._chain.head.uid} ended before its data did")
            case _:
                raise InvariantError(f"the gate handed out {type(event).__name__}")

    def _enumerator_event(self, channel: int, event: Element) -> None:
        """Event time of a source comes from its own records. The enumerator's end is the source's only when the job stops."""
        match event:
            case EndOfData(drain=True, stopped=False):
                self._ended_channels.add(channel)
                assert self._source is not None
                self._source.no_more_splits()
                self._ready_at_ms = 0
            case EndOfData(drain=drain, stopped=stopped):
                self._ended_channels.add(channel)
                self.end_source(drain=drain, stopped=stopped)
            case _:
                return

    def _end_input_of(self, channel: int) -> None:
        """The head learns that an input has ended, once all of its channels have, while others go on."""
        assert self._inputs is not None
        ended = self._inputs.indexes[channel]
        if all(each in self._ended_channels for each, index in enumerate(self._inputs.indexes) if index == ended):
            self._unended_inputs.discard(ended)
            self._work.append(self._chain.end_input(ended))

    def _time_signal(self, signal: Watermark | WatermarkStatus) -> Iterator[None]:
        """The work that follows. The head learns of a watermark now: a barrier may be taken before the first slice."""
        if isinstance(signal, WatermarkStatus):
            return self._pass_on(signal)
        self.watermark_ms = signal.timestamp_ms
        if self._holds_requests and signal.timestamp_ms == MAX_WATERMARK:
            return self._maximum()
        return self._chain.advance_watermark(signal.timestamp_ms)

    def _pass_on(self, status: WatermarkStatus) -> Iterator[None]:
        yield from self._settled()
        self._chain.process_status(idle=status.idle)
        yield

    # -------------------------------------------------------------------------------------------------- source and end

    def _poll_source(self, now_ms: int) -> bool:
        if self._source is None or self._phase is not SourcePhase.READING or now_ms < self._ready_at_ms or self.is_paused:
            return False
        began = self._clock.seconds()
        polled = self._source.poll(self._room.rows(self._rows.rows()), now_ms)
        if self._inputs is not None:
            self._inputs.gate.request_splits(self._source.splits_requested)
        if polled.batch is not None:
            self._rows.measured(polled.batch.num_rows, self._clock.seconds() - began)
            self._room.measured(polled.batch.num_rows)
            self._wake()
        elif polled.watermark_ms is not None and polled.watermark_ms < MAX_WATERMARK:
            self._wake()
        self._ready_at_ms = now_ms if polled.ready_at_ms is None else polled.ready_at_ms
        self.collect_own_watermarks()
        if polled.idle is not None:
            self._work.append(self._pass_on(WatermarkStatus(polled.idle)))
        if polled.finished:
            self.end_source(drain=True, stopped=False)
        return polled.batch is not None or polled.finished or self._ready_at_ms <= now_ms

    def source_is_ready(self) -> None:
        """The reader has something, whatever time it named: it is polled again."""
        self._ready_at_ms = 0

    def end_source(self, *, drain: bool, stopped: bool = True) -> None:
        """No further poll; the end of data follows as work. `stopped`: there is more to read, which the job was told to leave."""
        if self._phase is SourcePhase.READING:
            self._phase = SourcePhase.ENDED
            self._work.append(self._end_of_data(drain=drain, stopped=stopped))

    def _end_of_data(self, *, drain: bool, stopped: bool) -> Iterator[None]:
        """Event time ends and buffers are flushed, unless the job stops to go on later; then downstream is told.

        Of a drain that was ordered the end of event time is each subtask's own: those behind it come to it when all of their
        channels have ended, and not of one of them before the others."""
        if drain:
            yield from self._settled()
            self._chain.keeps_maximum = stopped
            if self.watermark_ms < MAX_WATERMARK:
                self.watermark_ms = MAX_WATERMARK
                yield from self._chain.advance_watermark(MAX_WATERMARK)
            yield from self._chain.own_watermarks()
            for index in sorted(self._unended_inputs):
                yield from self._chain.end_input(index)
                yield from self._chain.own_watermarks()
            yield from self._chain.finish()
        self._chain.broadcast(EndOfData(drain, stopped and drain))
        self.is_drained = True
        self.is_finished = drain and not stopped
        self._on_drained()


def _waits_for_work(barrier: CheckpointBarrier) -> bool:
    """Whether a cut may not fall between two slices. Before a drain all fires; and rows that work has read, and would put back into
    the state, must not be those of a key that is erased."""
    return barrier.drain or barrier.erasure is not msgspec.UNSET

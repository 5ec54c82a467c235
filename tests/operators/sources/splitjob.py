"""The real enumerator and readers of one source, with channels, checkpoints and restores that a test moves step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.operators.sources.enumerator import EnumeratorReader
from holdfast.operators.sources.split_source import SplitSourceReader
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.statebackends.errors import SourceDataLostError
from holdfast.statebackends.redistribute import split_redistribute
from tests.operators.ports import ManualContext

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])
DISCOVERY_INTERVAL_MS = 100
FETCH_ROWS = 4
UID = "letters"


class Letter(hf.SourceSplit, frozen=True):
    pass


@dataclass
class Outside:
    """Splits that a test appends to, and what it was told."""

    rows: dict[str, int] = field(default_factory=dict)
    """Split -> rows it has had."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Split -> the first row that is still there."""
    ended: set[str] = field(default_factory=set)
    told: dict[str, int] = field(default_factory=dict)
    discoveries_to_fail: int = 0
    fails_fetch: bool = False
    finds_twice: bool = False


@dataclass
class LetterSource(hf.Source[Letter]):
    outside: Outside
    splits_max: int = 1
    owned: bool = False
    """Reader 0 has a, reader 1 b, and so on."""
    bounded: bool = False
    on_data_loss: Literal["fail", "earliest"] = "fail"
    name: str = UID
    split_type = Letter
    schema = SCHEMA

    def __post_init__(self) -> None:
        self.splits_per_reader = self.splits_max

    def create_enumerator(self) -> Letters:
        return Letters(self)

    def create_split_reader(self, context: hf.ReaderContext) -> LetterReader:
        return LetterReader(self)


class Letters(hf.SplitEnumerator[Letter]):
    def __init__(self, source: LetterSource) -> None:
        self.source = source
        self.discovery_interval_ms = None if source.bounded else DISCOVERY_INTERVAL_MS

    def discover(self) -> list[Letter]:
        outside = self.source.outside
        if outside.discoveries_to_fail:
            outside.discoveries_to_fail -= 1
            raise OSError("no answer")
        return [Letter(name) for name in sorted(outside.rows)]

    def handle_discovered(self, found: list[Letter]) -> Sequence[Letter]:
        return found if self.source.outside.finds_twice else super().handle_discovered(found)

    def owner_of(self, split: Letter, parallelism: int) -> int | None:
        return (ord(split.split_id) - ord("a")) % parallelism if self.source.owned else None


class LetterReader(hf.SplitReader[Letter]):
    def __init__(self, source: LetterSource) -> None:
        self.source = source
        self.next: dict[str, int] = {}

    def add_splits(self, splits: Sequence[hf.AssignedSplit[Letter]]) -> None:
        self.next.update({each.split_id: each.position[0] if each.position else 0 for each in splits})

    def fetch(self) -> Sequence[hf.SplitRecords]:
        return [records for name in list(self.next) for records in self._fetch(name)]

    def _fetch(self, name: str) -> Iterator[hf.SplitRecords]:
        outside, begin = self.source.outside, self.next[name]
        if begin < outside.oldest.get(name, 0):
            begin = self._lost(name, begin)
        stop = min(begin + FETCH_ROWS, outside.rows[name])
        ends = name in outside.ended and stop == outside.rows[name]
        if begin == stop and not ends:
            return
        self.next[name] = stop
        if outside.fails_fetch:
            outside.fails_fetch = False
            raise OSError("the connection is gone")
        if ends:
            del self.next[name]
        numbers = np.arange(begin, stop)
        yield hf.SplitRecords(name, pa.RecordBatch.from_arrays([numbers], schema=SCHEMA), numbers + 1, finished=ends)

    def _lost(self, name: str, begin: int) -> int:
        if self.source.on_data_loss == "earliest":
            return self.source.outside.oldest[name]
        raise SourceDataLostError(
            f"{name}: gone from {begin} on", connector="LetterSource", split=name, position=(begin,), reason="gone"
        )

    def notify_checkpoint_complete(self, positions: Mapping[str, tuple[int, ...]]) -> None:
        self.source.outside.told.update({name: position[0] for name, position in positions.items()})


@dataclass
class Snapshot:
    """What one checkpoint or savepoint has."""

    id: int
    enumerator: list[bytes]
    readers: dict[int, list[bytes]] = field(default_factory=dict)
    """By subtask, of those that have acknowledged it."""
    rows: list[tuple[str, int]] = field(default_factory=list)
    """In front of it, as something behind the source counts them."""
    finished: set[str] = field(default_factory=set)

    def places(self) -> dict[str, list[hf.AssignedSplit[Letter]]]:
        codec = SplitCodec(Letter, UID)
        _, waiting = codec.decode_enumerator(self.enumerator)
        readers = {str(subtask): [codec.decode(each) for each in entries] for subtask, entries in sorted(self.readers.items())}
        return {"E": [hf.AssignedSplit(split) for split in waiting], **readers}

    def check(self) -> None:
        """Each split that was found, and has not finished, is in one place."""
        own, _ = SplitCodec(Letter, UID).decode_enumerator(self.enumerator)
        found = msgspec.msgpack.decode(own.state, type=list[str])
        assert len(set(found)) == len(found)
        names = [each.split_id for there in self.places().values() for each in there]
        assert sorted([*names, *self.finished]) == found, f"snapshot {self.id}: {self.places()}"


@dataclass
class Reading:
    """One reader, its channel, and what came from it."""

    reader: SplitSourceReader[Letter]
    context: ManualContext
    channel: deque[bytes | int | None] = field(default_factory=deque)
    """Splits, barriers (ids), and the end of the enumerator."""
    rows: list[tuple[str, int]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    status: str = ""
    """`-`: idle, `.`: at its end."""

    def get(self) -> bool:
        """Takes what is in front of the next barrier."""
        moved = False
        while self.channel and not isinstance(self.channel[0], int):
            moved, entry = True, self.channel.popleft()
            if isinstance(entry, bytes):
                self.reader.add_splits([entry])
            else:
                self.reader.no_more_splits()
        self.context.run_pool()
        return moved

    def read(self) -> bool:
        moved = False
        while True:
            polled = self.reader.poll(3, self.context.time_ms)
            had_work = bool(self.context.tasks)
            self.context.run_pool()
            if polled.batch is not None:
                self.rows += [(polled.split, number) for number in polled.batch.columns().column("n").to_pylist()]
            if polled.ended_split:
                self.finished.add(polled.ended_split)
            if polled.idle is not None:
                self.status = "-" if polled.idle else ""
            if polled.finished:
                moved, self.status = moved or self.status != ".", "."
                return moved
            if polled.batch is None and not polled.ended_split and polled.idle is None and not had_work:
                return moved
            moved = moved or polled.batch is not None or bool(polled.ended_split)


class SplitJob:
    """One job: attempts of it, and its snapshots."""

    def __init__(self, outside: Outside, *, readers: int = 2, **options: Any) -> None:
        self.source = LetterSource(outside, **options)
        self.readers = readers
        self.snapshots: dict[int, Snapshot] = {}
        self.completed: Snapshot | None = None
        self.attempt = 0
        self.time_ms = 0
        self.last_id = 0
        self.readings: list[Reading] = []
        """Readers of the newest attempt."""
        self.restore(None)

    # --------------------------------------------------------------------------------------------------------- attempts

    def restore(self, snapshot: Snapshot | None, readers: int | None = None) -> None:
        """A new attempt; None: without state."""
        if self.attempt:
            self._close()
        self.readers, self.attempt = readers or self.readers, self.attempt + 1
        self.base = snapshot or Snapshot(0, [], {0: []})
        self.last_id = max(self.last_id, self.base.id)
        dealt = self._dealt(self.base)
        self.enumerator = EnumeratorReader(self.source, self.readers)
        self.enumerator_context = self._context(0, 1)
        self.enumerator.open(self.enumerator_context, None if snapshot is None else snapshot.enumerator)
        self.readings = []
        for subtask in range(self.readers):
            reading = Reading(SplitSourceReader(self.source), self._context(subtask, self.readers))
            self.readings.append(reading)
            reading.reader.open(reading.context, None if snapshot is None else dealt[subtask])
            reading.context.run_pool()
        self.has_ended = False

    def _context(self, subtask: int, parallelism: int) -> ManualContext:
        return ManualContext(
            uid=UID,
            subtask=subtask,
            parallelism=parallelism,
            attempt=self.attempt,
            restored_checkpoint_id=self.base.id,
            time_ms=self.time_ms,
        )

    def _dealt(self, snapshot: Snapshot) -> list[list[bytes]]:
        """As a restore does it: each keeps its own at the same parallelism."""
        old = [entries for _, entries in sorted(snapshot.readers.items())]
        if len(old) == self.readers:
            return old
        return [each.get("positions", []) for each in split_redistribute({"positions": old}, self.readers)]

    def _close(self) -> None:
        self.enumerator.close()
        for each in self.readings:
            each.reader.close()
            each.context.run_pool()

    # ----------------------------------------------------------------------------------------------------------- splits

    def pass_time(self, by_ms: int) -> None:
        self.time_ms += by_ms
        for context in [self.enumerator_context, *(each.context for each in self.readings)]:
            context.time_ms = self.time_ms

    def find(self) -> None:
        self.pass_time(DISCOVERY_INTERVAL_MS)
        for _ in range(2):  # the second tells of its error
            self._poll_enumerator(0)
            self.enumerator_context.run_pool()

    def ask(self) -> None:
        for subtask, each in enumerate(self.readings):
            self.enumerator.split_requested(subtask, each.reader.splits_requested)

    def hand(self) -> bool:
        moved = False
        while self._poll_enumerator(1):
            moved = True
        return moved

    def _poll_enumerator(self, splits_max: int) -> bool:
        polled = self.enumerator.poll(splits_max, self.time_ms)
        if polled.batch is not None:
            for row in polled.batch.columns().to_pylist():
                self.readings[row["subtask"]].channel.append(row["split"])
        elif polled.finished and not self.has_ended:
            self.has_ended = True
            for each in self.readings:
                each.channel.append(None)
            return True
        return polled.batch is not None

    def get(self) -> bool:
        moved = [each.get() for each in self.readings]
        return any(moved)

    def read(self) -> bool:
        self.pass_time(50)  # behind the pause of a client that had nothing
        moved = [each.read() for each in self.readings]
        return any(moved)

    def go(self) -> None:
        moves: list[Callable[[], Any]] = [self.ask, self.hand, self.get, self.read]
        moved = [True]
        while any(moved):
            moved = [bool(move()) for move in moves]

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def cut(self) -> Snapshot:
        self.last_id += 1
        taken = Snapshot(self.last_id, self.enumerator.snapshot_of(self.last_id))
        taken.rows, taken.finished = list(self.base.rows), set(self.base.finished)
        self.snapshots[taken.id] = taken
        for each in self.readings:
            each.channel.append(taken.id)
        return taken

    def acknowledge(self, subtasks: Sequence[int]) -> None:
        for subtask in subtasks:
            each = self.readings[subtask]
            each.get()
            if not each.channel:
                continue
            taken = self.snapshots[cast(int, each.channel.popleft())]
            taken.readers[subtask] = each.reader.snapshot_of(taken.id)
            taken.rows += each.rows
            taken.finished |= each.finished
            if len(taken.readers) == self.readers:
                taken.check()

    def take(self) -> Snapshot:
        taken = self.cut()
        self.acknowledge(range(self.readers))
        return taken

    def mix(self, of_enumerator: Snapshot, of_readers: Snapshot) -> None:
        """What no checkpoint has."""
        self.restore(replace(of_readers, enumerator=of_enumerator.enumerator))

    def notify(self, number: int) -> None:
        taken = self.snapshots[number]
        assert len(taken.readers) == self.readers, f"{number} is not acknowledged by all"
        if self.completed is None or self.completed.id < number:
            self.completed = taken
        self.enumerator.notify_checkpoint_complete(number)
        for each in self.readings:
            each.reader.notify_checkpoint_complete(number)
            each.context.run_pool()

    @property
    def rows(self) -> list[tuple[str, int]]:
        """As something behind the source counts them that is restored with it."""
        return [*self.base.rows, *(row for each in self.readings for row in each.rows)]

    def where(self) -> str:
        waiting = Snapshot(0, self.enumerator.snapshot_of(self.last_id)).places()["E"]
        places = [("E", [each.split_id for each in waiting])]
        codec = SplitCodec(Letter, UID)
        for subtask, each in enumerate(self.readings):
            on_the_way = [codec.decode(entry).split_id for entry in each.channel if isinstance(entry, bytes)]
            places.append((f">{subtask}", on_the_way))
        for subtask, each in enumerate(self.readings):
            places.append((str(subtask), [*each.reader.splits, *([each.status] if each.status else [])]))
        return ", ".join(" ".join([place, *names]) for place, names in places if names)

    def kept(self, number: int) -> str:
        def said(each: hf.AssignedSplit[Letter]) -> str:
            return each.split_id + "".join(map(str, each.position))

        places = self.snapshots[number].places()
        return ", ".join(" ".join([place, *map(said, there)]) for place, there in places.items() if there)

"""The base of connectors that read: a source, its enumerator, its readers, and the splits that travel between them. Public.

A split is a part of the input that one reader reads on its own: a partition, a file, a part of a table. At every checkpoint it is
in one place: with the enumerator, or with one reader, together with the position that is reached. Source: Flink, FLIP-27."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.operators.base import CallThread
from holdfast.statebackends.errors import InvalidSplitError

Position = tuple[int, ...]
"""Where the next record of a split is: one int64, such as an offset or a row, or several, such as (commit LSN, index). Empty: at
its beginning."""

SPLIT_ID_CHARACTERS_MAX = 4_096


class SourceSplit(msgspec.Struct, frozen=True):
    """Base class of a connector's splits: `class Part(hf.SourceSplit, frozen=True)`, with further fields that msgspec can encode.

    They are stored in checkpoints: fields may be added, with a default, and none be renamed or removed."""

    split_id: str
    """Unique within the source, the same whenever the split is found; at most 4,096 characters."""


def kind_of(given: object) -> str:
    """What something is, for an error's text, without the records that it may have."""
    kinds = sorted({type(each).__name__ for each in given}) if isinstance(given, list | tuple) else []
    return f"a {type(given).__name__}" + (f" of {', '.join(kinds)[:100]}" if kinds else "")


SplitT = TypeVar("SplitT", bound=SourceSplit)


@dataclass(frozen=True, slots=True)
class AssignedSplit(Generic[SplitT]):
    """A split of one reader, and the position to go on from."""

    split: SplitT
    position: Position = ()

    @property
    def split_id(self) -> str:
        return self.split.split_id


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that can't be read as the columns of the source say. It fails the job, or leaves by `hf.DEAD_LETTERS`."""

    position: Position
    """Of the record itself."""
    behind: Position
    """Where to go on behind it."""
    error: str
    """What is wrong with it."""
    raw: bytes | None = None
    """The record as it came."""
    row: int = 0
    """Rows of the same SplitRecords that are in front of it."""


@dataclass(frozen=True, slots=True)
class SplitRecords:
    """Records of one split, in order, or news of it."""

    split_id: str
    columns: pa.RecordBatch | None = None
    """With the schema of the source; None: no records."""
    positions: npt.NDArray[np.int64] | None = None
    """The position behind each row: of shape (rows,), or (rows, n) for positions of n numbers. Any row may be the last one in front
    of a checkpoint."""
    timestamps: npt.NDArray[np.int64] | None = None
    """Event time of each row, ms since the epoch, if the source gives any."""
    position: Position | None = None
    """The position behind all of it, where that is behind the last row: what was skipped need not be read again."""
    finished: bool = False
    """The split ends behind these records: it is in no later checkpoint."""
    pending_records: int | None = None
    """Records that are known to wait in the split, behind these."""
    dead_letters: Sequence[DeadLetter] = ()
    """Records among these that can't be read, in order."""

    @property
    def num_rows(self) -> int:
        return 0 if self.columns is None else int(self.columns.num_rows)

    def until(self, stop: int) -> SplitRecords:
        """What of it is in front of a stop position, for positions of one number that rise: rows whose position is `stop` at most.

        Where the stop is reached the split is finished there."""
        positions, letters = self.positions, [each for each in self.dead_letters if each.behind[0] <= stop]
        count = 0 if positions is None else int(np.searchsorted(positions, stop, side="right"))
        ends = [] if positions is None else positions[-1:].tolist()
        ends += [each.behind[0] for each in self.dead_letters[-1:]] + list(self.position or ())
        if max(ends, default=stop - 1) < stop:
            return self
        return SplitRecords(
            self.split_id,
            None if self.columns is None or not count else self.columns.slice(0, count),
            None if positions is None or not count else positions[:count],
            None if self.timestamps is None or not count else self.timestamps[:count],
            position=(stop,),
            finished=True,
            dead_letters=letters,
        )

    def cut(self, count: int) -> tuple[SplitRecords, SplitRecords]:
        """The first rows, fewer than all, and the others. Dead letters between the two are with the others."""
        columns, positions, stamps = self.columns, self.positions, self.timestamps
        assert columns is not None
        assert positions is not None
        first = SplitRecords(
            self.split_id,
            columns.slice(0, count),
            positions[:count],
            None if stamps is None else stamps[:count],
            dead_letters=[each for each in self.dead_letters if each.row < count],
        )
        rest = replace(
            self,
            columns=columns.slice(count),
            positions=positions[count:],
            timestamps=None if stamps is None else stamps[count:],
            dead_letters=[replace(each, row=each.row - count) for each in self.dead_letters if each.row >= count],
        )
        return first, rest


class ReaderContext(Protocol):
    """Where a reader is, and what it can ask for."""

    job_id: str
    uid: str
    """Of the source."""
    subtask: int
    parallelism: int
    attempt: int

    def open_thread(self, name: str) -> CallThread:
        """A thread for a blocking client."""

    def source_is_ready(self) -> None:
        """There is something to poll, whatever the last poll said. On the loop."""

    def monotonic_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EnumeratorContext:
    """What an enumerator knows of its readers."""

    job_id: str
    uid: str
    """Of the source."""
    parallelism: int
    """Readers: subtasks 0 .. parallelism - 1."""
    attempt: int


class SplitEnumerator(ABC, Generic[SplitT]):
    """Finds the splits of a source and says who gets them: one instance for each attempt of a job, on one subtask.

    The runtime keeps the splits that are not handed out, and gives each to one reader once; what is kept here is what it takes to
    find each split once. All but `discover` and `close` are called on the loop, and must not block."""

    discovery_interval_ms: int | None = None
    """Time from the end of one discovery to the next. None: one discovery finds all splits."""
    has_discovered: bool = False
    """Set by the runtime: a discovery has succeeded before, in this attempt or in front of what was restored. What is found now has
    come since: it is read from its beginning, whatever the job was told of where to start."""

    @property
    def finds_more(self) -> bool:
        """Whether a later discovery may find a further split; asked behind the first one. When it may not, the source ends with the
        last split."""
        return self.discovery_interval_ms is not None

    def open(self, context: EnumeratorContext) -> None:
        """Called first, before `restore_state`."""

    @abstractmethod
    def discover(self) -> Any:
        """Look for splits, on a thread of its own: it may block, reads what the enumerator keeps, and changes none of it.

        Returns what `handle_discovered` takes: by default a list of splits, known ones among them. An error fails the job, unless
        an earlier discovery has succeeded: then it is logged, and ten in a row fail the job."""

    def handle_discovered(self, found: Any) -> Sequence[SplitT]:
        """The splits that are new, with the memory of them updated. By default those whose ids were not found before, all of which
        are kept: override it, with `snapshot_state` and `restore_state`, where splits come without end."""
        known = self._known
        new = []
        found = list(found) if isinstance(found, Iterable) else found
        if not isinstance(found, list) or not all(isinstance(split, SourceSplit) for split in found):
            reason = f"discover() gave {kind_of(found)}, not a list of splits"
            raise InvalidSplitError(f"{type(self).__name__}: {reason}", operator="", split="", reason=reason)
        for split in found:
            if split.split_id not in known:
                known.add(split.split_id)
                new.append(split)
        return new

    def owner_of(self, split: SplitT, parallelism: int) -> int | None:
        """The reader that gets a new split at once, also without asking; None (default): one that asks for a split."""
        return None

    def handle_split_request(self, subtask: int, splits: Sequence[SplitT]) -> int | None:
        """A reader asks for a split: the index of the one that it gets, of at least one that waits, oldest first; None: none of
        them for now. By default the oldest."""
        return 0

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """What is kept, for `restore_state`."""
        return msgspec.msgpack.encode(sorted(self._known))

    def restore_state(self, state: bytes) -> None:
        """What `snapshot_state` gave, before any discovery of this attempt. Raises whatever says that it can't be read."""
        self._known.update(msgspec.msgpack.decode(state, type=list[str]))

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint is complete."""

    def close(self) -> None:
        """Always called, also after a failure, and perhaps while `discover` is under way."""

    @property
    def _known(self) -> set[str]:
        known: set[str] = self.__dict__.setdefault("_known_splits", set())
        return known


class SplitReader(ABC, Generic[SplitT]):
    """Reads splits with a blocking client. Every method but `wake_up` is called on one thread, which is its own, one after the
    other; the runtime fetches a few batches ahead, and no more."""

    def open(self) -> None:
        """Called first, on the thread: connect here."""

    @abstractmethod
    def add_splits(self, splits: Sequence[AssignedSplit[SplitT]]) -> None:
        """Read these, too, each from its position on."""

    @abstractmethod
    def fetch(self) -> Sequence[SplitRecords]:
        """The next records of any splits; waits for some, up to about half a second. At least a split is there, and not paused.

        Nothing: none came. An error fails the job: no method but `close` is called behind it, records that were given before are
        passed on, and the attempt that follows reads again from the last checkpoint."""

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        """Give no records of some splits (ids) for now, and those of others again: event time waits for slower ones."""

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        """A checkpoint with these positions, by split, is complete: a broker may learn of them.

        It has splits that this reader had, finished ones included, and no split at its beginning. Behind a restore the restored
        checkpoint is one, whose positions come behind `add_splits`. Of several that wait to be told the newest positions are. An
        error is logged, and no more: what a restore goes on from is the checkpoint."""

    def wake_up(self) -> None:
        """End a `fetch` that waits, or is about to: another call waits behind it. Called on another thread, at any time, also
        before `open` has returned. It may be ignored where `fetch` returns soon by itself."""

    def close(self) -> None:
        """Called last, behind the call that is under way, also after an error, and where `open` has failed.

        The attempt that follows in the same process waits for its end, though five seconds at most; one in another process does
        not. A client of which there may be one (a slot, a durable consumer) must therefore be taken over in `open`, from an owner
        that may still live."""


class SourceReader(ABC, Generic[SplitT]):
    """One subtask's reader, on the loop: no method may block. A client that blocks is a `SplitReader`."""

    splits_max: int = 1
    """Splits that it asks for at once; the enumerator may give it more without being asked."""

    def open(self, context: ReaderContext) -> None:
        """Called first."""

    @abstractmethod
    def add_splits(self, splits: Sequence[AssignedSplit[SplitT]]) -> None:
        """Read these, too, each from its position on."""

    def no_more_splits(self) -> None:
        """There will be no further one."""

    @abstractmethod
    def poll(self, rows_max: int) -> SplitRecords | int | None:
        """The next records of one split, about `rows_max` rows; None: there are none until `context.source_is_ready()`.

        A number: there are none for so many ms."""

    def snapshot_state(self, checkpoint_id: int, splits: Sequence[AssignedSplit[SplitT]]) -> Sequence[AssignedSplit[SplitT]]:
        """The splits that a checkpoint keeps. `splits`: those that are not finished, at the position behind the last row given.

        What it returns has the same splits; their own fields may be others, and positions that the reader can go on from."""
        return splits

    def notify_checkpoint_complete(self, checkpoint_id: int, positions: Mapping[str, Position]) -> None:
        """The checkpoint is complete; `positions`: what it says of the splits that this reader had, finished ones included.

        Behind a restore: of the restored checkpoint, right behind its splits."""

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        """As of SplitReader."""

    def pending_records(self) -> int | None:
        """Records that are known to wait outside; None: that is not known."""
        return None

    @property
    def is_processing_backlog(self) -> bool:
        """Whether it works off what has piled up (history in front of live records, a lag), which needs no results soon.

        While any subtask of a source says so, `checkpoint_interval_during_backlog_ms` is the job's interval. Asked often, first
        before the first poll."""
        return False

    def close(self) -> None:
        """Always called, also after a failure."""


class Source(ABC, Generic[SplitT]):
    """A rewindable source of splits: picklable, immutable, and without a connection of its own.

    Give it to `Environment.from_source`."""

    name: str = "source"
    split_type: ClassVar[type[Any]]
    """The class of its splits."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns of its records."""

    @abstractmethod
    def create_enumerator(self) -> SplitEnumerator[SplitT]: ...

    def create_split_reader(self, context: ReaderContext) -> SplitReader[SplitT]:
        """Of one subtask, on the loop: it connects in `open`. Not called where `create_reader` makes something else."""
        raise NotImplementedError(f"{type(self).__name__} has neither create_split_reader nor create_reader")

    def create_reader(self, context: ReaderContext) -> SourceReader[SplitT] | None:
        """Of one subtask. None (default): one that fetches from its `SplitReader`, on a thread of its own."""
        return None

    gives_event_times: bool = False
    """All its records have `timestamps`: a watermark strategy needs no assigner."""
    splits_per_reader: int = 1
    """Splits that such a reader asks for at once."""
    reads_in_turn: bool = False
    """Its readers read one split behind the other, as one reads files: event time does not wait for a split that was not begun. Of
    partitions it does, from the moment in which a reader has them."""

"""Where an exactly-once sink writes to: `CommitTarget`, which connectors implement, and the operations by which it is called.

The operations are records like those of storage, so that a flow yields both: production performs them on a thread of the target's
own (`TargetPort`), and a test or the simulator may stop before or after each, lose its answer, or let it take effect later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition


class CommitTarget(ABC):
    """An outside system that takes rows and a position in one atomic step: with `StagedSink` a whole exactly-once sink.

    It is pickled into the job, and connects in `open`. Its methods are called one at a time, always on the same thread, which is
    its own: a call that blocks holds up neither checkpoints nor a restart, which lets it go. A target that raises FencedError, or
    another error of Holdfast that is final, has changed nothing. Any other error leaves open whether the call took effect: `open`
    is then called again, and what it returns is the truth. So `open` must wait for, or end, what an earlier call left in flight:
    every earlier `apply`, also of another process, must fail from then on."""

    @property
    def place(self) -> str:
        """Where it writes, in words for messages: `postgresql://host/db table orders`. Never a secret."""
        return ""

    @property
    def identity(self) -> str:
        """What it writes to, by what lasts as long as the output: a table, a topic, not the host that has it. Kept in the job graph
        and in snapshots: a restore is refused (SinkMovedError) where it is another one. As `place` unless overridden; empty: never
        compared. Never a secret."""
        return self.place

    def check(self, schema: pa.Schema) -> None:
        """Called on the driver, before the target is pickled into the job, with the columns that it will get. Raise
        InvalidConfigError for those that it does not take. It may look at the outside, which the driver must then reach, for the
        types of a table, say; it changes nothing there, and leaves no connection behind."""
        return

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        """Columns of what `stage` makes of rows with these columns."""
        return schema

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """What is staged of some rows: as many rows, in their order, which `apply` gets.

        Called in the writers, on the loop, on a copy of the target that is never opened. Encode rows here, where all subtasks share
        the work, and raise InvalidRowError for a row that the target would never take: behind the checkpoint it is too late."""
        return columns

    @abstractmethod
    def open(self, owner: CommitOwner) -> CommitPosition:
        """Connect; in one atomic step read the stored position of `owner.sink_id` (None if there is none), store what
        `owner.take(stored)` returns, and return that. What `take` raises must leave the stored position as it was."""

    @abstractmethod
    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        """Write all rows, and replace the stored position by `position`, in one atomic step, if it still equals `expected`.

        batches: at least one row, in order; read as they are taken, so that memory stays bounded. Take them all: their position
        covers them. Raises FencedError when another position is stored."""

    def close(self) -> None:
        """Release connections. Called once, behind the calls so far, also after a failure; never if the process dies, or a call
        never returns. `open` is not called again."""
        return


class FileSlice(msgspec.Struct, frozen=True):
    """Rows [start, stop) of a staged file."""

    folder: str
    """Location: an absolute folder or a URL."""
    name: str
    start: int
    stop: int


class OpenTarget(msgspec.Struct, frozen=True):
    """Take the target over. Result: CommitPosition."""

    path: str
    """Names the target in traces."""
    owner: CommitOwner


class ApplyRows(msgspec.Struct, frozen=True):
    """Commit rows. Result: None. Raises CommittableLostError before anything is applied when a file is missing, CorruptStateError
    for a damaged one."""

    path: str
    slices: tuple[FileSlice, ...]
    expected: CommitPosition
    position: CommitPosition


class FindMissing(msgspec.Struct, frozen=True):
    """Result: bool, whether one of these staged files is gone."""

    path: str
    folder: str
    names: tuple[str, ...]

"""The commit position of a sink, and what the committer of a `CommitTarget` keeps in state: records that committers and
coordinator share.

A target stores the position beside the rows. Who may move it on is for `holdfast.operators.sinks.targets.positions`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.barriers.sinks.log import StagedFile
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack, decode_versioned
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError

POSITION_VERSION = 1

ALL_ROWS = -1
"""`row` of a position that has all rows of its checkpoint."""

STATE_VERSION = 1

STAGED_CHECKPOINTS = "staged_checkpoints"
"""Name of the committer's one list state, of one entry: `StagedState`."""


class CommitMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A point that an output can have got to."""

    checkpoint_id: int = 0
    """All rows of lower ids are committed; 0: none are."""
    row: int = ALL_ROWS
    """Number of rows of `checkpoint_id` that are committed; -1: all of them."""
    tag: str = ""
    """Names the staged files of `checkpoint_id`, as `StagedCheckpoint.tag`: other rows under the same id have another one."""

    @property
    def progress(self) -> tuple[int, float]:
        """Rises with every commit of one line of checkpoints."""
        return self.checkpoint_id, math.inf if self.row == ALL_ROWS else self.row


class CommitPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the output of one sink is committed: what a target stores."""

    version: int
    sink_id: str
    owner: int
    """1, 2, 3 ...: rises whenever a committer opens the target. Whoever holds a lower one can't commit any more."""
    nonce: str
    """Drawn by the committer that opened the target."""
    job_id: str
    attempt: int
    checkpoint_id: int = 0
    """All rows of lower ids are committed; 0: none are."""
    row: int = ALL_ROWS
    """Number of rows of `checkpoint_id` that are committed; -1: all of them."""
    repeated: int = 0
    """Highest id of what was staged when a user went back with `allow_output_repeat`, until rows behind it are committed: files of
    it that are gone were committed before. 0: none did."""
    line: str = ""
    """Names the job's records in one state directory: attempts are numbered there. A job of the same name in another state
    directory has another line."""
    tag: str = ""
    """As `CommitMark.tag`."""
    reached: CommitMark | None = None
    """How far the output had got when a user went back with `allow_output_repeat`, until rows behind it are committed. Its tag goes
    with the first rows that are committed: then the way forward from there is shut."""

    def encode(self) -> bytes:
        """Compact JSON, UTF-8, at most some hundred bytes: fits a text column, a message, or a property of a table."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview | str, where: str = "the target") -> CommitPosition:
        """`where`: names the place in errors. Raises CorruptStateError, UnsupportedVersionError."""
        content = data.encode() if isinstance(data, str) else bytes(data)
        return decode_versioned(content, CommitPosition, where, supported=POSITION_VERSION, what="a sink's commit position")

    def has_all_of(self, checkpoint_id: int) -> bool:
        """Whether all rows of a checkpoint are committed."""
        return checkpoint_id < self.checkpoint_id or (checkpoint_id == self.checkpoint_id and self.row == ALL_ROWS)

    def rows_of(self, checkpoint_id: int) -> int:
        """Number of rows of a checkpoint, which is not committed as a whole, that are."""
        return self.row if checkpoint_id == self.checkpoint_id else 0

    @property
    def mark(self) -> CommitMark:
        return CommitMark(self.checkpoint_id, self.row, self.tag)

    @property
    def highest(self) -> CommitMark:
        """The farthest point that the output is known to have got to."""
        return max(self.mark, self.reached or self.mark, key=lambda mark: mark.progress)

    @property
    def progress(self) -> tuple[int, float]:
        """Rises with every commit of one line of checkpoints."""
        return self.mark.progress

    def moved(self, checkpoint_id: int, row: int = ALL_ROWS, tag: str = "") -> CommitPosition:
        """The same owner's position behind more rows."""
        repeated = self.repeated if checkpoint_id <= self.repeated else 0
        reached = None
        if self.reached is not None and CommitMark(checkpoint_id, row).progress < self.reached.progress:
            reached = CommitMark(self.reached.checkpoint_id, self.reached.row)
        return msgspec.structs.replace(self, checkpoint_id=checkpoint_id, row=row, tag=tag, repeated=repeated, reached=reached)

    def __str__(self) -> str:
        rows = "" if self.row == ALL_ROWS else f", {self.row} rows of it"
        return f"checkpoint {self.checkpoint_id}{rows} (job {self.job_id}, attempt {self.attempt}, owner {self.owner})"


class StagedCheckpoint(msgspec.Struct, frozen=True):
    """The staged files of one checkpoint, in the order of their rows."""

    checkpoint_id: int
    folder: str
    """Location of the files: another job may have staged them."""
    files: tuple[StagedFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def tag(self) -> str:
        """16 hex digits. Names of staged files are never used twice, so that no other rows have it, in any job."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.files))

    @property
    def external(self) -> Iterable[str]:
        """As `Operator.external_files`."""
        above = self.folder.rpartition("/")[0]
        return (f"{self.folder}/{file.name}|{above}/staging.json" for file in self.files)


class StagedState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a target's committer."""

    version: int
    position: CommitPosition | None
    """As the target last confirmed it."""
    checkpoints: tuple[StagedCheckpoint, ...]
    """Those whose commit is not known to be done."""
    place: str = ""
    """`CommitTarget.identity`; empty: it has none."""


def decode_staged_state(entry: bytes, operator: str) -> StagedState:
    """Raises CorruptStateError, UnsupportedVersionError, naming the operator."""
    try:
        state = decode_msgpack(entry, StagedState)
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"sink {operator}: its staged checkpoints can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    if state.version != STATE_VERSION:
        raise UnsupportedVersionError(
            f"sink {operator}: state of version {state.version}, this Holdfast reads {STATE_VERSION}",
            operator=operator,
            version=state.version,
            supported=STATE_VERSION,
        )
    return state

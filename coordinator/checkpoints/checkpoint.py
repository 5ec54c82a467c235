"""A requested checkpoint and a completed one: the records that events and actions of the checkpoint coordinator carry."""

from __future__ import annotations

import msgspec

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.handles import FileHandle


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A request for one checkpoint. The coordinator itself makes the periodic ones, users and the job's end all others."""

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    trigger_id: str = ""
    """Of a user's request; empty for all others."""
    periodic: bool = False
    folder: str | None = None
    """Absolute location of a savepoint's own folder; None for a checkpoint."""
    drain: bool = False
    """A stop that sends the maximum watermark first, so that event-time timers fire."""
    native: bool = False
    """A savepoint in the state backend's own files."""
    unaligned: bool | None = None
    """Of a checkpoint: whether its barriers may overtake; None: as the job's settings say when it is triggered."""
    aligned_timeout_ms: int | None = None
    """Of a checkpoint whose barriers may overtake: the age from which on they do; None: as the job's settings say then."""
    erasure: Erasure | None = None
    """A key that leaves keyed state at the cut of a checkpoint. It builds on no other, and none behind it builds on one before it;
    once it is complete, all before it are dropped, and savepoints that began before it are aborted."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint

    @property
    def ends_job(self) -> bool:
        return self.kind in (CheckpointKind.STOP_SAVEPOINT, CheckpointKind.FINAL)

    @property
    def is_forced(self) -> bool:
        """Not held back by the number of pending checkpoints."""
        return self.kind is not CheckpointKind.CHECKPOINT


class CompletedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose COMPLETED is stored."""

    checkpoint_id: int
    kind: CheckpointKind
    folder: str
    timestamp_ms: int
    size: int = 0
    """Bytes of state, those shared with its base included."""
    shared: tuple[FileHandle, ...] | None = ()
    """Files that other checkpoints refer to, too, or may later; None: its `_metadata` can't be read."""
    totals: Totals = {}
    """Counts of the submission's operators at its cut."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint

"""A checkpoint that is asked for, and one that is complete: what events and actions of the checkpoint coordinator carry."""

from __future__ import annotations

import msgspec

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.handles import FileHandle


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A wish for one checkpoint. Periodic ones come from the coordinator itself, all others from outside."""

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    trigger_id: str = ""
    periodic: bool = False
    folder: str | None = None
    """Absolute location of a savepoint's own folder; None for a checkpoint."""
    drain: bool = False
    native: bool = False
    """A savepoint in the state backend's own files."""

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
    """Bytes, full."""
    shared: tuple[FileHandle, ...] | None = ()
    """Files that it shares with other checkpoints, or may yet; None: its `_metadata` can't be read."""
    totals: Totals = {}
    """What the submission's operators had counted at its cut."""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint

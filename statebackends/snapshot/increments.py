"""What a backend that writes increments remembers: which file of its own, or which state, it stored as what, per checkpoint.

Only the base that a trigger names is ever looked up: that one is completed, whatever this process has heard of it. What is
not known here is stored again; a file is never recognised by its content."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

from holdfast.statebackends.handles import FileHandle

S = TypeVar("S")

CHECKPOINTS_MAX = 32
"""Checkpoints remembered, beside the base; one that is forgotten costs a full checkpoint if it becomes the base after all."""


class StoredByCheckpoint(Generic[S]):
    """Of one backend: what it stored for each checkpoint, by a name of its own. A restore starts with what it read.

    Any thread: flows ask and tell on the pool, notices come on the loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Mapping[str, S]] = {}
        self._base = 0

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Ids that are remembered, ascending."""
        with self._lock:
            return tuple(sorted(self._files))

    @property
    def base(self) -> int:
        """The newest base that was asked for; 0 before there was one."""
        with self._lock:
            return self._base

    def of_base(self, base: int | None) -> Mapping[str, S]:
        """Name -> what the base has of it; empty if there is none, or it isn't known here.

        Lower ids are forgotten: a later base is never older."""
        with self._lock:
            if base is None:
                return {}
            self._base = max(self._base, base)
            for checkpoint_id in [known for known in self._files if known < base]:
                del self._files[checkpoint_id]
            return self._files.get(base, {})

    def remember(self, checkpoint_id: int, files: Mapping[str, S]) -> None:
        """A checkpoint was stored here, or restored; whether it completes is for the coordinator to say."""
        with self._lock:
            self._files[checkpoint_id] = files
            known = sorted(self._files)
            for surplus in known[1 : max(1, len(known) - CHECKPOINTS_MAX)]:
                del self._files[surplus]

    def forget(self, checkpoint_id: int) -> None:
        """A checkpoint was aborted."""
        with self._lock:
            self._files.pop(checkpoint_id, None)


class StoredFiles(StoredByCheckpoint[FileHandle]):
    """Local name of a file -> the shared one. A database that is cloned by a restore gives its files new numbers."""

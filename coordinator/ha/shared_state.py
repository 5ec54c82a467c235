"""CORE: the registry of files that completed checkpoints share decides when the last reference to one is gone. Pure.

References are sets of checkpoint ids, of completed checkpoints alone: acknowledged files of an undecided checkpoint do not count. A
merged file stays while a checkpoint refers to any of its segments. After a restart the registry is rebuilt from the `_metadata` of
the retained checkpoints. Source: Flink, SharedStateRegistry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.barriers.messages import SubtaskKey
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import (
    FileHandle,
    KeyedStateHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
)
from holdfast.statebackends.layout import shared_name, shared_path, writer_of

TaskStates = Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
ResolvedStates = Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]


class UnresolvedError(Exception):
    """A checkpoint refers to a shared file that its base does not have: completing it would lose state."""


@dataclass(frozen=True, slots=True)
class Released:
    """Shared files that are deleted with a checkpoint."""

    names: tuple[str, ...]
    """Names of files that no remaining checkpoint refers to."""
    after: tuple[int, ...]
    """Other ids that are being deleted and refer to one of them: their claims are deleted before the first file."""


@dataclass(slots=True)
class _SharedFile:
    parts: dict[int | None, FileHandle] = field(default_factory=dict)
    """Handles by the offset of their segment; None: the whole file."""
    checkpoints: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    """Ids that refer to it and are being deleted: after a crash one of them may still be a checkpoint."""


class SharedStateRegistry:
    """Shared files of one job by name, each with the completed checkpoints that refer to it."""

    def __init__(self) -> None:
        self._files: dict[str, _SharedFile] = {}
        self._unreadable: set[int] = set()
        self._deleting: dict[str, int] = {}
        """Released file -> the checkpoint with which it is deleted."""

    def counts(self) -> dict[str, tuple[int, ...]]:
        """Name -> ids that refer to it; no ids for a file that only an unreadable checkpoint may refer to."""
        return {name: tuple(sorted(file.checkpoints)) for name, file in sorted(self._files.items())}

    def register(self, checkpoint_id: int, handles: Iterable[FileHandle] | None) -> None:
        """Add a completed checkpoint's files; None: its `_metadata` can't be read. The first handle of a name stays: names are
        never used twice, and a checkpoint with another handle fails when its files are checked."""
        if handles is None:
            self._unreadable.add(checkpoint_id)
            return
        for handle in handles:
            name = shared_name(handle.path)
            if name is None:
                raise InvariantError(f"checkpoint {checkpoint_id}: {handle.path} is no shared file")
            file = self._files.setdefault(name, _SharedFile())
            file.parts.setdefault(_offset_of(handle), handle)
            file.checkpoints.add(checkpoint_id)

    def release(self, checkpoint_id: int) -> Released:
        """A checkpoint is being deleted; returns the files that are deleted with it."""
        self._unreadable.discard(checkpoint_id)
        gone: list[str] = []
        after: set[int] = set()
        for name, file in self._files.items():
            if checkpoint_id in file.checkpoints:
                file.checkpoints.discard(checkpoint_id)
                file.leaving.add(checkpoint_id)
            if not file.checkpoints and not self._may_be_hidden(name):
                gone.append(name)
                after |= file.leaving
        for name in gone:
            del self._files[name]
            self._deleting[name] = checkpoint_id
        return Released(tuple(sorted(gone)), tuple(sorted(after - {checkpoint_id})))

    def forget(self, checkpoint_id: int) -> None:
        """A checkpoint and its files are deleted."""
        for file in self._files.values():
            file.leaving.discard(checkpoint_id)
        self._deleting = {name: owner for name, owner in self._deleting.items() if owner != checkpoint_id}

    def is_needed(self, name: str) -> bool:
        """Whether a completed checkpoint refers to a file, or may; one that is being deleted counts, too."""
        return name in self._files or name in self._deleting or self._may_be_hidden(name)

    def find(self, checkpoint_id: int, name: str, offset: int | None) -> FileHandle | None:
        """Handle of a file, or of its segment at an offset, in a completed checkpoint; None if that does not refer to it."""
        file = self._files.get(name)
        return None if file is None or checkpoint_id not in file.checkpoints else file.parts.get(offset)

    def resolve(self, checkpoint_id: int, base: int | None, states: TaskStates) -> ResolvedStates:
        """Acknowledged states, with the base's files in place of placeholders; the very ones of tasks that name no shared file.

        Raises UnresolvedError."""
        return {
            task: self._resolve_task(checkpoint_id, base, operators) if _names_shared(operators) else operators
            for task, operators in states.items()
        }

    def _resolve_task(
        self, checkpoint_id: int, base: int | None, operators: Mapping[str, OperatorSubtaskState]
    ) -> Mapping[str, OperatorSubtaskState]:
        return {uid: self._resolve_state(checkpoint_id, base, uid, state) for uid, state in operators.items()}

    def _resolve_state(self, checkpoint_id: int, base: int | None, uid: str, state: OperatorSubtaskState) -> OperatorSubtaskState:
        if not any(_is_shared(part) for keyed in state.keyed for part in keyed.parts):
            return state
        return msgspec.structs.replace(
            state, keyed=tuple(self._resolve_keyed(checkpoint_id, base, uid, keyed) for keyed in state.keyed)
        )

    def _resolve_keyed(self, checkpoint_id: int, base: int | None, uid: str, keyed: KeyedStateHandle) -> KeyedStateHandle:
        parts = tuple(self._resolve_part(checkpoint_id, base, uid, part) for part in keyed.parts)
        return msgspec.structs.replace(keyed, parts=parts)

    def _resolve_part(self, checkpoint_id: int, base: int | None, uid: str, part: StateHandle) -> StateHandle:
        name = _name_of(part)
        if isinstance(part, PlaceholderHandle):
            known = None if base is None or name is None else self.find(base, name, part.offset)
            if known is None:
                raise UnresolvedError(f"operator {uid!r} refers to {part.path}, which its base {base} does not have")
            if known.length != part.length:
                raise UnresolvedError(f"operator {uid!r} refers to {part.path} with {part.length} bytes; it has {known.length}")
            return known
        if name is not None and (writer_of(name) != checkpoint_id or name in self._files):
            raise UnresolvedError(f"operator {uid!r} names {name} as written for checkpoint {checkpoint_id}")
        return part

    def _may_be_hidden(self, name: str) -> bool:
        """Whether an unreadable checkpoint may refer to a file: to any that existed when it was taken."""
        writer = writer_of(name)
        return writer is None or any(writer <= unreadable for unreadable in self._unreadable)


def shared_handles(states: Iterable[OperatorSubtaskState]) -> tuple[FileHandle, ...]:
    """Files that other checkpoints refer to, too, or may later; each once."""
    found: dict[FileHandle, None] = {}
    for state in states:
        for keyed in state.keyed:
            for part in keyed.parts:
                if isinstance(part, FileHandle) and shared_name(part.path) is not None:
                    found[part] = None
    return tuple(found)


def _offset_of(handle: FileHandle) -> int | None:
    return handle.offset if isinstance(handle, SegmentHandle) else None


_SHARED = shared_path("")


def _names_shared(operators: Mapping[str, OperatorSubtaskState]) -> bool:
    """Whether the state of a task refers to a file that checkpoints share. In plain loops, as above: both look at every part of
    every checkpoint."""
    for state in operators.values():
        for keyed in state.keyed:
            for part in keyed.parts:
                if _is_shared(part):
                    return True
    return False


def _is_shared(part: StateHandle) -> bool:
    if isinstance(part, FileHandle):
        return part.path.startswith(_SHARED)
    return isinstance(part, PlaceholderHandle)


def _name_of(part: StateHandle) -> str | None:
    return shared_name(part.path) if isinstance(part, FileHandle | PlaceholderHandle) else None

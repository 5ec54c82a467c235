"""Rollback in place: a restart that restores what this process still has in memory takes it over, and reads nothing.

`KeptCheckpoints`, the CORE, decides what may be taken over. It is pure, and any doubt means storage: the deployment must restore
the very checkpoint, of an earlier attempt, and name for a state the very parts that this subtask acknowledged for it. Names of
files hold attempt and nonce and are never used twice; of what is inline the bytes are compared. So what is taken over is what would
be read: another job's snapshot or a rewritten one name other parts. At another parallelism a subtask may be given the same parts
for fewer key groups: a backend takes over what was frozen for exactly its own. Correctness needs none of it.

`StateKeeper`, the shell, lets go of what nobody needs any more: on the loop thread, its memory on the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.barriers.messages import Deployment, SubtaskKey
from holdfast.operators.task.context import Pool
from holdfast.statebackends.backend import KeptState
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import FileHandle, OperatorSubtaskState, PlaceholderHandle, SegmentHandle, StateHandle
from holdfast.statebackends.layout import is_checkpoint_folder
from holdfast.statebackends.snapshot.deltas import StatePart, state_parts
from holdfast.statebackends.storage import is_absolute_folder

UNCONFIRMED_MAX = 2
"""Checkpoints of a subtask that are kept beside the newest completed one: they may complete, or have. Of more, the oldest go."""

Parts = Mapping[str, StatePart]
"""State -> its table, and deltas."""


@dataclass(frozen=True, slots=True)
class Claim:
    """States of one operator that a deployment may take over."""

    kept: KeptState
    sizes: Mapping[str, int]
    """State -> bytes of files that are not read."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.sizes)


@dataclass(slots=True, eq=False)
class Kept:
    """State of one subtask in memory, as one checkpoint has it."""

    checkpoint_id: int
    attempt: int
    """That froze it."""
    states: dict[str, KeptState]
    """Operator -> state."""
    parts: dict[str, Parts] = field(default_factory=dict)
    """Operator -> what was acknowledged; nothing before that."""
    is_confirmed: bool = False
    """It is known to be complete."""


def own_checkpoint(deployment: Deployment) -> int | None:
    """The checkpoint in the job's own directory that a deployment restores; None: it restores nothing, or another snapshot."""
    folder = deployment.restored_folder
    is_own = bool(folder) and not is_absolute_folder(folder) and is_checkpoint_folder(folder)
    return deployment.restored_checkpoint_id if is_own else None


def is_restored(kept: Kept, checkpoint_id: int | None, attempt: int) -> bool:
    """Whether a deployment of `attempt` that restores `checkpoint_id` restores this one."""
    return kept.checkpoint_id == checkpoint_id and kept.attempt < attempt and bool(kept.parts)


def same_states(acknowledged: Parts, restored: OperatorSubtaskState) -> dict[str, int]:
    """State -> bytes, of those whose parts in a deployment are the very ones that were acknowledged."""
    try:
        wanted = state_parts(restored.keyed, operator="")
    except CorruptStateError:
        return {}
    by_name: dict[str, list[StatePart]] = {}
    for part in wanted:
        by_name.setdefault(part.meta.name, []).append(part)
    return {
        name: sum(table.length for table in found[0].tables if isinstance(table, FileHandle))
        for name, found in by_name.items()
        if len(found) == 1 and name in acknowledged and _is_same(acknowledged[name], found[0])
    }


def _is_same(ours: StatePart, wanted: StatePart) -> bool:
    if ours.meta != wanted.meta or ours.key_groups != wanted.key_groups or ours.handle.format != wanted.handle.format:
        return False
    pairs = zip(ours.tables, wanted.tables, strict=False)
    return not ours.is_native and len(ours.tables) == len(wanted.tables) and all(_is_same_table(*pair) for pair in pairs)


def _is_same_table(ours: StateHandle, wanted: StateHandle) -> bool:
    if isinstance(ours, PlaceholderHandle):  # the base has it; names of files are never used twice
        offset = wanted.offset if isinstance(wanted, SegmentHandle) else None
        return isinstance(wanted, FileHandle) and (ours.path, ours.length, ours.offset) == (wanted.path, wanted.length, offset)
    return type(ours) is type(wanted) and ours == wanted


class KeptCheckpoints:
    """What one worker process keeps of the subtasks it runs. Methods return what is to be let go."""

    def __init__(self) -> None:
        self._kept: dict[SubtaskKey, list[Kept]] = {}
        """Of each subtask, ids ascending."""

    def kept_of(self, key: SubtaskKey) -> tuple[int, ...]:
        """Ids, ascending."""
        return tuple(each.checkpoint_id for each in self._kept.get(key, ()))

    def froze(self, key: SubtaskKey, attempt: int, checkpoint_id: int, states: Mapping[str, KeptState]) -> list[Kept]:
        """At a barrier."""
        if not states:
            return []
        kept = self._kept.setdefault(key, [])
        kept.append(Kept(checkpoint_id, attempt, dict(states)))
        surplus = [each for each in kept if not each.is_confirmed][:-UNCONFIRMED_MAX]
        return self._drop(key, surplus)

    def acknowledged(self, key: SubtaskKey, checkpoint_id: int, states: Mapping[str, OperatorSubtaskState]) -> None:
        """All of it is durable."""
        for each in self._kept.get(key, ()):
            if each.checkpoint_id == checkpoint_id:
                parts = {uid: state_parts(states[uid].keyed, operator=uid) for uid in each.states if uid in states}
                each.parts = {uid: {part.meta.name: part for part in found} for uid, found in parts.items()}

    def completed(self, key: SubtaskKey, checkpoint_id: int) -> list[Kept]:
        """COMPLETED(id) is stored: no older one is ever restored."""
        for each in self._kept.get(key, ()):
            each.is_confirmed = each.is_confirmed or each.checkpoint_id == checkpoint_id
        return self._drop(key, [each for each in self._kept.get(key, ()) if each.checkpoint_id < checkpoint_id])

    def aborted(self, key: SubtaskKey, checkpoint_id: int) -> list[Kept]:
        """It will never be complete, or is not stored."""
        return self._drop(key, [each for each in self._kept.get(key, ()) if each.checkpoint_id == checkpoint_id])

    def deployed(self, deployment: Deployment) -> list[Kept]:
        """A deployment takes the place of the one before: what it does not restore is of no use."""
        checkpoint_id = own_checkpoint(deployment)
        wanted = {SubtaskKey(each.vertex, each.subtask) for each in deployment.subtasks}
        gone: list[Kept] = []
        for key in sorted(self._kept):
            stale = [
                each for each in self._kept[key] if key not in wanted or not is_restored(each, checkpoint_id, deployment.attempt)
            ]
            gone += self._drop(key, stale)
            for each in self._kept.get(key, ()):
                each.is_confirmed = True  # what is restored is complete, though the notice may have been lost
        return gone

    def claims(self, key: SubtaskKey, restored: Mapping[str, OperatorSubtaskState]) -> dict[str, Claim]:
        """Behind `deployed`: operator -> the states that this subtask takes over of what it restores."""
        found: dict[str, Claim] = {}
        for each in self._kept.get(key, ()):
            for uid, kept in each.states.items():
                sizes = same_states(each.parts.get(uid, {}), restored.get(uid, OperatorSubtaskState()))
                own = {name: size for name, size in sizes.items() if name in kept.names}
                if own:
                    found[uid] = Claim(kept, own)
        return found

    def _drop(self, key: SubtaskKey, gone: Sequence[Kept]) -> list[Kept]:
        if gone:
            left = [each for each in self._kept[key] if each not in gone]
            if left:
                self._kept[key] = left
            else:
                del self._kept[key]
        return list(gone)


class StateKeeper:
    """Keeps state for rollbacks of one worker process. Loop thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept = KeptCheckpoints()

    def deployed(self, deployment: Deployment) -> None:
        self._let_go(self._kept.deployed(deployment))

    def claims(self, key: SubtaskKey, restored: Mapping[str, OperatorSubtaskState]) -> dict[str, Claim]:
        return self._kept.claims(key, restored)

    def of(self, key: SubtaskKey, attempt: int) -> SubtaskStateKeeper:
        return SubtaskStateKeeper(self, self._kept, key, attempt)

    def _let_go(self, gone: Iterable[Kept]) -> None:
        states = [state for each in gone for state in each.states.values()]
        for state in states:
            state.release()
        if states:
            self._pool.run(lambda: _free(states), _ignore)


class SubtaskStateKeeper:
    """As one subtask in one attempt sees it."""

    def __init__(self, keeper: StateKeeper, kept: KeptCheckpoints, key: SubtaskKey, attempt: int) -> None:
        self._keeper = keeper
        self._kept = kept
        self._key = key
        self._attempt = attempt

    def froze(self, checkpoint_id: int, states: Mapping[str, KeptState]) -> None:
        self._keeper._let_go(self._kept.froze(self._key, self._attempt, checkpoint_id, states))

    def acknowledged(self, checkpoint_id: int, states: Mapping[str, OperatorSubtaskState]) -> None:
        self._kept.acknowledged(self._key, checkpoint_id, states)

    def completed(self, checkpoint_id: int) -> None:
        self._keeper._let_go(self._kept.completed(self._key, checkpoint_id))

    def aborted(self, checkpoint_id: int) -> None:
        self._keeper._let_go(self._kept.aborted(self._key, checkpoint_id))


def _free(states: Sequence[KeptState]) -> None:
    for state in states:
        state.free()


def _ignore(result: Any, error: BaseException | None) -> None:
    """Memory that was not freed bit by bit is freed at once."""

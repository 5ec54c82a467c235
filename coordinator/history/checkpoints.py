"""A flow that finds the records of one checkpoint, and of those in front of it, without reading the whole history.

Ids of checkpoints rise from file to file, but for a few that ended in another order than they began: the file is found by
bisection. What is read has a bound: a record may not be found though it is there, behind many files without any checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.history.records import HistoryEntry, RecordKind
from holdfast.coordinator.history.store import list_files, read_file_entries
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import Flow

PROBES_MAX = 100
"""Files that are read to find the one of an id."""
FILES_BEFORE_MAX, FILES_BEHIND_MAX = 60, 20
"""Files that are read in front of that one, for those to compare with; and behind it, for one that ended late, as savepoints do."""
LATE_FILES_MAX = 4
"""Files that are read behind the one of a checkpoint, for what was recorded of it later: its explanation, and when its subtasks
knew."""
EXPLAINED_WITHIN_MS = 15_000
"""An explanation is recorded so soon behind its checkpoint, or is not looked for: a leader explains one after the other."""
_KINDS = frozenset({RecordKind.CHECKPOINT, RecordKind.FAILURE, RecordKind.EXPLANATION})


def read_checkpoints(paths: JobPaths, checkpoint_id: int | None, count: int) -> Flow[tuple[HistoryEntry, ...]]:
    """Records of a checkpoint, of `count` completed ones in front of it, and of explanations and failures among them, oldest first;
    without an id of the newest ones. Raises HoldfastError as storage does."""
    files = yield from list_files(paths)
    if not files:
        return ()
    start = len(files) - 1 if checkpoint_id is None else (yield from _find_file(paths, files, checkpoint_id))
    found: list[HistoryEntry] = list((yield from read_file_entries(paths, files[start], _KINDS)))
    later: list[HistoryEntry] = []
    if checkpoint_id is not None:
        behind = list(files[start + 1 : start + 1 + FILES_BEHIND_MAX])
        while behind and checkpoint_id not in _ids(found):
            found += yield from read_file_entries(paths, behind.pop(0), _KINDS)
        if checkpoint_id not in _ids(found):
            return ()
        later = yield from _read_later(paths, found, behind[:LATE_FILES_MAX], checkpoint_id)
    for name in reversed(files[max(0, start - FILES_BEFORE_MAX) : start]):
        if _completed(found, checkpoint_id) >= count:
            break
        found[:0] = yield from read_file_entries(paths, name, _KINDS)
    return (*found, *later)


def _read_later(
    paths: JobPaths, found: Sequence[HistoryEntry], behind: Sequence[tuple[int, int]], checkpoint_id: int
) -> Flow[list[HistoryEntry]]:
    """What was recorded of a checkpoint behind the file that it is in: the next one tells when it was known."""
    later: list[HistoryEntry] = []
    ended = next(entry for entry in found if entry.kind == RecordKind.CHECKPOINT and entry.facts.get("id") == checkpoint_id)
    for name in behind:
        known = (*found, *later)
        has_next = any(number > checkpoint_id for number in _ids(known))
        if has_next and (_is_explained(known, checkpoint_id) or _is_past(known, ended)):
            break
        later += yield from read_file_entries(paths, name, _KINDS)
    return [entry for entry in later if entry.kind == RecordKind.EXPLANATION or entry.facts.get("notified")]


def _is_explained(entries: Sequence[HistoryEntry], checkpoint_id: int) -> bool:
    return any(entry.kind == RecordKind.EXPLANATION and entry.facts.get("id") == checkpoint_id for entry in entries)


def _is_past(entries: Sequence[HistoryEntry], ended: HistoryEntry) -> bool:
    """An explanation would be among them: they go on behind the time in which one is recorded, or under another leader."""
    return any(entry.epoch > ended.epoch or entry.at_ms > ended.at_ms + EXPLAINED_WITHIN_MS for entry in entries)


def _find_file(paths: JobPaths, files: Sequence[tuple[int, int]], checkpoint_id: int) -> Flow[int]:
    """Index of the last file whose oldest checkpoint is not newer than the id. Savepoints don't count: they end when they end."""
    low, high, probes = 0, len(files), 0
    while low < high and probes < PROBES_MAX:
        middle = index = (low + high) // 2
        first: int | None = None
        while first is None and index < high and probes < PROBES_MAX:
            first = min(_ids(_periodic((yield from read_file_entries(paths, files[index], _KINDS)))), default=None)
            index, probes = index + 1, probes + 1
        if first is None or first > checkpoint_id:
            high = middle
        else:
            low = index
    return max(0, low - 1)


def _periodic(entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    return [entry for entry in entries if entry.facts.get("checkpoint_kind") == CheckpointKind.CHECKPOINT.value]


def _ids(entries: Sequence[HistoryEntry]) -> set[int]:
    told = (entry.facts.get("id") for entry in entries if entry.kind == RecordKind.CHECKPOINT)
    return {each for each in told if isinstance(each, int)}


def _completed(entries: Sequence[HistoryEntry], checkpoint_id: int | None) -> int:
    facts = [entry.facts for entry in entries if entry.kind == RecordKind.CHECKPOINT and entry.facts.get("status") == "COMPLETED"]
    return sum(checkpoint_id is None or each.get("id") != checkpoint_id for each in facts)

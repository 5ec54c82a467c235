"""CORE: refuses a snapshot in which two hold the same split of a source: each would read it, and its records would be there twice.

Each subtask sees its own splits alone, so it is found here or nowhere. No file is read for it: it looks at entries that are
redistributed and at those in `_metadata`, which is all but the largest states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.barriers.exchange.split_entries import ENUMERATOR_KIND, find_split_id
from holdfast.barriers.jobgraph import JobGraph
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import InvalidSplitError
from holdfast.statebackends.handles import InlineHandle, OperatorState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata


def check_splits(metadata: SnapshotMetadata, graph: JobGraph, lists: Mapping[tuple[str, str], Sequence[Sequence[bytes]]]) -> None:
    """Raise InvalidSplitError naming source, split and both holders. `lists`: as of `assign_state`."""
    stored = {operator.uid: operator for operator in metadata.operators}
    for source, enumerator in _sources(graph):
        holders: dict[str, str] = {}
        for uid, word in ((source, "subtask {}"), (enumerator, "the enumerator")):
            if uid not in stored:
                continue
            for subtask, entry in _entries(stored[uid], lists):
                split, holder = find_split_id(entry), word.format(subtask)
                if split is None:
                    continue
                if split in holders:
                    raise _held_twice(source, split, holders[split], holder)
                holders[split] = holder


def _sources(graph: JobGraph) -> Iterator[tuple[str, str]]:
    """Uids of each source with splits, and of its enumerator."""
    for edge in graph.edges:
        head = graph.vertex(edge.source).operators[0]
        if head.kind == ENUMERATOR_KIND:
            yield graph.vertex(edge.target).operators[0].uid, head.uid


def _entries(stored: OperatorState, lists: Mapping[tuple[str, str], Sequence[Sequence[bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Entries that are at hand, with the subtask that stored them."""
    for (uid, _), subtasks in lists.items():
        if uid == stored.uid:
            yield from ((subtask, entry) for subtask, entries in enumerate(subtasks) for entry in entries)
    for subtask, state in enumerate(stored.subtasks):
        for handle in state.operator:
            if isinstance(handle.part, InlineHandle) and (stored.uid, handle.state.name) not in lists:
                yield from ((subtask, entry) for entry in _inline(handle.part))


def _inline(part: InlineHandle) -> list[bytes]:
    """None of what can't be read: the subtask that restores it says what is wrong with it."""
    try:
        return decode_msgpack(part.data, list[bytes])
    except UNDECODABLE:
        return []


def _held_twice(source: str, split: str, first: str, second: str) -> InvalidSplitError:
    where = f"in {first} and in {second}: both would read it" if first != second else f"twice in {first}"
    reason = f"the snapshot has it {where}"
    return InvalidSplitError(f"source {source}: split {split!r}: {reason}", operator=source, split=split, reason=reason)

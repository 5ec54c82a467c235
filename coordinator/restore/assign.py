"""CORE: assigns the state of a snapshot to the subtasks of a job graph. Pure; `compatibility.py` checks whether the two fit.

It opens no file: `dispatcher/storage_effects.py` reads the entries of split state that is redistributed; union and broadcast state
is assigned by whole handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.barriers.jobgraph import JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.restore.held_splits import check_splits
from holdfast.statebackends.handles import (
    NATIVE_FORMAT,
    InlineHandle,
    KeyedStateHandle,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
)
from holdfast.statebackends.redistribute import broadcast_redistribute, keyed_redistribute, split_redistribute, union_redistribute
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.state import Redistribution

ListEntries = Mapping[tuple[str, str], Sequence[Sequence[bytes]]]
"""(operator uid, state name) -> entries of each old subtask."""


def find_list_states(metadata: SnapshotMetadata, graph: JobGraph) -> list[tuple[OperatorState, str]]:
    """(operator, state name) of split states that are redistributed, since the parallelism changed."""
    found: list[tuple[OperatorState, str]] = []
    for vertex in graph.vertices:
        for operator in vertex.operators:
            state = next((entry for entry in metadata.operators if entry.uid == operator.uid), None)
            if state is None or state.parallelism == vertex.parallelism:
                continue
            found.extend((state, name) for name in stored_lists(state, operator, Redistribution.SPLIT))
    return found


def assign_state(
    metadata: SnapshotMetadata, graph: JobGraph, lists: ListEntries
) -> dict[SubtaskKey, dict[str, OperatorSubtaskState]]:
    """What each subtask of the job restores: operator uid -> state. Operators without stored state are left out.

    `lists` holds the entries of every state that `find_list_states` names. Raises InvalidSplitError where two hold one split."""
    check_splits(metadata, graph, lists)
    stored = {operator.uid: operator for operator in metadata.operators}
    assigned: dict[SubtaskKey, dict[str, OperatorSubtaskState]] = {
        SubtaskKey(vertex.vertex_id, subtask): {} for vertex in graph.vertices for subtask in range(vertex.parallelism)
    }
    for vertex in graph.vertices:
        for operator in vertex.operators:
            state = stored.get(operator.uid)
            if state is None:
                continue
            for subtask, part in enumerate(_assign_operator(state, operator, vertex, lists)):
                if part.keyed or part.operator or part.external:
                    assigned[SubtaskKey(vertex.vertex_id, subtask)][operator.uid] = part
    return assigned


def _assign_operator(
    stored: OperatorState, declared: OperatorDescription, vertex: JobVertex, lists: ListEntries
) -> list[OperatorSubtaskState]:
    names = {state.name for state in declared.states}
    keyed = [_claimed(subtask.keyed, names) for subtask in stored.subtasks]
    old = [OperatorSubtaskState(keyed=handles) for handles in keyed]
    shares = keyed_redistribute(old, vertex.max_parallelism, vertex.parallelism)
    operator = _assign_lists(stored, declared, vertex.parallelism, lists)
    same = stored.parallelism == vertex.parallelism
    union = tuple(dict.fromkeys(path for subtask in stored.subtasks for path in subtask.external))
    return [
        OperatorSubtaskState(
            keyed=tuple(share.handle for share in shares[subtask]),
            operator=operator[subtask],
            external=stored.subtasks[subtask].external if same else union,
        )
        for subtask in range(vertex.parallelism)
    ]


def _claimed(handles: Sequence[KeyedStateHandle], names: set[str]) -> tuple[KeyedStateHandle, ...]:
    """Handles without the states that the operator no longer declares; native files hold all states and stay whole."""
    kept: list[KeyedStateHandle] = []
    for handle in handles:
        if handle.format == NATIVE_FORMAT or all(state.name in names for state in handle.states):
            kept.append(handle)
            continue
        pairs = [(state, part) for state, part in zip(handle.states, handle.parts, strict=True) if state.name in names]
        if pairs:
            states, parts = zip(*pairs, strict=True)
            kept.append(msgspec.structs.replace(handle, states=states, parts=parts))
    return tuple(kept)


def _assign_lists(
    stored: OperatorState, declared: OperatorDescription, parallelism: int, lists: ListEntries
) -> list[tuple[OperatorListHandle, ...]]:
    """Handles of each new subtask, by state name. A subtask that gets several of one name has their entries, in that order."""
    split = _assign_split(stored, declared, parallelism, lists)
    union = union_redistribute(stored_lists(stored, declared, Redistribution.UNION), parallelism)
    broadcast = broadcast_redistribute(stored_lists(stored, declared, Redistribution.BROADCAST), parallelism)
    shares = [{**split[index], **union[index], **broadcast[index]} for index in range(parallelism)]
    return [tuple(handle for name in sorted(share) for handle in share[name]) for share in shares]


def _assign_split(
    stored: OperatorState, declared: OperatorDescription, parallelism: int, lists: ListEntries
) -> list[dict[str, list[OperatorListHandle]]]:
    """At equal parallelism every subtask keeps its own handles; else the entries are redistributed, inline."""
    handles = stored_lists(stored, declared, Redistribution.SPLIT)
    if stored.parallelism == parallelism:
        return [{name: subtasks[index] for name, subtasks in handles.items()} for index in range(parallelism)]
    metas = {state.name: state for state in declared.states}
    dealt = split_redistribute({name: lists[stored.uid, name] for name in handles}, parallelism)
    return [
        {
            name: [OperatorListHandle(metas[name], InlineHandle(msgspec.msgpack.encode(entries)), len(entries))]
            for name, entries in subtask.items()
        }
        for subtask in dealt
    ]


def stored_lists(
    stored: OperatorState, declared: OperatorDescription, redistribution: Redistribution
) -> dict[str, list[list[OperatorListHandle]]]:
    """State name -> handles of each old subtask, of the states that the job declares so; names are sorted.

    A state without entries may have been stored as another kind: what the job declares counts."""
    found: dict[str, list[list[OperatorListHandle]]] = {}
    for name in sorted(state.name for state in declared.states if state.kind == redistribution.kind):
        subtasks = [[handle for handle in subtask.operator if handle.state.name == name] for subtask in stored.subtasks]
        if any(subtasks):
            found[name] = subtasks
    return found

"""Snapshot + job graph -> preflight verdict, and the state of each new subtask; pure.

Everything wrong is a typed error that names the operator, before any task starts. It opens no file: entries of split
state that must be dealt out anew are read before, by `effects.py`; union and broadcast state is given by whole handles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from barriers.jobgraph import JobGraph, JobVertex, OperatorDescription
from barriers.messages import SubtaskKey
from statebackends.errors import MaxParallelismError, RestoreError, UnclaimedStateError
from statebackends.handles import (
    InlineHandle,
    KeyedStateHandle,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from statebackends.metadata import SnapshotMetadata
from statebackends.redistribute import broadcast_redistribute, keyed_redistribute, split_redistribute, union_redistribute
from statebackends.state import Redistribution
from statebackends.statecodec import check_compatible

ListEntries = Mapping[tuple[str, str], Sequence[Sequence[bytes]]]
"""(operator uid, state name) -> entries of each old subtask."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A snapshot that fits a job."""

    graph: JobGraph
    """The job's graph with the max parallelism of the snapshot adopted where the job left it open."""
    dropped: Mapping[str, int]
    """Uid -> bytes of state that no operator claims; empty unless that was allowed."""
    dropped_states: Mapping[str, tuple[str, ...]]
    """Uid -> states that the operator no longer declares; empty unless that was allowed."""


def plan_restore(metadata: SnapshotMetadata, graph: JobGraph, *, allow_non_restored_state: bool = False) -> RestorePlan:
    """Judge a snapshot against a job.

    New operators start empty. Raises a RestoreError: UnclaimedStateError, IncompatibleStateError, MaxParallelismError, or the plain
    one where a union is not whole. Each names what is wrong."""
    stored = {operator.uid: operator for operator in metadata.operators}
    declared = {operator.uid: operator for vertex in graph.vertices for operator in vertex.operators}
    dropped = {uid: state.size for uid, state in stored.items() if uid not in declared and _has_state(state)}
    if dropped and not allow_non_restored_state:
        raise _unclaimed_operators(dropped, stored, declared)
    dropped_states = {
        uid: names for uid, operator in declared.items() if uid in stored and (names := _check_states(stored[uid], operator))
    }
    if dropped_states and not allow_non_restored_state:
        raise _unclaimed_states(dropped_states, stored)
    vertices = tuple(_adopt_max_parallelism(vertex, stored, graph) for vertex in graph.vertices)
    return RestorePlan(msgspec.structs.replace(graph, vertices=vertices), dropped, dropped_states)


def _has_state(operator: OperatorState) -> bool:
    return any(subtask.keyed or any(handle.count for handle in subtask.operator) for subtask in operator.subtasks)


def _stored_states(operator: OperatorState) -> dict[str, StateMeta]:
    """Every state that some subtask stored; list states without entries count as nothing."""
    states: dict[str, StateMeta] = {}
    for subtask in operator.subtasks:
        for keyed in subtask.keyed:
            states.update((state.name, state) for state in keyed.states)
        states.update((handle.state.name, handle.state) for handle in subtask.operator if handle.count)
    return states


def _check_states(stored: OperatorState, declared: OperatorDescription) -> tuple[str, ...]:
    """Names of stored states that the operator does not declare. Raises IncompatibleStateError on one declared otherwise,
    RestoreError on a union that is not whole."""
    wanted = {state.name: state for state in declared.states}
    unclaimed = []
    for name, state in sorted(_stored_states(stored).items()):
        if name not in wanted:
            unclaimed.append(name)
            continue
        check_compatible(state, wanted[name], operator=declared.uid)
    for name, subtasks in _stored_lists(stored, declared, Redistribution.UNION).items():
        _check_union(declared.uid, name, subtasks)
    return tuple(unclaimed)


def _check_union(uid: str, name: str, subtasks: Sequence[Sequence[OperatorListHandle]]) -> None:
    """A subtask that had finished stored nothing: its entries would be missing in the union. Raises RestoreError."""
    count = sum(1 for handles in subtasks if handles)
    if count < len(subtasks):
        raise RestoreError(
            f"operator {uid!r}: union state {name!r} was stored by {count} of {len(subtasks)} subtasks; the others had finished",
            operator=uid,
            state=name,
        )


def _unclaimed_operators(
    dropped: Mapping[str, int], stored: Mapping[str, OperatorState], declared: Mapping[str, OperatorDescription]
) -> UnclaimedStateError:
    new = {uid: operator for uid, operator in declared.items() if uid not in stored}
    renames = {uid: guess for uid in sorted(dropped) if (guess := propose_rename(stored[uid], new)) is not None}
    parts = [f"{uid!r} ({size} bytes)" for uid, size in sorted(dropped.items())]
    hint = "".join(f"; was {old!r} renamed to {guess!r}?" for old, guess in renames.items())
    return UnclaimedStateError(
        f"the snapshot holds state of operators that the job lacks: {', '.join(parts)}{hint} "
        "Give the operator its old uid, or drop that state with allow_non_restored_state=True.",
        operators=dict(dropped),
        renames=renames,
    )


def propose_rename(stored: OperatorState, new: Mapping[str, OperatorDescription]) -> str | None:
    """The uid among the job's new operators that most likely is the stored one: same states first, then a similar uid."""
    names = set(_stored_states(stored))

    def likeness(uid: str) -> tuple[bool, float]:
        same_states = bool(names) and names == {state.name for state in new[uid].states}
        return same_states, difflib.SequenceMatcher(None, uid, stored.uid).ratio()

    best = max(sorted(new), key=likeness, default=None)
    if best is None:
        return None
    same_states, ratio = likeness(best)
    return best if same_states or ratio >= 0.6 else None


def _unclaimed_states(
    dropped: Mapping[str, tuple[str, ...]], stored: Mapping[str, OperatorState]
) -> UnclaimedStateError:
    parts = [f"operator {uid!r}: {', '.join(names)}" for uid, names in sorted(dropped.items())]
    return UnclaimedStateError(
        f"the snapshot holds states that the job does not declare: {'; '.join(parts)}. "
        "Declare them, or drop them with allow_non_restored_state=True.",
        operators={uid: stored[uid].size for uid in dropped},
        states={uid: list(names) for uid, names in dropped.items()},
    )


def _adopt_max_parallelism(vertex: JobVertex, stored: Mapping[str, OperatorState], graph: JobGraph) -> JobVertex:
    """The stored max parallelism is part of the state: adopted unless the job says another one, or can't run under it."""
    explicit = graph.explicit_max_parallelism or any(
        operator.properties.get("explicit_max_parallelism") for operator in vertex.operators
    )
    adopted = vertex.max_parallelism
    found = [stored[operator.uid] for operator in vertex.operators if operator.uid in stored and _has_state(stored[operator.uid])]
    for state in found:
        if state.max_parallelism != found[0].max_parallelism:
            raise _max_parallelism(state.uid, state.max_parallelism, found[0].max_parallelism, "it shares a chain with another one")
        if explicit and state.max_parallelism != vertex.max_parallelism:
            raise _max_parallelism(state.uid, state.max_parallelism, vertex.max_parallelism, "it is fixed in the snapshot")
        adopted = state.max_parallelism
    if vertex.parallelism > adopted:
        reason = f"parallelism {vertex.parallelism} is above it"
        raise _max_parallelism(vertex.operators[0].uid, adopted, vertex.parallelism, reason)
    return msgspec.structs.replace(vertex, max_parallelism=adopted)


def _max_parallelism(uid: str, stored: int, requested: int, reason: str) -> MaxParallelismError:
    return MaxParallelismError(
        f"operator {uid!r}: the snapshot has max parallelism {stored}, the job asks for {requested}: {reason}",
        operator=uid,
        stored=stored,
        requested=requested,
    )


def find_list_states(metadata: SnapshotMetadata, graph: JobGraph) -> list[tuple[OperatorState, str]]:
    """(operator, state name) of split states that must be dealt out anew because the parallelism changed."""
    found: list[tuple[OperatorState, str]] = []
    for vertex in graph.vertices:
        for operator in vertex.operators:
            state = next((entry for entry in metadata.operators if entry.uid == operator.uid), None)
            if state is None or state.parallelism == vertex.parallelism:
                continue
            found.extend((state, name) for name in _stored_lists(state, operator, Redistribution.SPLIT))
    return found


def assign_state(
    metadata: SnapshotMetadata, graph: JobGraph, lists: ListEntries
) -> dict[SubtaskKey, dict[str, OperatorSubtaskState]]:
    """What each subtask of the job restores: operator uid -> state. Operators without stored state are left out.

    `lists` holds the entries of every state that `find_list_states` names."""
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
        if handle.format == "rocksdb" or all(state.name in names for state in handle.states):
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
    union = union_redistribute(_stored_lists(stored, declared, Redistribution.UNION), parallelism)
    broadcast = broadcast_redistribute(_stored_lists(stored, declared, Redistribution.BROADCAST), parallelism)
    shares = [{**split[index], **union[index], **broadcast[index]} for index in range(parallelism)]
    return [tuple(handle for name in sorted(share) for handle in share[name]) for share in shares]


def _assign_split(
    stored: OperatorState, declared: OperatorDescription, parallelism: int, lists: ListEntries
) -> list[dict[str, list[OperatorListHandle]]]:
    """At equal parallelism every subtask keeps its own handles; else the entries are dealt out, inline."""
    handles = _stored_lists(stored, declared, Redistribution.SPLIT)
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


def _stored_lists(
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

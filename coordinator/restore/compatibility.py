"""CORE: compares a snapshot's metadata with a job's graph: which state fits, which would be dropped, which is refused. Pure; it
opens no file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE, describe_guarantee, loose_vertices
from holdfast.barriers.jobgraph import JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.sinks.log import MUTED_PROPERTY, PLACE_PROPERTY
from holdfast.coordinator.restore.assign import stored_lists
from holdfast.coordinator.restore.branches import find_left
from holdfast.coordinator.restore.in_flight import check_in_flight
from holdfast.coordinator.restore.preflight import OperatorFinding, Presence, Refusal, SchemaVerdict, SinkFinding, StateFinding
from holdfast.coordinator.restore.sink_forks import MovedSink
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import (
    BackendMismatchError,
    HoldfastError,
    IncompatibleStateError,
    MasterHookError,
    MaxParallelismError,
    RestoreError,
    UnclaimedStateError,
)
from holdfast.statebackends.handles import NATIVE_FORMAT, OperatorListHandle, OperatorState, StateMeta
from holdfast.statebackends.serialization.schema_changes import ChangeKind, Compatibility
from holdfast.statebackends.serialization.state_serializer import check_compatible, meta_text, state_changes
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, SnapshotMetadata
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.contents import states_of

NATIVE_FORMATS = {NATIVE_FORMAT: "rocksdb"}
"""Format of a keyed handle -> the only state backend that reads it; every backend reads the others."""

_FAMILIES = {"memory": "heap", "filesystem": "heap"}
"""Backends with the same working state and the same files."""

_PICKLED = re.compile(r"(?<!\w)pickled(?![\w:])")
"""Matches a pickled type in the text of a type; a field of this name is followed by a colon."""

CHANGES_SHOWN_MAX = 8
"""Changes of one state that a note lists."""


@dataclass(frozen=True, slots=True)
class CompatibilityResult:
    """Result of the comparison of a snapshot's metadata with a job."""

    graph: JobGraph
    """The job's graph with the max parallelism of the snapshot adopted where the job left it open."""
    operators: tuple[OperatorFinding, ...]
    refusals: tuple[Refusal, ...]
    dropped: Mapping[str, int]
    """Uid -> bytes of state that no operator claims."""
    dropped_states: Mapping[str, tuple[str, ...]]
    """Uid -> states that the operator no longer declares."""
    repeats: tuple[str, ...] = ()
    """What checkpoints at least once, of the job or behind the snapshot, mean for its records."""
    dropped_hooks: tuple[str, ...] = ()
    """Master hooks whose state no hook of the job claims."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on state that is dropped or rewritten, on pickled state, and on operators without a uid of their own."""
        said = [f"operator {uid!r} is not in the job: its state is dropped ({size} bytes)" for uid, size in self.dropped.items()]
        for uid, names in self.dropped_states.items():
            states = {state.name: state for found in self.operators if found.uid == uid for state in found.states}
            sizes = ", ".join(_sized(name, states[name].size) for name in names)
            said.append(f"operator {uid!r}: states {sizes} are dropped: it declares none of that name")
        for found in self.operators:
            who = f"operator {found.uid!r}"
            migrated = [state for state in found.states if state.verdict is SchemaVerdict.MIGRATION]
            for each in migrated:
                said.append(f"{who}: state {each.name!r} is rewritten from {each.stored} to {each.declared}{_changes_text(each)}")
            pickled = [state.name for state in found.states if state.pickled]
            if pickled:
                said.append(f"{who}: {', '.join(pickled)} is pickled: only the classes that wrote it can read it")
            if found.uid_generated and (found.states or found.size):
                said.append(f"{who} has no uid of its own, and its state is lost when the graph changes: set .uid()")
        said += [f"master hook {name!r} is not among the job's: its state is dropped" for name in self.dropped_hooks]
        return (*said, *self.repeats)


def check_compatibility(
    metadata: SnapshotMetadata, graph: JobGraph, *, allow_non_restored_state: bool = False
) -> CompatibilityResult:
    """Compare `_metadata` with a job's graph; reads no file.

    Refusals: UnclaimedStateError, IncompatibleStateError, BackendMismatchError, MaxParallelismError, MasterHookError,
    InFlightStateError (whatever is allowed), CorruptStateError for channels that can't have been, and RestoreError if subtasks of
    a union state had finished (docs/invariants.md, L08)."""
    stored = {operator.uid: operator for operator in metadata.operators}
    declared = {operator.uid: operator for vertex in graph.vertices for operator in vertex.operators}
    left = find_left(graph)
    dropped = {uid: state.size for uid, state in stored.items() if uid not in declared and uid not in left and has_state(state)}
    found: list[HoldfastError] = []
    if dropped and not allow_non_restored_state:
        found.append(_unclaimed_operators(dropped, stored, declared))
    findings: dict[str, tuple[StateFinding, ...]] = {}
    for uid in declared:
        if uid in stored:
            findings[uid] = _compare_states(stored[uid], declared[uid], found)
            found += _backend_mismatches(stored[uid], metadata.properties.get(NATIVE_PROPERTY), graph.config.state_backend)
    removed = {uid: tuple(s.name for s in states if s.verdict is SchemaVerdict.REMOVED) for uid, states in findings.items()}
    dropped_states = {uid: names for uid, names in removed.items() if names and uid not in left}
    if dropped_states and not allow_non_restored_state:
        found.append(_unclaimed_states(dropped_states, stored, findings))
    vertices = []
    for vertex in graph.vertices:
        try:
            vertices.append(_adopt_max_parallelism(vertex, stored, graph))
        except MaxParallelismError as error:
            found.append(error)
            vertices.append(vertex)
    adopted = msgspec.structs.replace(graph, vertices=tuple(vertices))
    found += check_in_flight(metadata.in_flight, metadata.graph, adopted, checkpoint_id=metadata.checkpoint_id)
    lost_hooks = tuple(hook.name for hook in metadata.hooks if hook.name not in graph.config.master_hooks)
    if lost_hooks and not allow_non_restored_state:
        found.append(_unclaimed_hooks(lost_hooks))
    operators = tuple(_operator_findings(stored, adopted, findings))
    refusals = tuple(Refusal.of(error) for error in found)
    return CompatibilityResult(adopted, operators, refusals, dropped, dropped_states, _repeats(metadata, adopted), lost_hooks)


def _repeats(metadata: SnapshotMetadata, graph: JobGraph) -> tuple[str, ...]:
    """Notes on records that may be processed again."""
    said = []
    try:
        stored = None if metadata.graph is None else msgspec.convert(metadata.graph, JobGraph)
    except UNDECODABLE:  # of a version with another graph
        stored = None
    if stored is not None and (loose := loose_vertices(stored)):
        names = ", ".join(stored.vertex(each).name for each in loose)
        said.append(f"the snapshot was taken at least once: behind this restore some records may repeat in {names} and behind")
    if graph.config.checkpointing_mode == AT_LEAST_ONCE:
        said.append(f"the job runs {describe_guarantee(graph)}")
    return tuple(said)


def find_sinks(graph: JobGraph, *, repeats: Collection[str], moved: Iterable[MovedSink] = ()) -> tuple[SinkFinding, ...]:
    """The sinks of a job; `repeats`: ids of those whose output may be written again, `moved`: those that write elsewhere."""
    found: dict[str, OperatorDescription] = {}
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.sink_id:
                found.setdefault(operator.sink_id, operator)
    elsewhere = {sink.sink_id: sink for sink in moved}
    return tuple(
        SinkFinding(
            sink_id,
            operator.uid,
            sink_id in repeats,
            path=operator.properties.get(PLACE_PROPERTY),
            is_moved=sink_id in elsewhere,
            stored_path=elsewhere[sink_id].stored if sink_id in elsewhere else None,
            stored_id=elsewhere[sink_id].stored_id if sink_id in elsewhere else None,
            is_muted=operator.properties.get(MUTED_PROPERTY) is True,
        )
        for sink_id, operator in sorted(found.items())
    )


def has_state(operator: OperatorState) -> bool:
    return any(subtask.keyed or any(handle.count for handle in subtask.operator) for subtask in operator.subtasks)


def _stored_states(operator: OperatorState) -> dict[str, StateMeta]:
    """Every state that some subtask stored; list states without entries count as nothing."""
    states: dict[str, StateMeta] = {}
    for subtask in operator.subtasks:
        for keyed in subtask.keyed:
            states.update((state.name, state) for state in keyed.states)
        states.update((handle.state.name, handle.state) for handle in subtask.operator if handle.count)
    return states


def _operator_findings(
    stored: Mapping[str, OperatorState], graph: JobGraph, findings: Mapping[str, tuple[StateFinding, ...]]
) -> Iterable[OperatorFinding]:
    """The job's operators in data order, then those that only the snapshot has."""
    declared = {operator.uid: operator for vertex in graph.vertices for operator in vertex.operators}
    for vertex in graph.vertices:
        for operator in vertex.operators:
            old = stored.get(operator.uid)
            added = tuple(_state_finding(None, state, SchemaVerdict.ADDED) for state in operator.states)
            yield OperatorFinding(
                operator.uid,
                Presence.ADDED if old is None else Presence.MATCHED,
                findings.get(operator.uid, added),
                size=0 if old is None else old.size,
                stored_parallelism=None if old is None else old.parallelism,
                parallelism=vertex.parallelism,
                stored_max_parallelism=None if old is None else old.max_parallelism,
                max_parallelism=vertex.max_parallelism,
                uid_generated=operator.uid_generated,
            )
    new = {uid: operator for uid, operator in declared.items() if uid not in stored}
    for uid, old in stored.items():
        if uid not in declared:
            yield OperatorFinding(
                uid,
                Presence.REMOVED,
                tuple(
                    _state_finding(state, None, SchemaVerdict.REMOVED, sizes.get(name))
                    for sizes in (_sizes(old),)
                    for name, state in sorted(_stored_states(old).items())
                ),
                size=old.size,
                stored_parallelism=old.parallelism,
                stored_max_parallelism=old.max_parallelism,
                renamed_to=propose_rename(old, new) if has_state(old) else None,
            )


def _sizes(operator: OperatorState) -> dict[str, int]:
    """Bytes of each stored state that has files of its own."""
    return {name: state.size for name, state in states_of(operator).items() if state.size >= 0}


def _sized(name: str, size: int | None) -> str:
    return name if size is None else f"{name} ({size} bytes)"


def _changes_text(state: StateFinding) -> str:
    """Changes of a rewritten state, without the widening of the value itself, which its two types show."""
    changes = [change.text for change in state.changes if change.path or change.kind is not ChangeKind.WIDENED]
    more = [f"and {len(changes) - CHANGES_SHOWN_MAX} more (a preflight lists them)"] if len(changes) > CHANGES_SHOWN_MAX else []
    return f": {'; '.join(changes[:CHANGES_SHOWN_MAX] + more)}" if changes else ""


def _state_finding(
    stored: StateMeta | None, declared: StateMeta | None, verdict: SchemaVerdict, size: int | None = None
) -> StateFinding:
    some = declared or stored
    assert some is not None
    return StateFinding(
        some.name,
        verdict,
        None if stored is None else meta_text(stored),
        None if declared is None else meta_text(declared),
        pickled=any(meta is not None and _PICKLED.search(meta.value_type) for meta in (stored, declared)),
        size=size,
        changes=() if stored is None or declared is None else tuple(state_changes(stored, declared)),
    )


def _compare_states(stored: OperatorState, declared: OperatorDescription, found: list[HoldfastError]) -> tuple[StateFinding, ...]:
    """Findings by state name. Errors are added to `found`: incompatible states, and unions whose subtasks had finished."""
    wanted = {state.name: state for state in declared.states}
    old, sizes = _stored_states(stored), _sizes(stored)
    findings = {name: _state_finding(None, state, SchemaVerdict.ADDED) for name, state in wanted.items() if name not in old}
    for name, state in sorted(old.items()):
        declaration = wanted.get(name)
        verdict = SchemaVerdict.REMOVED
        if declaration is not None:
            try:
                as_is = check_compatible(state, declaration, operator=declared.uid) is Compatibility.COMPATIBLE_AS_IS
                verdict = SchemaVerdict.AS_IS if as_is else SchemaVerdict.MIGRATION
            except IncompatibleStateError as error:
                found.append(error)
                verdict = SchemaVerdict.INCOMPATIBLE
        findings[name] = _state_finding(state, declaration, verdict, sizes.get(name))
    for name, subtasks in stored_lists(stored, declared, Redistribution.UNION).items():
        if findings[name].verdict is not SchemaVerdict.INCOMPATIBLE:
            found += _union_errors(declared.uid, name, subtasks)
    return tuple(findings[name] for name in sorted(findings))


def _union_errors(uid: str, name: str, subtasks: Sequence[Sequence[OperatorListHandle]]) -> list[HoldfastError]:
    """A subtask that had finished stored nothing: its entries would be missing in the union."""
    count = sum(1 for handles in subtasks if handles)
    if count == len(subtasks):
        return []
    message = f"operator {uid!r}: union state {name!r} was stored by {count} of {len(subtasks)} subtasks; the others had finished"
    return [RestoreError(message, operator=uid, state=name)]


def _backend_mismatches(stored: OperatorState, native: str | None, backend: str) -> list[HoldfastError]:
    """`native`: the backend that a native savepoint was taken of. `memory` and `filesystem` are one backend that stores alike."""
    formats = {handle.format for subtask in stored.subtasks for handle in subtask.keyed}
    owners = {NATIVE_FORMATS[name] for name in formats if name in NATIVE_FORMATS}
    if native is not None and formats:
        owners.add(native)
    return [
        BackendMismatchError(
            f"operator {stored.uid!r}: its state is stored in the {owner} backend's own files, and the job runs on {backend}: "
            f"set state_backend={owner!r}, or take a savepoint in the format CANONICAL, which every backend reads",
            operator=stored.uid,
            stored=owner,
            requested=backend,
        )
        for owner in sorted(owners)
        if _FAMILIES.get(owner, owner) != _FAMILIES.get(backend, backend)
    ]


def _unclaimed_hooks(names: Sequence[str]) -> MasterHookError:
    return MasterHookError(
        f"the snapshot holds state of master hooks that the job does not name: {', '.join(map(repr, names))}. "
        "Name them in master_hooks, or drop that state with allow_non_restored_state=True.",
        hooks=list(names),
    )


def _unclaimed_operators(
    dropped: Mapping[str, int], stored: Mapping[str, OperatorState], declared: Mapping[str, OperatorDescription]
) -> UnclaimedStateError:
    new = {uid: operator for uid, operator in declared.items() if uid not in stored}
    renames = {uid: guess for uid in sorted(dropped) if (guess := propose_rename(stored[uid], new)) is not None}
    parts = [f"{uid!r} ({size} bytes)" for uid, size in sorted(dropped.items())]
    hint = "".join(f"; was {old!r} renamed to {guess!r}?" for old, guess in renames.items())
    return UnclaimedStateError(
        f"the snapshot holds state of operators that the job lacks: {', '.join(parts)}{hint or '.'} "
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
    dropped: Mapping[str, tuple[str, ...]], stored: Mapping[str, OperatorState], findings: Mapping[str, tuple[StateFinding, ...]]
) -> UnclaimedStateError:
    sizes = {uid: {state.name: state.size for state in findings[uid]} for uid in dropped}
    parts = [
        f"operator {uid!r}: {', '.join(_sized(name, sizes[uid][name]) for name in names)}" for uid, names in sorted(dropped.items())
    ]
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
    found = [stored[operator.uid] for operator in vertex.operators if operator.uid in stored and has_state(stored[operator.uid])]
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

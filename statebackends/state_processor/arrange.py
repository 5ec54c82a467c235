"""Writes a canonical savepoint with operators and states removed, renamed, added, or with another max parallelism.

Unchanged state is carried over as in edit.py. Where max parallelism changes, each key is hashed again, and its row sorted into its
new key group. Operators keep their parallelism, since a restore redistributes state to any. The wanted result is an Arrangement
(arrangement.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.statebackends.handles import OperatorState, OperatorSubtaskState
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.state_processor.arrangement import Arrangement, KeptOperator, renamed
from holdfast.statebackends.state_processor.bootstrap import AnyState, NewState, Shape, grouped, new_operator
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, refuse_in_flight, states_of
from holdfast.statebackends.state_processor.edit import Batches, OperatorRewriting, finish_edited, layout_of, named_schema
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches
from holdfast.statebackends.state_processor.writing import ClaimedFolder, TableFiles, claimed_folder
from holdfast.statebackends.storage.port import Storage


def shape_of(arrangement: Arrangement, uid: str, shape: Shape) -> Shape:
    """Shape of states that are added to an operator. `shape`: that of operators which are not in the snapshot."""
    if uid not in arrangement.operators:
        return shape
    kept = arrangement.operators[uid]
    parallelism = arrangement.snapshot.operator(kept.source).parallelism
    return replace(shape, max_parallelism=kept.max_parallelism, parallelism=parallelism)


def write_arranged(
    arrangement: Arrangement,
    added: Sequence[AnyState],
    shape: Shape,
    storage: Storage,
    folder: str,
    *,
    graph: dict[str, Any] | None,
) -> StoredSnapshot:
    """Write kept and added state into a folder that is new or empty.

    `graph`: the job's graph with the operators' new uids. `shape`: that of operators which are not in the snapshot; states added to
    others have that of `shape_of`. Raises InvalidConfigError for an added state that is kept already, and as `write_savepoint` and
    `edit_snapshot` do; the folder is then as it was."""
    source = arrangement.snapshot
    refuse_in_flight(source)
    by_operator = grouped(added, {uid: list(arrangement.metas(uid).values()) for uid in arrangement.operators})
    places = {kept.source: uid for uid, kept in arrangement.operators.items()}
    with claimed_folder(storage, folder, "edit") as target, source.reader() as reader:
        writing = _Writing(arrangement, shape, target, storage, reader, TableFiles(target, reader))
        operators = [
            writing.kept(operator, places[operator.uid], by_operator.get(places[operator.uid], ()))
            for operator in source.metadata.operators
            if operator.uid in places
        ]
        operators += [writing.new(uid, own) for uid, own in sorted(by_operator.items()) if uid not in arrangement.operators]
        metadata = msgspec.structs.replace(
            source.metadata, operators=tuple(operators), external=_external(arrangement), graph=graph
        )
        edited = [*arrangement.described(), *(f"{state.uid}.{state.meta.name} added" for state in added)]
        return finish_edited(metadata, "; ".join(edited), target, storage, folder)


@dataclass(frozen=True, slots=True)
class _Writing:
    arrangement: Arrangement
    shape: Shape
    target: ClaimedFolder
    storage: Storage
    reader: PartReader
    files: TableFiles

    def new(self, uid: str, states: Sequence[AnyState]) -> OperatorState:
        shape = shape_of(self.arrangement, uid, self.shape)
        shape.check()
        return new_operator(uid, states, shape, self.target, self.storage, self.files)

    def kept(self, operator: OperatorState, uid: str, added: Sequence[AnyState]) -> OperatorState:
        """A kept operator; states added to it are in handles of their own."""
        kept = self.arrangement.operators[uid]
        moved = self._moved(operator, uid, kept) if kept.max_parallelism != operator.max_parallelism else []
        names = {stored: name for stored, name in kept.names.items() if not any(state.meta.name == name for state in moved)}
        carried = OperatorRewriting(self.reader, self.target, self.files, operator, uid, names, {}, {}).operator()
        carried = msgspec.structs.replace(carried, max_parallelism=kept.max_parallelism)
        if moved or added:
            beside = self.new(uid, [*moved, *added])
            subtasks = [_joined(*each) for each in zip(carried.subtasks, beside.subtasks, strict=True)]
            carried = msgspec.structs.replace(carried, subtasks=tuple(subtasks))
        self.reader.forget()
        return carried

    def _moved(self, operator: OperatorState, uid: str, kept: KeptOperator) -> list[NewState]:
        """Keyed states of an operator whose max parallelism changes."""
        states = states_of(operator)
        return [self._rehashed(states[stored], uid, name, kept) for name, stored in kept.states.items() if states[stored].is_keyed]

    def _rehashed(self, state: StoredState, uid: str, name: str, kept: KeptOperator) -> NewState:
        layout, meta = layout_of(self.reader, state), renamed(state.meta, name)
        schema = named_schema(layout.schema, meta)
        made = replace(layout, operator=uid, meta=meta, max_parallelism=kept.max_parallelism, schema=schema)
        return NewState(made, self._without_groups(state))

    def _without_groups(self, state: StoredState) -> Batches:
        for batch in state_batches(self.reader, state, layout_of(self.reader, state).schema):
            yield batch.drop_columns([KEY_GROUP])


def _joined(carried: OperatorSubtaskState, beside: OperatorSubtaskState) -> OperatorSubtaskState:
    keyed = tuple(handle for handle in carried.keyed if handle.states)  # a handle without states is not needed beside others
    return msgspec.structs.replace(carried, keyed=(*keyed, *beside.keyed), operator=(*carried.operator, *beside.operator))


def _external(arrangement: Arrangement) -> tuple[str, ...]:
    """External files, without those that only removed operators need."""
    kept = {operator.source for operator in arrangement.operators.values()}
    named: Mapping[bool, set[str]] = {True: set(), False: set()}
    metadata = arrangement.snapshot.metadata
    for operator in metadata.operators:
        for subtask in operator.subtasks:
            named[operator.uid in kept].update(subtask.external)
    return tuple(entry for entry in metadata.external if entry not in named[False] - named[True])

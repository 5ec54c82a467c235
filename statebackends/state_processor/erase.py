"""Erases one key from states of a snapshot: a canonical savepoint without its rows. Finds the rows of a key, too.

A snapshot in another form may hold rows of the key that its newest rows have replaced (bases of deltas, files of RocksDB): only a
canonical one without deltas has no other rows than those that can be read."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import OperatorState
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.keys import key_columns
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of
from holdfast.statebackends.state_processor.edit import CANONICAL, filter_snapshot
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.storage.port import Storage

EVERY_STATE = "*"
"""In place of a state's name: all keyed states and timers of its operator."""


def chosen_states(snapshot: StoredSnapshot, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], StoredState]:
    """The keyed states that (uid, state) pairs name, EVERY_STATE included. Raises NotFoundError, InvalidConfigError."""
    found: dict[tuple[str, str], StoredState] = {}
    for uid, name in wanted:
        if name == EVERY_STATE:
            found |= {(uid, each): state for each, state in states_of(snapshot.operator(uid)).items() if state.is_keyed}
            continue
        state = snapshot.state(uid, name)
        if not state.is_keyed:
            raise InvalidConfigError(f"operator {uid!r}: state {name!r} is not keyed", operator=uid, state=name)
        found[uid, name] = state
    return found


def is_canonical(operator: OperatorState) -> bool:
    """Whether all keyed state of an operator is in tables that hold what can be read and nothing else."""
    return all(handle.format == CANONICAL for subtask in operator.subtasks for handle in subtask.keyed)


def count_rows(snapshot: StoredSnapshot, states: Iterable[StoredState], key_text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(uid, state) -> (rows of the key, all rows), of those states whose key type can have the key. Reads every row."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    with snapshot.reader() as reader:
        for state in states:
            try:
                key = KeyOf.parse(key_text, state.key_type())
            except InvalidConfigError:
                continue
            found[state.operator.uid, state.meta.name] = _counted(reader, state, key)
            reader.forget()
    return found


def _counted(reader: PartReader, state: StoredState, key: KeyOf) -> tuple[int, int]:
    rows = total = 0
    for batch in state_batches(reader, state, state_schema(reader, state), columns=key_columns(key.key_type)):
        rows += pc.sum(key.mask(batch)).as_py() or 0
        total += batch.num_rows
    return rows, total


def erase_key(
    source: StoredSnapshot, wanted: Iterable[tuple[str, str]], key_text: str, storage: Storage, folder: str
) -> tuple[StoredSnapshot, dict[tuple[str, str], tuple[int, int]]]:
    """Write the snapshot without the rows of a key, into a folder that is new or empty; all other rows as they are.

    Returns it, and of each state (rows of the key, all rows) as they were read from the source. Raises as `filter_snapshot` and
    `chosen_states`; InvalidConfigError if the key can't be one of a state's."""
    states = chosen_states(source, wanted)
    erasures = {which: _Erasure(KeyOf.parse(key_text, state.key_type())) for which, state in states.items()}
    written = filter_snapshot(source, erasures, storage, folder)
    return written, {which: (erasure.rows, erasure.total) for which, erasure in erasures.items()}


class _Erasure:
    """The rows of one state but those of one key, counted."""

    def __init__(self, key: KeyOf) -> None:
        self._key = key
        self.rows = self.total = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        mask = self._key.mask(batch)
        found = pc.sum(mask).as_py() or 0
        self.rows += found
        self.total += batch.num_rows
        return batch.filter(pc.invert(mask)) if found else batch

"""`hf.Savepoint`: a savepoint made of DataFrames, for a job to start with history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa

from api.snapshots.frames import batches_of, is_frame
from api.snapshots.snapshot import Snapshot
from statebackends.errors import HoldfastError, InvalidConfigError, UserFunctionError
from statebackends.keyedtables import MAP_KEY, NAMESPACE, POSITION, TTL_STAMP, VALUE, key_columns
from statebackends.keys import KeyType
from statebackends.snapshots.bootstrapping import NewState, Shape, layout_of_descriptor, write_savepoint
from statebackends.snapshots.editing import Batches
from statebackends.snapshots.layout import StateLayout
from statebackends.snapshots.places import Location, place_of
from statebackends.state import ColumnarStateDescriptor, MapStateDescriptor, StateDescriptor


@dataclass(frozen=True, slots=True)
class _Given:
    uid: str
    descriptor: StateDescriptor
    frame: Any
    key: tuple[str, ...]
    key_type: KeyType | None
    renamed: dict[str, str]
    """Column of the frame -> column of the state's table; those that are there under their own names are left out."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """What a savepoint is to hold; each step gives another one, and `write` writes it."""

    _shape: Shape
    _states: tuple[_Given, ...] = ()

    @staticmethod
    def create(*, max_parallelism: int, parallelism: int = 1, job_name: str = "bootstrap") -> Savepoint:
        """A savepoint without state. `max_parallelism` must be that of the operators that take it, which adopt it if they leave it
        open; `parallelism` only says into how many files each state goes. Raises InvalidConfigError."""
        shape = Shape(job_name, max_parallelism, parallelism, int(time.time() * 1_000))
        shape.check()
        return Savepoint(shape)

    def with_state(
        self,
        uid: str,
        descriptor: StateDescriptor,
        frame: Any,
        *,
        key: str | Sequence[str] = "key",
        key_type: Any = None,
        value: str = VALUE,
        map_key: str = MAP_KEY,
        namespace: str | None = None,
        position: str | None = None,
        stamp: str | None = None,
    ) -> Savepoint:
        """Add the keyed state that a descriptor declares for the operator `uid`: a row a key (an element, an entry) of a frame.

        `key`, `value`, `map_key`, `namespace`, `position` and `stamp` name columns of the frame (Arrow, pandas, Polars, Spark);
        further columns are not looked at. `stamp`: when a value with a TTL was written, ms; without it, now. Several key columns
        are a tuple. `key_type` as in `key_by`; without it, that of the columns. Columnar state has its accumulators under the
        names that an export shows. Rows are read by `write`. Raises InvalidConfigError."""
        if not is_frame(frame):
            raise InvalidConfigError(
                f"operator {uid!r}, state {descriptor.name!r}: {type(frame).__name__} is no table or DataFrame",
                operator=uid,
                state=descriptor.name,
            )
        renamed = {}
        if not isinstance(descriptor, ColumnarStateDescriptor):
            renamed[value] = VALUE
        if isinstance(descriptor, MapStateDescriptor):
            renamed[map_key] = MAP_KEY
        for given, own in ((namespace, NAMESPACE), (position, POSITION), (stamp, TTL_STAMP)):
            if given is not None:
                renamed[given] = own
        keys = (key,) if isinstance(key, str) else tuple(key)
        declared = None if key_type is None else KeyType.of(key_type)
        if declared is not None and len(declared.fields) != len(keys):
            raise InvalidConfigError(
                f"operator {uid!r}, state {descriptor.name!r}: keys of {declared.text} from {len(keys)} columns",
                operator=uid,
                state=descriptor.name,
            )
        return replace(self, _states=(*self._states, _Given(uid, descriptor, frame, keys, declared, renamed)))

    def write(self, target: Location) -> Snapshot:
        """Write the savepoint into a new folder; gives it. A job starts from it with `restore=`.

        Raises InvalidConfigError, InvalidKeyError and StateValueError naming operator, state and row; StorageUnavailableError.
        Then the folder is as it was."""
        place = place_of(target)
        states = [_prepared(state, self._shape) for state in self._states]
        return Snapshot._of(write_savepoint(states, self._shape, place.storage, place.folder))


def filled_by(function: Callable[[Savepoint], Any], name: str, empty: Savepoint) -> Savepoint:
    """What a user's function makes of a savepoint without state. Raises InvalidConfigError, UserFunctionError."""
    try:
        filled = function(empty)
    except HoldfastError:
        raise
    except Exception as error:
        raise UserFunctionError(f"{name} raised {type(error).__name__}: {error}", operator="", function=name, record="") from error
    if not isinstance(filled, Savepoint):
        raise InvalidConfigError(
            f"{name} must return the Savepoint with its states, not {type(filled).__name__}", setting="function"
        )
    return filled


def _prepared(given: _Given, shape: Shape) -> NewState:
    """The state with its key type, which the first batch may have to tell."""
    declared = given.key_type
    expected = layout_of_descriptor(given.uid, given.descriptor, declared or _any_key(given), shape)
    batches = iter(batches_of(given.frame, _as_given(expected, given), given.uid, given.descriptor.name))
    first = next(batches, None)
    if first is None and declared is None:
        raise _unknown_key(given, "the frame is empty")
    if declared is None:
        assert first is not None
        missing = [name for name in given.key if name not in first.schema.names]
        if missing:
            raise _no_column(given, missing[0], first.schema.names)
        try:
            declared = KeyType.from_arrow([first.schema.field(name).type for name in given.key])
        except InvalidConfigError as error:
            raise _unknown_key(given, error.message) from error
    layout = layout_of_descriptor(given.uid, given.descriptor, declared, shape)
    rows = batches if first is None else chain([first], batches)
    return NewState(layout, _named(rows, given, layout))


def _any_key(given: _Given) -> KeyType:
    """Stands for a key whose type is not known yet."""
    return KeyType.parse("utf8" if len(given.key) == 1 else f"tuple<{','.join(['utf8'] * len(given.key))}>")


def _as_given(layout: StateLayout, given: _Given) -> pa.Schema:
    """The types of the frame's columns, as far as they are declared, under the frame's names."""
    back = {own: name for name, own in given.renamed.items()}
    keys = dict(zip(key_columns(layout.key_type), given.key, strict=False))
    fields = [
        pa.field(back.get(field.name, keys.get(field.name, field.name)), field.type)
        for field in layout.schema
        if field.name not in keys or given.key_type is not None
    ]
    return pa.schema(fields)


def _named(batches: Iterator[pa.RecordBatch | pa.Table], given: _Given, layout: StateLayout) -> Batches:
    """The columns of the state, under its own names."""
    wanted = dict(zip(given.key, key_columns(layout.key_type), strict=False)) | given.renamed
    if isinstance(given.descriptor, ColumnarStateDescriptor):
        own = [name for name in layout.schema.names if name not in ("key_group", *key_columns(layout.key_type), NAMESPACE)]
        wanted |= {name: name for name in own}
    for batch in batches:
        names = batch.schema.names
        missing = [name for name in wanted if names.count(name) != 1]
        if missing:
            raise _no_column(given, missing[0], names)
        yield pa.Table.from_arrays([batch.column(name) for name in wanted], names=list(wanted.values()))


def _no_column(given: _Given, name: str, names: Sequence[str]) -> InvalidConfigError:
    known = ", ".join(names)
    return InvalidConfigError(
        f"operator {given.uid!r}, state {given.descriptor.name!r}: no column {name!r} in the frame, or twice; it has: {known}",
        operator=given.uid,
        state=given.descriptor.name,
        column=name,
    )


def _unknown_key(given: _Given, reason: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"operator {given.uid!r}, state {given.descriptor.name!r}: of which type are its keys? {reason}; give key_type",
        operator=given.uid,
        state=given.descriptor.name,
    )

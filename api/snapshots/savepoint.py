"""`hf.Savepoint`: a savepoint made of DataFrames, for a job to start with history; or made of a snapshot, with operators and states
added, removed, renamed or given another number of key groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa

from holdfast.api.snapshots.frames import batches_of, is_frame, is_spark, quoted
from holdfast.api.snapshots.snapshot import Snapshot, outside_of, target_of
from holdfast.barriers.jobgraph import with_uids
from holdfast.barriers.sinks.log import COMMITTABLES
from holdfast.operators.task.timers import EVENT_TIMERS, PROCESSING_TIMERS
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StateValueError, UserFunctionError
from holdfast.statebackends.layout import MAP_KEY, NAMESPACE, POSITION, TIME, TTL_STAMP, VALUE
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.state import (
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    RowTableStateDescriptor,
    StateDescriptor,
)
from holdfast.statebackends.state_processor.arrange import shape_of, write_arranged
from holdfast.statebackends.state_processor.arrangement import Arrangement
from holdfast.statebackends.state_processor.bootstrap import (
    AnyState,
    NewEntries,
    NewState,
    Shape,
    SpreadState,
    layout_of_descriptor,
    layout_of_timers,
    write_savepoint,
)
from holdfast.statebackends.state_processor.conform import StateLayout
from holdfast.statebackends.state_processor.contents import Location
from holdfast.statebackends.state_processor.edit import Batches
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.state_processor.rows import JSON, SUBTASK


@dataclass(frozen=True, slots=True)
class _Timers:
    """Takes the place of a descriptor, which timers don't have."""

    name: str


@dataclass(frozen=True, slots=True)
class _GivenEntries:
    uid: str
    descriptor: OperatorListStateDescriptor
    entries: Any
    renamed: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    uid: str
    descriptor: StateDescriptor | _Timers
    frame: Any
    key: tuple[str, ...]
    key_type: KeyType | None
    renamed: dict[str, str]
    """Column of the state's table -> column of the frame, which may serve several; columns under their own names are omitted."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Content of a savepoint to be written; each step returns another Savepoint, and `write` writes it."""

    _shape: Shape
    _states: tuple[_Given | _GivenEntries, ...] = ()
    _base: Arrangement | None = None
    """Content taken from a snapshot."""
    _asks: bool = False
    """The max parallelism of added operators was not given."""

    @staticmethod
    def create(*, max_parallelism: int, parallelism: int = 1, job_name: str = "bootstrap") -> Savepoint:
        """A savepoint without state. `max_parallelism` must be that of the operators that restore it, which adopt it if theirs is
        not set; `parallelism` decides only into how many files each state is written. Raises InvalidConfigError."""
        shape = Shape(job_name, max_parallelism, parallelism, int(time.time() * 1_000))
        shape.check()
        return Savepoint(shape)

    @staticmethod
    def from_snapshot(snapshot: Snapshot | Location, *, max_parallelism: int | None = None, parallelism: int = 1) -> Savepoint:
        """A savepoint with the whole content of a checkpoint or savepoint, which itself is not changed.

        `max_parallelism` and `parallelism` are those of added operators; by default the first is that of the snapshot's operators,
        which then have to agree. Raises as `Snapshot` does, and InvalidConfigError."""
        stored = (snapshot if isinstance(snapshot, Snapshot) else Snapshot(snapshot))._stored
        arrangement = Arrangement.of(stored)
        groups = max_parallelism or max((each.max_parallelism for each in stored.metadata.operators), default=parallelism)
        shape = Shape(stored.metadata.job_name, groups, parallelism, int(time.time() * 1_000))
        shape.check()
        return Savepoint(shape, _base=arrangement, _asks=max_parallelism is None)

    def without_operator(self, uid: str) -> Savepoint:
        """Remove an operator with all of its state. Raises NotFoundError if it does not exist, as do the methods below.

        Output that a sink has staged and not yet committed is lost with its state."""
        base = self._snapshot_part().without_operator(uid)
        return replace(self, _base=base, _states=tuple(state for state in self._states if state.uid != uid))

    def without_state(self, uid: str, state: str) -> Savepoint:
        """Remove one state of an operator. Raises InvalidConfigError for the output that a sink has yet to commit."""
        _refuse_committables(uid, state, state)
        return replace(self, _base=self._snapshot_part().without_state(uid, state))

    def with_operator_renamed(self, uid: str, to: str) -> Savepoint:
        """Rename an operator. Raises InvalidConfigError if there is one of that uid.

        A sink's output is known by its `sink_id`, by default its uid: then give the sink the old uid as `sink_id`."""
        base = self._snapshot_part().with_operator_renamed(uid, to)
        if any(state.uid == to for state in self._states):
            raise InvalidConfigError(f"operator {uid!r} can't become {to!r}: states were added to one of that uid", operator=uid)
        states = tuple(replace(state, uid=to) if state.uid == uid else state for state in self._states)
        return replace(self, _base=base, _states=states)

    def with_state_renamed(self, uid: str, state: str, to: str) -> Savepoint:
        """Rename a state of an operator.

        Raises InvalidConfigError if there is one of that name, for timers, and for the output that a sink has yet to commit."""
        _refuse_committables(uid, state, state, to)
        if to in (EVENT_TIMERS, PROCESSING_TIMERS):
            raise InvalidConfigError(f"operator {uid!r}: {to!r} is the name of its timers", operator=uid, state=state)
        return replace(self, _base=self._snapshot_part().with_state_renamed(uid, state, to))

    def with_max_parallelism(self, max_parallelism: int, *, uid: str | None = None) -> Savepoint:
        """Set another number of key groups for the snapshot's operators, or for one: each key's rows move to its new key group.

        Raises InvalidConfigError if it is out of bounds, or less than the parallelism at which the snapshot was taken."""
        base = self._snapshot_part().with_max_parallelism(max_parallelism, uid)
        shape = self._shape if uid is not None else replace(self._shape, max_parallelism=max_parallelism)
        return replace(self, _base=base, _shape=shape, _asks=self._asks and uid is not None)

    def _snapshot_part(self) -> Arrangement:
        if self._base is None:
            raise InvalidConfigError("there is nothing yet to remove or rename: use Savepoint.from_snapshot")
        return self._base

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
        """Add the keyed state that a descriptor declares for the operator `uid`: one row of a frame for each key (element, entry).

        `key`, `value`, `map_key`, `namespace`, `position` and `stamp` name columns of the frame (Arrow, pandas, Polars, Spark);
        further columns are ignored. `stamp`: when a value with a TTL was written, ms; by default now. Several key columns are a
        tuple. `key_type` as in `key_by`; by default that of the columns. Columnar state has its accumulators, and a row table its
        order, time and columns, under the names that an export shows. `write` reads the rows. Raises InvalidConfigError."""
        _check_frame(uid, descriptor.name, frame)
        renamed = {}
        if not isinstance(descriptor, ColumnarStateDescriptor | RowTableStateDescriptor):
            renamed[VALUE] = value
        if isinstance(descriptor, MapStateDescriptor):
            renamed[MAP_KEY] = map_key
        for given, own in ((namespace, NAMESPACE), (position, POSITION), (stamp, TTL_STAMP)):
            if given is not None:
                renamed[own] = given
        return self._with_rows(uid, descriptor, frame, key, key_type, renamed)

    def with_timers(
        self,
        uid: str,
        frame: Any,
        *,
        key: str | Sequence[str] = "key",
        key_type: Any = None,
        time: str = TIME,
        namespace: str | None = None,
        processing_time: bool = False,
    ) -> Savepoint:
        """Add timers of the operator `uid`, one row for each timer: its key, and in the column `time` when it fires, in ms since
        1970.

        Event time, unless `processing_time`. A timer that is due already fires at once. `key`, `key_type` and `namespace` as in
        `with_state`. Raises InvalidConfigError."""
        timers = _Timers(PROCESSING_TIMERS if processing_time else EVENT_TIMERS)
        _check_frame(uid, timers.name, frame)
        renamed = {TIME: time} if namespace is None else {TIME: time, NAMESPACE: namespace}
        return self._with_rows(uid, timers, frame, key, key_type, renamed)

    def with_operator_state(
        self,
        uid: str,
        descriptor: OperatorListStateDescriptor,
        entries: Any,
        *,
        value: str = VALUE,
        json: str | None = None,
        subtask: str | None = None,
        position: str | None = None,
    ) -> Savepoint:
        """Add the list, union or broadcast state that a descriptor declares for the operator `uid`.

        `entries`: a sequence of bytes, as the operator encodes them, or a frame with them in the column `value`; with `json`, that
        column has JSON texts instead, which are stored as msgpack. `subtask` and `position` name columns with the subtask of each
        entry (below `parallelism`), and its order; by default entries are dealt out evenly in the order of the rows. Broadcast
        state needs one copy. Raises InvalidConfigError."""
        if not isinstance(descriptor, OperatorListStateDescriptor):
            raise InvalidConfigError(
                f"operator {uid!r}, state {descriptor.name!r}: {type(descriptor).__name__} declares keyed state: use with_state",
                operator=uid,
                state=descriptor.name,
            )
        if not is_frame(entries):
            entries = _entries_frame(uid, descriptor.name, entries)
        renamed = {VALUE: value} if json is None else {JSON: json}
        renamed |= {own: given for given, own in ((subtask, SUBTASK), (position, POSITION)) if given is not None}
        return replace(self, _states=(*self._states, _GivenEntries(uid, descriptor, entries, renamed)))

    def _with_rows(
        self,
        uid: str,
        descriptor: StateDescriptor | _Timers,
        frame: Any,
        key: str | Sequence[str],
        key_type: Any,
        renamed: dict[str, str],
    ) -> Savepoint:
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
        """Write the savepoint into a new folder and return it. A job starts from it with `restore=`.

        Raises InvalidConfigError, InvalidKeyError and StateValueError naming operator, state and row; StorageUnavailableError. On
        an error the folder is left as it was."""
        if self._base is None:
            place = target_of(target)
            return Snapshot._of(write_savepoint(self._prepared_states(), self._shape, place.storage, place.folder))
        place = outside_of(self._base.snapshot.location, target)
        self._check_added(self._base)
        graph = with_uids(self._base.snapshot.metadata.graph, self._base.renamed_operators)
        states = self._prepared_states()
        return Snapshot._of(write_arranged(self._base, states, self._shape, place.storage, place.folder, graph=graph))

    def _check_added(self, base: Arrangement) -> None:
        """Raises InvalidConfigError unless the max parallelism of added operators is known."""
        groups = {kept.max_parallelism for kept in base.operators.values()}
        added = sorted({state.uid for state in self._states} - set(base.operators))
        if added and self._asks and len(groups) != 1:
            known = f"those of the snapshot have {', '.join(map(str, sorted(groups)))}" if groups else "the snapshot has none"
            raise InvalidConfigError(
                f"operator {added[0]!r}: of which max parallelism? {known}; give max_parallelism to from_snapshot",
                operator=added[0],
                setting="max_parallelism",
            )

    def _prepared_states(self) -> list[AnyState]:
        return [
            _prepared_entries(state) if isinstance(state, _GivenEntries) else _prepared(state, self._shape_of(state.uid))
            for state in self._states
        ]

    def _shape_of(self, uid: str) -> Shape:
        return self._shape if self._base is None else shape_of(self._base, uid, self._shape)


def filled_by(function: Callable[[Savepoint], Any], name: str, empty: Savepoint) -> Savepoint:
    """Savepoint that a user's function makes of an empty one. Raises InvalidConfigError, UserFunctionError."""
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


def _refuse_committables(uid: str, state: str, *names: str) -> None:
    if COMMITTABLES in names:
        raise InvalidConfigError(
            f"operator {uid!r}: {COMMITTABLES!r} is output that a sink has staged and not yet committed; it is found by this name "
            "alone, and removed only with its operator, by without_operator",
            operator=uid,
            state=state,
        )


def _check_frame(uid: str, state: str, frame: Any) -> None:
    if not is_frame(frame):
        raise InvalidConfigError(
            f"operator {uid!r}, state {state!r}: {type(frame).__name__} is no table or DataFrame", operator=uid, state=state
        )


def _entries_frame(uid: str, state: str, entries: Any) -> pa.Table:
    if isinstance(entries, Sequence) and not isinstance(entries, bytes | str):
        wrong = next((row for row, entry in enumerate(entries) if not isinstance(entry, bytes)), None)
        if wrong is None:
            return pa.table({VALUE: pa.array(entries, pa.binary())})
        kind = type(entries[wrong]).__name__
        raise StateValueError(
            f"operator {uid!r}, state {state!r}, row {wrong}: {kind} is not bytes, as the operator encodes it",
            operator=uid,
            state=state,
            row=wrong,
        )
    raise InvalidConfigError(
        f"operator {uid!r}, state {state!r}: {type(entries).__name__} is neither a sequence of bytes nor a table or DataFrame",
        operator=uid,
        state=state,
    )


def _prepared_entries(given: _GivenEntries) -> NewEntries:
    meta = state_meta(given.descriptor, None)
    expected = pa.schema([(name, pa.binary()) for own, name in given.renamed.items() if own == VALUE])
    batches = batches_of(given.entries, expected, given.uid, given.descriptor.name)
    return NewEntries(given.uid, meta, _selected(batches, given.renamed, given))


def _layout(given: _Given, key_type: KeyType, shape: Shape) -> StateLayout:
    if isinstance(given.descriptor, _Timers):
        return layout_of_timers(given.uid, given.descriptor.name, key_type, shape)
    return layout_of_descriptor(given.uid, given.descriptor, key_type, shape)


def _prepared(given: _Given, shape: Shape) -> NewState | SpreadState:
    return _spread(given, shape) if _can_be_spread(given) else _gathered(given, shape)


def _gathered(given: _Given, shape: Shape) -> NewState:
    """The state with its key type, which may have to be taken from the first batch."""
    declared = given.key_type
    expected = _layout(given, declared or _any_key(given), shape)
    batches = iter(batches_of(given.frame, _as_given(expected, given), given.uid, given.descriptor.name))
    first = next(batches, None)
    if first is None and declared is None:
        raise _unknown_key(given, "the frame is empty")
    if declared is None:
        assert first is not None
        missing = [name for name in given.key if name not in first.schema.names]
        if missing:
            raise _no_column(given, missing[0], first.schema.names)
        declared = _key_type_of(given, first.schema)
    layout = _layout(given, declared, shape)
    rows = batches if first is None else chain([first], batches)
    return NewState(layout, _named(rows, given, layout))


def _key_type_of(given: _Given, schema: pa.Schema) -> KeyType:
    try:
        return KeyType.from_arrow([schema.field(name).type for name in given.key])
    except InvalidConfigError as error:
        raise _unknown_key(given, error.message) from error


def _can_be_spread(given: _Given) -> bool:
    """Whether Spark's tasks can write it. List elements without a position have the order of the DataFrame, which a shuffle
    loses."""
    is_list = isinstance(given.descriptor, ListStateDescriptor)
    return is_spark(given.frame) and not (is_list and POSITION not in given.renamed)


def _spread(given: _Given, shape: Shape) -> SpreadState:
    from holdfast.operators.sources.dataframe_write import arrow_schema_of
    from holdfast.operators.spark.datasource.state import spread_over_tasks

    names, declared = given.frame.columns, given.key_type
    for name in _wanted(given, _layout(given, declared or _any_key(given), shape)).values():
        if names.count(name) != 1:
            raise _no_column(given, name, names)
    if declared is None:
        keys = given.frame.select(*(given.frame[quoted(name)] for name in given.key))
        declared = _key_type_of(given, arrow_schema_of(keys))
    layout = _layout(given, declared, shape)
    wanted = _wanted(given, layout)
    frame = given.frame.select(*(given.frame[quoted(name)].alias(own) for own, name in wanted.items()))
    return SpreadState(layout, spread_over_tasks(frame))


def _any_key(given: _Given) -> KeyType:
    """Placeholder for a key type that is not known yet."""
    return KeyType.parse("utf8" if len(given.key) == 1 else f"tuple<{','.join(['utf8'] * len(given.key))}>")


def _as_given(layout: StateLayout, given: _Given) -> pa.Schema:
    """Declared types of the frame's columns, under the frame's names."""
    keys = dict(zip(key_columns(layout.key_type), given.key, strict=False))
    fields: dict[str, pa.Field] = {}
    for field in layout.schema:
        if field.name not in keys or given.key_type is not None:
            name = given.renamed.get(field.name, keys.get(field.name, field.name))
            fields.setdefault(name, pa.field(name, field.type))
    return pa.schema(list(fields.values()))


def _named(batches: Iterator[pa.RecordBatch | pa.Table], given: _Given, layout: StateLayout) -> Batches:
    """Columns of the state, under its own names."""
    return _selected(batches, _wanted(given, layout), given)


def _wanted(given: _Given, layout: StateLayout) -> dict[str, str]:
    """Column of the state's table -> column of the frame."""
    wanted = dict(zip(key_columns(layout.key_type), given.key, strict=False)) | given.renamed
    if isinstance(given.descriptor, ColumnarStateDescriptor | RowTableStateDescriptor):
        own = [name for name in layout.schema.names if name not in ("key_group", *key_columns(layout.key_type), NAMESPACE)]
        wanted |= {name: name for name in own}
    return wanted


def _selected(batches: Iterator[pa.RecordBatch | pa.Table], wanted: Mapping[str, str], given: _Given | _GivenEntries) -> Batches:
    """Only the needed columns, under the state's names."""
    for batch in batches:
        note(rows=batch.num_rows, what=f"{given.uid}.{given.descriptor.name}")
        names = batch.schema.names
        missing = [name for name in wanted.values() if names.count(name) != 1]
        if missing:
            raise _no_column(given, missing[0], names)
        yield pa.Table.from_arrays([batch.column(name) for name in wanted.values()], names=list(wanted))


def _no_column(given: _Given | _GivenEntries, name: str, names: Sequence[str]) -> InvalidConfigError:
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

"""Rows and entries from outside, checked and converted to the form of a savepoint.

Keys are hashed again, since a row with a wrong key group would never be found; values are cast only where nothing is lost, and
checked one by one. Entries of operator state are opaque: their columns and order are checked, and that copies of broadcast state
are equal; then they are distributed over the subtasks. All entries of a state are held in memory, as in a restore. How rows are
sorted and written is for writing.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError, InvalidKeyError, StateValueError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, TTL_STAMP, VALUE
from holdfast.statebackends.redistribute import split_redistribute
from holdfast.statebackends.serialization.column_types import loses_nothing
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.rows import JSON, SUBTASK
from holdfast.statebackends.state_processor.values import entry_json

_POSITION_HINT = f"; leave {POSITION!r} out to have elements in the order of the rows"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Table of one state of one operator."""

    operator: str
    meta: StateMeta
    key_type: KeyType
    max_parallelism: int
    schema: pa.Schema
    serializer: StateSerializer | None
    """None: a state with columns of its own."""
    stamp_ms: int = 0
    """Stamp, ms since the epoch, of values with a TTL that come without one."""

    def conform(self, batch: pa.RecordBatch | pa.Table, first_row: int = 0) -> pa.Table:
        """The batch with the columns of the schema, in its order and types.

        Optional columns: `key_group`, which must be right if given; `namespace` (default: empty, or 0); `position` (default: the
        order of rows); `ttl_stamp_ms` (default: `stamp_ms`). `first_row`: number of rows before, for errors. Raises
        InvalidKeyError, StateValueError, InvalidConfigError; each names operator, state and, if known, the row."""
        self._check_columns(batch)
        columns: dict[str, pa.Array] = {}
        keys = [self._whole(batch, name, first_row, InvalidKeyError) for name in key_columns(self.key_type)]
        try:
            column = self.key_type.column(keys, max_parallelism=self.max_parallelism, operator=self.operator)
            groups = column.key_groups
        except InvalidKeyError as error:
            raise InvalidKeyError(
                f"state {self.meta.name!r}: {error.message}", **{**error.fields, "state": self.meta.name}
            ) from error
        columns.update(zip(key_columns(self.key_type), column.arrays, strict=True))
        columns[KEY_GROUP] = pa.array(groups)
        self._check_groups(batch, groups, first_row)
        for field in self.schema:
            if field.name not in columns:
                columns[field.name] = self._column(batch, field, first_row)
        return pa.Table.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)

    def _check_columns(self, batch: pa.RecordBatch | pa.Table) -> None:
        names = batch.schema.names
        optional = (KEY_GROUP, NAMESPACE, POSITION, TTL_STAMP)
        missing = [name for name in self.schema.names if name not in names and name not in optional]
        unknown = [name for name in names if name not in self.schema.names or names.count(name) > 1]
        if missing or unknown:
            wrong = f"no column {missing[0]!r}" if missing else f"column {unknown[0]!r} is not its own, or there twice"
            raise InvalidConfigError(
                f"{self._who}: {wrong}; its columns are: {', '.join(self.schema.names)}",
                **self._named,
                column=(missing + unknown)[0],
            )

    def _check_groups(self, batch: pa.RecordBatch | pa.Table, groups: Any, first_row: int) -> None:
        if KEY_GROUP not in batch.schema.names:
            return
        given = self._whole(batch, KEY_GROUP, first_row, InvalidKeyError)
        if not pa.types.is_integer(given.type):
            self._refuse(InvalidKeyError, first_row, f"column {KEY_GROUP!r} is {given.type}")
        wrong = np.flatnonzero(given.to_numpy(zero_copy_only=False) != groups)
        if len(wrong):
            row = int(wrong[0])
            reason = f"{KEY_GROUP} is {given[row]}, and that of its key is {groups[row]}; leave the column out to have it computed"
            self._refuse(InvalidKeyError, first_row + row, reason)

    def _column(self, batch: pa.RecordBatch | pa.Table, field: pa.Field, first_row: int) -> pa.Array:
        if field.name not in batch.schema.names:
            if field.name == POSITION:
                return pa.array(np.arange(first_row, first_row + batch.num_rows, dtype=np.int32))
            missing = self.stamp_ms if field.name == TTL_STAMP else 0 if pa.types.is_integer(field.type) else b""
            return pa.array([missing] * batch.num_rows, field.type)
        array = _combined(batch.column(field.name))
        if not field.nullable and array.null_count:
            self._refuse(StateValueError, first_row + _first_null(array), f"column {field.name!r} is null")
        array = self._cast(array, field, first_row)
        serializer = self._type_serializer(field.name)
        if serializer is not None:
            self._check_values(array, serializer, first_row)
        return array

    def _type_serializer(self, column: str) -> TypeSerializer | None:
        if self.serializer is None:
            return None
        return self.serializer.value if column == VALUE else self.serializer.map_key if column == MAP_KEY else None

    def _cast(self, array: pa.Array, field: pa.Field, first_row: int) -> pa.Array:
        if array.type == field.type:
            return array
        if pa.types.is_dictionary(field.type):  # of a row table: the rows' values have been taken out of theirs
            return self._cast(array, field.with_type(field.type.value_type), first_row).cast(field.type)
        serializer = self._type_serializer(field.name)
        if not loses_nothing(array.type, field.type, None if serializer is None else serializer.value_type):
            wanted = serializer.text if serializer is not None and "decimal" in serializer.text else field.type
            self._refuse(StateValueError, first_row, f"column {field.name!r} is {array.type} and has to be {wanted}")
        try:
            return array.cast(field.type)
        except (pa.ArrowException, ValueError) as error:
            self._refuse(
                StateValueError,
                first_row + _first_failing(array, lambda part: part.cast(field.type)),
                f"column {field.name!r}: {error}",
            )

    def _check_values(self, array: pa.Array, serializer: TypeSerializer, first_row: int) -> None:
        try:
            values = serializer.from_arrow(array)
        except CorruptStateError as error:
            self._refuse(StateValueError, first_row + _first_failing(array, serializer.from_arrow), error.message)
        for row, value in enumerate(values):
            try:
                serializer.check(value)
            except StateValueError as error:
                self._refuse(StateValueError, first_row + row, error.message)

    def _whole(self, batch: pa.RecordBatch | pa.Table, name: str, first_row: int, kind: type[HoldfastError]) -> pa.Array:
        array = _combined(batch.column(name))
        if array.null_count:
            self._refuse(kind, first_row + _first_null(array), f"column {name!r} is null")
        return array

    def check_distinct(self, table: pa.Table) -> None:
        """Raises InvalidKeyError for two rows of one identity, of which only one would be found.

        The table must hold all rows of each of its keys."""
        twice = self.rules.repeated(table)
        if twice is not None:
            raise InvalidKeyError(
                f"{self._who}: two rows have {twice}{_POSITION_HINT if POSITION in twice else ''}",
                **self._named,
                value=repr(twice)[:200],
            )

    @property
    def rules(self) -> RowRules:
        """Rules by which readers judge the rows."""
        return RowRules(self.key_type, self.max_parallelism, self.meta, self.serializer, self.schema)

    def lists(self, table: pa.Table) -> list[bytes]:
        """The list of each row, as bytes of its key and namespace."""
        arrays = [table.column(name) for name in key_columns(self.key_type)]
        encoded = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).encoded()
        namespaces = table.column(NAMESPACE).to_pylist()
        return [b"%d:%b%b" % (len(key), key, mark) for key, mark in zip(encoded, namespaces, strict=True)]

    @property
    def _who(self) -> str:
        return f"operator {self.operator!r}, state {self.meta.name!r}"

    @property
    def _named(self) -> dict[str, Any]:
        return {"operator": self.operator, "state": self.meta.name}

    def _refuse(self, kind: type[HoldfastError], row: int, reason: str) -> NoReturn:
        raise kind.of(f"{self._who}, row {row}: {reason}", {**self._named, "row": row})


def _combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _first_null(array: pa.Array) -> int:
    return int(pc.index(array.is_null(), True).as_py())


def _first_failing(array: pa.Array, convert: Callable[[pa.Array], Any]) -> int:
    """The first row on which a conversion fails."""
    start, stop = 0, len(array)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            convert(array.slice(start, middle - start))
        except (pa.ArrowException, ValueError, CorruptStateError):
            stop = middle
        else:
            start = middle
    return start


_COLUMNS = (SUBTASK, POSITION, VALUE, JSON)
_Entry: TypeAlias = tuple[int, int, bytes]
"""Subtask (-1: not given), position (the row, where it is not given), bytes."""


class EntryLists:
    """Entries of one operator state: rows are added, and then distributed over the subtasks."""

    def __init__(
        self, operator: str, meta: StateMeta, subtasks: Sequence[int], check_json: Callable[[], None] | None = None
    ) -> None:
        """`subtasks`: those that get a share, ascending. `check_json` is called once, before the first entry that is given as JSON
        alone; it raises if the operator's entries are not the same after JSON."""
        self._operator = operator
        self._meta = meta
        self._subtasks = list(subtasks)
        self._check_json = check_json
        self._entries: list[_Entry] = []
        self._given: set[str] | None = None

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Add rows with `value` (bytes), `json` (the entry as JSON text, stored as msgpack), or both, which must agree.

        Optional columns: `subtask` (default: entries are distributed evenly) and `position` (default: the order of rows). Raises
        StateValueError and InvalidConfigError naming operator, state and row."""
        self._check_columns(batch)
        if not batch.num_rows:
            return
        first = len(self._entries)
        subtasks = self._integers(batch, SUBTASK, first) or [-1] * batch.num_rows
        positions = self._integers(batch, POSITION, first) or list(range(first, first + batch.num_rows))
        for row, subtask in enumerate(subtasks, first):
            if subtask not in self._subtasks and subtask != -1:
                self._refuse(row, f"subtask {subtask} has no share of this state; those are: {', '.join(map(str, self._subtasks))}")
        self._entries += zip(subtasks, positions, self._values(batch, first), strict=True)

    def dealt(self) -> dict[int, list[bytes]]:
        """Subtask -> its entries. Raises StateValueError for copies of broadcast state that differ, and for a repeated position."""
        entries = sorted(self._entries, key=lambda entry: entry[:2])
        for before, after in pairwise(entries):
            if before[:2] == after[:2]:
                whose = "" if before[0] == -1 else f" of subtask {before[0]}"
                raise StateValueError(
                    f"{self._who}: two rows have the {POSITION} {before[1]}{whose}, so their order is not known; leave "
                    f"{POSITION!r} out to have the order of the rows",
                    **self._named,
                )
        lists = {subtask: [entry[2] for entry in rows] for subtask, rows in groupby(entries, key=lambda entry: entry[0])}
        if self._meta.kind == Redistribution.BROADCAST.kind:
            return dict.fromkeys(self._subtasks, self._copy_of(lists))
        if -1 in lists:
            shares = split_redistribute({VALUE: [lists[-1]]}, len(self._subtasks))
            lists = {subtask: share[VALUE] for subtask, share in zip(self._subtasks, shares, strict=True)}
        return {subtask: lists.get(subtask, []) for subtask in self._subtasks}

    def _copy_of(self, lists: dict[int, list[bytes]]) -> list[bytes]:
        for subtask, entries in lists.items():
            first = next(iter(lists))
            if entries != lists[first]:
                raise StateValueError(
                    f"{self._who}: the copies of subtasks {first} and {subtask} differ, and broadcast state has equal ones; "
                    f"give one copy, without {SUBTASK!r}",
                    **self._named,
                )
        return next(iter(lists.values()), [])

    def _check_columns(self, batch: pa.RecordBatch | pa.Table) -> None:
        names = batch.schema.names
        unknown = [name for name in names if name not in _COLUMNS or names.count(name) > 1]
        if unknown or not {VALUE, JSON} & set(names):
            wrong = f"column {unknown[0]!r} is not its own, or there twice" if unknown else f"no column {VALUE!r} or {JSON!r}"
            raise InvalidConfigError(
                f"{self._who}: {wrong}; its columns are: {', '.join(_COLUMNS)}", **self._named, column=(unknown or [VALUE])[0]
            )
        given = {SUBTASK, POSITION} & set(names)
        if self._given is not None and batch.num_rows and given != self._given:
            name = min(given ^ self._given)
            raise InvalidConfigError(f"{self._who}: column {name!r} is there in some batches only", **self._named, column=name)
        self._given = given if batch.num_rows else self._given

    def _integers(self, batch: pa.RecordBatch | pa.Table, name: str, first: int) -> list[int] | None:
        if name not in batch.schema.names:
            return None
        column = batch.column(name)
        if not pa.types.is_integer(column.type):
            self._refuse(first, f"column {name!r} is {column.type} and has to be an integer")
        found: list[int | None] = column.to_pylist()
        for row, value in enumerate(found, first):
            if value is None or value < 0:
                self._refuse(row, f"column {name!r} is {'null' if value is None else value}")
        return [value for value in found if value is not None]

    def _values(self, batch: pa.RecordBatch | pa.Table, first: int) -> list[bytes]:
        names = batch.schema.names
        texts = self._texts(batch, first) if JSON in names else [None] * batch.num_rows
        if VALUE not in names:
            if self._check_json is not None:
                self._check_json()
                self._check_json = None
            return [self._entry_of(text, row) for row, text in enumerate(texts, first)]
        values = batch.column(VALUE)
        if not _is_binary(values.type):
            self._refuse(first, f"column {VALUE!r} is {values.type} and has to be binary")
        entries: list[bytes] = values.to_pylist()
        for row, (entry, text) in enumerate(zip(entries, texts, strict=True), first):
            if entry is None:
                self._refuse(row, f"column {VALUE!r} is null")
            if text is not None and not _is_json_of(entry, text):
                self._refuse(row, f"{JSON!r} is not that of {VALUE!r}: leave the one out that is not meant")
        return entries

    def _texts(self, batch: pa.RecordBatch | pa.Table, first: int) -> list[str | None]:
        column = batch.column(JSON)
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if not any(fits(column.type) for fits in kinds):
            self._refuse(first, f"column {JSON!r} is {column.type} and has to be text")
        found: list[str | None] = column.to_pylist()
        return found

    def _entry_of(self, text: str | None, row: int) -> bytes:
        if text is None:
            self._refuse(row, f"column {JSON!r} is null")
        try:
            return msgspec.msgpack.encode(msgspec.json.decode(text))
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            self._refuse(row, f"column {JSON!r}: {error}")

    @property
    def _who(self) -> str:
        return f"operator {self._operator!r}, state {self._meta.name!r}"

    @property
    def _named(self) -> dict[str, Any]:
        return {"operator": self._operator, "state": self._meta.name}

    def _refuse(self, row: int, reason: str) -> NoReturn:
        raise StateValueError(f"{self._who}, row {row}: {reason}", **self._named, row=row)


def refuse_json(operator: str, meta: StateMeta, entry: bytes) -> HoldfastError | None:
    """The error if an entry is not the same after a round trip through JSON; None if it is."""
    text = entry_json(entry)
    if text is not None and msgspec.msgpack.encode(msgspec.json.decode(text)) == entry:
        return None
    return InvalidConfigError(
        f"operator {operator!r}, state {meta.name!r}: its entries are not the same after JSON (bytes, NaN, numbers as keys, or no "
        f"msgpack at all): give {VALUE!r}",
        operator=operator,
        state=meta.name,
        column=JSON,
    )


def _is_json_of(entry: bytes, text: str) -> bool:
    own = entry_json(entry)
    try:
        return own is not None and bool(msgspec.json.decode(own) == msgspec.json.decode(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(fits(kind) for fits in tests)

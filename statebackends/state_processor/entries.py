"""Entries of one operator state that somebody else made, judged and dealt out over the subtasks of a savepoint.

Entries are opaque bytes of the operator's own. What can be checked is their form, their order, and that copies of a broadcast
state are equal. All entries of a state are held: a restore holds them, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any, NoReturn, TypeAlias

import msgspec
import pyarrow as pa

from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StateValueError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import POSITION, VALUE
from holdfast.statebackends.redistribute import split_redistribute
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.rows import JSON, SUBTASK
from holdfast.statebackends.state_processor.values import entry_json

_COLUMNS = (SUBTASK, POSITION, VALUE, JSON)
_Entry: TypeAlias = tuple[int, int, bytes]
"""Subtask (-1: not given), position (the row, where it is not given), bytes."""


class EntryLists:
    """The entries of one state; rows are added, and then dealt out."""

    def __init__(
        self, operator: str, meta: StateMeta, subtasks: Sequence[int], check_json: Callable[[], None] | None = None
    ) -> None:
        """`subtasks`: those that get a share, ascending. `check_json` is called once, before the first entry that is given as JSON
        text alone; it raises if the operator's entries don't survive that."""
        self._operator = operator
        self._meta = meta
        self._subtasks = list(subtasks)
        self._check_json = check_json
        self._entries: list[_Entry] = []
        self._given: set[str] | None = None

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Rows with `value` (bytes) or `json` (the entry as JSON text, stored as msgpack); of both, `json` must be that of `value`.

        `subtask` may be left out: entries are then dealt out evenly; `position` is their order, else it is that of the rows.
        Raises StateValueError and InvalidConfigError naming operator, state and row."""
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
        """The entries of each subtask. Raises StateValueError for copies of a broadcast state that differ, and a position twice."""
        entries = sorted(self._entries, key=lambda entry: entry[:2])
        for before, after in pairwise(entries):
            if before[:2] == after[:2]:
                whose = "" if before[0] == -1 else f" of subtask {before[0]}"
                raise StateValueError(
                    f"{self._who}: two rows have the {POSITION} {before[1]}{whose}: nobody knows which entry comes first; leave "
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
    """What is wrong with making entries like this one of JSON; None: it comes out as it is."""
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

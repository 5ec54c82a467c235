"""The columns of a row table as text, which snapshots hold, and back: `rowtable<price: int64, "plane-type": list<string>>`.

Also what a column of the user's is called in a stored table, where Holdfast's own columns stand beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pyarrow as pa

from holdfast.statebackends.layout import KEY_GROUP, NAMESPACE, ORDER, OWN_COLUMN, TIME

_PREFIX = "rowtable<"
_TOMBSTONE = "tombstone"
_OURS = re.compile(rf"{KEY_GROUP}|key|key_\d+|{NAMESPACE}|{ORDER}|{TIME}|{_TOMBSTONE}|{re.escape(OWN_COLUMN)}.*", re.DOTALL)
_NAME = re.compile(r'([^\W\d]\w*|"(?:[^"\\]|\\.)*"): ')
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=([^\]]+))?\]")
_FIXED = re.compile(r"fixed_size_binary\[(\d+)\]")
_SCALARS = {
    str(kind): kind
    for kind in (
        pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
        pa.binary_view(), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    )
}  # fmt: skip


def row_table_text(schema: pa.Schema) -> str:
    """Canonical text of the columns."""
    return f"{_PREFIX}{_members(list(schema))}>"


def fields_of_text(text: str) -> list[pa.Field] | None:
    """The columns of a text; None if it has a type that is not known here."""
    if not text.startswith(_PREFIX):
        return None
    parser = _Parser(text, len(_PREFIX))
    try:
        fields = parser.members()
    except ValueError:
        return None
    return fields if parser.at == len(text) else None


def unkept_column(schema: pa.Schema) -> pa.Field | None:
    """The first column that an operator's row table can't keep: its type has no text here, or as `unreadable_column`."""
    return next((each for each in schema if fields_of_text(row_table_text(pa.schema([each]))) is None), unreadable_column(schema))


def unreadable_column(schema: pa.Schema) -> pa.Field | None:
    """The first column of which no savepoint could be written, or no snapshot be restored."""
    return next((field for field in schema if _is_unreadable(field.type)), None)


def _is_unreadable(kind: pa.DataType) -> bool:
    """Whether it has a view, of which pyarrow takes no rows, or a struct without fields, which Parquet does not have."""
    types = pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind) or (types.is_struct(kind) and not kind.num_fields):
        return True
    return any(_is_unreadable(kind.field(index).type) for index in range(kind.num_fields))


def stored_name(name: str) -> str:
    """Of a user's column in a stored table; other names for other columns."""
    return f"{OWN_COLUMN}{name}" if _OURS.fullmatch(name) else name


def stored_fields(fields: Sequence[pa.Field]) -> list[pa.Field]:
    """The columns of a stored table behind namespace: order, time and the user's."""
    own = [pa.field(ORDER, pa.int64(), nullable=False), pa.field(TIME, pa.int64())]
    return own + [pa.field(stored_name(field.name), field.type) for field in fields]


def _members(fields: Sequence[pa.Field]) -> str:
    return ", ".join(f"{_name_text(field.name)}: {_type_text(field.type)}" for field in fields)


def _name_text(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)


def _type_text(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_struct(kind):
        return f"struct<{_members([kind.field(index) for index in range(kind.num_fields)])}>"
    if types.is_map(kind):
        return f"map<{_type_text(kind.key_type)},{_type_text(kind.item_type)}>"
    if types.is_list(kind):
        return f"list<{_type_text(kind.value_type)}>"
    if types.is_large_list(kind):
        return f"large_list<{_type_text(kind.value_type)}>"
    return str(kind)


class _Parser:
    """Raises ValueError for what it does not know."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def members(self) -> list[pa.Field]:
        fields: list[pa.Field] = []
        while not self._took(">"):
            if fields and not self._took(", "):
                raise ValueError(self.text)
            name = self._match(_NAME)[1]
            fields.append(pa.field(json.loads(name) if name.startswith('"') else name, self.kind()))
        return fields

    def kind(self) -> pa.DataType:
        if self._took("struct<"):
            return pa.struct(self.members())
        if self._took("map<"):
            key = self._closed(",")
            return pa.map_(key, self._closed(">"))
        for name, of in (("list<", pa.list_), ("large_list<", pa.large_list)):
            if self._took(name):
                return of(self._closed(">"))
        if found := _DECIMAL.match(self.text, self.at):
            self.at = found.end()
            return (pa.decimal128 if found[1] == "128" else pa.decimal256)(int(found[2]), int(found[3]))
        if found := _TIMESTAMP.match(self.text, self.at):
            self.at = found.end()
            return pa.timestamp(found[1], found[2])
        if found := _FIXED.match(self.text, self.at):
            self.at = found.end()
            return pa.binary(int(found[1]))
        name = max((each for each in _SCALARS if self.text.startswith(each, self.at)), key=len, default="")
        if not self._took(name) or not name:
            raise ValueError(self.text)
        return _SCALARS[name]

    def _closed(self, by: str) -> pa.DataType:
        kind = self.kind()
        if not self._took(by):
            raise ValueError(self.text)
        return kind

    def _took(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(self.text)
        self.at = found.end()
        return found

"""Shapes of records: msgspec.Struct, dataclass, NamedTuple and TypedDict values, as Arrow structs by field name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.serialization.mapkeys import Form
from holdfast.statebackends.serialization.shapes import OptionalShape, Shape, refused, scatter

MISSING: Any = object()
"""The value of a TypedDict key that isn't there."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    attribute: str
    name: str
    """As encoded, and as the Arrow struct names it."""
    shape: Shape
    default: Callable[[], Any] | None
    """Makes the value of a record that was written without the field; None: the field is required."""

    @property
    def text(self) -> str:
        name = self.name if self.name.isidentifier() else json.dumps(self.name)
        return f"{name}: {self.shape.text}" + (" = default" if self.default is not None else "")


class RecordShape(Shape):
    """A record. `struct<...>` is encoded as a map by name, `namedtuple<...>` as an array by position."""

    def __init__(
        self,
        kind: str,
        record_class: Any,
        fields: tuple[RecordField, ...],
        *,
        is_dict: bool = False,
        positional: bool = False,
    ) -> None:
        self.kind, self.fields = kind, fields
        self.text = f"{kind}<{', '.join(field.text for field in fields)}>"
        self.arrow_type = pa.struct([(field.name, field.shape.arrow_type) for field in fields])
        self.children = tuple(field.shape for field in fields)
        self._class, self._is_dict, self._positional = record_class, is_dict, positional

    def read(self, value: Any, field: RecordField) -> Any:
        """A field of a record, or MISSING. Raises StateValueError for a key that has to be there."""
        if not self._is_dict:
            return getattr(value, field.attribute)
        member = value.get(field.attribute, MISSING)
        if member is MISSING and field.default is None:
            raise refused(value, self.text, f"{field.attribute!r} is missing")
        return member

    def check_class(self, value: Any) -> None:
        """Raises StateValueError for what is no record of this kind, whatever its fields are."""
        if not isinstance(value, self._class):
            raise refused(value, self.text)
        if self._is_dict and not value.keys() <= {field.attribute for field in self.fields}:
            raise refused(value, self.text, "unknown keys")

    def check(self, value: Any) -> None:
        self.check_class(value)
        for field in self.fields:
            member = self.read(value, field)
            if member is not MISSING:
                field.shape.check(member)

    def key_form(self) -> Form | None:
        forms = [field.shape.key_form() for field in self.fields]
        if not any(forms):
            return None

        def form(value: Any) -> Any:
            given = zip(self.fields, [self.read(value, field) for field in self.fields], forms, strict=True)
            found = [
                (field.name, member if each is None else each(member))
                for field, member, each in given
                if member is not MISSING  # of a dict that was made without it
            ]
            return [member for _, member in found] if self.kind == "namedtuple" else dict(found)

        return form

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        for value in values:
            self.check_class(value)
        arrays = [self._column(field, [self.read(value, field) for value in values]) for field in self.fields]
        return pa.StructArray.from_arrays(arrays, fields=list(self.arrow_type))

    def _column(self, field: RecordField, members: list[Any]) -> pa.Array:
        if not self._is_dict or field.default is None:
            return field.shape.to_arrow(members)
        present = [member for member in members if member is not MISSING]
        return scatter(field.shape.to_arrow(present), [member is not MISSING for member in members])

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        columns = [self._members(field, array) for field in self.fields]
        if self._positional:
            return [self._class(*members) for members in zip(*columns, strict=True)]
        names = [field.attribute for field in self.fields]
        rows = (zip(names, members, strict=True) for members in zip(*columns, strict=True))
        if self._is_dict:
            return [{name: member for name, member in row if member is not MISSING} for row in rows]
        return [self._class(**dict(row)) for row in rows]

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        for index, field in enumerate(self.fields):
            column = array.field(index)
            if column.null_count and field.default is not None and not isinstance(field.shape, OptionalShape):
                column = column.drop_null()  # the field is absent
            field.shape.check_column(column)

    def _members(self, field: RecordField, array: pa.Array) -> list[Any]:
        index = array.type.get_field_index(field.name)
        if index >= 0:
            column = array.field(index)
            if column.null_count and field.default is not None and not isinstance(field.shape, OptionalShape):
                present = iter(field.shape.from_arrow(column.drop_null()))
                return [next(present) if valid else field.default() for valid in column.is_valid().to_pylist()]
            return field.shape.from_arrow(column)
        if field.default is not None:
            return [field.default() for _ in range(len(array))]
        if isinstance(field.shape, OptionalShape):
            return [None] * len(array)
        raise CorruptStateError(f"no column {field.name!r} for {self.text}", reason="missing column")

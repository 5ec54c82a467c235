"""Serializers of keyed states: of a declared state, or of a stored one from its StateMeta alone, without the user's classes.

It also makes the StateMeta of a declared state, and decides whether a stored one fits it; the rules for types are in evolution.py.
A serializer made from a StateMeta leaves pickled values as bytes, so that tools run no user code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.columnar.accumulators import check_descriptor, value_type_text
from holdfast.statebackends.errors import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidConfigError,
    InvariantError,
    StateValueError,
)
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import TTL_STAMP, VALUE
from holdfast.statebackends.row_tables.table import check_row_table
from holdfast.statebackends.row_tables.type_text import row_table_text
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.schema_changes import ChangeKind, Compatibility, SchemaChange, worst_verdict
from holdfast.statebackends.serialization.type_serializer import (
    Copier,
    TypeSerializer,
    copier_of,
    map_text,
    migrate,
    split_map_text,
    type_changes,
)
from holdfast.statebackends.serialization.value_checks import Checks, checks_of
from holdfast.statebackends.serialization.value_types import Form, OpaqueType
from holdfast.statebackends.state import (
    DESCRIPTORS,
    ColumnarStateDescriptor,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    RowTableStateDescriptor,
    StateDescriptor,
    Ttl,
    split_ttl_text,
    ttl_text,
)

TIMERS_KIND = "timers"
ROW_TABLE_KIND = "row_table"
COLUMNAR_KIND = "columnar"
TIMERS_VALUE_TYPE = "int"
"""Value type of timers, whose rows hold a time, int64 ms."""
CODED_KINDS = ("value", "list", "map", "reducing", "aggregating")
"""Kinds of state whose values have one declared type, and may have a TTL; other kinds have columns of their own."""

OPAQUE_ENTRIES = "bytes"
"""Value type of operator state whose entries the operator encodes itself."""

_ROW_LIST = msgspec.msgpack.Decoder(list[bytes])
_STAMP = struct.Struct(">q")
"""Stamp before the encoding of a value of a state with a TTL."""


def can_change_in_place(descriptor: StateDescriptor) -> bool:
    """Whether a value, list element or map value that the state gives may be changed. Raises InvalidConfigError."""
    if isinstance(descriptor, ColumnarStateDescriptor | RowTableStateDescriptor | OperatorListStateDescriptor):
        return False
    return copier_of(TypeSerializer.of(descriptor.type)) is not None


@dataclass(frozen=True, slots=True)
class StateSerializer:
    """Serializer of one value, list, map, reducing or aggregating state."""

    meta: StateMeta
    value: TypeSerializer
    """Of a value, list element, map value or accumulator."""
    map_key: TypeSerializer | None
    """Of a map's keys; None for other kinds."""
    copy: Copier | None
    """Copies one value, list element or map value; None if they can't be changed in place."""
    key_form: Form | None = None
    """Of a map's keys: see ValueType.key_form."""

    @staticmethod
    def of(descriptor: StateDescriptor, key_type: KeyType) -> StateSerializer:
        """Serializer of a declared state. Raises InvalidConfigError for a state with columns of its own, or an invalid type."""
        if isinstance(descriptor, ColumnarStateDescriptor | RowTableStateDescriptor | OperatorListStateDescriptor):
            raise InvalidConfigError(f"{descriptor.kind} state has no rows per key", state=descriptor.name)
        value = TypeSerializer.of(descriptor.type)
        map_key = TypeSerializer.of(descriptor.key_type) if isinstance(descriptor, MapStateDescriptor) else None
        if not isinstance(descriptor.ttl, Ttl | None):
            raise InvalidConfigError(f"state {descriptor.name!r}: ttl is {descriptor.ttl!r}, not a Ttl", state=descriptor.name)
        text = value.text if descriptor.ttl is None else ttl_text(value.text)
        if map_key is not None:
            text = map_text(map_key.text, text)
        meta = StateMeta(descriptor.name, descriptor.kind, text, key_type.text)
        copy = copier_of(value)
        form = None if map_key is None else _key_form(map_key, descriptor.name)
        if descriptor.ttl is None:
            return StateSerializer(meta, value, map_key, copy, form)
        return TtlSerializer(meta, value, map_key, None if copy is None else lambda stamped: (stamped[0], copy(stamped[1])), form)

    @property
    def checks(self) -> Checks:
        """Checks of values for the state object, before it accepts them."""
        return checks_of(self.name, self.kind, self.value.value_type, None if self.map_key is None else self.map_key.value_type)

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def kind(self) -> str:
        return self.meta.kind

    @property
    def value_fields(self) -> list[pa.Field]:
        """Columns of values, list elements or map values in a table."""
        return [pa.field(VALUE, self.value.arrow_type)]

    def to_arrays(self, values: Sequence[Any]) -> list[pa.Array]:
        """Arrays of `value_fields` for values, list elements or map values. Raises StateValueError."""
        return [self.value.to_arrow(values)]

    def from_columns(self, batch: pa.RecordBatch) -> list[Any]:
        """Inverse of `to_arrays`; the columns may be of an older, compatible type. Raises CorruptStateError."""
        return self.value.from_arrow(batch.column(VALUE))

    def decode_value(self, encoded: bytes) -> Any:
        """One value, list element or map value. Raises CorruptStateError."""
        return self.value.decode(encoded)

    def decode_values(self, encoded: Sequence[bytes]) -> list[Any]:
        """`decode_value` of each."""
        return self.value.decode_all(encoded)

    def encode(self, value: Any) -> bytes:
        """Bytes of one key's value or list, or of one map entry's value. Raises StateValueError."""
        if self.kind == "list":
            return msgspec.msgpack.encode([self.value.encode(element) for element in value])
        return self.value.encode(value)

    def encode_all(self, values: Sequence[Any]) -> list[bytes]:
        """`encode` of each value."""
        return [self.encode(value) for value in values] if self.kind == "list" else self.value.encode_all(values)

    def decode(self, encoded: bytes) -> Any:
        """Inverse of `encode`. Raises CorruptStateError."""
        if self.kind != "list":
            return self.value.decode(encoded)
        return [self.value.decode(element) for element in _elements(self, encoded)]

    def encode_entry(self, map_key: Any) -> bytes:
        """Bytes of a map's key, equal for equal keys. Raises StateValueError."""
        if self.map_key is None:
            raise InvariantError(f"state {self.name!r} is no map state")
        return self.map_key.encode(map_key) if self.key_form is None else self.map_key.encode_as(map_key, self.key_form)

    def decode_entry(self, encoded: bytes) -> Any:
        """Inverse of `encode_entry`. Raises CorruptStateError."""
        if self.map_key is None:
            raise InvariantError(f"state {self.name!r} is no map state")
        return self.map_key.decode(encoded)


class TtlSerializer(StateSerializer):
    """Serializer of a state with a TTL, whose tables hold and store (stamp in ms, value) instead of values."""

    __slots__ = ()

    @property
    def value_fields(self) -> list[pa.Field]:
        return [pa.field(VALUE, self.value.arrow_type), pa.field(TTL_STAMP, pa.int64(), nullable=False)]

    def to_arrays(self, values: Sequence[Any]) -> list[pa.Array]:
        return [self.value.to_arrow([value for _, value in values]), pa.array([stamp_ms for stamp_ms, _ in values], pa.int64())]

    def from_columns(self, batch: pa.RecordBatch) -> list[Any]:
        stamps = batch.column(TTL_STAMP)
        if stamps.null_count or not pa.types.is_integer(stamps.type):
            raise CorruptStateError(f"column {TTL_STAMP!r} holds nulls or is not an integer", reason="column type")
        return list(zip(stamps.cast(pa.int64()).to_pylist(), super().from_columns(batch), strict=True))

    def decode_values(self, encoded: Sequence[bytes]) -> list[Any]:
        return [self.decode_value(each) for each in encoded]

    def decode_value(self, encoded: bytes) -> Any:
        return self.stamp_of(encoded), self.value.decode(encoded[_STAMP.size :])

    def encode(self, value: Any) -> bytes:
        if self.kind == "list":
            return msgspec.msgpack.encode([self._encode_value(element) for element in value])
        return self._encode_value(value)

    def encode_all(self, values: Sequence[Any]) -> list[bytes]:
        return [self.encode(value) for value in values]

    def _encode_value(self, stamped: tuple[int, Any]) -> bytes:
        return _STAMP.pack(stamped[0]) + self.value.encode(stamped[1])

    def decode(self, encoded: bytes) -> Any:
        if self.kind == "list":
            return [self.decode_value(element) for element in _elements(self, encoded)]
        return self.decode_value(encoded)

    def newest_stamp(self, encoded: bytes) -> int:
        """Newest stamp, ms, in the bytes of one key's value or list, or of one map entry. Raises CorruptStateError."""
        if self.kind == "list":
            return max(map(self.stamp_of, _elements(self, encoded)), default=-(2**63))
        return self.stamp_of(encoded)

    def stamp_of(self, encoded: bytes) -> int:
        if len(encoded) < _STAMP.size:
            raise CorruptStateError(f"state {self.name!r}: {encoded!r} has no stamp", reason="value encoding")
        stamp_ms: int = _STAMP.unpack_from(encoded)[0]
        return stamp_ms


def _key_form(map_key: TypeSerializer, name: str) -> Form | None:
    try:
        return map_key.value_type.key_form()
    except InvalidConfigError as error:
        raise InvalidConfigError(f"state {name!r}: {error.message}", state=name) from error


def _elements(serializer: StateSerializer, encoded: bytes) -> list[bytes]:
    try:
        return _ROW_LIST.decode(encoded)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"state {serializer.name!r}: not a list: {error}", reason="value encoding") from error


def migrate_rows(stored: StateMeta, serializer: StateSerializer, encoded: Sequence[bytes], now_ms: int) -> list[bytes]:
    """Rewrite encoded values (map entries, for map state) of a stored state for a declared one that it fits.

    Values without a stamp get `now_ms`, as if written at the restore, where the declared state has a TTL.
    Raises CorruptStateError, StateValueError."""
    if stored.value_type == serializer.meta.value_type:
        return list(encoded)
    _, value_text, had_stamps = value_texts(stored)
    has_stamps = isinstance(serializer, TtlSerializer)
    rows = [_elements(serializer, row) for row in encoded] if serializer.kind == "list" else [[row] for row in encoded]
    values = [value for row in rows for value in row]
    stamps = [_STAMP.pack(now_ms)] * len(values)
    if had_stamps:
        for value in values:
            if len(value) < _STAMP.size:
                raise CorruptStateError(f"state {serializer.name!r}: {value!r} has no stamp", reason="value encoding")
        stamps = [value[: _STAMP.size] for value in values]
        values = [value[_STAMP.size :] for value in values]
    values = migrate(value_text, serializer.value, values)
    if has_stamps:
        values = [stamp + value for stamp, value in zip(stamps, values, strict=True)]
    if serializer.kind != "list":
        return values
    left = iter(values)
    return [msgspec.msgpack.encode([next(left) for _ in row]) for row in rows]


def value_texts(meta: StateMeta) -> tuple[str, str, bool]:
    """(type text of a map's keys or "", type text of the values, whether they carry stamps). Raises InvalidConfigError."""
    key, text = split_map_text(meta.value_type) if meta.kind == "map" else ("", meta.value_type)
    return key, *split_ttl_text(text)


def has_stamps(meta: StateMeta) -> bool:
    """Whether the values of a stored state carry TTL stamps."""
    return meta.kind in CODED_KINDS and value_texts(meta)[2]


def state_meta(descriptor: StateDescriptor, key_type: KeyType | None) -> StateMeta:
    """StateMeta of a declared state. Raises InvalidConfigError if its type or name can't be stored, which would fail every
    checkpoint."""
    if not isinstance(descriptor, DESCRIPTORS):
        raise InvalidConfigError(f"{descriptor!r} declares no state: use a descriptor, such as ValueStateDescriptor")
    name = descriptor.name
    if not isinstance(name, str) or not name or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidConfigError(f"the name of a state is {name!r}: it must be text, and not empty", state=str(name))
    if isinstance(descriptor, OperatorListStateDescriptor):
        text = OPAQUE_ENTRIES if descriptor.type is None else TypeSerializer.of(descriptor.type).text
        return StateMeta(descriptor.name, descriptor.kind, text)
    if key_type is None:
        raise InvalidConfigError(f"keyed state {descriptor.name!r} is declared on an operator without a key", state=descriptor.name)
    if isinstance(descriptor, ColumnarStateDescriptor):
        check_descriptor(descriptor, key_columns(key_type))
        return StateMeta(descriptor.name, descriptor.kind, value_type_text(descriptor), key_type.text)
    if isinstance(descriptor, RowTableStateDescriptor):
        check_row_table(descriptor)
        return StateMeta(descriptor.name, descriptor.kind, row_table_text(descriptor.schema), key_type.text)
    return StateSerializer.of(descriptor, key_type).meta


def state_metas(descriptors: Sequence[StateDescriptor], key_type: KeyType | None) -> tuple[StateMeta, ...]:
    """StateMeta of each state that an operator declares. Raises InvalidConfigError for an invalid or repeated name, or a type."""
    metas = tuple(state_meta(descriptor, key_type) for descriptor in descriptors)
    names = [meta.name for meta in metas]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfigError(f"state {name!r} is declared more than once", state=name)
    return metas


def check_compatible(stored: StateMeta, declared: StateMeta, *, operator: str) -> Compatibility:
    """Verdict on a stored state: rows are read as they are, or rewritten. Raises IncompatibleStateError for other states."""
    changes = state_changes(stored, declared)
    verdict = worst_verdict(changes)
    if verdict is Compatibility.INCOMPATIBLE:
        refusing = [change.text for change in changes if change.verdict is verdict and change.path]
        raise _incompatible(stored, declared, operator, f": {'; '.join(refusing)}" if refusing else "")
    return verdict


def state_changes(stored: StateMeta, declared: StateMeta) -> list[SchemaChange]:
    """Differences between a stored state and the declared one of its name."""
    if stored == declared:
        return []
    retyped = [SchemaChange("", ChangeKind.RETYPED, meta_text(stored), meta_text(declared))]
    if (stored.kind, stored.key_type) != (declared.kind, declared.key_type) or declared.kind not in CODED_KINDS:
        return retyped
    try:
        (old_key, old, had_stamps), (key, value, stamps) = value_texts(stored), value_texts(declared)
    except InvalidConfigError:
        return retyped
    if old_key != key:
        return retyped
    changes = type_changes(old, TypeSerializer.parse(value))
    if had_stamps != stamps:
        changes.append(SchemaChange("", ChangeKind.TTL_ADDED if stamps else ChangeKind.TTL_REMOVED))
    return changes


def not_widened(stored: StateMeta, declared: StateMeta, error: StateValueError, *, operator: str) -> IncompatibleStateError:
    """The error for a value that can't be rewritten though its type can (an int without an equal float): the types don't fit."""
    return _incompatible(stored, declared, operator, f": {error.message}")


def _incompatible(stored: StateMeta, declared: StateMeta, operator: str, reason: str = "") -> IncompatibleStateError:
    return IncompatibleStateError(
        f"operator {operator!r}: state {stored.name!r} was stored as {meta_text(stored)} "
        f"and is declared as {meta_text(declared)}{reason}",
        operator=operator,
        state=stored.name,
        stored=meta_text(stored),
        declared=meta_text(declared),
    )


def meta_text(meta: StateMeta) -> str:
    """A stored or declared state in words, for messages."""
    key = f" by {meta.key_type}" if meta.key_type is not None else ""
    return f"{meta.kind} of {meta.value_type}{key}"


PICKLED = "pickled"

_OPAQUE = TypeSerializer(PICKLED, OpaqueType(PICKLED, bytes, bytes), bytes, bytes)


def stored_type(text: str) -> TypeSerializer:
    """Serializer of a stored type's text, with `pickled` as plain bytes. Raises InvalidConfigError."""
    return _OPAQUE if text == PICKLED else TypeSerializer.parse(text)


def serializer_of_meta(meta: StateMeta) -> StateSerializer | None:
    """Serializer of a stored keyed state; None for kinds with columns of their own. Raises InvalidConfigError."""
    if meta.kind not in CODED_KINDS:
        return None
    key_text, value_text, stamped = value_texts(meta)
    map_key = stored_type(key_text) if meta.kind == "map" else None
    form = None if map_key is None else _form_of(map_key)
    return (TtlSerializer if stamped else StateSerializer)(meta, stored_type(value_text), map_key, None, form)


def _form_of(map_key: TypeSerializer) -> Form | None:
    try:
        return map_key.value_type.key_form()
    except InvalidConfigError:
        return None  # no job can declare such a map any more: keys are identified by their bytes

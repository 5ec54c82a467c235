"""What a declared keyed state is made of: its stored description, its codecs, and how its values are copied.

It decides whether stored state fits a declaration; the rules for types are in evolution.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from statebackends.accumulators import check_descriptor, value_type_text
from statebackends.errors import CorruptStateError, IncompatibleStateError, InvalidConfigError, InvariantError
from statebackends.handles import StateMeta
from statebackends.keys import KeyType
from statebackends.serializers import Compatibility, TypeSpec, compatibility, map_text, split_map_text
from statebackends.state import (
    OPERATOR_KINDS,
    ColumnarStateDescriptor,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    StateDescriptor,
)
from statebackends.valuecopy import Copier, copier_of

TIMERS_KIND = "timers"
TIMERS_VALUE_TYPE = "int"
"""Timer rows hold a time, int64 ms."""

_ROW_LIST = msgspec.msgpack.Decoder(list[bytes])


@dataclass(frozen=True, slots=True)
class StateCodec:
    """Codecs of one value, list, map, reducing or aggregating state."""

    meta: StateMeta
    value: TypeSpec
    """Of the value, list element, map value or accumulator."""
    map_key: TypeSpec | None
    copy: Copier | None
    """Copies one value, element or map value; None if they can't change."""

    @staticmethod
    def of(descriptor: StateDescriptor, key_type: KeyType) -> StateCodec:
        """Raises InvalidConfigError for a descriptor without such rows."""
        if isinstance(descriptor, ColumnarStateDescriptor | OperatorListStateDescriptor):
            raise InvalidConfigError(f"{descriptor.kind} state has no rows per key", state=descriptor.name)
        value = TypeSpec.of(descriptor.type)
        map_key = TypeSpec.of(descriptor.key_type) if isinstance(descriptor, MapStateDescriptor) else None
        text = value.text if map_key is None else map_text(map_key, value)
        meta = StateMeta(descriptor.name, descriptor.kind, text, key_type.text)
        return StateCodec(meta, value, map_key, copier_of(value))

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def kind(self) -> str:
        return self.meta.kind

    def encode(self, value: Any) -> bytes:
        """Bytes of what one key has (of one entry, for map state)."""
        if self.kind == "list":
            return msgspec.msgpack.encode([self.value.encode(element) for element in value])
        return self.value.encode(value)

    def decode(self, encoded: bytes) -> Any:
        """The inverse. Raises CorruptStateError."""
        if self.kind != "list":
            return self.value.decode(encoded)
        try:
            return [self.value.decode(element) for element in _ROW_LIST.decode(encoded)]
        except msgspec.MsgspecError as error:
            raise CorruptStateError(f"state {self.name!r}: not a list: {error}", reason="value encoding") from error

    def encode_entry(self, map_key: Any) -> bytes:
        """Bytes of a map's key."""
        if self.map_key is None:
            raise InvariantError(f"state {self.name!r} is no map state")
        return self.map_key.encode(map_key)

    def decode_entry(self, encoded: bytes) -> Any:
        """The inverse. Raises CorruptStateError."""
        if self.map_key is None:
            raise InvariantError(f"state {self.name!r} is no map state")
        return self.map_key.decode(encoded)


def state_meta(descriptor: StateDescriptor, key_type: KeyType | None) -> StateMeta:
    """What is stored about a declared state. Raises InvalidConfigError if its type can't be stored."""
    if isinstance(descriptor, OperatorListStateDescriptor):
        return StateMeta(descriptor.name, descriptor.kind, "bytes")
    if key_type is None:
        raise InvalidConfigError(f"keyed state {descriptor.name!r} is declared on an operator without a key", state=descriptor.name)
    if isinstance(descriptor, ColumnarStateDescriptor):
        check_descriptor(descriptor)
        return StateMeta(descriptor.name, descriptor.kind, value_type_text(descriptor), key_type.text)
    return StateCodec.of(descriptor, key_type).meta


def state_metas(descriptors: Sequence[StateDescriptor], key_type: KeyType | None) -> tuple[StateMeta, ...]:
    """Of all states that an operator declares. Raises InvalidConfigError for a repeated name or an invalid type."""
    names = [descriptor.name for descriptor in descriptors]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfigError(f"state {name!r} is declared more than once", state=name)
    return tuple(state_meta(descriptor, key_type) for descriptor in descriptors)


def check_compatible(stored: StateMeta, declared: StateMeta, *, operator: str) -> Compatibility:
    """Whether stored rows can be read as they are or rewritten. Raises IncompatibleStateError."""
    verdict = Compatibility.INCOMPATIBLE
    if stored == declared:
        return Compatibility.COMPATIBLE_AS_IS
    if (stored.kind, stored.key_type) == (declared.kind, declared.key_type):
        if declared.kind == "map":
            (stored_key, stored_value), (key, value) = split_map_text(stored.value_type), split_map_text(declared.value_type)
            if stored_key == key:
                verdict = compatibility(stored_value, TypeSpec.parse(value))
        elif declared.kind not in {"columnar", TIMERS_KIND} | OPERATOR_KINDS:
            verdict = compatibility(stored.value_type, TypeSpec.parse(declared.value_type))
    if verdict is Compatibility.INCOMPATIBLE:
        raise IncompatibleStateError(
            f"operator {operator!r}: state {stored.name!r} was stored as {meta_text(stored)} "
            f"and is declared as {meta_text(declared)}",
            operator=operator,
            state=stored.name,
            stored=meta_text(stored),
            declared=meta_text(declared),
        )
    return verdict


def meta_text(meta: StateMeta) -> str:
    """A stored or declared state in words; operator state has no key."""
    key = f" by {meta.key_type}" if meta.key_type is not None else ""
    return f"{meta.kind} of {meta.value_type}{key}"

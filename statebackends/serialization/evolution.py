"""Schema evolution: the differences between a stored type and a declared one, and the verdict that follows from them.

Accepted: equal types; a value that becomes nullable; int to float (where each stored value has an equal one) or Decimal; in a
record, at any depth: added fields that are nullable or have a default, removed fields, reordered fields, as long as one field
stays. Fields go by name: a renamed field is one removed and one added. All else is refused: retyped values, required fields that
are new, other key types of dicts. How values are rewritten is for type_serializer.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import assert_never

import msgspec

from holdfast.statebackends.serialization.value_types import (
    DictType,
    ListType,
    OptionalType,
    RecordField,
    RecordType,
    TupleType,
    ValueType,
)


class Compatibility(StrEnum):
    """Verdict on stored state; ordered from best to worst."""

    COMPATIBLE_AS_IS = "compatible_as_is"
    COMPATIBLE_AFTER_MIGRATION = "compatible_after_migration"
    """A restore rewrites the values: `type_serializer.migrate` (bytes) or `from_arrow` (columns)."""
    INCOMPATIBLE = "incompatible"


class ChangeKind(StrEnum):
    """How one part of a declared type differs from the stored type."""

    ADDED = "added"
    """A field was added; values stored without it get its default, or None."""
    REMOVED = "removed"
    """A field was removed; its stored values are lost."""
    WIDENED = "widened"
    """A number became one of a wider type."""
    NULLABLE = "nullable"
    REORDERED = "reordered"
    """A record stored by position has its fields in another order."""
    TTL_ADDED = "ttl added"
    """Values count as written at the restore."""
    TTL_REMOVED = "ttl removed"
    RETYPED = "retyped"
    """Refused."""
    REQUIRED = "required"
    """Refused: a field without a default, which stored values may lack."""


_VERDICTS = {
    ChangeKind.NULLABLE: Compatibility.COMPATIBLE_AS_IS,
    ChangeKind.RETYPED: Compatibility.INCOMPATIBLE,
    ChangeKind.REQUIRED: Compatibility.INCOMPATIBLE,
}
_SEVERITY = list(Compatibility)
_WIDENED = {("int", "float"), ("int", "decimal")}


class SchemaChange(msgspec.Struct, frozen=True):
    """One difference between a stored type and a declared one."""

    path: str
    """Path of the part that differs: `address.lines[]`, `{}` for values of a dict, `[1]` of a tuple; empty for the value itself."""
    kind: ChangeKind
    stored: str | None = None
    declared: str | None = None
    """Canonical text of the declared part, as `stored` of the stored one; None if there is no such part."""
    default: bool = False
    """An added field has a default; otherwise it is None in stored values."""

    @property
    def verdict(self) -> Compatibility:
        return _VERDICTS.get(self.kind, Compatibility.COMPATIBLE_AFTER_MIGRATION)

    @property
    def text(self) -> str:
        """The difference in words."""
        what = self.path or "the value"
        match self.kind:
            case ChangeKind.ADDED:
                return f"{what} ({self.declared}) is added, with {'its default' if self.default else 'null'} in stored values"
            case ChangeKind.REMOVED:
                return f"{what} ({self.stored}) is removed, and what was stored in it is lost"
            case ChangeKind.REQUIRED:
                return f"{what} ({self.declared}) is required, and stored values may lack it"
            case ChangeKind.REORDERED:
                return f"the fields of {what} are stored in another order"
            case ChangeKind.TTL_ADDED:
                return f"{what} gets a TTL, as if written at the restore"
            case ChangeKind.TTL_REMOVED:
                return f"{what} has no TTL any more"
            case ChangeKind.NULLABLE:
                return f"{what} ({self.stored}) may be null now"
            case ChangeKind.WIDENED | ChangeKind.RETYPED:
                return f"{what} is {self.kind} from {self.stored} to {self.declared}"
            case _:
                assert_never(self.kind)


def worst_verdict(changes: Iterable[SchemaChange]) -> Compatibility:
    """The worst verdict of the changes; COMPATIBLE_AS_IS without changes."""
    return max((change.verdict for change in changes), key=_SEVERITY.index, default=Compatibility.COMPATIBLE_AS_IS)


def compare(stored: ValueType, declared: ValueType) -> Compatibility:
    """Verdict on reading values of type `stored` as `declared`."""
    return worst_verdict(find_changes(stored, declared))


def find_changes(stored: ValueType, declared: ValueType, path: str = "") -> Iterator[SchemaChange]:
    """Differences between two types, at any depth; in a record first the stored fields in their order, then the added ones."""
    if stored.text == declared.text:
        return
    retyped = SchemaChange(path, ChangeKind.RETYPED, stored.text, declared.text)
    if (stored.text, declared.text) in _WIDENED:
        yield SchemaChange(path, ChangeKind.WIDENED, stored.text, declared.text)
    elif isinstance(declared, OptionalType):
        if not isinstance(stored, OptionalType):
            yield SchemaChange(path, ChangeKind.NULLABLE, stored.text, declared.text)
        yield from find_changes(stored.inner if isinstance(stored, OptionalType) else stored, declared.inner, path)
    elif isinstance(stored, RecordType) and isinstance(declared, RecordType) and stored.kind == declared.kind:
        yield from _record_changes(stored, declared, path)
    elif isinstance(stored, DictType) and isinstance(declared, DictType):
        (old_key, old), (key, value) = stored.children, declared.children
        if old_key.text != key.text:
            yield retyped
        else:
            yield from find_changes(old, value, f"{path}{{}}")
    elif isinstance(stored, ListType) and isinstance(declared, ListType) and _container(stored) == _container(declared):
        yield from find_changes(stored.inner, declared.inner, f"{path}[]")
    elif isinstance(stored, TupleType) and isinstance(declared, TupleType) and len(stored.children) == len(declared.children):
        for index, (old, value) in enumerate(zip(stored.children, declared.children, strict=True)):
            yield from find_changes(old, value, f"{path}[{index}]")
    else:
        yield retyped


def _container(value_type: ListType) -> str:
    return value_type.text.partition("<")[0]


def _record_changes(stored: RecordType, declared: RecordType, path: str) -> Iterator[SchemaChange]:
    old_fields = {field.name: field for field in stored.fields}
    new_fields = {field.name: field for field in declared.fields}
    if not old_fields.keys() & new_fields.keys():
        # nothing of a value would be left: most likely the type is another state's
        yield SchemaChange(path, ChangeKind.RETYPED, stored.text, declared.text)
        return
    for name, old in old_fields.items():
        new = new_fields.get(name)
        at = f"{path}.{name}".lstrip(".")
        if new is None:
            yield SchemaChange(at, ChangeKind.REMOVED, old.value_type.text, None)
            continue
        if old.default is not None and new.default is None:
            yield SchemaChange(at, ChangeKind.REQUIRED, old.value_type.text, new.value_type.text)
        yield from find_changes(old.value_type, new.value_type, at)
    for name, new in new_fields.items():
        if name not in old_fields:
            missing = new.default is None and not isinstance(new.value_type, OptionalType)
            kind = ChangeKind.REQUIRED if missing else ChangeKind.ADDED
            yield SchemaChange(f"{path}.{name}".lstrip("."), kind, None, new.value_type.text, default=new.default is not None)
    if stored.kind == "namedtuple" and _positions(old_fields, new_fields) != _positions(new_fields, old_fields):
        yield SchemaChange(path, ChangeKind.REORDERED, stored.text, declared.text)


def _positions(fields: Mapping[str, RecordField], others: Mapping[str, RecordField]) -> list[str]:
    """Names of the fields that both have, in the order of the first."""
    return [name for name in fields if name in others]

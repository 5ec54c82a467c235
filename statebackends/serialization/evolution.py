"""Schema evolution: the differences between a stored type and a declared one, and the verdict that follows from them.

Accepted: equal types; a value that becomes nullable; int to float (where each stored value has an equal one) or Decimal; in a
record, at any depth: added fields that are nullable or have a default, removed fields, reordered fields, as long as one field
stays. Fields go by name: a renamed field is one removed and one added. All else is refused: retyped values, required fields that
are new, other key types of dicts. How values are rewritten is for type_serializer.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.statebackends.serialization.schema_changes import ChangeKind, Compatibility, SchemaChange, worst_verdict
from holdfast.statebackends.serialization.value_types import (
    DictType,
    ListType,
    OptionalType,
    RecordField,
    RecordType,
    TupleType,
    ValueType,
)

_WIDENED = {("int", "float"), ("int", "decimal")}


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

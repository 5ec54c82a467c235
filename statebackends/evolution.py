"""Whether state stored under one type can be read under another: a verdict per pair of shapes.

Accepted: the same; a value becoming nullable; int becoming float (where each stored value has an equal one) or Decimal; of a
record, at any depth: fields gained that are nullable or have a default, fields removed, fields in another order, as long as
one stays. Fields go by name: a renamed one is one removed and one gained. All else (retyped, newly required, keys of dicts)
is refused."""

from __future__ import annotations

from enum import StrEnum

from statebackends.recordshapes import RecordShape
from statebackends.valueshapes import DictShape, ListShape, OptionalShape, Shape, TupleShape


class Compatibility(StrEnum):
    """Verdict on stored state; ordered from best to worst by `_SEVERITY`."""

    COMPATIBLE_AS_IS = "compatible_as_is"
    COMPATIBLE_AFTER_MIGRATION = "compatible_after_migration"
    """`serializers.migrate` (bytes) or `from_arrow` (columns) rewrites the values on restore."""
    INCOMPATIBLE = "incompatible"


_SEVERITY = list(Compatibility)
_WIDENED = {("int", "float"), ("int", "decimal")}


def _worst(verdicts: list[Compatibility]) -> Compatibility:
    return max(verdicts, key=_SEVERITY.index, default=Compatibility.COMPATIBLE_AS_IS)


def compare(stored: Shape, declared: Shape) -> Compatibility:
    """Can values of `stored` be read as `declared`?"""
    if stored.text == declared.text:
        return Compatibility.COMPATIBLE_AS_IS
    if (stored.text, declared.text) in _WIDENED:
        return Compatibility.COMPATIBLE_AFTER_MIGRATION
    if isinstance(declared, OptionalShape):
        return compare(stored.inner if isinstance(stored, OptionalShape) else stored, declared.inner)
    if isinstance(stored, RecordShape) and isinstance(declared, RecordShape) and stored.kind == declared.kind:
        return _compare_records(stored, declared)
    if isinstance(stored, DictShape) and isinstance(declared, DictShape):
        if stored.children[0].text != declared.children[0].text:
            return Compatibility.INCOMPATIBLE
        return compare(stored.children[1], declared.children[1])
    if isinstance(stored, ListShape) and isinstance(declared, ListShape) and _container(stored) == _container(declared):
        return compare(stored.inner, declared.inner)
    if isinstance(stored, TupleShape) and isinstance(declared, TupleShape) and len(stored.children) == len(declared.children):
        return _worst([compare(old, new) for old, new in zip(stored.children, declared.children, strict=True)])
    return Compatibility.INCOMPATIBLE


def _container(shape: ListShape) -> str:
    return shape.text.partition("<")[0]


def _compare_records(stored: RecordShape, declared: RecordShape) -> Compatibility:
    new_fields = {field.name: field for field in declared.fields}
    verdicts = []
    kept = 0
    for old in stored.fields:
        new = new_fields.pop(old.name, None)
        if new is None:
            verdicts.append(Compatibility.COMPATIBLE_AFTER_MIGRATION)
            continue
        if old.default is not None and new.default is None:
            return Compatibility.INCOMPATIBLE
        verdicts.append(compare(old.shape, new.shape))
        kept += 1
    if not kept:
        return Compatibility.INCOMPATIBLE  # nothing of the value would be left: most likely another state's type
    for added in new_fields.values():
        if added.default is None and not isinstance(added.shape, OptionalShape):
            return Compatibility.INCOMPATIBLE
        verdicts.append(Compatibility.COMPATIBLE_AFTER_MIGRATION)
    if stored.kind == "namedtuple" and [field.name for field in stored.fields] != [field.name for field in declared.fields]:
        verdicts.append(Compatibility.COMPATIBLE_AFTER_MIGRATION)  # the bytes are positional
    return _worst(verdicts)

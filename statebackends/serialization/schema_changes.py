"""Differences between a stored type and a declared one, as records, and the verdict on them. Reports of a preflight have them, and
who reads a report needs no types: evolution.py finds them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import assert_never

import msgspec


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

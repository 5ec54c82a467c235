"""Canonical text of a value type -> a plain Python type, so that a tool can read a snapshot without the user's classes."""

from __future__ import annotations

import json
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NotRequired
from uuid import UUID

from holdfast.statebackends.errors import InvalidConfigError

_NAMES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "date": date,
    "datetime": datetime,
    "decimal": Decimal,
    "time": time,
    "timedelta": timedelta,
    "uuid": UUID,
}
_COLLECTIONS: dict[str, Any] = {"list": list, "set": set, "frozenset": frozenset}


def parse_type(text: str) -> Any:
    """The type whose shape has this text; structs become TypedDicts. Raises InvalidConfigError."""
    parser = _Parser(text)
    parsed = parser.type()
    if parser.rest():
        raise parser.error()
    return parsed


class _Parser:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0

    def rest(self) -> str:
        return self._text[self._position :]

    def error(self) -> InvalidConfigError:
        return InvalidConfigError(f"{self._text!r} is not the text of a state type (at {self._position})")

    def type(self) -> Any:
        name = self._word()
        if not self._take("<"):
            if name not in _NAMES:
                raise self.error()
            return _NAMES[name]
        if name in ("struct", "namedtuple"):
            parsed = self._record(name)
        else:
            parsed = self._generic(name, self._arguments())
        self._expect(">")
        return parsed

    def _arguments(self) -> list[Any]:
        arguments = [self.type()]
        while self._take(","):
            arguments.append(Ellipsis if self._take("...") else self.type())
        return arguments

    def _generic(self, name: str, arguments: list[Any]) -> Any:
        if name == "tuple":
            return tuple.__class_getitem__(tuple(arguments))
        if name == "union":
            return typing.Union[tuple(arguments)]  # noqa: UP007 - made from a list
        if name == "dict" and len(arguments) == 2:
            return dict.__class_getitem__(tuple(arguments))
        if len(arguments) == 1 and name == "optional":
            return arguments[0] | None
        if len(arguments) == 1 and name in _COLLECTIONS:
            return _COLLECTIONS[name][arguments[0]]
        raise self.error()

    def _record(self, kind: str) -> Any:
        members: dict[str, Any] = {}
        optional: set[str] = set()
        while not self.rest().startswith(">"):
            if members:
                self._expect(", ")
            name = self._field_name()
            self._expect(": ")
            members[name] = self.type()
            if self._take(" = default"):
                optional.add(name)
        if kind == "namedtuple":
            record: Any = typing.NamedTuple("Row", list(members.items()))  # type: ignore[misc]
            # the stored default is unknown; every stored row has the field
            record.__new__.__defaults__ = (None,) * len(optional)
            record._field_defaults = dict.fromkeys((n for n in members if n in optional), None)
            return record
        fields = {name: NotRequired[member] if name in optional else member for name, member in members.items()}
        return typing.TypedDict("Row", fields)  # type: ignore[operator]

    def _field_name(self) -> str:
        if not self.rest().startswith('"'):
            return self._word()
        try:
            name, length = json.JSONDecoder().raw_decode(self.rest())
        except ValueError as error:
            raise self.error() from error
        self._position += length
        return str(name)

    def _word(self) -> str:
        start = self._position
        while self._position < len(self._text) and (self._text[self._position] == "_" or self._text[self._position].isalnum()):
            self._position += 1
        if start == self._position:
            raise self.error()
        return self._text[start : self._position]

    def _take(self, literal: str) -> bool:
        if not self._text.startswith(literal, self._position):
            return False
        self._position += len(literal)
        return True

    def _expect(self, literal: str) -> None:
        if not self._take(literal):
            raise self.error()

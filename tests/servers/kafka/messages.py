"""Answers are written as plain values; this makes kafka-python's classes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Caller:
    """Who asks: the connection's client, and the version of this request."""

    client_id: str
    version: int
    advertised: tuple[str, int]
    """Where clients of its listener find the broker."""
    mechanism: str = ""
    user: str = ""


def make(kind: Any, **fields: Any) -> Any:
    """A message, or a part of one, with dicts for its parts."""
    known = kind._struct.fields
    return kind(**{name: _value(known[name], value) for name, value in fields.items()})


def _value(field: Any, value: Any) -> Any:
    if field.is_struct_array() and value is not None:
        return [make(field.data_class, **each) for each in value]
    if field.is_struct() and value is not None:
        return make(field.data_class, **value)
    return value

"""A key as a text: what people write who name one, and what an erasure carries."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidConfigError, InvalidKeyError
from holdfast.statebackends.serialization.keys import KeyType, key_columns

TRUTHS = {"true": True, "false": False}

_NO_KEY = (ValueError, TypeError, InvalidOperation, RecursionError, InvalidConfigError, InvalidKeyError)
"""What is raised for a text that is no value of a type (an int, a JSON list that is nested too deeply), and for a value that can't
be a key (an int beyond int64, a time without a zone)."""


@dataclass(frozen=True, slots=True, repr=False)
class KeyOf:
    """One key of one type. No text that may end up in a log shows it."""

    key_type: KeyType
    value: Any
    encoded: bytes

    @staticmethod
    def parse(text: str, key_type: KeyType) -> KeyOf:
        """The key that a text names: as it is for text, ISO for dates and times, hex for bytes, a JSON list of these for a tuple.

        Raises InvalidConfigError, which does not repeat the text."""
        try:
            value = key_type.check(_parsed(text, key_type))  # canonical: Arrow ends the process for some equal ones (0E-999999999)
            return KeyOf(key_type, value, key_type.encode(value))
        except _NO_KEY:
            message = f"the key can't be one of the type {key_type.text}"
            raise InvalidConfigError(message, setting="key") from None  # the cause has the key

    def mask(self, batch: pa.RecordBatch | pa.Table) -> pa.Array:
        """For each row, whether it is of this key, as canonical bytes would say: any NaN is the same, and -0.0 is 0.0."""
        names = key_columns(self.key_type)
        candidates: Any = None
        for name, member in zip(names, self.value if self.key_type.is_tuple else (self.value,), strict=True):
            column = batch.column(name)
            is_nan = isinstance(member, float) and math.isnan(member)
            same = pc.is_nan(column) if is_nan else pc.equal(column, pa.scalar(member, column.type))
            candidates = same if candidates is None else pc.and_(candidates, same)
        return pc.fill_null(candidates, False)


def _parsed(text: str, key_type: KeyType) -> Any:
    if not key_type.is_tuple:
        return _member(text, key_type.fields[0].text)
    members = json.loads(text)
    if not isinstance(members, list) or len(members) != len(key_type.fields):
        raise ValueError("no list of its fields")
    texts = [member if isinstance(member, str) else json.dumps(member) for member in members]
    return tuple(_member(each, field.text) for each, field in zip(texts, key_type.fields, strict=True))


def _member(text: str, field: str) -> Any:
    match field:
        case "utf8":
            return text
        case "int64":
            return int(text)
        case "float64":
            return float(text)
        case "bool":
            return TRUTHS[text.lower()] if text.lower() in TRUTHS else int("not a truth value")
        case "binary":
            return bytes.fromhex(text)
        case "date32":
            return date.fromisoformat(text)
        case "timestamp[us, UTC]":
            return datetime.fromisoformat(text)
        case _:
            return Decimal(text)

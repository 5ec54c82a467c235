"""Texts of errors without the records and keys that Holdfast adds to them. Pure.

Errors of functions and of rows end with the record that they happened on, and its key. What a user's own exception says is not
known to be a record, and stays."""

from __future__ import annotations

import re

WITHHELD = "(records and keys are not shown to viewers)"

_BEGINNING = r"(; )(?=(?:key|record) )|\b(?=(?:record|row) \{)"
_QUOTED = re.compile(rf"(?:{_BEGINNING}).*(?:\n {{2}}\| .*)*")
"""To the end of the line, and of those that `user_failures.text_lines` marks as its continuation."""
_QUOTED_IN_JSON = re.compile(rf"(?:{_BEGINNING})(?:[^\"\\]|\\[^n]|\\n {{2}}\| )*".encode())
"""The same in a string of a JSON text, where a line break is an escape and the string ends with the first quote that is none."""
_SIGNS = tuple(text.encode() for text in ("; key ", "; record ", "record {", "row {"))


def without_rows(text: str) -> str:
    """The text of an error without the records that it quotes."""
    return _QUOTED.sub(rf"\g<1>{WITHHELD}", text)


def without_rows_in_json(body: bytes) -> bytes:
    """A JSON text whose strings quote no record; the same object if none does."""
    if not any(sign in body for sign in _SIGNS):
        return body
    return _QUOTED_IN_JSON.sub(rf"\g<1>{WITHHELD}".encode(), body)

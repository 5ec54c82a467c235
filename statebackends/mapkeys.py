"""What is encoded in the place of a map's key, so that keys which are equal in Python have one encoding (ADR 25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import time, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeAlias

Form: TypeAlias = Callable[[Any], Any]

_DECIMAL_ZEROS_MAX = 28
"""Written out at the end of a map's key; behind more it keeps its exponent."""


def one_decimal(value: Decimal) -> Decimal:
    """The same for 1.0, 1.00 and 1, and for 1E+1 and 10."""
    if not value.is_finite():
        return value
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    if not value:
        return Decimal(0)
    zeros = next(count for count, digit in enumerate(reversed(digits)) if digit)
    digits, exponent = digits[: len(digits) - zeros], exponent + zeros
    if 0 < exponent <= _DECIMAL_ZEROS_MAX:
        digits, exponent = digits + (0,) * exponent, 0
    return Decimal((sign, digits, exponent))


def one_time(value: Any) -> Any:
    """The same for 12:00 UTC and 14:00+02:00: a time of UTC; or, where that would be of the day before or after, at the offset
    nearest to UTC in whole minutes at which it is of the same day. (01:00+02:00 is not 23:00 UTC.)"""
    offset = value.utcoffset() if isinstance(value, time) else None
    if offset is None:
        return value
    day = 24 * 60 * 60
    seconds = (value.hour * 60 + value.minute) * 60 + value.second - offset.days * day - offset.seconds
    minutes = -(min(seconds, 0) // 60) - max(seconds - day + 60, 0) // 60
    minute, second = divmod(seconds + 60 * minutes, 60)
    return time(minute // 60, minute % 60, second, value.microsecond, timezone(timedelta(minutes=minutes)))


def form_of_members(forms: Sequence[Form | None]) -> Form | None:
    """Of a sequence with a form for each member, or None for one that stays as it is."""
    if not any(forms):
        return None
    return lambda value: [member if form is None else form(member) for form, member in zip(forms, value, strict=True)]

"""What is encoded in the place of a map's key, so that keys which are equal in Python have one encoding (ADR 25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def form_of_members(forms: Sequence[Form | None]) -> Form | None:
    """Of a sequence with a form for each member, or None for one that stays as it is."""
    if not any(forms):
        return None
    return lambda value: [member if form is None else form(member) for form, member in zip(forms, value, strict=True)]

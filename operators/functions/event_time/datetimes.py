"""Event times as datetimes. CORE: no clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def is_naive(moment: datetime) -> bool:
    """Whether Python takes it for naive: it has no zone, or one that knows no offset."""
    return moment.tzinfo is None or moment.utcoffset() is None  # pandas' NaT has no zone, and raises when asked for its offset


def datetime_ms(moment: datetime) -> int:
    """ms since the epoch of an aware datetime, rounded down. Raises ValueError on a naive one, whose zone nobody knows."""
    if is_naive(moment):
        raise ValueError(f"{moment!r} is naive: give it a time zone")
    return (moment - EPOCH) // _MILLISECOND

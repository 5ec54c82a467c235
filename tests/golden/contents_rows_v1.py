"""Three checkpoints of one operator with a row table, each after the first an increment: new rows, deleted ones, a namespace that
was dropped, and rows that came into it again.

Never change what is here: the snapshots are kept for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from holdfast.statebackends.state import RowTableStateDescriptor
from tests.golden.model import Appended, Contents, Key

ROWS = RowTableStateDescriptor(
    "bids",
    pa.schema(
        [
            ("amount", pa.int64()),
            ("key", pa.string()),
            ("plane-type", pa.float64()),
            ("row.at", pa.timestamp("us", tz="UTC")),
        ]
    ),
)
ROWS_TYPE = 'rowtable<amount: int64, key: string, "plane-type": double, "row.at": timestamp[us, tz=UTC]>'
Deleted = Callable[[Key, int, Mapping[str, Any]], bool]
_START = datetime(2026, 1, 2, tzinfo=UTC)


def _rows(first: int, count: int, namespace: int | None = None) -> Appended:
    return [
        (
            ["", "AA", "UA", "键", f"user-{number % 20}"][number % 5],
            number % 4 - 1 if namespace is None else namespace,
            None if number % 7 == 0 else 1_000 * number,
            {
                "amount": number if number % 6 else None,
                "key": f"k{number}" if number % 5 else None,
                "plane-type": number / 4,
                "row.at": _START + timedelta(seconds=number) if number % 4 else None,
            },
        )
        for number in range(first, first + count)
    ]


def _contents(appended: Appended, deleted: Deleted, dropped: tuple[int, ...] = ()) -> Contents:
    return Contents(
        uid="bids",
        key_type="utf8",
        row_table=ROWS,
        row_table_type=ROWS_TYPE,
        appended=appended,
        deleted=deleted,
        dropped=dropped,
        dropped_before=120,
    )


def _none(key: Key, namespace: int, row: Mapping[str, Any]) -> bool:
    return False


def _some(key: Key, namespace: int, row: Mapping[str, Any]) -> bool:
    """Of the base and of what came since."""
    return row["amount"] is not None and row["amount"] % 9 == 1 and row["amount"] < 110


def _more(key: Key, namespace: int, row: Mapping[str, Any]) -> bool:
    return _some(key, namespace, row) or row["amount"] in (5, 100, 121)


FIRST = _contents(_rows(0, 90), _none)
SECOND = _contents([*_rows(0, 90), *_rows(90, 30)], _some, (2,))
THIRD = _contents([*_rows(0, 90), *_rows(90, 30), *_rows(120, 4), *_rows(124, 2, 2)], _more, (2,))

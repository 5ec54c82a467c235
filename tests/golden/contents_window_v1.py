"""A window operator as it was stored while its watermark was split list state: so many copies that each subtask is dealt one.

Never change what is here: the snapshot is kept for ever."""

from __future__ import annotations

import pyarrow as pa

from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, OperatorListStateDescriptor
from tests.golden.model import MAX_PARALLELISM, Contents

SIZE_MS = 10_000
WATERMARK_MS = 19_999
"""The windows [0, 10_000) and [10_000, 20_000) have fired, and the rows of the second were not all emitted yet."""
WINDOWED = Contents(
    uid="days",
    key_type="utf8",
    columnar=ColumnarStateDescriptor(
        "windows", (ColumnAggregate("count", None, "flights"), ColumnAggregate("sum", "seats", "seats", pa.int32()))
    ),
    columnar_type="columnar<flights=count,seats=sum(int32)>",
    updates=(
        (0, [("AA", 1, None)]),
        (10_000, [("UA", 5, None)]),
        (20_000, [("AA", 2, None), ("UA", 3, None), ("AA", None, None), ("WN", 7, None)]),
    ),
    dropped_windows=(0,),
    lists={OperatorListStateDescriptor("watermark"): [WATERMARK_MS.to_bytes(8, "big", signed=True)] * MAX_PARALLELISM},
)

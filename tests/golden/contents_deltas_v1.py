"""Three checkpoints of one operator, each after the first an increment: tables of state with deltas on them.

Never change what is here: the snapshots are kept for ever."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from tests.golden.model import Contents, Held, Updates

COUNT = ValueStateDescriptor("count", int | None)
SEEN = ListStateDescriptor("seen", str)
TAGS = MapStateDescriptor("tags", str, int)
WINDOWS = ColumnarStateDescriptor(
    "windows", (ColumnAggregate("count", None, "rows"), ColumnAggregate("sum", "seats", "seats", pa.int64()),
                ColumnAggregate("mean", "delay", "average", pa.float64()))
)  # fmt: skip
COLUMNAR_TYPE = "columnar<rows=count,seats=sum(int64),average=mean(double)>"
N = b"n"

_KEYS = [f"user-{number}" for number in range(60)]
_HOUR = 3_600_000


def _round(
    count: Mapping[tuple[str, bytes], int | None],
    seen: Mapping[str, list[str]],
    tags: Mapping[str, dict[str, int]],
    timers: list[tuple[str, int]],
    updates: Updates,
    dropped: tuple[int, ...] = (),
) -> Contents:
    return Contents(
        uid="totals",
        key_type="utf8",
        held=(
            Held(COUNT, [(key, namespace, value) for (key, namespace), value in count.items()], "optional<int>"),
            Held(SEEN, [(key, b"", value) for key, value in seen.items()], "str"),
            Held(TAGS, [(key, b"", value) for key, value in tags.items()], "map<str,int>"),
        ),
        columnar=WINDOWS,
        columnar_type=COLUMNAR_TYPE,
        updates=updates,
        dropped_windows=dropped,
        timers={"_event_time_timers": [(key, b"", moment) for key, moment in timers]},
    )


_COUNT = {(key, N if number % 7 == 0 else b""): number for number, key in enumerate(_KEYS)}
_SEEN = {key: [key, "x"] for key in _KEYS}
_TAGS = {key: {"t": 1, "u": number} for number, key in enumerate(_KEYS)}
_TIMERS = [(key, number) for number, key in enumerate(_KEYS)]
_UPDATES: Updates = (
    (0, [(key, number, 0.5) for number, key in enumerate(_KEYS)]),
    (_HOUR, [(key, 1, None) for key in _KEYS[:25]]),
)

FIRST = _round(_COUNT, _SEEN, _TAGS, _TIMERS, _UPDATES)
SECOND = _round(
    # some changed, some gone, some null, one new
    {
        place: 1_000 + (value or 0) if place[0] in _KEYS[:9] else value
        for place, value in _COUNT.items()
        if place[0] not in _KEYS[54:]
    }
    | {("user-20", b""): None, ("new-1", N): 1},
    {key: [*value, "y"] if key in _KEYS[:9] else value for key, value in _SEEN.items() if key != "user-40"},
    {key: {"t": 2} if key in _KEYS[:9] else value for key, value in _TAGS.items() if key != "user-41"},
    [*_TIMERS[5:], ("new-1", -1)],
    (*_UPDATES, (0, [("user-1", 5, 2.0), ("new-1", 7, 1.0)])),
)
THIRD = _round(
    # what had changed changes again, goes, or comes back
    {place: value for place, value in {**_COUNT, **{(key, b""): 7 for key in _KEYS[1:4]}}.items() if place[0] not in _KEYS[4:9]},
    {key: ["z"] if key in _KEYS[5:12] else value for key, value in _SEEN.items()},
    {key: {} | value | {"v": 9} if key in _KEYS[:3] else value for key, value in _TAGS.items() if key not in ("user-3", "user-42")},
    [*_TIMERS[3:], ("new-2", 5)],
    (*_UPDATES, (0, [("user-1", 5, 2.0), ("new-1", 7, 1.0)]), (0, [("user-1", 1, None)]), (2 * _HOUR, [("user-2", 1, 4.0)])),
    dropped=(_HOUR,),
)

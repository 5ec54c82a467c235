"""State with a TTL, version 1: every value, element and entry with the time of its last write.

Never change what is here: the snapshots are kept for ever."""

from __future__ import annotations

from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    Pickled,
    ReducingStateDescriptor,
    Ttl,
    ValueStateDescriptor,
)
from tests.golden.contents_v1 import LATE, Mean, Stop
from tests.golden.model import Contents, Held

NOW_MS = 1_780_000_000_000
DURATION_MS = 60_000
"""At NOW_MS nothing has expired yet, which older code may or may not have kept."""

_TTL = Ttl(DURATION_MS)
_OLD, _LATER, _NEW = NOW_MS - 59_000, NOW_MS - 30_000, NOW_MS
N = b"n"

TTL_JOB = (
    Contents(
        uid="sessions",
        key_type="utf8",
        now_ms=NOW_MS,
        held=(
            Held(
                ValueStateDescriptor("last", int | None, _TTL),
                [("a", b"", 1), ("b", b"", None), ("c", N, 3), ("a", b"", 4)],
                "ttl<optional<int>>",
                (_OLD, _OLD, _LATER, _NEW),
            ),
            Held(
                ValueStateDescriptor("stop", Stop, _TTL),
                [("a", b"", Stop("FRA", LATE, 5)), ("b", b"", Stop("JFK", LATE))],
                "ttl<struct<code: str, at: datetime, delay: optional<int> = default>>",
                (_OLD, _NEW),
            ),
            Held(ValueStateDescriptor("blob", Pickled, _TTL), [("a", b"", complex(1, 2))], "ttl<pickled>", (_LATER,)),
            Held(
                ListStateDescriptor("clicks", str, _TTL),
                [("a", b"", ["x", "y"]), ("a", b"", ["z"]), ("b", b"", ["x"])],
                "ttl<str>",
                (_OLD, _NEW, _OLD),
            ),
            Held(
                MapStateDescriptor("pages", str, float, _TTL),
                [("a", b"", {"/": 1.5, "/x": -0.0}), ("a", b"", {"/x": 2.0}), ("c", b"", {"/": 0.5})],
                "map<str,ttl<float>>",
                (_OLD, _LATER, _NEW),
            ),
            Held(
                ReducingStateDescriptor("total", int, lambda old, added: old + added, _TTL),
                [("a", b"", [1, 2]), ("a", b"", [3]), ("b", b"", [4])],
                "ttl<int>",
                (_OLD, _NEW, _OLD),
            ),
            Held(
                AggregatingStateDescriptor("mean", tuple[int, int], Mean(), _TTL),
                [("a", b"", [4, 5]), ("c", b"", [6])],
                "ttl<tuple<int,int>>",
                (_LATER, _OLD),
            ),
            Held(ValueStateDescriptor("count", int), [("a", b"", 7)], "int"),
        ),
    ),
)

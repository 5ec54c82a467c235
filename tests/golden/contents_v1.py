"""What the golden snapshots of version 1 hold: declared states and their contents.

Never change what is here: the snapshots are kept for ever. New contents get a module of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import NamedTuple, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pyarrow as pa

from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    Pickled,
    Redistribution,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from tests.golden.model import EPOCH, Contents, Held

# ----------------------------------------------------------------------------------------------------- types of values


class Stop(msgspec.Struct):
    code: str
    at: datetime
    delay: int | None = None


class Trip(msgspec.Struct, rename={"plane_type": "plane-type"}):
    """Everything nested; one field with a name that is no word."""

    plane_type: str
    stops: list[Stop]
    seats: tuple[int, str]
    tags: set[str]
    extra: dict[str, list[int]]
    price: Decimal
    first: Stop | None = None


@dataclass
class Scalars:
    flag: bool
    count: int
    ratio: float
    text: str
    raw: bytes
    day: date
    at: datetime
    amount: Decimal
    note: str | None = None


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Position(msgspec.Struct, array_like=True):
    latitude: float
    longitude: float


class Profile(TypedDict):
    name: str
    age: NotRequired[int]


class Mean:
    """(sum, count)."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator

    def merge(self, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]


LATE = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
EARLY = datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
WINDOW_NAMESPACE = b"w\x00\xff"

COLUMNAR_TYPE = (
    "columnar<flights=count,counted=count(int32),seats=sum(int32),fewest=min(int32),load=mean(int32),"
    "delay=sum(double),least=min(double),most=max(double),average=mean(double)>"
)

FLIGHTS = Contents(
    uid="flüge/1",
    key_type="utf8",
    held=(
        Held(
            ValueStateDescriptor("count", int),
            [("AA", b"", 1), ("UA", b"", -(2**63)), ("键", b"", 2**63 - 1), ("", b"", 0), ("AA", WINDOW_NAMESPACE, 7)],
            "int",
        ),
        Held(
            ValueStateDescriptor("ratio", float),
            [("AA", b"", -0.0), ("UA", b"", math.inf), ("WN", b"", 0.1), ("DL", b"", math.nan)],
            "float",
        ),
        Held(ValueStateDescriptor("note", str | None), [("AA", b"", None), ("UA", b"", "größer")], "optional<str>"),
        Held(ValueStateDescriptor("amount", Decimal), [("AA", b"", Decimal("1.50")), ("UA", b"", Decimal("-1E+30"))], "decimal"),
        Held(ValueStateDescriptor("at", datetime), [("AA", b"", LATE), ("UA", b"", EARLY)], "datetime"),
        Held(
            ValueStateDescriptor("wait", timedelta),
            [("AA", b"", timedelta(hours=1, seconds=30, milliseconds=500)), ("UA", b"", timedelta(days=-1, seconds=5))],
            "timedelta",
        ),
        Held(ValueStateDescriptor("clock", time), [("AA", b"", time(1, 2, 3, 4))], "time"),
        Held(ValueStateDescriptor("token", UUID), [("AA", b"", UUID(int=5))], "uuid"),
        Held(ValueStateDescriptor("choice", int | str), [("AA", b"", 5), ("UA", b"", "five")], "union<int,str>"),
        Held(ValueStateDescriptor("blob", Pickled), [("AA", b"", complex(1, 2))], "pickled"),
        Held(
            ValueStateDescriptor("scalars", Scalars),
            [
                ("AA", b"", Scalars(True, 1, 2.5, "a\0b", b"\x00\xff", date(2026, 1, 2), LATE, Decimal("0.10"))),
                ("UA", b"", Scalars(False, -1, -0.5, "", b"", date(1, 1, 1), EARLY, Decimal("12"), "noted")),
            ],
            "struct<flag: bool, count: int, ratio: float, text: str, raw: bytes, day: date, at: datetime, amount: decimal, "
            "note: optional<str> = default>",
        ),
        Held(
            ValueStateDescriptor("trip", Trip),
            [
                (
                    "AA",
                    b"",
                    Trip(
                        "A320",
                        [Stop("FRA", LATE), Stop("JFK", EARLY, 5)],
                        (12, "F"),
                        {"x", "y"},
                        {"a": [1, 2], "b": []},
                        Decimal("99.00"),
                        Stop("FRA", LATE, -1),
                    ),
                ),
                ("UA", b"", Trip("", [], (0, ""), set(), {}, Decimal(0))),
            ],
            'struct<"plane-type": str, stops: list<struct<code: str, at: datetime, delay: optional<int> = default>>, '
            "seats: tuple<int,str>, tags: set<str>, extra: dict<str,list<int>>, price: decimal, "
            "first: optional<struct<code: str, at: datetime, delay: optional<int> = default>> = default>",
        ),
        Held(
            ValueStateDescriptor("point", Point),
            [("AA", b"", Point(1)), ("UA", b"", Point(-1, 2.5))],
            "namedtuple<x: int, y: float = default>",
        ),
        Held(
            ValueStateDescriptor("position", Position),
            [("AA", b"", Position(50.0, 8.5))],
            "namedtuple<latitude: float, longitude: float>",
        ),
        Held(
            ValueStateDescriptor("profile", Profile),
            [("AA", b"", {"name": "Anna"}), ("UA", b"", {"name": "Uwe", "age": 7})],
            "struct<name: str, age: int = default>",
        ),
        Held(ValueStateDescriptor("path", tuple[int, ...]), [("AA", b"", (3, 1, 2)), ("UA", b"", ())], "tuple<int,...>"),
        Held(ValueStateDescriptor("nothing", int), [], "int"),
        Held(
            ListStateDescriptor("seen", str | None),
            [("AA", b"", ["one", None, "three"]), ("UA", b"", [""]), ("AA", WINDOW_NAMESPACE, ["two", "one"])],
            "optional<str>",
        ),
        Held(
            ListStateDescriptor("stops", Stop),
            [("AA", b"", [Stop("FRA", LATE), Stop("JFK", EARLY, 5)])],
            "struct<code: str, at: datetime, delay: optional<int> = default>",
        ),
        Held(
            MapStateDescriptor("tags", str, int),
            [("AA", b"", {"t": 1, "u": -2, "": 3}), ("WN", WINDOW_NAMESPACE, {"t": 4})],
            "map<str,int>",
        ),
        Held(
            MapStateDescriptor("routes", tuple[str, int], Stop | None),
            [("AA", b"", {("FRA", 1): Stop("FRA", LATE), ("JFK", 2): None})],
            "map<tuple<str,int>,optional<struct<code: str, at: datetime, delay: optional<int> = default>>>",
        ),
        Held(
            ReducingStateDescriptor("total", int, lambda old, added: old + added),
            [("AA", b"", [1, 2, 3]), ("UA", b"", [-5])],
            "int",
        ),
        Held(
            AggregatingStateDescriptor("mean", tuple[int, int], Mean()),
            [("AA", b"", [4, 5]), ("AA", WINDOW_NAMESPACE, [9])],
            "tuple<int,int>",
        ),
    ),
    columnar=ColumnarStateDescriptor(
        "windows",
        (
            ColumnAggregate("count", None, "flights"),
            ColumnAggregate("count", "seats", "counted", pa.int32()),
            ColumnAggregate("sum", "seats", "seats", pa.int32()),
            ColumnAggregate("min", "seats", "fewest", pa.int32()),
            ColumnAggregate("mean", "seats", "load", pa.int32()),
            ColumnAggregate("sum", "delay", "delay", pa.float64()),
            ColumnAggregate("min", "delay", "least", pa.float64()),
            ColumnAggregate("max", "delay", "most", pa.float64()),
            ColumnAggregate("mean", "delay", "average", pa.float64()),
        ),
    ),
    columnar_type=COLUMNAR_TYPE,
    updates=(
        (0, [("AA", 100, 1.5), ("UA", 200, None), ("AA", 50, -2.0), ("WN", None, None)]),
        (-60_000, [("AA", -1, math.nan), ("AA", 2, 4.0)]),
        (0, [("UA", None, 0.25), ("WN", None, None)]),
        (86_400_000, [("键", 2**31 - 1, math.inf), ("DL", 3, math.nan)]),
    ),
    timers={
        "_event_time_timers": [("AA", b"", 1_000), ("AA", b"", 2_000), ("UA", WINDOW_NAMESPACE, -5)],
        "_processing_time_timers": [("键", b"", 2**63 - 1)],
    },
)

PAIR = ("a\0b", -1, True, -0.5, b"\x00\xff\x00", date(2026, 1, 2), LATE, Decimal("12.34"))
PAIRS = Contents(
    uid="pairs",
    key_type="tuple<utf8,int64,bool,float64,binary,date32,timestamp[us, UTC],decimal128(10, 2)>",
    held=(
        Held(
            ValueStateDescriptor("latest", int),
            [
                (PAIR, b"", 1),
                (("", 0, False, 0.0, b"", date(1970, 1, 1), EPOCH, Decimal("0.00")), b"", 2),
                (("größe", 2**63 - 1, True, math.inf, b"\x7f", date(9999, 12, 31), EARLY, Decimal("-99999999.99")), b"", 3),
            ],
            "int",
        ),
        Held(MapStateDescriptor("per", int, float | None), [(PAIR, b"", {5: 0.5, -6: None})], "map<int,optional<float>>"),
    ),
    timers={"_processing_time_timers": [(PAIR, b"", 123)]},
)
SOURCE = Contents(
    uid="source",
    lists={
        OperatorListStateDescriptor("positions"): [b"\x92\x01\x02", b"", b"\xff\x00", b"\x93\xa1a\x01\xc3"],
        OperatorListStateDescriptor("owners", Redistribution.UNION): [b"\xa1x", b"\xa1y", b"\xa1z"],
        OperatorListStateDescriptor("rules", Redistribution.BROADCAST): [b"\xa2r1", b"\xa2r2"],
        OperatorListStateDescriptor("unused"): [],
    },
    external=("9f0cde4a7b1e4d0c8a5b6f1e2d3c4b5a/sources/source/1/manifest.json",),
)
SINK = Contents(uid="sink")
JOB = (SOURCE, FLIGHTS, PAIRS, SINK)

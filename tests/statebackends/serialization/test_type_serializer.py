"""Value codecs: what goes in comes out equal through msgpack and Arrow, or is refused; evolution verdicts are kept."""

import math
import pickle
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, StateValueError
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer, value_texts
from holdfast.statebackends.serialization.type_serializer import (
    Compatibility,
    TypeSerializer,
    compatibility,
    map_text,
    migrate,
    split_map_text,
)
from holdfast.statebackends.state import MapStateDescriptor, Pickled
from tests.examples import examples


class Trip(msgspec.Struct, frozen=True):
    carrier: str
    delay: float
    origin: str | None = None
    legs: list[int] = msgspec.field(default_factory=list)


class Renamed(msgspec.Struct, rename="camel"):
    first_leg: int


class ByPosition(msgspec.Struct, array_like=True):
    a: int
    b: str = "x"


class Empty(msgspec.Struct):
    pass


class Tagged(msgspec.Struct, tag="t"):
    a: int


class Recursive(msgspec.Struct):
    inner: "Recursive | None" = None


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Row(TypedDict):
    key: str
    note: NotRequired[int]


class Ambiguous(TypedDict):
    note: NotRequired[int | None]


@dataclass
class Flight:
    number: int
    day: date
    point: Point
    tags: dict[str, list[int]] = field(default_factory=dict)
    trip: Trip | None = None


@dataclass
class Keyword:
    b: int = field(kw_only=True, default=1)
    a: str = "s"


@dataclass
class NotInit:
    a: int = field(init=False, default=3)


class Colour(Enum):
    RED = 1


INTS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=6)
FLOATS = st.floats(allow_nan=False)
TRIPS = st.builds(Trip, TEXT, FLOATS, st.none() | TEXT, st.lists(INTS, max_size=3))
POINTS = st.builds(Point, INTS, FLOATS)
TAGS = st.dictionaries(TEXT, st.lists(INTS, max_size=2), max_size=2)
FLIGHTS = st.builds(Flight, INTS, st.dates(), POINTS, TAGS, st.none() | TRIPS)
INSTANTS = st.datetimes(timezones=st.just(UTC))
TYPES: list[tuple[Any, str, st.SearchStrategy[Any]]] = [
    (int, "int", INTS),
    (float, "float", FLOATS),
    (bool, "bool", st.booleans()),
    (str, "str", TEXT),
    (bytes, "bytes", st.binary(max_size=5)),
    (date, "date", st.dates()),
    (datetime, "datetime", INSTANTS),
    (Decimal, "decimal", st.decimals(allow_nan=False)),
    (time, "time", st.times()),
    (timedelta, "timedelta", st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000))),
    (UUID, "uuid", st.uuids()),
    (int | None, "optional<int>", st.none() | INTS),
    (list[int], "list<int>", st.lists(INTS, max_size=4)),
    (list[list[str | None]], "list<list<optional<str>>>", st.lists(st.lists(st.none() | TEXT, max_size=3), max_size=3)),
    (list[int] | None, "optional<list<int>>", st.none() | st.lists(INTS, max_size=3)),
    (set[str], "set<str>", st.sets(TEXT, max_size=4)),
    (frozenset[int], "frozenset<int>", st.frozensets(INTS, max_size=4)),
    (tuple[int, str], "tuple<int,str>", st.tuples(INTS, TEXT)),
    (tuple[int, ...], "tuple<int,...>", st.lists(INTS, max_size=3).map(tuple)),
    (dict[str, int], "dict<str,int>", st.dictionaries(TEXT, INTS, max_size=4)),
    (dict[tuple[int, str], Point | None], "", st.dictionaries(st.tuples(INTS, TEXT), st.none() | POINTS, max_size=3)),
    (dict[datetime, bool], "dict<datetime,bool>", st.dictionaries(INSTANTS, st.booleans(), max_size=3)),
    (int | str, "union<int,str>", INTS | TEXT),
    (list[int | str | None], "list<optional<union<int,str>>>", st.lists(st.none() | INTS | TEXT, max_size=3)),
    (
        Trip,
        "struct<carrier: str, delay: float, origin: optional<str> = default, legs: list<int> = default>",
        TRIPS,
    ),
    (Renamed, "struct<firstLeg: int>", st.builds(Renamed, INTS)),
    (ByPosition, "namedtuple<a: int, b: str = default>", st.builds(ByPosition, INTS, TEXT)),
    (Empty, "struct<>", st.builds(Empty)),
    (Point, "namedtuple<x: int, y: float = default>", POINTS),
    (Row, "struct<key: str, note: int = default>", st.fixed_dictionaries({"key": TEXT}, optional={"note": INTS})),
    (Flight, "", FLIGHTS),
    (Keyword, "", st.builds(Keyword, b=INTS, a=TEXT)),
    (list[Flight], "", st.lists(FLIGHTS, max_size=3)),
    (Pickled, "pickled", st.complex_numbers(allow_nan=False)),
    (Pickled[complex], "pickled", st.complex_numbers(allow_nan=False)),
]


def through_parquet(array: pa.Array) -> pa.Array:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"value": array}), sink)
    column = pq.read_table(pa.BufferReader(sink.getvalue())).column("value")
    return column.combine_chunks().cast(array.type)


@pytest.mark.parametrize(("declared", "text", "strategy"), TYPES, ids=[str(t[1] or t[0]) for t in TYPES])
def test_values_round_trip(declared: Any, text: str, strategy: st.SearchStrategy[Any]) -> None:
    spec = TypeSerializer.of(declared)
    assert not text or spec.text == text

    @given(st.lists(strategy, max_size=6))
    @settings(max_examples=examples(25), deadline=None)
    def check(values: list[Any]) -> None:
        decoded = [spec.decode(spec.encode(value)) for value in values]
        assert decoded == values
        assert [type(value) for value in decoded] == [type(value) for value in values]
        array = spec.to_arrow(values)
        assert array.type == spec.arrow_type
        assert len(array) == len(values)
        back = spec.from_arrow(array)
        assert back == values
        assert [type(value) for value in back] == [type(value) for value in values]
        assert spec.from_arrow(array.slice(1)) == values[1:]
        assert spec.from_arrow(pa.chunked_array([array.slice(0, 1), array.slice(1)])) == values

    check()


@pytest.mark.parametrize(("declared", "text", "strategy"), TYPES, ids=[str(t[1] or t[0]) for t in TYPES])
def test_values_round_trip_through_parquet_and_the_parsed_text(declared: Any, text: str, strategy: Any) -> None:
    spec = TypeSerializer.of(declared)
    parsed = TypeSerializer.parse(spec.text)
    assert parsed == spec
    assert parsed.arrow_type == spec.arrow_type

    @given(st.lists(strategy, max_size=4))
    @settings(max_examples=examples(8), deadline=None)
    def check(values: list[Any]) -> None:
        array = through_parquet(spec.to_arrow(values))
        assert spec.from_arrow(array) == values
        plain = parsed.from_arrow(array)
        assert plain == [parsed.decode(spec.encode(value)) for value in values]
        assert spec.from_arrow(parsed.to_arrow(plain)) == values
        assert [spec.decode(parsed.encode(value)) for value in plain] == values

    check()


def test_special_floats_survive() -> None:
    spec = TypeSerializer.of(float)
    values = [math.nan, math.inf, -0.0]
    for back in ([spec.decode(spec.encode(value)) for value in values], spec.from_arrow(spec.to_arrow(values))):
        assert math.isnan(back[0])
        assert back[1] == math.inf
        assert math.copysign(1.0, back[2]) == -1.0


def test_decimal_keeps_its_exponent() -> None:
    spec = TypeSerializer.of(Decimal)
    for text in ("1.50", "1E+5", "-0.000", "123456789012345678901234567890.12345678901234567890"):
        value = Decimal(text)
        assert str(spec.decode(spec.encode(value))) == text
        assert str(spec.from_arrow(spec.to_arrow([value]))[0]) == text


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, "1"),
        (int, 1.0),
        (int, True),
        (int, None),
        (int, 2**63),
        (int, -(2**63) - 1),
        (float, "1"),
        (float, True),
        (float, 2**53 + 1),
        (float, 10**400),
        (bool, 1),
        (str, b"x"),
        (str, "\ud800"),
        (bytes, "x"),
        (date, datetime(2020, 1, 1, tzinfo=UTC)),
        (datetime, datetime(2020, 1, 1)),
        (datetime, date(2020, 1, 1)),
        (Decimal, 1.5),
        (list[int], (1,)),
        (list[int], [None]),
        (list[int], [1, "a"]),
        (list[int], [2**63]),
        (tuple[int, str], (1,)),
        (tuple[int, str], [1, "a"]),
        (tuple[int, ...], [1]),
        (dict[str, int], {1: 1}),
        (dict[str, int], {"a": None}),
        (dict[str, int], [("a", 1)]),
        (Trip, {"carrier": "a", "delay": 1.0}),
        (Trip, Trip(1, 1.0)),  # type: ignore[arg-type]
        (Row, {"note": 1}),
        (Row, {"key": "a", "other": 1}),
        (Row, Trip("a", 1.0)),
        (int | str, 1.5),
        (Point, (1, 2.0)),
        (list[datetime], [datetime(2020, 1, 1)]),
    ],
)
def test_value_of_another_type_is_refused(declared: Any, value: Any) -> None:
    spec = TypeSerializer.of(declared)
    for refuse in (spec.encode, spec.check, lambda v: spec.to_arrow([v])):
        with pytest.raises(StateValueError) as caught:
            refuse(value)
        assert pickle.loads(pickle.dumps(caught.value)).fields == caught.value.fields


@pytest.mark.parametrize(
    ("declared", "value", "plain"),
    [
        (int, np.int32(3), 3),
        (float, np.float32(0.5), 0.5),
        (float, 3, 3.0),
        (bool, np.bool_(True), True),
        (str, np.str_("a"), "a"),
        (list[int], [np.int64(4)], [4]),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (datetime, datetime(2020, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2020, 1, 1, tzinfo=UTC)),
        (dict[str, float], {"a": np.float64(2.0)}, {"a": 2.0}),
        (int, pa.scalar(5), 5),
    ],
)
def test_scalars_are_unwrapped(declared: Any, value: Any, plain: Any) -> None:
    spec = TypeSerializer.of(declared)
    for back in (spec.decode(spec.encode(value)), spec.from_arrow(spec.to_arrow([value]))[0]):
        assert back == plain
        assert type(back) is type(plain)


@pytest.mark.parametrize(
    "declared",
    [
        Any, object, list, dict, tuple, None, complex, Colour, Literal[1], Tagged, Recursive, Ambiguous, NotInit,
        dict[list[int], int], dict[int | None, int], list[Pickled[int]], tuple[()], lambda: 1, "int", pa.uint64(),
        pa.timestamp("ns", "UTC"), pa.timestamp("us"), pa.null(), {"a": int},
    ],
)  # fmt: skip
def test_undeclarable_types_are_refused(declared: Any) -> None:
    with pytest.raises(InvalidConfigError):
        TypeSerializer.of(declared)


def test_refusal_of_any_offers_the_opt_in() -> None:
    with pytest.raises(InvalidConfigError, match="Pickled"):
        TypeSerializer.of(Any)
    with pytest.raises(InvalidConfigError, match="field 'inner'"):
        TypeSerializer.of(Recursive)


def test_unpicklable_and_unloadable_values_are_typed_errors() -> None:
    spec = TypeSerializer.of(Pickled)
    with pytest.raises(StateValueError):
        spec.encode(lambda: 1)
    with pytest.raises(StateValueError, match=r"^a Local can't be pickled: .*dataclass or a msgspec\.Struct instead") as caught:
        spec.encode(type("Local", (), {"__module__": "no_such_module"})())
    assert "0x" not in str(caught.value), "an address is another one in every run"
    with pytest.raises(CorruptStateError):
        spec.decode(b"not a pickle")


def test_damaged_values_are_corrupt_state() -> None:
    spec = TypeSerializer.of(Trip)
    encoded = spec.encode(Trip("AA", 1.0))
    for stop in range(len(encoded)):
        with pytest.raises(CorruptStateError):
            spec.decode(encoded[:stop])
    with pytest.raises(CorruptStateError):
        TypeSerializer.of(int).decode(TypeSerializer.of(str).encode("x"))
    with pytest.raises(CorruptStateError):
        TypeSerializer.of(int).from_arrow(pa.array([1, None]))
    with pytest.raises(CorruptStateError):
        spec.from_arrow(pa.array([{"carrier": "AA"}]))
    with pytest.raises(CorruptStateError):
        TypeSerializer.of(int).from_arrow(pa.array(["x"]))
    with pytest.raises(CorruptStateError):
        TypeSerializer.of(list[int]).from_arrow(pa.array([1]))


@pytest.mark.parametrize(
    ("data_type", "text"),
    [
        (pa.int16(), "int"),
        (pa.float32(), "float"),
        (pa.large_utf8(), "str"),
        (pa.dictionary(pa.int8(), pa.utf8()), "str"),
        (pa.timestamp("ms", "UTC"), "datetime"),
        (pa.decimal128(5, 2), "decimal"),
        (pa.list_(pa.bool_()), "list<bool>"),
        (pa.map_(pa.utf8(), pa.date32()), "dict<str,date>"),
        (pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.utf8())]), "struct<a: int, b: optional<str>>"),
    ],
)
def test_arrow_types_name_specs(data_type: pa.DataType, text: str) -> None:
    assert TypeSerializer.of(data_type).text == text


@pytest.mark.parametrize(
    "text",
    ["", "any", "list", "list<>", "list<int", "list<int,int>", "int>", "struct<a int>", "optional<int,str>", 'struct<"a: int>'],
)
def test_unknown_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        TypeSerializer.parse(text)


def test_odd_field_names_survive_in_the_text() -> None:
    odd = TypedDict("odd", {"a b": int, 'q"': Annotated[str, "note"]})
    spec = TypeSerializer.of(odd)
    assert TypeSerializer.parse(spec.text).text == spec.text
    assert spec.from_arrow(spec.to_arrow([{"a b": 1, 'q"': "x"}])) == [{"a b": 1, 'q"': "x"}]


def test_specs_are_made_once() -> None:
    assert TypeSerializer.of(list[int]) is TypeSerializer.of(list[int])
    assert TypeSerializer.of(TypeSerializer.of(int)) is TypeSerializer.of(int)
    assert TypeSerializer.of(bool) != TypeSerializer.of(int)


class V1(msgspec.Struct):
    a: int
    b: str | None = None


class WithDefault(msgspec.Struct):
    b: str | None = None
    a: int = 7
    c: list[int] = msgspec.field(default_factory=lambda: [9])


class WithNullable(msgspec.Struct, kw_only=True):
    a: float
    b: str | None = None
    c: str | None
    d: int = 4


class PointV2(NamedTuple):
    x: int
    y: float = 0.5
    z: str = "z"


class PointMoved(NamedTuple):
    z: str = "z"
    x: int = 1
    y: float = 0.5


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        (int, 3, float, 3.0),
        (V1, V1(1, "x"), WithDefault, WithDefault(a=1, b="x")),
        (V1, V1(1, "x"), WithNullable, WithNullable(a=1.0, b="x", c=None)),
        (list[V1], [V1(1)], list[WithDefault], [WithDefault(a=1)]),
        (dict[str, int], {"a": 1}, dict[str, float], {"a": 1.0}),
        (tuple[int, str], (1, "a"), tuple[float, str], (1.0, "a")),
        (Point, Point(1, 2.0), PointV2, PointV2(1, 2.0, "z")),
        (int, 3, float | None, 3.0),
        (set[int], {1}, set[float], {1.0}),
    ],
)
def test_compatible_after_migration(old: Any, value: Any, new: Any, expected: Any) -> None:
    stored, declared = TypeSerializer.of(old), TypeSerializer.of(new)
    assert compatibility(stored.text, declared) is Compatibility.COMPATIBLE_AFTER_MIGRATION
    migrated = migrate(stored.text, declared, [stored.encode(value)])
    assert migrated == [declared.encode(expected)]
    assert declared.decode(migrated[0]) == expected
    assert declared.from_arrow(stored.to_arrow([value])) == [expected]


class Reordered(msgspec.Struct):
    b: str | None = None
    a: int = 0


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        (int, 3, int, 3),
        (int, 3, int | None, 3),
        (list[int], [3], list[int | None], [3]),
        (V1, V1(1, "x"), Reordered, Reordered(a=1, b="x")),
    ],
)
def test_compatible_as_is(old: Any, value: Any, new: Any, expected: Any) -> None:
    stored, declared = TypeSerializer.of(old), TypeSerializer.of(new)
    assert compatibility(stored.text, declared) is Compatibility.COMPATIBLE_AS_IS
    assert declared.decode(stored.encode(value)) == expected
    assert declared.from_arrow(stored.to_arrow([value])) == [expected]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (float, int),
        (int, str),
        (bool, int),
        (int | None, int),
        (V1, msgspec.defstruct("Required", [("a", int), ("b", str | None)])),
        (V1, msgspec.defstruct("Added", [("a", int), ("c", int), ("b", str | None, None)])),
        (V1, msgspec.defstruct("Retyped", [("a", str), ("b", str | None, None)])),
        (list[int], set[int]),
        (list[int], tuple[int, ...]),
        (tuple[int, str], tuple[int, str, int]),
        (dict[int, int], dict[float, int]),
        (Point, V1),
        (int | str, int | str | float),
        (Pickled, int),
        (int, Pickled),
    ],
)
def test_incompatible(old: Any, new: Any) -> None:
    assert compatibility(TypeSerializer.of(old).text, TypeSerializer.of(new)) is Compatibility.INCOMPATIBLE


def test_unreadable_stored_text_is_incompatible() -> None:
    assert compatibility("hologram<int>", TypeSerializer.of(int)) is Compatibility.INCOMPATIBLE


def test_map_state_text() -> None:
    key, value = TypeSerializer.of(tuple[int, str]), TypeSerializer.of(dict[str, list[int]])
    assert map_text(key.text, value.text) == "map<tuple<int,str>,dict<str,list<int>>>"
    assert split_map_text(map_text(key.text, value.text)) == (key.text, value.text)
    quoted = map_text('struct<"a\\\\": int>', 'struct<"\\"<,": int>')
    assert map_text(*split_map_text(quoted)) == quoted
    for bad in ("int", "map<int>", "list<int,int>", "map<int,int", "map<int,int,int>", 'map<struct<"a: int>,int>'):
        with pytest.raises(InvalidConfigError):
            split_map_text(bad)


@pytest.mark.parametrize("name", ["a<b", "a>b", "a,b", ", a: int", "(", "ü]"])
def test_a_map_state_has_records_with_any_name_of_a_field(name: str) -> None:
    record = msgspec.defstruct("Record", [("field", int, msgspec.field(name=name))], frozen=True, array_like=True)
    for key, value in ((record, int), (int, record), (record, record)):
        texts = (TypeSerializer.of(key).text, TypeSerializer.of(value).text)
        assert split_map_text(map_text(*texts)) == texts
        meta = StateSerializer.of(MapStateDescriptor("m", key, value), KeyType.of(int)).meta
        assert value_texts(meta) == (*texts, False)


@pytest.mark.parametrize(
    ("declared", "given_", "read"),
    [
        (float, 2**70, 2.0**70),
        (set[float], {2**70, 1.5}, {2.0**70, 1.5}),
        (dict[str, list[float]], {"a": [1, -(2**64)]}, {"a": [1.0, -(2.0**64)]}),
        (tuple[float, int] | None, (2**64, 3), (2.0**64, 3)),
    ],
)
def test_an_int_in_place_of_a_float_may_be_beyond_those_of_msgpack(declared: Any, given_: Any, read: Any) -> None:
    """It is accepted as it is put, and by columns: a checkpoint of RocksDB must not fail of it for good."""
    serializer = TypeSerializer.of(declared)
    serializer.check(given_)
    assert serializer.decode(serializer.encode(given_)) == read
    assert [serializer.decode(each) for each in serializer.encode_all([given_, given_])] == [read, read]
    assert serializer.from_arrow(serializer.to_arrow([given_])) == [read]

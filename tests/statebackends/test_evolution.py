"""Evolution of keyed state (R11): for every pair of an old and a new type a verdict, and what becomes of the values.

The table is run through types alone, and through snapshots of every kind of state and every backend; a property test draws
types, values and evolutions at any depth."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import CorruptStateError, IncompatibleStateError, InvalidConfigError, StateValueError
from holdfast.statebackends.factory import BACKEND_KINDS
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import check_compatible, state_changes, state_meta
from holdfast.statebackends.serialization.type_serializer import Compatibility, TypeSerializer, compatibility, migrate, type_changes
from holdfast.statebackends.serialization.value_types import RecordType
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    KeyedStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    Pickled,
    ReducingStateDescriptor,
    Ttl,
    ValueStateDescriptor,
)
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.export import export_snapshot
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.examples import crossed
from tests.statebackends.backend_harness import KEY, Cluster, stored, use

AS_IS, MIGRATION, INCOMPATIBLE = Compatibility


def struct(*fields: Any, **config: Any) -> type[msgspec.Struct]:
    return msgspec.defstruct("Row", fields, **config)


@dataclass
class Order:
    item: str
    count: int = 1


@dataclass
class OrderWithTags:
    item: str
    count: int = 1
    tags: list[str] = field(default_factory=lambda: ["new"])
    note: str | None = None


@dataclass
class OrderWithoutCount:
    item: str


class Pair(NamedTuple):
    a: int
    b: str


class PairMoved(NamedTuple):
    b: str
    a: int


class PairInserted(NamedTuple):
    z: int = 9
    a: int = 0
    b: str = ""


class PairCut(NamedTuple):
    b: str


class Options(TypedDict):
    a: int
    b: NotRequired[str]


class OptionsWithout(TypedDict):
    a: int


class OptionsWith(TypedDict):
    a: float
    b: NotRequired[str]
    c: NotRequired[int]


ORDER = struct(("item", str), ("count", int, 7))
A = struct(("a", int))
A_DEFAULT = struct(("a", int, 5))
A_FLOAT = struct(("a", float))
AB = struct(("a", int), ("b", str | None, None))
BA = struct(("b", str | None, None), ("a", int, 0))
AB_STRICT = struct(("b", str | None, None), ("a", int), forbid_unknown_fields=True, kw_only=True)
A_STRICT = struct(("a", int), forbid_unknown_fields=True, kw_only=True)
AB_REQUIRED = struct(("a", int), ("b", str))
B_DEFAULT = struct(("b", str, "x"))
RENAMED = struct(("a", int), rename={"a": "alpha"})
ARRAY = struct(("a", int), ("b", str), array_like=True)
ARRAY_MOVED = struct(("b", str), ("a", float), ("c", int, 3), array_like=True)
NESTED = struct(("inner", A), ("many", list[A]), ("by", dict[str, A]), ("pair", tuple[A, int]), ("maybe", A | None))  # type: ignore[valid-type]
NESTED_NEW = struct(("inner", AB), ("many", list[AB]), ("by", dict[str, AB]), ("pair", tuple[AB, float]), ("maybe", AB | None))  # type: ignore[valid-type]
NESTED_CUT = struct(("inner", A))
DEEP = struct(("x", list[dict[str, tuple[A, ...]]]))  # type: ignore[valid-type]
DEEP_NEW = struct(("x", list[dict[str, tuple[A_FLOAT, ...]]]))  # type: ignore[valid-type]
DEEP_BAD = struct(("x", list[dict[str, tuple[struct(("a", str)), ...]]]))  # type: ignore[misc]
WHEN = datetime(2026, 1, 2, tzinfo=UTC)


@dataclass(frozen=True)
class Case:
    old: Any
    value: Any
    new: Any
    verdict: Compatibility
    expected: Any = None

    def __str__(self) -> str:
        return f"{TypeSerializer.of(self.old).text}-{TypeSerializer.of(self.new).text}"


CASES: Sequence[Case] = (
    # the same
    Case(int, 3, int, AS_IS, 3),
    Case(pa.int16(), 3, pa.int64(), AS_IS, 3),
    Case(pa.float32(), 0.5, float, AS_IS, 0.5),
    Case(Order, Order("x", 2), ORDER, AS_IS, ORDER("x", 2)),
    # nullable
    Case(int, 3, int | None, AS_IS, 3),
    Case(int | None, None, int | None, AS_IS, None),
    Case(list[int], [3], list[int | None], AS_IS, [3]),
    Case(A, A(1), A | None, AS_IS, A(1)),
    Case(int | None, 3, int, INCOMPATIBLE),
    # widened numbers
    Case(int, 3, float, MIGRATION, 3.0),
    Case(int, -(2**53), float, MIGRATION, float(-(2**53))),
    Case(int, 2**63 - 1, Decimal, MIGRATION, Decimal(2**63 - 1)),
    Case(int, 3, float | None, MIGRATION, 3.0),
    Case(int | None, None, float | None, MIGRATION, None),
    Case(set[int], {1}, set[float], MIGRATION, {1.0}),
    Case(frozenset[int], frozenset({1}), frozenset[Decimal], MIGRATION, frozenset({Decimal(1)})),
    Case(tuple[int, ...], (1, 2), tuple[float, ...], MIGRATION, (1.0, 2.0)),
    Case(tuple[int, str], (1, "a"), tuple[Decimal, str], MIGRATION, (Decimal(1), "a")),
    Case(dict[int, int], {1: 2}, dict[int, float], MIGRATION, {1: 2.0}),
    Case(pa.list_(pa.int32()), [1], pa.list_(pa.float64()), MIGRATION, [1.0]),
    Case(float, 1.0, int, INCOMPATIBLE),
    Case(float, 1.0, Decimal, INCOMPATIBLE),
    Case(Decimal, Decimal(1), int, INCOMPATIBLE),
    Case(bool, True, int, INCOMPATIBLE),
    Case(int, 1, bool, INCOMPATIBLE),
    Case(date, date(2026, 1, 2), datetime, INCOMPATIBLE),
    Case(int, 1, str, INCOMPATIBLE),
    Case(str, "a", bytes, INCOMPATIBLE),
    # fields added
    Case(A, A(1), AB, MIGRATION, AB(1)),
    Case(A, A(1), BA, MIGRATION, BA(a=1)),
    Case(Order, Order("x", 2), OrderWithTags, MIGRATION, OrderWithTags("x", 2, ["new"], None)),
    Case(Options, {"a": 1, "b": "x"}, OptionsWith, MIGRATION, {"a": 1.0, "b": "x"}),
    Case(Options, {"a": 1}, OptionsWith, MIGRATION, {"a": 1.0}),
    Case(A, A(1), AB_REQUIRED, INCOMPATIBLE),
    Case(pa.struct([("a", pa.int8())]), {"a": 1}, pa.struct([("b", pa.utf8()), ("a", pa.int8())]), MIGRATION, {"a": 1, "b": None}),
    Case(pa.struct([("a", pa.int32()), ("b", pa.utf8())]), {"a": 1, "b": "x"}, pa.struct([("a", pa.int64())]), MIGRATION, {"a": 1}),
    # fields removed
    Case(AB, AB(1, "x"), A, MIGRATION, A(1)),
    Case(AB, AB(1, "x"), A_STRICT, MIGRATION, A_STRICT(a=1)),
    Case(OrderWithTags, OrderWithTags("x"), OrderWithoutCount, MIGRATION, OrderWithoutCount("x")),
    Case(Options, {"a": 1, "b": "x"}, OptionsWithout, MIGRATION, {"a": 1}),
    Case(NESTED, NESTED(A(1), [], {}, (A(2), 2), None), NESTED_CUT, MIGRATION, NESTED_CUT(A(1))),
    Case(A, A(1), B_DEFAULT, INCOMPATIBLE),  # nothing would be left
    Case(A, A(1), RENAMED, INCOMPATIBLE),  # fields go by the name that is stored
    # fields moved
    Case(AB, AB(1, "x"), AB_STRICT, AS_IS, AB_STRICT(b="x", a=1)),
    Case(AB, AB(1, "x"), BA, AS_IS, BA("x", 1)),
    Case(Pair, Pair(1, "x"), PairMoved, MIGRATION, PairMoved("x", 1)),
    Case(Pair, Pair(1, "x"), PairInserted, MIGRATION, PairInserted(9, 1, "x")),
    Case(Pair, Pair(1, "x"), PairCut, MIGRATION, PairCut("x")),
    Case(ARRAY, ARRAY(1, "x"), ARRAY_MOVED, MIGRATION, ARRAY_MOVED("x", 1.0, 3)),
    Case(Pair, Pair(1, "x"), AB_REQUIRED, INCOMPATIBLE),
    # fields that became required, or another type
    Case(A_DEFAULT, A_DEFAULT(1), A, INCOMPATIBLE),
    Case(A, A(1), A_DEFAULT, AS_IS, A_DEFAULT(1)),
    Case(A, A(1), A_FLOAT, MIGRATION, A_FLOAT(1.0)),
    Case(A_FLOAT, A_FLOAT(1.0), A, INCOMPATIBLE),
    # at any depth
    Case(
        NESTED,
        NESTED(A(1), [A(2)], {"k": A(3)}, (A(4), 5), A(6)),
        NESTED_NEW,
        MIGRATION,
        NESTED_NEW(AB(1), [AB(2)], {"k": AB(3)}, (AB(4), 5.0), AB(6)),
    ),
    Case(DEEP, DEEP([{"k": (A(1),)}]), DEEP_NEW, MIGRATION, DEEP_NEW([{"k": (A_FLOAT(1.0),)}])),
    Case(DEEP, DEEP([]), DEEP_BAD, INCOMPATIBLE),
    # containers and keys of dicts
    Case(list[int], [1], set[int], INCOMPATIBLE),
    Case(list[int], [1], tuple[int, ...], INCOMPATIBLE),
    Case(tuple[int, str], (1, "a"), tuple[int, str, int], INCOMPATIBLE),
    Case(dict[int, int], {1: 1}, dict[float, int], INCOMPATIBLE),
    Case(dict[str, A], {}, A, INCOMPATIBLE),  # type: ignore[valid-type]
    Case(int | str, 1, int | str, AS_IS, 1),
    Case(int | str, 1, int | str | float, INCOMPATIBLE),
    # pickle
    Case(Pickled, {1: object}, Pickled, AS_IS, {1: object}),
    Case(Pickled, 1, int, INCOMPATIBLE),
    Case(int, 1, Pickled, INCOMPATIBLE),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verdict_of_every_pair_of_types(case: Case) -> None:
    stored, declared = TypeSerializer.of(case.old), TypeSerializer.of(case.new)
    assert compatibility(stored.text, declared) is case.verdict
    if case.verdict is INCOMPATIBLE:
        return
    encoded = [stored.encode(case.value)]
    if case.verdict is AS_IS:
        assert declared.decode(encoded[0]) == case.expected
    else:
        encoded = migrate(stored.text, declared, encoded)
    assert declared.decode(encoded[0]) == case.expected
    (read,) = declared.from_arrow(stored.to_arrow([case.value]))
    assert read == case.expected
    assert type(read) is type(case.expected)


def _first(left: Any, right: Any) -> Any:
    return left


class Keeping:
    """An aggregate whose accumulator is the value itself."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def create_accumulator(self) -> Any:
        return self.value

    def add(self, value: Any, accumulator: Any) -> Any:
        return value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    merge = staticmethod(_first)


KINDS: dict[str, Callable[[Any], KeyedStateDescriptor]] = {
    "value": lambda declared: ValueStateDescriptor("s", declared),
    "list": lambda declared: ListStateDescriptor("s", declared),
    "map": lambda declared: MapStateDescriptor("s", str, declared),
    "reducing": lambda declared: ReducingStateDescriptor("s", declared, _first),
    "aggregating": lambda declared: AggregatingStateDescriptor("s", declared, Keeping()),
}


def write(state: Any, kind: str, value: Any) -> None:
    match kind:
        case "value":
            state.update(value)
        case "map":
            state.put("k", value)
        case _:
            state.add(value)


def read(state: Any, kind: str) -> Any:
    match kind:
        case "value":
            return state.value()
        case "map":
            return dict(state.items())["k"]
        case "list":
            return state.get()[0]
    return state.get()


@pytest.fixture(params=BACKEND_KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = Cluster(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("canonical", "kind"), crossed([False, True], list(KINDS), every=2))
def test_every_pair_of_types_in_snapshots_of_every_kind_of_state(cluster: Cluster, kind: str, canonical: bool) -> None:
    """All cases are states of one backend; each incompatible one is refused before anything is loaded."""
    cases = dict(enumerate(CASES))
    old = {number: _named(KINDS[kind](case.old), number) for number, case in cases.items()}
    new = {number: _named(KINDS[kind](case.new), number) for number, case in cases.items()}
    backend = cluster.backend(list(old.values()))
    use(backend, "key")
    for number, case in cases.items():
        write(backend.get_state(old[number]), kind, case.value)
    snapshot = cluster.take(backend, canonical=canonical)
    for number, case in cases.items():
        metas = state_meta(old[number], KEY), state_meta(new[number], KEY)
        if case.verdict is INCOMPATIBLE:
            with pytest.raises(IncompatibleStateError) as raised:
                cluster.restored(snapshot, [new[number]], allow_unclaimed_state=True)
            fields = raised.value.fields
            assert fields == {"operator": "op", "state": f"s{number}"} | {key: fields[key] for key in ("stored", "declared")}
            assert (metas[0].value_type in fields["stored"], metas[1].value_type in fields["declared"]) == (True, True)
            assert fields["stored"] in str(raised.value)
            assert fields["declared"] in str(raised.value)
        else:
            assert check_compatible(*metas, operator="op") is case.verdict
    readable = [number for number, case in cases.items() if case.verdict is not INCOMPATIBLE]
    restored = cluster.restored(snapshot, [new[number] for number in readable], allow_unclaimed_state=True)
    again = cluster.restored(cluster.take(restored, canonical=canonical), [new[number] for number in readable])
    for each in (restored, again):
        use(each, "key")
        for number in readable:
            found = read(each.get_state(new[number]), kind)
            assert found == cases[number].expected, cases[number]
            assert type(found) is type(cases[number].expected), cases[number]


def _named(descriptor: KeyedStateDescriptor, number: int) -> KeyedStateDescriptor:
    object.__setattr__(descriptor, "name", f"s{number}")
    return descriptor


def test_keys_never_evolve(cluster: Cluster) -> None:
    """Neither the key of the stream nor that of a map, not even where a value may."""
    old = MapStateDescriptor("m", int, int)
    backend = cluster.backend([old], key_type=KeyType.of(int))
    use(backend, 1)
    backend.get_state(old).put(1, 1)
    snapshot = cluster.take(backend, canonical=True)
    for key_type, declared in (
        (KeyType.of(float), old),
        (KeyType.of(tuple[int, int]), old),
        (KeyType.of(int), MapStateDescriptor("m", float, int)),
        (KeyType.of(int), MapStateDescriptor("m", int | None, int)),  # type: ignore[arg-type]
    ):
        with pytest.raises(IncompatibleStateError):
            cluster.restored(snapshot, [declared], key_type=key_type)
    restored = cluster.restored(snapshot, [MapStateDescriptor("m", int, float)], key_type=KeyType.of(int))
    use(restored, 1)
    assert restored.get_state(MapStateDescriptor("m", int, float)).get(1) == 1.0


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_the_wider_type_does_not_have_is_refused(cluster: Cluster, kind: str, canonical: bool) -> None:
    """Types fit, and this value doesn't: nothing is rounded."""
    backend = cluster.backend([KINDS[kind](int)])
    use(backend, "key")
    write(backend.get_state(KINDS[kind](int)), kind, 2**53 + 1)
    snapshot = cluster.take(backend, canonical=canonical)
    with pytest.raises(IncompatibleStateError, match=str(2**53 + 1)) as raised:
        cluster.restored(snapshot, [KINDS[kind](float)])
    assert raised.value.fields["operator"] == "op"
    assert raised.value.fields["state"] == "s"
    assert "int" in raised.value.fields["stored"]
    assert "float" in raised.value.fields["declared"]
    with pytest.raises(StateValueError):
        migrate("int", TypeSerializer.of(float), [TypeSerializer.of(int).encode(2**53 + 1)])


def test_types_whose_stored_values_would_change_with_the_code_are_refused() -> None:
    """Their text would be the same, and the values not."""
    with pytest.raises(InvalidConfigError, match="omit_defaults"):
        TypeSerializer.of(struct(("a", int, 5), omit_defaults=True))
    with pytest.raises(InvalidConfigError, match=r"field 'a'.*ge"):
        TypeSerializer.of(struct(("a", Annotated[int, msgspec.Meta(ge=0)])))
    with pytest.raises(InvalidConfigError, match="max_length"):
        TypeSerializer.of(list[Annotated[str, msgspec.Meta(max_length=3)]])
    assert TypeSerializer.of(Annotated[int, "any note", msgspec.Meta(description="fine")]).text == "int"


# ---------------------------------------------------------------------------------------------------------- random evolutions


@dataclass(frozen=True)
class Evolved:
    """An old type with a value, and a new one with what the value becomes."""

    old: Any
    value: Any
    new: Any
    expected: Any


SCALARS = st.sampled_from([(int, 3), (int, -(2**53)), (str, "ß"), (bool, True), (float, 0.5), (bytes, b"\0"), (datetime, WHEN)])


@st.composite
def evolutions(draw: st.DrawFn, depth: int = 3) -> Evolved:
    """Any accepted change: widen, make nullable, and in records add, remove and move fields; at any depth."""
    shape = draw(st.sampled_from(["scalar", "list", "dict", "tuple", "record", "named", "optional"] if depth else ["scalar"]))
    if shape == "scalar":
        python_type, value = draw(SCALARS)
        if python_type is int and draw(st.booleans()):
            wider = draw(st.sampled_from([float, Decimal]))
            return Evolved(int, value, wider, wider(value))
        return Evolved(python_type, value, python_type, value)
    if shape in ("record", "named"):
        return draw(_records(shape, depth))
    inner = draw(evolutions(depth - 1))
    if shape == "optional":
        old = inner.old | None if draw(st.booleans()) else inner.old
        is_none = old is not inner.old and draw(st.booleans())
        return Evolved(old, None if is_none else inner.value, inner.new | None, None if is_none else inner.expected)
    if shape == "list":
        return Evolved(list[inner.old], [inner.value], list[inner.new], [inner.expected])  # type: ignore[name-defined]
    if shape == "dict":
        return Evolved(dict[str, inner.old], {"k": inner.value}, dict[str, inner.new], {"k": inner.expected})  # type: ignore[name-defined]
    other = draw(evolutions(depth - 1))
    return Evolved(
        tuple[inner.old, other.old],  # type: ignore[name-defined]
        (inner.value, other.value),
        tuple[inner.new, other.new],  # type: ignore[name-defined]
        (inner.expected, other.expected),
    )


@st.composite
def _records(draw: st.DrawFn, shape: str, depth: int) -> Evolved:
    kept = [(f"f{number}", draw(evolutions(depth - 1))) for number in range(draw(st.integers(1, 3)))]
    removed = [(f"r{number}", draw(evolutions(depth - 1))) for number in range(draw(st.integers(0, 2)))]
    choices: st.SearchStrategy[tuple[Any, Any]] = st.sampled_from([(int, 7), (str | None, None), (str, "d")])
    added: list[tuple[Any, ...]] = [(f"a{number}", *draw(choices)) for number in range(draw(st.integers(0, 2)))]
    old_fields = draw(st.permutations(kept + removed))
    array_like = shape == "named"
    old = msgspec.defstruct("Old", [(name, each.old) for name, each in old_fields], array_like=array_like)
    new_fields = draw(st.permutations([*[(name, each.new) for name, each in kept], *added]))
    new = msgspec.defstruct("New", new_fields, array_like=array_like, kw_only=True)
    value = old(**{name: each.value for name, each in old_fields})
    return Evolved(old, value, new, new(**{name: each.expected for name, each in kept}))


@given(evolutions())
def test_what_evolution_accepts_is_read_and_written_under_the_new_type(evolved: Evolved) -> None:
    stored, declared = TypeSerializer.of(evolved.old), TypeSerializer.of(evolved.new)
    verdict = compatibility(stored.text, declared)
    assert verdict is not INCOMPATIBLE
    encoded = [stored.encode(evolved.value)]
    migrated = encoded if verdict is AS_IS else migrate(stored.text, declared, encoded)
    assert declared.decode(migrated[0]) == evolved.expected
    assert declared.from_arrow(stored.to_arrow([evolved.value])) == [evolved.expected]
    assert declared.encode(declared.decode(migrated[0])) == declared.encode(evolved.expected)


@given(evolutions(), evolutions())
def test_whatever_is_not_refused_decodes_under_the_new_type(one: Evolved, other: Evolved) -> None:
    """Two types that have nothing to do with each other, mostly."""
    for old, value, new in ((one.old, one.value, other.new), (one.new, one.expected, other.old), (one.new, one.expected, one.old)):
        stored, declared = TypeSerializer.of(old), TypeSerializer.of(new)
        verdict = compatibility(stored.text, declared)
        if verdict is not INCOMPATIBLE:
            encoded = [stored.encode(value)]
            migrated = encoded if verdict is AS_IS else migrate(stored.text, declared, encoded)
            found = declared.decode(migrated[0])
            declared.check(found)
            assert declared.from_arrow(stored.to_arrow([value])) == [found]


CHANGES: dict[str, tuple[Any, Any, list[tuple[str, str]]]] = {
    "the same": (int, int, []),
    "widened": (int, float, [("", "widened")]),
    "nullable and widened": (int, float | None, [("", "nullable"), ("", "widened")]),
    "widened below null": (int | None, float | None, [("", "widened")]),
    "another type": (int, str, [("", "retyped")]),
    "added": (A, AB, [("b", "added")]),
    "added, with default": (Pair, PairInserted, [("z", "added")]),
    "required": (A, AB_REQUIRED, [("b", "required")]),
    "no default any more": (A_DEFAULT, A, [("a", "required")]),
    "removed": (OrderWithTags, OrderWithoutCount, [("count", "removed"), ("tags", "removed"), ("note", "removed")]),
    "moved, by name": (AB, BA, []),
    "moved, by position": (Pair, PairMoved, [("", "reordered")]),
    "renamed, and nothing left": (A, RENAMED, [("", "retyped")]),
    "everything at once": (ARRAY, ARRAY_MOVED, [("a", "widened"), ("c", "added"), ("", "reordered")]),
    "a typed dict": (OptionsWith, OptionsWithout, [("a", "retyped"), ("b", "removed"), ("c", "removed")]),
    "at any depth": (
        NESTED,
        NESTED_NEW,
        [
            ("inner.b", "added"),
            ("many[].b", "added"),
            ("by{}.b", "added"),
            ("pair[0].b", "added"),
            ("pair[1]", "widened"),
            ("maybe.b", "added"),
        ],
    ),
    "refused far down": (DEEP, DEEP_BAD, [("x[]{}[].a", "retyped")]),
    "keys of dicts": (dict[int, A], dict[float, AB], [("", "retyped")]),  # type: ignore[valid-type]
    "pickle": (Pickled, int, [("", "retyped")]),
}


@pytest.mark.parametrize(("old", "new", "expected"), CHANGES.values(), ids=CHANGES.keys())
def test_every_difference_is_told_where_it_is(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
    changes = type_changes(TypeSerializer.of(old).text, TypeSerializer.of(new))
    assert [(change.path, change.kind) for change in changes] == expected
    for change in changes:
        assert change.text.startswith((change.path or "the ", "the fields of"))
        assert (change.stored is None) == (change.kind == "added" or (change.kind == "required" and change.path == "b"))


def test_a_default_is_told_from_null() -> None:
    (added,) = type_changes(TypeSerializer.of(A).text, TypeSerializer.of(struct(("a", int), ("b", int, 3))))
    assert added.text == "b (int) is added, with its default in stored values"
    nullable, null = type_changes("struct<a: int>", TypeSerializer.of(pa.struct([("a", pa.int64()), ("b", pa.utf8())])))
    assert (nullable.text, null.text) == ("a (int) may be null now", "b (optional<str>) is added, with null in stored values")


def test_a_ttl_and_a_map_and_another_kind_are_told_too() -> None:
    plain, ttl = ValueStateDescriptor("s", int), ValueStateDescriptor("s", float, ttl=Ttl(timedelta(hours=1)))
    metas = [state_meta(each, KEY) for each in (plain, ttl)]
    assert [change.kind for change in state_changes(*metas)] == ["widened", "ttl added"]
    assert [change.kind for change in state_changes(state_meta(ttl, KEY), state_meta(plain, KEY))] == ["retyped", "ttl removed"]
    old, new = (state_meta(MapStateDescriptor("s", str, value), KEY) for value in (A, AB))
    assert [(change.path, change.kind) for change in state_changes(old, new)] == [("b", "added")]
    other = state_meta(MapStateDescriptor("s", int, A), KEY)
    assert [(change.path, change.kind) for change in state_changes(old, other)] == [("", "retyped")]
    wrong = state_meta(MapStateDescriptor("s", str, struct(("a", str))), KEY)
    with pytest.raises(IncompatibleStateError, match=r": a is retyped from int to str$"):
        check_compatible(old, wrong, operator="op")


@given(evolutions())
def test_a_field_is_told_exactly_when_one_side_lacks_it(evolved: Evolved) -> None:
    stored, declared = TypeSerializer.of(evolved.old), TypeSerializer.of(evolved.new)
    changes = type_changes(stored.text, declared)
    if isinstance(stored.value_type, RecordType) and isinstance(declared.value_type, RecordType):
        old, new = ({field.name for field in value_type.fields} for value_type in (stored.value_type, declared.value_type))
        at_top = {(change.path, change.kind) for change in changes if not set(change.path) & set(".[{")}
        assert {path for path, kind in at_top if kind == "removed"} == old - new
        assert {path for path, kind in at_top if kind == "added"} == new - old
    assert type_changes(declared.text, declared) == []


# ------------------------------------------------------------------------------------------------------------------- pickle


def test_nothing_but_a_restore_unpickles(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [KINDS["value"](Pickled), MapStateDescriptor("m", str, Pickled)]
    backend = cluster.backend(states)
    use(backend, "key")
    backend.get_state(states[0]).update({"any": 1})
    backend.get_state(states[1]).put("k", {"any": 2})
    snapshots = [stored(cluster, cluster.take(backend, canonical=canonical)) for canonical in (False, True)]

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("unpickled")

    with monkeypatch.context() as patched:
        patched.setattr(pickle, "loads", refuse)
        patched.setattr(pickle, "load", refuse)
        for number, snapshot in enumerate(snapshots):
            storage = LocalStorage(tmp_path / f"out-{number}")
            assert not run_flow(verify_files(snapshot), snapshot.storage).problems
            export_snapshot(snapshot, list(snapshot.states()), storage, "export")
            copy_snapshot(snapshot, storage, "copy")
        assert diff_snapshots(snapshots[0], snapshots[1]).is_same
        for state in states:
            check_compatible(state_meta(state, KEY), state_meta(state, KEY), operator="op")
        with pytest.raises(CorruptStateError, match="unpickled"):
            _restore_and_read(cluster, snapshots[0], states[0])


def _restore_and_read(cluster: Cluster, snapshot: StoredSnapshot, state: KeyedStateDescriptor) -> None:
    (handle,) = [part for part in snapshot.metadata.operators[0].subtasks[0].keyed if part.states]
    restored = cluster.restored(((handle,), snapshot.folder), [state], allow_unclaimed_state=True)
    use(restored, "key")
    restored.get_state(state).value()

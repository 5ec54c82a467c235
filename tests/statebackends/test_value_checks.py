"""A value of a wrong type is refused where it is written, by every kind of state, with and without a TTL."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operators.functions.process import ProcessFunction
from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.serialization.value_checks import checks_of
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    Pickled,
    ReducingStateDescriptor,
    Ttl,
    ValueStateDescriptor,
)
from tests.operators.functions.test_process import ROWS, harness


@dataclasses.dataclass
class Visit:
    page: str
    seconds: int | None = None


class Price(TypedDict):
    name: str
    cents: int | None


class Forgetful:
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        accumulator += value
        return None  # type: ignore[return-value]

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, left: int, right: int) -> int:
        return left + right


def refused(descriptor: Any, use: Any) -> StateValueError:
    class Uses(ProcessFunction):
        states = (descriptor,)

        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            use(ctx.state(descriptor))

    with harness(Uses()) as one, pytest.raises(StateValueError) as caught:
        one.process([{"k": "a", "v": 7}], schema=ROWS.schema)
    return caught.value


TTL = Ttl(1_000)
LAST = "is not of the declared type int"


@pytest.mark.parametrize("ttl", [None, TTL])
@pytest.mark.parametrize(
    ("make", "use", "said"),
    [
        (lambda ttl: ValueStateDescriptor("s", int, ttl), lambda s: s.update("1"), f"state 's': '1' (str) {LAST}"),
        (lambda ttl: ValueStateDescriptor("s", int, ttl), lambda s: s.update(None), "use clear() to forget the value"),
        (lambda ttl: ValueStateDescriptor("s", int, ttl), lambda s: s.update(2**63), f"(int) {LAST}"),
        (lambda ttl: ListStateDescriptor("s", int, ttl), lambda s: s.add(True), f"True (bool) {LAST}"),
        (lambda ttl: ListStateDescriptor("s", int, ttl), lambda s: s.add_all([1, "x"]), f"'x' (str) {LAST}"),
        (lambda ttl: ListStateDescriptor("s", int, ttl), lambda s: s.update([1, 1.5]), f"1.5 (float) {LAST}"),
        (lambda ttl: MapStateDescriptor("s", str, int, ttl), lambda s: s.put("a", "b"), f"'b' (str) {LAST}"),
        (lambda ttl: MapStateDescriptor("s", str, int, ttl), lambda s: s.put(1, 1), "state 's', a key of its map: 1 (int) is not"),
        (lambda ttl: ReducingStateDescriptor("s", int, max, ttl), lambda s: s.add("x"), f"'x' (str) {LAST}"),
        (
            lambda ttl: AggregatingStateDescriptor("s", int, Forgetful(), ttl),
            lambda s: s.add(1),
            f"the accumulator that its function returns: None (NoneType) {LAST}",
        ),
    ],
)
def test_a_wrong_value_is_refused_as_it_is_written_with_key_and_record(make: Any, use: Any, said: str, ttl: Ttl | None) -> None:
    error = refused(make(ttl), use)
    assert error.message.startswith("operator 'op', subtask 0: state 's'")
    assert said in error.message
    assert error.message.endswith("; key 'a', record {'k': 'a', 'v': 7}")
    assert (error.state, error.operator, error.record) == ("s", "op", "{'k': 'a', 'v': 7}")
    assert "process_element (test_value_checks.py:" in error.message
    assert "caused by" not in (error.frames or "")


NOW = datetime(2026, 1, 1, tzinfo=UTC)
MANY = list(range(100))
LARGE = dict.fromkeys(map(str, MANY), 1)
VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [0, -(2**63), 2**63 - 1, np.int64(5)], [2**63, True, 1.0, "1", None]),
    (float, [1.5, 1, np.float64(2.0)], ["1", None, True, 2**60 + 1]),
    (str, ["", "é", "x" * 1_000], [b"x", "\ud800", 1]),
    (bytes, [b""], ["x", 1]),
    (bool, [True, np.True_], [1, None]),
    (datetime, [NOW], [datetime(2026, 1, 1), "2026"]),
    (Decimal, [Decimal("1.0")], [1, 1.0]),
    (int | None, [None, 1], ["x"]),
    (int | str, [1, "x"], [1.5, None]),
    (list[int], [[], [1] * 3, MANY], [(1,), ["x"], [*MANY, "x"], ["x", *MANY], [1, None]]),
    (set[str], [set(), {"a"}], [{1}, ["a"]]),
    (tuple[int, str], [(1, "a")], [(1,), (1, 2), [1, "a"]]),
    (dict[str, int], [{}, {"a": 1}, LARGE], [{1: 1}, {"a": "b"}, {**LARGE, "z": "z"}]),
    (Visit, [Visit("a"), Visit("a", 1)], [Visit(1), Visit("a", "b"), {"page": "a"}, None]),  # type: ignore[arg-type]
    (Price, [{"name": "é", "cents": 1}, {"name": "a", "cents": None}], [
        {"name": "a"}, {"name": "a", "cents": 2**63}, {"name": "\ud800", "cents": 1}, {"name": 1, "cents": 1},
        {"name": "a", "cents": 1, "more": 1}, {"name": "a", "sense": 1}, {"name": "a", "cents": True}, Visit("a"), None,
    ]),
    (list[Visit], [[Visit("a")]], [[Visit("a"), Visit(2)]]),  # type: ignore[arg-type]
    (Pickled, [object(), None], []),
]


@pytest.mark.parametrize(("declared", "fine", "wrong"), VALUES, ids=[str(declared) for declared, _, _ in VALUES])
def test_what_is_asked_of_a_value_agrees_with_how_it_is_encoded(declared: Any, fine: list[Any], wrong: list[Any]) -> None:
    spec = TypeSerializer.of(declared)
    checks = checks_of("s", "value", spec.value_type, None)
    for value in fine:
        spec.check(value)
        checks.value(value)
    checks.values(fine)
    for value in wrong:
        with pytest.raises(StateValueError, match="state 's': "):
            checks.value(value)
        with pytest.raises(StateValueError):
            spec.check(value)
        with pytest.raises(StateValueError, match="state 's': "):
            checks.values([*fine, value])


SCALAR_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**64), 2**64), st.floats(), st.text(max_size=2), st.binary(max_size=2),
    st.just(datetime(2020, 1, 1)), st.just(datetime(2020, 1, 1, tzinfo=UTC)), st.just(date(2020, 1, 1)), st.just(Decimal("1.5")),
    st.just(np.int64(3)), st.just("\ud800"),
)  # fmt: skip


class Pair(tuple[Any, ...]):
    """A tuple that is none by its class."""


@pytest.mark.parametrize(
    "declared",
    [
        tuple[int, int, int],
        tuple[str, float | None, bool],
        tuple[bytes, datetime, date, Decimal],
        tuple[int, tuple[int | None, str]] | None,
        tuple[tuple[int, ...], int],
        tuple[list[int], str],
    ],
)
@given(value=SCALAR_VALUES, near=st.lists(SCALAR_VALUES, min_size=2, max_size=4), odd=st.booleans())
def test_a_compiled_check_accepts_what_the_type_accepts(declared: Any, value: Any, near: list[Any], odd: bool) -> None:
    value_type = TypeSerializer.of(declared).value_type
    check = checks_of("s", "value", value_type, None).value
    for each in (value, tuple(near), Pair(near), (1, tuple(near[:2])), (1, 2, 3)[: 2 + odd], (0, (None, "x"))):
        assert _refusal(check, each) == _refusal(value_type.check, each)


def _refusal(check: Any, value: Any) -> bool:
    try:
        check(value)
    except StateValueError:
        return True
    return False


def test_an_int_beyond_those_of_msgpack_is_no_float_of_a_union() -> None:
    """Nothing could tell it from an int, and every checkpoint would refuse it."""
    declared = TypeSerializer.of(float | str)
    check = checks_of("s", "value", declared.value_type, None).value
    check(2**63)
    with pytest.raises(StateValueError, match="union<float,str>"):
        check(2**64)

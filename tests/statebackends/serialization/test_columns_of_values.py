"""Columns of tuples and of dicts: the way that takes all values at once gives what the way of each value gives, and refuses the
same."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.serialization.type_serializer import TypeSerializer


class Price(TypedDict):
    name: str
    cents: int


class Offer(TypedDict):
    name: str
    cents: NotRequired[int]


class Special(tuple[Any, ...]):
    """A tuple that is none by its class."""


class Mapped(dict[str, Any]):
    """A dict that is none by its class."""


DECLARED: list[Any] = [Price, Offer]
TUPLES = st.one_of(st.tuples(st.integers(0, 9), st.text(max_size=1)), st.tuples(st.integers(0, 9)), st.just([1, "a"]))
DICTS = st.one_of(
    st.fixed_dictionaries({"name": st.text(max_size=1), "cents": st.integers(0, 9)}),
    st.fixed_dictionaries({"name": st.text(max_size=1), "other": st.integers(0, 9)}),
    st.fixed_dictionaries({"name": st.text(max_size=1)}),
    st.fixed_dictionaries({"name": st.text(max_size=1), "cents": st.integers(0, 9), "more": st.integers(0, 9)}),
)


def arrow(declared: Any, values: list[Any]) -> pa.Array | str:
    try:
        return TypeSerializer.of(declared).to_arrow(values)
    except StateValueError:
        return "refused"


@given(values=st.lists(TUPLES, max_size=4))
def test_tuples(values: list[Any]) -> None:
    alike = [Special(value) if isinstance(value, tuple) else value for value in values]
    assert arrow(tuple[int, str], values) == arrow(tuple[int, str], alike)


NUMBERS = {
    int: st.one_of(st.integers(-(2**64), 2**64), st.sampled_from([2**63 - 1, -(2**63), 2**63, True, np.int64(3), 1.0])),
    float: st.one_of(st.floats(), st.sampled_from([-0.0, 1, True, 2**63, 2**53 + 1, np.float64(2)])),
}


@given(kind=st.sampled_from([int, float]), data=st.data())
def test_tuples_of_numbers(kind: type, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.tuples(NUMBERS[kind], st.integers(0, 9).map(kind)), max_size=3))
    together, alike = arrow(tuple[kind, kind], values), arrow(tuple[kind, kind], [Special(value) for value in values])  # type: ignore[valid-type]
    one_by_one = [arrow(kind, [member]) for value in values for member in value]
    assert isinstance(together, str) == isinstance(alike, str) == any(isinstance(each, str) for each in one_by_one)
    if not isinstance(together, str) and not isinstance(alike, str):
        expected = [each.to_pylist()[0] for each in one_by_one if not isinstance(each, str)]
        assert repr([member for value in together.to_pylist() for member in value.values()]) == repr(expected)
        assert together.type == alike.type
        assert not together.null_count
        assert not any(field.null_count for field in together.flatten())


@given(values=st.lists(DICTS, max_size=4), declared=st.sampled_from(DECLARED))
def test_dicts(values: list[Any], declared: Any) -> None:
    assert arrow(declared, values) == arrow(declared, [Mapped(value) for value in values])


@pytest.mark.parametrize("declared", [tuple[int, str], Price, Offer])
def test_nothing_is_a_column(declared: Any) -> None:
    found = arrow(declared, [])
    assert isinstance(found, pa.Array)
    assert len(found) == 0



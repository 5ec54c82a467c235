"""Columns of tuples and of dicts: the way that takes all values at once gives what the way of each value gives, and refuses the
same."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

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


@given(values=st.lists(DICTS, max_size=4), declared=st.sampled_from(DECLARED))
def test_dicts(values: list[Any], declared: Any) -> None:
    assert arrow(declared, values) == arrow(declared, [Mapped(value) for value in values])


@pytest.mark.parametrize("declared", [tuple[int, str], Price, Offer])
def test_nothing_is_a_column(declared: Any) -> None:
    found = arrow(declared, [])
    assert isinstance(found, pa.Array)
    assert len(found) == 0



"""Declared types in a module whose annotations are texts, which Python itself then does not look into."""

from __future__ import annotations

from typing import NotRequired, Required, TypedDict

import pytest

from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.serialization.type_serializer import TypeSerializer


class Row(TypedDict):
    name: str
    age: NotRequired[int]


class Loose(TypedDict, total=False):
    name: Required[str]
    age: int


@pytest.mark.parametrize("declared", [Row, Loose])
def test_keys_of_a_typed_dict_may_be_absent(declared: type) -> None:
    spec = TypeSerializer.of(declared)
    assert spec.text == "struct<name: str, age: int = default>"
    for row in ({"name": "Anna"}, {"name": "Anna", "age": 3}):
        assert spec.decode(spec.encode(row)) == row
        assert spec.from_arrow(spec.to_arrow([row])) == [row]
    with pytest.raises(StateValueError, match="'name' is missing"):
        spec.encode({"age": 3})

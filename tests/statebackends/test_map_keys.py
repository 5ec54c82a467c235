"""Keys of a map that are equal in Python are one entry: live, in RocksDB's files, in a savepoint, and after a restore."""

from __future__ import annotations

import datetime as dt
import fractions
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.serialization.value_types import FloatType
from holdfast.statebackends.state import MapStateDescriptor, Pickled
from tests.examples import examples
from tests.statebackends.backend_harness import Cluster, use


@dataclass(frozen=True)
class Place:
    name: str
    height: float


class Price(NamedTuple):
    amount: Decimal
    currency: str


class Span(msgspec.Struct, frozen=True, rename="camel"):
    from_: float
    until_hour: int | None


UTC, EAST = dt.UTC, dt.timezone(dt.timedelta(hours=2))
EQUAL: list[tuple[Any, Any, Any]] = [
    (float, 1.0, 1),
    (float, 0.0, -0.0),
    (float, 2.5, np.float64(2.5)),
    (Decimal, Decimal("1.0"), Decimal("1.00")),
    (Decimal, Decimal("1E+1"), Decimal("10")),
    (Decimal, Decimal("0.000"), Decimal("-0E+5")),
    (Decimal, Decimal("7E+40"), Decimal("7" + 40 * "0")),
    (tuple[float, int], (0.0, 1), (-0.0, 1)),
    (tuple[float, ...], (0.0, 2.0), (0, 2)),
    (float | None, 3.0, 3),
    (Place, Place("a", 1.0), Place("a", 1)),
    (Price, Price(Decimal("1.50"), "EUR"), Price(Decimal("1.5"), "EUR")),
    (Span, Span(1.0, None), Span(1, None)),
    (int, 1, np.int64(1)),
    (dt.datetime, dt.datetime(2024, 1, 1, 12, tzinfo=UTC), dt.datetime(2024, 1, 1, 14, tzinfo=EAST)),
]


@pytest.fixture(params=["filesystem", "rocksdb"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("key_type", "one", "other"), EQUAL)
def test_equal_keys_are_one_entry_wherever_it_lies(cluster: Cluster, key_type: Any, one: Any, other: Any) -> None:
    assert one == other
    seen = MapStateDescriptor("seen", key_type, int)
    backend: Any = cluster.backend([seen])
    state = backend.get_state(seen)
    use(backend, "k")
    state.put(one, 1)
    taken = cluster.take(backend)
    native: Any = cluster.restored(taken, [seen])
    use(native, "k")
    found = native.get_state(seen)
    assert [found.get(key) for key in (one, other)] == [1, 1]
    found.put(other, 2)
    for canonical in (False, True):
        again: Any = cluster.restored(cluster.take(native, canonical=canonical), [seen], kind="filesystem" if canonical else None)
        use(again, "k")
        entries = again.get_state(seen)
        assert [entries.get(key) for key in (one, other)] == [2, 2]
        assert list(entries.items()) == [(one, 2)]
    found.remove(one)
    last: Any = cluster.restored(cluster.take(native), [seen])
    use(last, "k")
    assert last.get_state(seen).is_empty()


def test_rows_with_an_older_form_of_a_key_are_mended_by_a_canonical_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, "rocksdb")
    seen = MapStateDescriptor("seen", float, int)
    with monkeypatch.context() as older:
        older.setattr(FloatType, "key_form", lambda shape: None)
        backend: Any = cluster.backend([seen])
        use(backend, "k")
        backend.get_state(seen).put(1, 7)
        taken = cluster.take(backend)
    restored: Any = cluster.restored(taken, [seen])
    use(restored, "k")
    assert list(restored.get_state(seen).items()) == [(1.0, 7)]
    assert restored.get_state(seen).get(1.0) is None
    mended: Any = cluster.restored(cluster.take(restored, canonical=True), [seen])
    use(mended, "k")
    assert mended.get_state(seen).get(1.0) == 7
    mended.get_state(seen).remove(1)
    last: Any = cluster.restored(cluster.take(mended), [seen])
    use(last, "k")
    assert last.get_state(seen).is_empty()
    cluster.close()


NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.sampled_from([0.0, -0.0]), st.integers(-5, 5).map(float)
)


@given(st.lists(NUMBERS, min_size=2, max_size=8))
@settings(max_examples=examples(100))
def test_floats_have_one_encoding_each(keys: list[float]) -> None:
    serializer = StateSerializer.of(MapStateDescriptor("m", float, int), KeyType.of(int))
    assert len({serializer.encode_entry(key) for key in keys}) == len(set(keys))
    assert [serializer.decode_entry(serializer.encode_entry(key)) for key in keys] == keys


@given(st.lists(st.decimals(allow_nan=False) | st.decimals(-20, 20, places=2), min_size=2, max_size=8), st.integers(0, 5))
@settings(max_examples=examples(100))
def test_decimals_have_one_encoding_each(keys: list[Decimal], zeros: int) -> None:
    serializer = StateSerializer.of(MapStateDescriptor("m", Decimal, int), KeyType.of(int))
    for key in keys:
        encoded = serializer.encode_entry(key)
        assert serializer.decode_entry(encoded) == key
        if key.is_finite():
            sign, digits, exponent = key.as_tuple()
            assert isinstance(exponent, int)
            assert serializer.encode_entry(Decimal((sign, digits + (0,) * zeros, exponent - zeros))) == encoded
    assert len(set(map(serializer.encode_entry, keys))) == len(set(keys))


@pytest.mark.parametrize(
    ("key_type", "key", "encoded"),
    [
        (float, 1, "cb3ff0000000000000"),
        (float, -0.0, "cb0000000000000000"),
        (Decimal, Decimal("1.50"), "a3312e35"),
        (Decimal, Decimal("1E+2"), "a3313030"),
        (tuple[float, str], (2, "a"), "92cb4000000000000000a161"),
        (Place, Place("a", 1), "82a46e616d65a161a6686569676874cb3ff0000000000000"),
        (Price, Price(Decimal(1), "a"), "92a131a161"),
        (int, 1, "01"),
    ],
)
def test_the_stored_bytes_stay_what_they_are(key_type: Any, key: Any, encoded: str) -> None:
    serializer = StateSerializer.of(MapStateDescriptor("m", key_type, int), KeyType.of(int))
    assert serializer.encode_entry(key).hex() == encoded


@pytest.mark.parametrize(
    "key_type", [frozenset[int], tuple[frozenset[str], int], int | float, float | str, bool | int, Decimal | int, Pickled]
)
def test_types_whose_equal_keys_would_be_stored_differently_are_refused(key_type: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"state 'm': .* is not the key type of a map: ") as caught:
        StateSerializer.of(MapStateDescriptor("m", key_type, int), KeyType.of(int))
    assert caught.value.state == "m"
    assert TypeSerializer.of(key_type).text, "as a value it is one"


@pytest.mark.parametrize("key_type", [int | str, int | bytes, int | None, tuple[int, str]])
def test_other_types_are_keys(key_type: Any) -> None:
    assert StateSerializer.of(MapStateDescriptor("m", key_type, int), KeyType.of(int)).key_form is None


def test_a_key_of_another_type_is_refused() -> None:
    serializer = StateSerializer.of(MapStateDescriptor("m", float, int), KeyType.of(int))
    for wrong in ("1", None, fractions.Fraction(1, 2), 2**63 + 1):
        with pytest.raises(Exception, match="is not of the declared type float"):
            serializer.encode_entry(wrong)

"""Key types: lossless casts, canonical bytes, key hash v1; scalar and vectorised forms agree."""

import pickle
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvalidKeyError
from holdfast.statebackends.keygroups import key_group_of_hash
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=20)
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int64": INT64,
    "float64": st.floats(),
    "utf8": TEXT | st.text("ab\0", max_size=4),
    "binary": st.binary(max_size=20) | st.lists(st.sampled_from([b"\0", b"\xff", b"a"]), max_size=4).map(b"".join),
    "date32": st.dates(),
    "timestamp[us, UTC]": st.datetimes(timezones=st.just(UTC)),
    "decimal128(10, 2)": st.decimals(-99999999, 99999999, places=2),
    "decimal128(38, 0)": st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
}
TUPLES = st.lists(st.sampled_from(sorted(STRATEGIES)), min_size=1, max_size=3).map(lambda f: f"tuple<{','.join(f)}>")


def strategy_of(key_type: KeyType) -> st.SearchStrategy[Any]:
    if key_type.is_tuple:
        return st.tuples(*[STRATEGIES[field.text] for field in key_type.fields])
    return STRATEGIES[key_type.text]


@st.composite
def typed_keys(draw: st.DrawFn) -> tuple[KeyType, list[Any]]:
    key_type = KeyType.parse(draw(st.sampled_from(sorted(STRATEGIES)) | TUPLES))
    return key_type, draw(st.lists(strategy_of(key_type), max_size=12))


def order(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(order(member) for member in value)
    if isinstance(value, float):
        return (value != value, 0.0 if value != value else value)
    return value


@given(typed_keys())
@settings(max_examples=examples(300), deadline=None)
def test_scalar_and_vectorised_forms_agree_and_round_trip(typed: tuple[KeyType, list[Any]]) -> None:
    key_type, values = typed
    column = key_type.column_of_values(values, max_parallelism=100, operator="o")
    encoded = [key_type.encode(value) for value in values]
    assert len(column) == len(values)
    assert column.encoded() == encoded
    assert column.hashes().tolist() == [key_type.hash32(value) for value in values]
    assert column.key_groups.tolist() == [key_group_of_hash(key_type.hash32(value), 100) for value in values]
    expected = [order(key_type.check(value)) for value in values]
    for decoded in ([key_type.decode(row) for row in encoded], key_type.values(encoded), column.values()):
        assert [order(value) for value in decoded] == expected
    arrays = key_type.arrays_of_encoded(encoded)
    again = key_type.column(arrays, max_parallelism=100, operator="o")
    assert again.encoded() == encoded
    assert [array.type for array in arrays] == key_type.arrow_types


@given(typed_keys())
@settings(max_examples=examples(200), deadline=None)
def test_canonical_bytes_keep_the_order_of_keys(typed: tuple[KeyType, list[Any]]) -> None:
    key_type, values = typed
    by_value = sorted(values, key=lambda value: order(key_type.check(value)))
    by_bytes = sorted(values, key=key_type.encode)
    assert [order(value) for value in by_value] == [order(value) for value in by_bytes]


@given(typed_keys(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_sliced_and_taken_columns_agree(typed: tuple[KeyType, list[Any]], data: st.DataObject) -> None:
    key_type, values = typed
    start = data.draw(st.integers(0, len(values)))
    whole = key_type.column_of_values(values, max_parallelism=7, operator=None)
    sliced = key_type.column([array.slice(start) for array in whole.arrays], max_parallelism=7, operator=None)
    rows = np.arange(start, len(values))
    lazy = whole.take(rows)
    assert sliced.hashes().tolist() == whole.hashes().tolist()[start:] == lazy.hashes().tolist()
    assert sliced.encoded() == whole.encoded()[start:] == lazy.encoded()
    eager = whole.take(rows)
    assert eager.key_groups.tolist() == sliced.key_groups.tolist()
    assert eager.encoded() == sliced.encoded()


@pytest.mark.parametrize(
    ("key_type", "value", "h32"),
    [
        (bool, True, 1231),
        (bool, False, 1237),
        (int, 0, 0),
        (int, -1, 0),
        (int, 2**32 + 5, 4),
        (date, date(1970, 1, 3), 2),
        (float, 0.0, 0),
        (float, -0.0, 0),
        (float, 1.0, 0x3FF00000),
        (float, float("nan"), 0x7FF80000),
        (str, "😀", 1772899),
        (bytes, b"", 1),
        (bytes, b"\xff", 30),
        (pa.decimal128(10, 2), Decimal("1.5"), 150),
        (tuple[int, str], (1, "a"), (31 * (31 + 1) + 97)),
    ],
)
def test_hash_vectors(key_type: Any, value: Any, h32: int) -> None:
    assert KeyType.of(key_type).hash32(value) == h32


def test_surrogate_pairs_hash_as_two_units() -> None:
    high, low = 0xD83D, 0xDE00
    assert KeyType.of(str).hash32("😀") == 31 * high + low


def test_equal_looking_keys_of_other_types_stay_distinct() -> None:
    encoded = {KeyType.of(type(key)).encode(key) for key in (1, 1.0, True, "1", b"1")}
    assert len(encoded) == 5


@pytest.mark.parametrize(
    ("key_type", "value"),
    [
        ("int64", None),
        ("int64", True),
        ("int64", 1.0),
        ("int64", "1"),
        ("int64", 2**63),
        ("int64", -(2**63) - 1),
        ("int64", np.float64(1.0)),
        ("int64", np.bool_(True)),
        ("int64", np.datetime64("2020-01-01T00:00:00", "ns")),
        ("int64", np.uint64(2**63)),
        ("int64", pa.scalar(None, pa.int64())),
        ("float64", 1),
        ("float64", True),
        ("bool", 1),
        ("utf8", b"x"),
        ("utf8", "\ud800"),
        ("binary", "x"),
        ("date32", datetime(2020, 1, 1)),
        ("timestamp[us, UTC]", datetime(2020, 1, 1)),
        ("timestamp[us, UTC]", date(2020, 1, 1)),
        ("timestamp[us, UTC]", datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))),
        ("timestamp[us, UTC]", np.datetime64("2020-01-01T00:00:00", "us")),
        ("timestamp[us, UTC]", pa.scalar(1, pa.timestamp("ns", "UTC"))),
        ("decimal128(4, 2)", Decimal("100")),
        ("decimal128(4, 2)", Decimal("1.005")),
        ("decimal128(4, 2)", Decimal("NaN")),
        ("decimal128(4, 2)", Decimal("Infinity")),
        ("decimal128(4, 2)", Decimal("1e999999")),
        ("decimal128(4, 2)", Decimal("1e-999999")),
        ("decimal128(4, 2)", Decimal("1e-999999999")),
        ("decimal128(4, 2)", Decimal(f"1.{'0' * 90}1")),
        ("decimal128(4, 2)", 1),
        ("tuple<int64,utf8>", (1, None)),
        ("tuple<int64,utf8>", (None, "a")),
        ("tuple<int64,utf8>", None),
        ("tuple<int64,utf8>", (1,)),
        ("tuple<int64,utf8>", [1, "a"]),
    ],
)
def test_lossy_or_null_key_is_refused_and_names_the_operator(key_type: str, value: Any) -> None:
    parsed = KeyType.parse(key_type)
    with pytest.raises(InvalidKeyError, match="count-by-user") as caught:
        parsed.check(value, operator="count-by-user")
    assert caught.value.operator == "count-by-user"
    for refuse in (parsed.encode, parsed.hash32):
        with pytest.raises(InvalidKeyError):
            refuse(value)
    with pytest.raises(InvalidKeyError, match="count-by-user"):
        parsed.column_of_values([value], max_parallelism=128, operator="count-by-user")


@pytest.mark.parametrize(
    ("key_type", "value", "canonical"),
    [
        ("int64", np.int8(-3), -3),
        ("int64", np.uint64(7), 7),
        ("int64", pa.scalar(7, pa.uint16()), 7),
        ("float64", np.float32(0.5), 0.5),
        ("float64", -0.0, 0.0),
        ("utf8", np.str_("a"), "a"),
        ("utf8", pa.scalar("a", pa.large_utf8()), "a"),
        ("binary", bytearray(b"a"), b"a"),
        ("bool", np.bool_(True), True),
        ("date32", np.datetime64("2020-01-02"), date(2020, 1, 2)),
        ("timestamp[us, UTC]", datetime(2020, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2020, 1, 1, tzinfo=UTC)),
        ("decimal128(4, 2)", Decimal("1.5000"), Decimal("1.50")),
        ("decimal128(4, 2)", Decimal("-0"), Decimal("0.00")),
    ],
)
def test_lossless_casts(key_type: str, value: Any, canonical: Any) -> None:
    parsed = KeyType.parse(key_type)
    checked = parsed.check(value)
    assert checked == canonical
    assert type(checked) is type(canonical)
    assert parsed.encode(value) == parsed.encode(canonical)
    assert parsed.column_of_values([value], max_parallelism=1).encoded() == [parsed.encode(canonical)]


@pytest.mark.parametrize(
    ("array", "key_type"),
    [
        (pa.array([1, 2], pa.int8()), "int64"),
        (pa.array([1, 2], pa.uint32()), "int64"),
        (pa.array([0.5, 2], pa.float32()), "float64"),
        (pa.array(["a", "b"]).dictionary_encode(), "utf8"),
        (pa.array(["a", "b"], pa.large_utf8()), "utf8"),
        (pa.array(["a", "b"], pa.string_view()), "utf8"),
        (pa.array([b"ab"], pa.binary(2)), "binary"),
        (pa.array([date(2020, 1, 1)]), "date32"),
        (pa.array([1], pa.timestamp("ms", "Europe/Rome")), "timestamp[us, UTC]"),
        (pa.array([Decimal("1.5")], pa.decimal256(5, 2)), "decimal128(5, 2)"),
        (pa.chunked_array([["a"], ["b"]]), "utf8"),
        (pa.chunked_array([], pa.utf8()), "utf8"),
        (pa.array([], pa.int64()), "int64"),
    ],
)
def test_columns_are_cast(array: Any, key_type: str) -> None:
    inferred = KeyType.from_arrow([array.type])
    assert inferred.text == key_type
    column = inferred.column([array], max_parallelism=128, operator="o")
    assert column.arrays[0].type == inferred.arrow_types[0]
    assert column.hashes().tolist() == [inferred.hash32(value) for value in column.values()]
    assert column.encoded() == [inferred.encode(value) for value in column.values()]


@pytest.mark.parametrize(
    ("array", "key_type"),
    [
        (pa.array([1, None]), "int64"),
        (pa.nulls(1), "utf8"),
        (pa.array(["a", None]).dictionary_encode(), "utf8"),
        (pa.array([1.0]), "int64"),
        (pa.array([True]), "int64"),
        (pa.array([1]), "float64"),
        (pa.array([1], pa.timestamp("us")), "timestamp[us, UTC]"),
        (pa.array([1], pa.timestamp("ns", "UTC")), "timestamp[us, UTC]"),
        (pa.array([2**62], pa.timestamp("us", "UTC")), "timestamp[us, UTC]"),
        (pa.array([2**62], pa.timestamp("s", "UTC")), "timestamp[us, UTC]"),
        (pa.array([2**30], pa.date32()), "date32"),
        (pa.array([Decimal("1.234")], pa.decimal128(10, 3)), "decimal128(5, 2)"),
        (pa.array([[1]]), "int64"),
    ],
)
def test_column_with_null_or_lossy_rows_is_refused(array: pa.Array, key_type: str) -> None:
    with pytest.raises(InvalidKeyError, match="by-key"):
        KeyType.parse(key_type).column([array], max_parallelism=128, operator="by-key")


@pytest.mark.parametrize("rows", [[b"\xed\xa0\x80"], [b"\xff"], [b"a\xc3", b"\xa9"]])
def test_column_with_invalid_text_is_refused(rows: list[bytes]) -> None:
    column = KeyType.of(str).column([pa.array(rows, pa.binary()).view(pa.utf8())], max_parallelism=128, operator="by-key")
    with pytest.raises(InvalidKeyError, match="UTF-8"):
        _ = column.key_groups


def test_wrong_number_or_length_of_columns_is_refused() -> None:
    pair = KeyType.of(tuple[int, int])
    with pytest.raises(InvalidConfigError, match="2 columns"):
        pair.column([pa.array([1])], max_parallelism=128)
    with pytest.raises(InvalidConfigError, match="length"):
        pair.column([pa.array([1]), pa.array([1, 2])], max_parallelism=128)


@pytest.mark.parametrize(
    "data_type",
    [
        pa.uint64(),
        pa.timestamp("us"),
        pa.timestamp("ns", "UTC"),
        pa.null(),
        pa.list_(pa.int64()),
        pa.date64(),
        pa.decimal256(50, 2),
    ],
)
def test_columns_that_no_key_type_holds_are_refused(data_type: pa.DataType) -> None:
    with pytest.raises(InvalidConfigError):
        KeyType.from_arrow([data_type])


@pytest.mark.parametrize("named", [Decimal, list, tuple[()], tuple[int, ...], object, None, complex, tuple[tuple[int], int]])
def test_python_types_that_are_no_keys_are_refused(named: Any) -> None:
    with pytest.raises(InvalidConfigError):
        KeyType.of(named)


@pytest.mark.parametrize(
    "text", ["", "int32", "tuple<>", "tuple<int64", "decimal128(39, 1)", "tuple<tuple<int64>>", "decimal128(4,2"]
)
def test_unknown_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        KeyType.parse(text)


def test_texts_round_trip() -> None:
    texts = [*STRATEGIES, "tuple<int64>", "tuple<utf8,decimal128(10, 2),timestamp[us, UTC],binary>"]
    for text in texts:
        assert KeyType.parse(text).text == text
        assert KeyType.parse(text) is KeyType.parse(text)
        assert pickle.loads(pickle.dumps(KeyType.parse(text))) == KeyType.parse(text)
    assert KeyType.of(tuple[str, pa.decimal128(3, 1)]).text == "tuple<utf8,decimal128(3, 1)>"  # type: ignore[misc]
    assert KeyType.from_arrow([pa.int8(), pa.utf8()]).text == "tuple<int64,utf8>"
    assert KeyType.of(KeyType.parse("int64")) == KeyType.of(int)


@given(typed_keys(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_damaged_bytes_never_decode_to_a_wrong_length(typed: tuple[KeyType, list[Any]], data: st.DataObject) -> None:
    key_type, values = typed
    for value in values[:2]:
        encoded = key_type.encode(value)
        cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
        try:
            decoded = key_type.decode(cut)
        except CorruptStateError:
            continue
        assert key_type.encode(decoded) == cut
    for wrong in (b"", b"\xee", key_type.encode(values[0]) + b"\0" if values else b""):
        if key_type.text in ("utf8", "binary") and wrong[:1] in (b"\x04", b"\x05"):
            continue
        with pytest.raises(CorruptStateError):
            key_type.decode(wrong)
        with pytest.raises(CorruptStateError):
            key_type.arrays_of_encoded([wrong])

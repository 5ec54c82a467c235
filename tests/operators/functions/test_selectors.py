"""Keys of batches: columns, functions, declared types (scenarios O10, O13)."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import FunctionKeySelector, Selector, key_selector
from holdfast.statebackends.errors import GraphError, InvalidKeyError, UserFunctionError

ROWS = RowType(pa.schema([("s", pa.string()), ("i", pa.int32()), ("f", pa.float64()), ("d", pa.date32())]))
COLUMNS = pa.record_batch({"s": ["a", "b"], "i": [1, 2], "f": [0.5, -0.0], "d": [1, 2]}, schema=ROWS.schema)


def selector(key: Any, key_type: Any = None) -> Selector:
    return key_selector(key, key_type, ROWS, "key_by(test)")


def keys(chosen: Selector, batch: Batch | None = None) -> Any:
    return chosen.keys(batch or Batch(columns=COLUMNS), max_parallelism=128, operator="op", subtask=1)


@pytest.mark.parametrize(
    ("key", "key_type", "text", "names"),
    [
        ("s", None, "utf8", ("s",)),
        (["i"], None, "int64", ("i",)),
        (["s", "i"], None, "tuple<utf8,int64>", ("s", "i")),
        (lambda row: row["i"], int, "int64", ("key",)),
        (lambda row: row["i"], "int64", "int64", ("key",)),
        (lambda row: (row["s"], row["i"]), tuple[str, int], "tuple<utf8,int64>", ("key_0", "key_1")),
    ],
)
def test_types_and_names(key: Any, key_type: Any, text: str, names: tuple[str, ...]) -> None:
    chosen = selector(key, key_type)
    assert (chosen.key_type_text, chosen.names) == (text, names)


def test_a_column_and_a_function_agree_on_identity_and_place() -> None:
    by_column, by_function = keys(selector("s")), keys(selector(lambda row: row["s"], str))
    assert by_column.encoded() == by_function.encoded()
    assert by_column.key_groups.tolist() == by_function.key_groups.tolist() == [81, 22]


def test_rows_without_columns_are_keyed_through_their_schema() -> None:
    rows = Batch(rows=COLUMNS.to_pylist(), schema=ROWS.schema)
    assert keys(selector(["s", "i"]), rows).encoded() == keys(selector(["s", "i"])).encoded()


def test_o13_numbers_that_are_equal_in_python_are_distinct_keys() -> None:
    encoded = {
        keys(selector(lambda row, value=value: value, kind)).encoded()[0]
        for value, kind in ((1, int), (1.0, float), (True, bool), ("1", str))
    }
    assert len(encoded) == 4
    for value, kind in ((True, int), (1, bool), (1.0, int), ("1", int)):
        with pytest.raises(InvalidKeyError):
            keys(selector(lambda row, value=value: value, kind))


@pytest.mark.parametrize("make", [lambda: selector("s"), lambda: selector(lambda row: row["s"], str)])
def test_o10_a_null_key_names_operator_and_subtask(make: Any) -> None:
    null = Batch(columns=pa.RecordBatch.from_pylist([{"s": "a"}, {"s": None}], schema=ROWS.schema))
    with pytest.raises(InvalidKeyError, match="'op'") as caught:
        keys(make(), null)
    assert (caught.value.operator, caught.value.subtask) == ("op", 1)


def test_a_function_that_raises_names_the_record() -> None:
    with pytest.raises(UserFunctionError) as caught:
        keys(selector(lambda row: 1 // (row["i"] - 2), int))
    assert (caught.value.operator, caught.value.subtask) == ("op", 1)
    assert "'i': 2" in (caught.value.record or "")


def test_the_annotation_of_a_function_is_its_key_type() -> None:
    def key(row: dict[str, Any]) -> np.int64 | int:
        return int(row["i"])

    def plain(row: dict[str, Any]) -> int:
        return int(row["i"])

    assert selector(plain).key_type_text == "int64"
    with pytest.raises(GraphError, match=r"key_by\(test\)"):
        selector(key)


def test_a_selector_travels() -> None:
    for chosen in (selector(["s", "i"]), selector(lambda row: row["s"], str)):
        copied = pickle.loads(cloudpickle.dumps(chosen))
        assert keys(copied).encoded() == keys(chosen).encoded()
        assert isinstance(copied, FunctionKeySelector) == (chosen.columns is None)

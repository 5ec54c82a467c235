"""Rows that somebody brings, by `bootstrap` and `edit`: spellings, decimals, numbers and positions."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.statebackends.errors import HoldfastError, InvalidKeyError, StateValueError
from holdfast.statebackends.state import StateDescriptor

BY_DECIMAL = hf.MapStateDescriptor("s", Decimal, int)
BY_FLOAT = hf.MapStateDescriptor("s", float, int)
PRICE = hf.ValueStateDescriptor("s", Decimal)
PRICES = hf.ListStateDescriptor("s", list[Decimal])
SHARE = hf.ValueStateDescriptor("s", float)
SEEN = hf.ListStateDescriptor("s", int)


def bootstrap(folder: Path, descriptor: StateDescriptor, frame: Any, **names: str) -> hf.Snapshot:
    return hf.Savepoint.create(max_parallelism=8).with_state("op", descriptor, frame, **names).write(folder)


REFUSED: dict[str, tuple[StateDescriptor, dict[str, Any], type[HoldfastError], str]] = {
    "one decimal in two spellings": (
        BY_DECIMAL,
        {"map_key": ["1.0", "1.00"], "value": [1, 2]},
        InvalidKeyError,
        "two rows have {'key': 'a', 'namespace': b'', 'map_key': '1.00'}",
    ),
    "one zero in two spellings": (BY_FLOAT, {"map_key": [0.0, -0.0], "value": [1, 2]}, InvalidKeyError, "two rows have"),
    "a key that is no decimal": (BY_DECIMAL, {"map_key": ["1", "x"], "value": [1, 2]}, StateValueError, "row 1: 'x' is no decimal"),
    "elements of one position": (SEEN, {"position": [3, 3], "value": [1, 2]}, InvalidKeyError, "3}; leave 'position' out"),
    "a list with what is no decimal": (PRICES, {"value": [["1"], ["2", "y"]]}, StateValueError, "row 1: 'y' is no decimal"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("tool", ["bootstrap", "edit"])
def test_what_a_state_can_not_have_is_refused_by_name(tmp_path: Path, tool: str, name: str) -> None:
    descriptor, columns, kind, words = REFUSED[name]
    rows = pa.table({"key": ["a", "a"], **columns})
    target = tmp_path / "target"
    names = {"position": "position"} if "position" in columns else {}
    source = bootstrap(tmp_path / "source", descriptor, rows.slice(0, 1), **names)

    def write() -> object:
        if tool == "bootstrap":
            return bootstrap(target, descriptor, rows, **names)
        return source.edit(target, uid="op", state="s", function=lambda batch: rows)

    with pytest.raises(kind) as caught:
        write()
    assert words in str(caught.value)
    assert (caught.value.fields["operator"], caught.value.fields["state"]) == ("op", "s")
    assert not target.exists()


def test_text_that_is_no_decimal_names_its_row(tmp_path: Path) -> None:
    rows = pa.table({"key": ["a", "b", "c"], "value": ["1.5", "1E+3", "one"]})
    with pytest.raises(StateValueError, match="operator 'op', state 's', row 2: 'one' is no decimal") as caught:
        bootstrap(tmp_path / "target", PRICE, rows)
    assert caught.value.fields["row"] == 2


TAKEN: list[tuple[StateDescriptor, Any, list[Any]]] = [
    (PRICE, pa.array([Decimal("1.50")], pa.decimal128(10, 2)), ["1.50"]),
    (PRICE, pa.array([Decimal("1E+3")], pa.decimal128(3, -3)), ["1E+3"]),
    (PRICE, pa.array([7], pa.int16()), ["7"]),
    (PRICES, pa.array([[Decimal("1.50")]], pa.list_(pa.decimal128(10, 2))), [["1.50"]]),
    (SHARE, pa.array([2**53]), [float(2**53)]),
    (SHARE, pa.array([0.5], pa.float32()), [0.5]),
]


@pytest.mark.parametrize(("descriptor", "values", "stored"), TAKEN)
def test_numbers_fit_where_nothing_is_lost(
    tmp_path: Path, descriptor: StateDescriptor, values: pa.Array, stored: list[Any]
) -> None:
    snapshot = bootstrap(tmp_path / "target", descriptor, pa.table({"key": ["a"], "value": values}))
    assert snapshot.table("op", "s").read_all()["value"].to_pylist() == stored


def test_decimals_of_pandas_fit(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"key": ["a", "b"], "value": [Decimal("1.5"), Decimal("20.25")]})
    snapshot = bootstrap(tmp_path / "target", PRICE, frame)
    assert sorted(map(Decimal, snapshot.table("op", "s").read_all()["value"].to_pylist())) == [Decimal("1.5"), Decimal("20.25")]
    with pytest.raises(StateValueError, match="has to be string"):
        bootstrap(tmp_path / "texts", hf.ValueStateDescriptor("s", str), frame)


@pytest.mark.parametrize(
    ("descriptor", "values", "words"),
    [
        (SHARE, [1, 2**53 + 1], "row 1: column 'value': Integer value 9007199254740993 not in range"),
        (PRICE, [0.5, 0.1], "row 0: column 'value' is double and has to be decimal"),
        (PRICE, [True, False], "row 0: column 'value' is bool and has to be decimal"),
    ],
)
def test_numbers_that_would_lose_something_are_refused(
    tmp_path: Path, descriptor: StateDescriptor, values: list[Any], words: str
) -> None:
    with pytest.raises(StateValueError) as caught:
        bootstrap(tmp_path / "target", descriptor, pa.table({"key": ["a", "b"], "value": values}))
    assert words in str(caught.value)


def test_one_column_of_a_frame_may_serve_as_several(tmp_path: Path) -> None:
    rows = pa.table({"key": ["a", "a"], "n": [5, 3]})
    snapshot = bootstrap(tmp_path / "target", SEEN, rows, value="n", position="n")
    assert snapshot.table("op", "s").read_all()["value"].to_pylist() == [3, 5]


@pytest.mark.parametrize("kind", ["memory", "filesystem", "rocksdb"])
def test_a_map_is_the_same_whichever_spelling_a_backend_keeps(tmp_path: Path, kind: Any) -> None:
    from holdfast.statebackends.backend import SnapshotTarget
    from holdfast.statebackends.factory import create_keyed_backend
    from holdfast.statebackends.handles import KeyGroupRange, OperatorState, OperatorSubtaskState
    from holdfast.statebackends.keygroups import operator_id
    from holdfast.statebackends.serialization.keys import KeyType
    from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
    from holdfast.statebackends.storage.directory import LocalStorage
    from holdfast.statebackends.storage.port import run_flow

    key, storage = KeyType.of(str), LocalStorage(tmp_path)
    backend = create_keyed_backend(
        kind, descriptors=(BY_DECIMAL,), key_type=key, key_groups=KeyGroupRange(0, 8), max_parallelism=8, operator="op", subtask=0,
        local_dir=str(tmp_path / "local"),
    )  # fmt: skip
    backend.set_current_key(key.encode("a"), key.key_group("a", 8))
    backend.get_state(BY_DECIMAL).put(Decimal("1.50"), 1)
    backend.get_state(BY_DECIMAL).put(Decimal("1E+2"), 2)
    handles = run_flow(backend.snapshot(1).flow(SnapshotTarget(1, "sp", "op-0-1-n", False, 0)), storage)
    operator = OperatorState("op", operator_id("op"), "op", 1, 8, (OperatorSubtaskState(tuple(handles)),))
    metadata = SnapshotMetadata(
        job_id="0" * 32, job_name="j", checkpoint_id=1, kind="savepoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
        completion_timestamp_ms=0, operators=(operator,),
    )  # fmt: skip
    (tmp_path / "sp").mkdir(exist_ok=True)
    (tmp_path / "sp/_metadata").write_bytes(encode_metadata(metadata))
    rows = pa.table({"key": ["a", "a"], "map_key": ["1.5", "100"], "value": [1, 2]})
    other = bootstrap(tmp_path / "other", BY_DECIMAL, rows)
    found = hf.Snapshot(tmp_path / "sp").diff(other)
    assert [(state.same, state.added, state.removed, state.changed) for state in found.states] == [(2, 0, 0, 0)]
    backend.dispose()

"""List state from tables whose rows another tool has moved: elements come back in the order of their positions, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot import row_rules as rowrules
from holdfast.statebackends.snapshot import table_file as tables_module
from holdfast.statebackends.snapshot.list_order import in_list_order
from holdfast.statebackends.state import ListStateDescriptor, Ttl
from holdfast.statebackends.state_processor import rows as judgedrows
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from tests.statebackends.backend_harness import MAX_PARALLELISM, SEEN, Cluster, stored, use

KINDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")
LISTS = {"a": ["a0", "a1"], "b": ["b0", "b1", "b2"], "c": ["c0"], "d": ["d0", "d1"]}

Change = Callable[[pa.Table], pa.Table]


def _changed(cluster: Cluster, change: Change, state: ListStateDescriptor = SEEN) -> tuple[tuple[KeyedStateHandle, ...], str]:
    """A savepoint of LISTS whose table another tool has changed."""
    backend = cluster.backend([state])
    for key, elements in LISTS.items():
        for namespace in (b"", b"w"):
            use(backend, key)
            backend.get_state(state, namespace).add_all([element + namespace.decode() for element in elements])
    target = cluster.target(canonical=True, inline_threshold=1 << 20)
    pending = backend.snapshot(target.checkpoint_id)
    (handle,), folder = cluster.finish(pending, canonical=True, inline_threshold=1 << 20)
    (part,) = handle.parts
    assert isinstance(part, InlineHandle)
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(io.BytesIO(part.data))), sink)
    changed = KeyedStateHandle(handle.key_groups, handle.format, handle.states, (InlineHandle(sink.getvalue()),), handle.names)
    return (changed,), folder


def _restored(cluster: Cluster, change: Change, state: ListStateDescriptor = SEEN) -> KeyedBackendBase:
    return cluster.restored(_changed(cluster, change, state), [state])


def _rows(cluster: Cluster, change: Change, **options: Any) -> pa.Table:
    """What tools read of the same savepoint."""
    snapshot = stored(cluster, _changed(cluster, change))
    state = snapshot.state("op", "seen")
    with snapshot.reader() as reader:
        schema = state_schema(reader, state)
        batches = list(state_batches(reader, state, schema, **options))
        return pa.Table.from_batches(batches, batches[0].schema)


def _lists(backend: KeyedBackendBase, state: ListStateDescriptor = SEEN) -> dict[tuple[str, bytes], list[str]]:
    found = {}
    for namespace in (b"", b"w"):
        for key in LISTS:
            use(backend, key)
            found[key, namespace] = list(backend.get_state(state, namespace).get())
    return found


def _sorted(*columns: tuple[str, str]) -> Change:
    return lambda table: table.sort_by(list(columns))


def _positions(array: Callable[[list[int]], pa.Array]) -> Change:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("position")
        return table.set_column(index, "position", array(table.column(index).to_pylist()))

    return change


def _reversed_pairs(table: pa.Table) -> pa.Table:
    """Lists of two elements backwards: 1, 0, 1, 0."""
    keys, names, positions = (table.column(name).to_pylist() for name in ("key", "namespace", "position"))
    order = sorted(range(len(keys)), key=lambda row: (keys[row], names[row], positions[row] * (1 if keys[row] == "b" else -1)))
    return table.take(order)


def _nested_pairs(table: pa.Table) -> pa.Table:
    """One list around the other: 0 of this, 1 and 0 of that, 1 of this."""
    keys, names, positions = (table.column(name).to_pylist() for name in ("key", "namespace", "position"))
    places = {(b"", 0): 0, (b"w", 1): 1, (b"w", 0): 2, (b"", 1): 3}
    pairs = [row for row in range(len(keys)) if keys[row] in "ad"]
    pairs.sort(key=lambda row: (keys[row], places[names[row], positions[row]]))
    return table.take([*pairs, *(row for row in range(len(keys)) if keys[row] not in "ad")])


WHOLE = {(key, name): [each + name.decode() for each in elements] for key, elements in LISTS.items() for name in (b"", b"w")}

MOVED: dict[str, Change] = {
    "as written": lambda table: table,
    "reversed within keys": _sorted(("key_group", "ascending"), ("key", "ascending"), ("position", "descending")),
    "pairs reversed": _reversed_pairs,
    "pairs nested": _nested_pairs,
    "by position": _sorted(("position", "ascending"), ("key", "ascending")),
    "by position, the last first": _sorted(("position", "descending"), ("key", "ascending")),
    "by value": _sorted(("value", "descending")),
    "namespaces between each other": _sorted(("key", "ascending"), ("position", "descending"), ("namespace", "ascending")),
    "int64": _positions(lambda given: pa.array(given, pa.int64())),
    "uint8": _positions(lambda given: pa.array(given, pa.uint8())),
    "dictionary": _positions(lambda given: pa.array(given, pa.int32()).dictionary_encode()),
    "with gaps": _positions(lambda given: pa.array([position * 7 + 3 for position in given], pa.int32())),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_elements_come_by_position(tmp_path: Path, kind: BackendKind, change: Change) -> None:
    cluster = Cluster(tmp_path, kind)
    assert _lists(_restored(cluster, change)) == WHOLE
    cluster.close()


def test_an_element_that_another_tool_took_out_is_gone(tmp_path: Path) -> None:
    found = _lists(_restored(Cluster(tmp_path, "filesystem"), lambda table: table.filter(pc.field("value") != "b1")))
    assert found == WHOLE | {("b", b""): ["b0", "b2"]}


def test_elements_with_a_ttl_come_by_position(tmp_path: Path) -> None:
    state = ListStateDescriptor("seen", str, ttl=Ttl(60_000))
    assert _lists(_restored(Cluster(tmp_path, "rocksdb"), MOVED["reversed within keys"], state), state) == WHOLE


WRONG: dict[str, tuple[Change, str]] = {
    "null": (_positions(lambda given: pa.array([None, *given[1:]], pa.int32())), "null in column 'position'"),
    "fraction": (_positions(lambda given: pa.array([each + 0.5 for each in given])), "is double"),
    "whole float": (_positions(lambda given: pa.array([float(each) for each in given])), "is double"),
    "text": (_positions(lambda given: pa.array(list(map(str, given)))), "is string"),
    "nulls only": (_positions(lambda given: pa.nulls(len(given))), "is null"),
    "negative": (_positions(lambda given: pa.array([-1, *given[1:]], pa.int32())), "-1 in column 'position'"),
    "beyond int64": (_positions(lambda given: pa.array([2**64 - 1, *given[1:]], pa.uint64())), "18446744073709551615"),
    "missing": (lambda table: table.drop_columns(["position"]), "no column 'position'"),
    "all the same": (_positions(lambda given: pa.array([0] * len(given), pa.int32())), "two rows have the position 0 of key"),
    "rows twice": (lambda table: pa.concat_tables([table, table]), "two rows have the position 0 of key"),
    "a list twice": (
        lambda table: pa.concat_tables([table, table.filter((pc.field("key") == "d") & (pc.field("namespace") == b"w"))]),
        "two rows have the position 0 of key 'd', namespace b'w'",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_positions_that_mean_nothing_are_refused(tmp_path: Path, kind: BackendKind, wrong: tuple[Change, str]) -> None:
    cluster = Cluster(tmp_path, kind)
    with pytest.raises(CorruptStateError, match=r"operator 'op': .*state 'seen': .*" + wrong[1]) as caught:
        _restored(cluster, wrong[0])
    assert caught.value.fields["operator"] == "op"
    assert "seen" in caught.value.fields["path"]
    cluster.close()


@pytest.fixture(params=[1, 7, 1 << 17])
def judged_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows that tools judge together; batches are of 3."""
    monkeypatch.setattr(judgedrows, "JUDGED_ROWS", request.param)
    monkeypatch.setattr(tables_module, "BATCH_ROWS", 3)
    return int(request.param)


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_tools_show_what_a_restore_takes(tmp_path: Path, judged_rows: int, change: Change) -> None:
    found: dict[Any, list[Any]] = {}
    for row in _rows(Cluster(tmp_path, "filesystem"), change).to_pylist():
        found.setdefault((row["key"], row["namespace"]), []).append((row["position"], row["value"]))
    assert {owner: [value for _, value in sorted(rows)] for owner, rows in found.items()} == WHOLE


@pytest.mark.parametrize("columns", [None, ["value"], ["position", "key"]])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_tools_refuse_what_a_restore_refuses(
    tmp_path: Path, judged_rows: int, wrong: tuple[Change, str], columns: list[str] | None
) -> None:
    with pytest.raises(CorruptStateError, match=r"operator 'op'.*state 'seen'.*" + wrong[1]):
        _rows(Cluster(tmp_path, "filesystem"), wrong[0], columns=columns)


def test_tools_hold_a_batch_of_key_groups_and_no_values(tmp_path: Path, judged_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[pa.Table] = []
    monkeypatch.setattr(rowrules, "in_list_order", lambda table, *_: judged.append(table))
    table = _rows(Cluster(tmp_path, "filesystem"), MOVED["by value"])
    largest = max(pc.value_counts(table["key_group"]).field("counts").to_pylist())
    assert sum(map(len, judged)) == len(table)
    assert max(map(len, judged)) < judged_rows + 3 + largest
    assert {name for each in judged for name in each.schema.names} == {"key_group", "key", "namespace", "position"}


KEY_TYPES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (str, ("a", "Aa", "BB", "")),  # two of them have the same hash
    (int, (0, -1, 2**40)),
    (float, (0.0, 1.5, float("nan"))),
    (tuple[str, int], (("Aa", 1), ("BB", 1), ("Aa", 2))),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[KeyType, pa.Table]:
    """Rows of lists as a backend writes them, some moved, some numbered otherwise; `value` is the number of the row."""
    declared, keys = draw(st.sampled_from(KEY_TYPES))
    key_type = KeyType.of(declared)
    owners = draw(st.lists(st.tuples(st.sampled_from(keys), st.sampled_from([b"", b"w", b"x"])), max_size=5, unique=True))
    rows = [(owner, position) for owner in owners for position in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    if draw(st.booleans()) and rows:
        rows += draw(st.lists(st.tuples(st.sampled_from(owners), st.integers(0, 5)), max_size=3))
    arrays = key_type.arrays_of_encoded([key_type.encode(key) for (key, _), _ in rows])
    names = [f"key_{index}" for index in range(len(arrays))] if key_type.is_tuple else ["key"]
    table = pa.table(
        [
            *arrays,
            pa.array([namespace for (_, namespace), _ in rows], pa.binary()),
            pa.array([position for _, position in rows], pa.int32()),
            pa.array(range(len(rows)), pa.int64()),
        ],
        names=[*names, "namespace", "position", "value"],
    )
    cut = draw(st.integers(0, len(rows)))
    return key_type, pa.concat_tables([table.slice(0, cut), table.slice(cut)])


@given(tables())
def test_order_is_that_of_a_sort_of_each_list(given_table: tuple[KeyType, pa.Table]) -> None:
    key_type, table = given_table
    own = [name for name in table.schema.names if name.startswith("key")]
    lists: dict[Any, list[tuple[int, int]]] = {}
    for row in table.to_pylist():
        lists.setdefault((repr([row[name] for name in own]), row["namespace"]), []).append((row["position"], row["value"]))
    if any(len({position for position, _ in rows}) < len(rows) for rows in lists.values()):
        with pytest.raises(ValueError, match="two rows have the position"):
            in_list_order(table, key_type, MAX_PARALLELISM)
        return
    found: dict[Any, list[tuple[int, int]]] = {}
    for row in in_list_order(table, key_type, MAX_PARALLELISM).to_pylist():
        found.setdefault((repr([row[name] for name in own]), row["namespace"]), []).append((row["position"], row["value"]))
    assert found == {owner: sorted(rows) for owner, rows in lists.items()}

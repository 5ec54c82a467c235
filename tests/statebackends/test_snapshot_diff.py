"""Snapshots compared: keys added, removed, changed, whatever the parallelism, the backend and the number of key groups."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.api.snapshots.row_pages import RowPosition, read_page
from holdfast.api.snapshots.rows import rows_of
from holdfast.statebackends.errors import CorruptStateError, NotFoundError
from holdfast.statebackends.handles import OperatorState, StateMeta
from holdfast.statebackends.state import RowTableStateDescriptor
from holdfast.statebackends.state_processor import diff as diffing
from holdfast.statebackends.state_processor import diff as diffrows
from holdfast.statebackends.state_processor.change_feed import ChangeFeed
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.diff import Change, SnapshotDiff, StateDiff, diff_snapshots
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.state_processor.values import Comparer
from tests.examples import crossed, examples
from tests.statebackends.backend_harness import Cluster, stored
from tests.statebackends.snapshot_harness import KEY, KINDS, SOME, UID, Contents, write
from tests.statebackends.test_snapshot_rows import with_table

FORMS = [(kind, parallelism, canonical) for kind in KINDS for parallelism in (1, 3) for canonical in (False, True)]

_numbers = itertools.count()


def snapshot(root: Path, contents: Contents, form: tuple[Any, int, bool] = ("memory", 1, False), **options: Any) -> StoredSnapshot:
    kind, parallelism, canonical = form
    number = next(_numbers)
    folder = f"savepoint-{number}" if canonical else f"job/chk-{number}"
    return write(root, folder, contents, kind=kind, parallelism=parallelism, canonical=canonical, **options)


def counts(found: SnapshotDiff) -> dict[str, tuple[int, int, int, int]]:
    return {state.state: (state.added, state.removed, state.changed, state.same) for state in found.states}


def only(found: SnapshotDiff) -> StateDiff:
    (state,) = found.states
    return state


AFTER = [("memory", 1, False), ("rocksdb", 2, False), ("filesystem", 4, True)]


@pytest.mark.parametrize(("before", "after"), crossed(FORMS, AFTER))
def test_the_same_contents_are_the_same_in_every_form(tmp_path: Path, before: Any, after: Any) -> None:
    found = diff_snapshots(snapshot(tmp_path, SOME, before), snapshot(tmp_path, SOME, after))
    assert found.is_same
    assert counts(found) == {
        "_timers": (0, 0, 0, 2),
        "count": (0, 0, 0, 3),
        "labels": (0, 0, 0, 2),
        "positions": (0, 0, 0, 2),
        "rules": (0, 0, 0, 2),
        "seen": (0, 0, 0, 2),
        "tags": (0, 0, 0, 3),
        "windows": (0, 0, 0, 3),
    }


CHANGES: list[tuple[str, Contents, tuple[int, int, int, int]]] = [
    ("count", replace(SOME, count={"AA": 1, "UA": 5, "DL": 3}), (1, 1, 1, 1)),
    ("labels", replace(SOME, labels={"AA": {"x": {"b", "a", "c"}}, "UA": {}}), (0, 0, 1, 1)),
    ("seen", replace(SOME, seen={"AA": ["one", "more"], "WN": ["two", "three"]}), (0, 0, 1, 1)),
    ("seen", replace(SOME, seen={"AA": ["one"], "WN": ["three", "two"]}), (0, 0, 1, 1)),
    ("tags", replace(SOME, tags={"AA": {"t": 9, "v": 1}}), (1, 2, 1, 0)),
    ("windows", replace(SOME, windows={("AA", 60): 5, ("AA", 180): 6, ("WN", 60): 8}), (1, 1, 1, 1)),
    ("_timers", replace(SOME, timers={("AA", 1_000), ("UA", -4)}), (1, 1, 0, 1)),
    ("positions", replace(SOME, positions=[["a.parquet", 11], ["b.parquet", 0], ["b.parquet", 0]]), (2, 1, 0, 1)),
    ("rules", replace(SOME, rules=["r2", "r3"]), (1, 1, 0, 1)),
]


@pytest.mark.parametrize(("state", "changed", "expected"), CHANGES)
@pytest.mark.parametrize("form", [("memory", 1, False), ("rocksdb", 3, False), ("filesystem", 2, True)])
def test_each_kind_of_state_is_counted(tmp_path: Path, state: str, changed: Contents, expected: Any, form: Any) -> None:
    found = diff_snapshots(snapshot(tmp_path, SOME), snapshot(tmp_path, changed, form))
    assert not found.is_same
    assert counts(found)[state] == expected
    assert [each.state for each in found.states if not each.is_same] == [state]


def test_order_of_sets_and_dicts_is_no_difference() -> None:
    comparer = Comparer(msgspec.structs.replace(META, value_type="dict<str,set<str>>"))
    one = comparer.encode([[[("a", ["x", "y"]), ("b", [])]]])
    assert one == comparer.encode([[[("b", []), ("a", ["y", "x"])]]])
    assert one != comparer.encode([[[("b", ["x"]), ("a", ["y"])]]])
    ordered = Comparer(msgspec.structs.replace(META, value_type="list<str>"))
    assert ordered.encode([[["x", "y"]]]) != ordered.encode([[["y", "x"]]])


META = StateMeta("s", "value", "int", "utf8")


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("optional<set<int>>", [2, 1], [1, 2]),
        ("tuple<int,set<int>>", {"0": 1, "1": [2, 3]}, {"0": 1, "1": [3, 2]}),
        ("struct<a: int, b: dict<str,int>>", {"a": 1, "b": [("x", 1), ("y", 2)]}, {"a": 1, "b": [("y", 2), ("x", 1)]}),
        ("list<frozenset<str>>", [["b", "a"]], [["a", "b"]]),
    ],
)
def test_sets_inside_other_types(text: str, value: Any, same: Any) -> None:
    comparer = Comparer(msgspec.structs.replace(META, value_type=text))
    assert comparer.encode([[value]]) == comparer.encode([[same]])
    assert comparer.encode([[None]]) != comparer.encode([[same]])


@pytest.mark.parametrize("unit_rows", [1, 7, 1 << 20])
def test_another_max_parallelism_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_rows: int) -> None:
    monkeypatch.setattr(diffing, "UNIT_ROWS_MAX", unit_rows)
    left = Contents(count={f"k{n}": n for n in range(30)}, seen={f"k{n}": ["a", "b"] for n in range(9)})
    right = Contents(count={f"k{n}": n + (n == 7) for n in range(1, 31)}, seen={f"k{n}": ["a", "b"] for n in range(9)})
    found = diff_snapshots(
        snapshot(tmp_path, left, ("rocksdb", 2, False)), snapshot(tmp_path, right, max_parallelism=12), keys_max=5
    )
    assert counts(found)["count"] == (1, 1, 1, 28)
    assert counts(found)["seen"] == (0, 0, 0, 9)
    assert {(each.key, each.change) for state in found.states for each in state.keys} == {
        ("k0", Change.REMOVED),
        ("k30", Change.ADDED),
        ("k7", Change.CHANGED),
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_first_keys_are_shown_in_the_same_order_in_every_form(tmp_path: Path, form: Any) -> None:
    left = Contents(count={f"k{n}": n for n in range(20)}, tags={"AA": {"t": 1}}, timers={("AA", 5)}, positions=[["a", 1]])
    right = Contents(count={f"k{n}": n * 2 for n in range(10, 30)}, tags={"AA": {"t": 2}}, timers={("AA", 6)}, positions=[["a", 2]])
    found = diff_snapshots(snapshot(tmp_path, left, form), snapshot(tmp_path, right), keys_max=4)
    shown = {state.state: [(k.change, k.key, k.entry, k.before, k.after) for k in state.keys] for state in found.states}
    everything = sorted(
        ((KEY.key_group(f"k{n}", 8), KEY.encode(f"k{n}"), n) for n in range(30)), key=lambda place: place[:2]
    )  # fmt: skip
    expected = [
        (Change.REMOVED, f"k{n}", None, n, None)
        if n < 10
        else (Change.ADDED, f"k{n}", None, None, n * 2)
        if n >= 20
        else (Change.CHANGED, f"k{n}", None, n, n * 2)
        for *_, n in everything
    ]
    assert shown["count"] == expected[:4]
    assert shown["tags"] == [(Change.CHANGED, "AA", "t", 1, 2)]
    assert shown["_timers"] == [(Change.REMOVED, "AA", 5, None, None), (Change.ADDED, "AA", 6, None, None)]
    assert shown["positions"] == [(Change.REMOVED, None, None, ["a", 1], None), (Change.ADDED, None, None, None, ["a", 2])]


def altered(found: StoredSnapshot, **fields: Any) -> StoredSnapshot:
    """With other fields of its only operator."""
    operator: OperatorState = msgspec.structs.replace(found.metadata.operators[0], **fields)
    return replace(found, metadata=msgspec.structs.replace(found.metadata, operators=(operator,)))


def test_operators_and_states_of_one_side_alone(tmp_path: Path) -> None:
    left = snapshot(tmp_path, SOME)
    right = altered(snapshot(tmp_path, SOME), uid="other")
    found = diff_snapshots(left, right)
    assert (found.operators_added, found.operators_removed) == (("other",), (UID,))
    sums = {(state.operator, state.state): (state.added, state.removed) for state in found.states}
    assert sums[UID, "count"] == (0, 3)
    assert sums["other", "count"] == (3, 0)
    assert sums["other", "positions"] == (2, 0)
    assert not found.is_same


def test_a_stateless_operator_of_one_side_is_a_difference(tmp_path: Path) -> None:
    left = altered(snapshot(tmp_path, SOME), subtasks=(diffing_empty(),))
    right = replace(left, metadata=msgspec.structs.replace(left.metadata, operators=()))
    found = diff_snapshots(left, right)
    assert (found.states, found.operators_removed, found.is_same) == ((), (UID,), False)


def diffing_empty() -> Any:
    from holdfast.statebackends.handles import OperatorSubtaskState

    return OperatorSubtaskState()


def renamed_state(found: StoredSnapshot, **fields: Any) -> StoredSnapshot:
    """With another description of the state `count`, whose files stay as they are."""
    (subtask,) = found.metadata.operators[0].subtasks
    keyed = tuple(
        msgspec.structs.replace(
            each, states=tuple(msgspec.structs.replace(m, **fields) if m.name == "count" else m for m in each.states)
        )
        for each in subtask.keyed
    )
    return altered(found, subtasks=(msgspec.structs.replace(subtask, keyed=keyed),))


def test_a_widened_type_is_a_difference_but_no_changed_key(tmp_path: Path) -> None:
    left = snapshot(tmp_path, SOME)
    found = diff_snapshots(left, renamed_state(left, value_type="optional<int>"), UID, "count")
    assert counts(found) == {"count": (0, 0, 0, 3)}
    assert not found.is_same


def test_states_of_other_kinds_have_nothing_in_common(tmp_path: Path) -> None:
    left = snapshot(tmp_path, SOME)
    found = diff_snapshots(left, renamed_state(left, kind="reducing"), UID, "count", keys_max=5)
    assert counts(found) == {"count": (3, 3, 0, 0)}


def test_one_operator_or_one_state(tmp_path: Path) -> None:
    left, right = snapshot(tmp_path, SOME), snapshot(tmp_path, replace(SOME, count={}, tags={}))
    assert len(diff_snapshots(left, right, UID).states) == 8
    assert counts(diff_snapshots(left, right, UID, "tags")) == {"tags": (0, 3, 0, 0)}
    with pytest.raises(NotFoundError, match="neither snapshot has an operator 'nothing'"):
        diff_snapshots(left, right, "nothing")
    with pytest.raises(NotFoundError, match="has no state 'nothing' in either"):
        diff_snapshots(left, right, UID, "nothing")


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    columns = {
        "key_group": pa.array([6, 6], pa.int32()),
        "key": ["AA", "AA"],
        "namespace": pa.array([b"", b""]),
        "value": pa.array([1, 2], pa.int64()),
    }
    left = with_table(snapshot(tmp_path, Contents(), ("memory", 1, True)), pa.table(columns))
    with pytest.raises(CorruptStateError, match=r"operator 'totals', state 'count': .*two rows have {'key': 'AA'"):
        diff_snapshots(left, left, UID, "count")


def test_a_damaged_side_is_named(tmp_path: Path) -> None:
    left, right = snapshot(tmp_path, SOME, ("filesystem", 1, True)), snapshot(tmp_path, SOME)
    for file in Path(left.location).iterdir():
        if file.name != "_metadata":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    for sides in ((left, right), (right, left)):
        with pytest.raises(CorruptStateError, match=r"operator 'totals' subtask 0: .*: the checksum does not match"):
            diff_snapshots(*sides)


def test_long_lists_compare_as_one_value() -> None:
    values = [msgspec.msgpack.encode(number) for number in range(70_000)]
    for count in (0, 1, 15, 16, 65_536, 70_000):
        joined = diffrows._joined(list(enumerate(values[:count])))
        assert msgspec.msgpack.decode(joined) == list(range(count))


# ------------------------------------------------------------------------------------------------------------- Hypothesis

KEYS = st.sampled_from([f"k{number}" for number in range(12)])
SMALL = st.integers(0, 2)
CONTENTS = st.builds(
    Contents,
    count=st.dictionaries(KEYS, SMALL),
    labels=st.dictionaries(KEYS, st.dictionaries(st.sampled_from("ab"), st.sets(st.sampled_from("xy")))),
    seen=st.dictionaries(KEYS, st.lists(st.sampled_from("ab"), min_size=1, max_size=3)),
    tags=st.dictionaries(KEYS, st.dictionaries(st.sampled_from("tu"), SMALL)),
    windows=st.dictionaries(st.tuples(KEYS, st.sampled_from([60, 120])), SMALL),
    timers=st.sets(st.tuples(KEYS, SMALL)),
    positions=st.lists(SMALL, max_size=4),
    rules=st.lists(SMALL, max_size=3),
)
FORM = st.tuples(st.sampled_from(KINDS), st.integers(1, 4), st.booleans())


def model(contents: Contents) -> dict[str, Mapping[Any, Any]]:
    """Identity -> value of everything that is in a state."""
    return {
        "count": contents.count,
        "labels": contents.labels,
        "seen": contents.seen,
        "tags": {(key, tag): value for key, tags in contents.tags.items() for tag, value in tags.items()},
        "windows": contents.windows,
        "_timers": dict.fromkeys(contents.timers),
    }


def expected(before: Contents, after: Contents) -> dict[str, tuple[int, int, int, int]]:
    counted = {}
    for (state, old), new in zip(model(before).items(), model(after).values(), strict=True):
        common = old.keys() & new.keys()
        changed = sum(old[key] != new[key] for key in common)
        counted[state] = (len(new.keys() - old.keys()), len(old.keys() - new.keys()), changed, len(common) - changed)
    for state, old_list, new_list in (
        ("positions", before.positions, after.positions),
        ("rules", before.rules, after.rules),
    ):
        was, now = Counter(old_list), Counter(new_list)
        counted[state] = ((now - was).total(), (was - now).total(), 0, (was & now).total())
    return counted


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(before=CONTENTS, after=CONTENTS, forms=st.tuples(FORM, FORM), max_parallelism=st.sampled_from([8, 8, 12]))
def test_any_two_snapshots(before: Contents, after: Contents, forms: Any, max_parallelism: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        left = snapshot(root, before, forms[0])
        right = snapshot(root, after, forms[1], max_parallelism=max_parallelism)
        found = diff_snapshots(left, right, keys_max=100)
        assert counts(found) == expected(before, after)
        assert found.is_same is (expected(before, after) == expected(after, before) == expected(before, before))
        for state in found.states:
            by_change = Counter(key.change for key in state.keys)
            assert (state.added, state.removed, state.changed) == tuple(by_change[change] for change in Change)
        assert diff_snapshots(left, left).is_same
        back = diff_snapshots(right, left)
        assert counts(back) == {state: (r, a, c, s) for state, (a, r, c, s) in counts(found).items()}


TIMES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.timestamp("ns"), [1, 2]),
    (pa.duration("ns"), [1, 2]),
    (pa.timestamp("ms"), [10**15, 0]),
    (pa.timestamp("us", "Nowhere/City"), [0, 1]),
    (pa.date32(), [10**7, 0]),
    (pa.duration("s"), [10**15, 0]),
    (pa.list_(pa.timestamp("ms")), [[10**15], [0]]),
    (pa.struct([("at", pa.timestamp("ns")), ("n", pa.int64())]), [{"at": 1, "n": 1}, {"at": 2, "n": 1}]),
    (pa.dictionary(pa.int8(), pa.utf8()), ["a", "b"]),
]


@pytest.mark.parametrize(("kind", "values"), TIMES, ids=[str(kind) for kind, _ in TIMES])
def test_rows_with_times_that_python_has_none_for_are_no_damage(tmp_path: Path, kind: pa.DataType, values: list[Any]) -> None:
    """Rows of joins and windows have whatever columns the records had."""
    cluster = Cluster(tmp_path, "filesystem")
    state = RowTableStateDescriptor("rows", pa.schema([("at", kind)]))
    found = []
    for count in (1, 2):
        backend = cluster.backend((state,))
        column = pa.array(values[:count], pa.int32() if pa.types.is_date32(kind) else None).cast(kind)
        backend.row_table(state, ["k"]).append(KEY.column_of_values(["a"] * count, max_parallelism=16), 0, [column], None)
        found.append(stored(cluster, cluster.take(backend)))
    before, after = found
    (difference,) = diff_snapshots(before, after, keys_max=3).states
    assert (difference.added, difference.changed, difference.same) == (1, 0, 1)
    assert len(difference.keys) == 1
    feed = pa.Table.from_batches(list(ChangeFeed.of(before, after, "op", "rows").batches()))
    assert feed.column("after_at").combine_chunks().equals(column.slice(1))
    with after.reader() as reader:
        assert len(list(rows_of(reader, after.state("op", "rows")))) == 2
    assert len(read_page(after, "op", "rows", RowPosition.parse(""), 10).rows) == 2
    edited = edit_snapshot(after, {("op", "rows"): lambda batches, _: batches}, cluster.storage, "edited", now_ms=0)
    (difference,) = diff_snapshots(after, edited).states
    assert (difference.added, difference.removed, difference.changed, difference.same) == (0, 0, 0, 2)
    cluster.close()

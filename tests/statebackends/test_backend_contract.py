"""The contract of a keyed state backend, held by all three."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.statebackends.backend import TimerRow
from holdfast.statebackends.backends import keyed
from holdfast.statebackends.errors import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidConfigError,
    InvariantError,
    StateValueError,
    UnclaimedStateError,
    UndeclaredStateError,
)
from holdfast.statebackends.factory import BACKEND_KINDS, create_keyed_backend
from holdfast.statebackends.handles import FileHandle, KeyGroupRange
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from holdfast.statebackends.storage.port import one_by_one
from tests.statebackends.backend_harness import (
    ALL,
    COUNT,
    KEY,
    MEAN,
    SEEN,
    TAGS,
    TOTAL,
    VISIT,
    WINDOWS,
    Cluster,
    Visit,
    assign,
    columnar_update,
    contents,
    fill,
    owner,
    smuggle,
    union,
    use,
)

KEYS = [f"user-{number}" for number in range(40)]


@pytest.fixture(params=BACKEND_KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, request.param)
    yield cluster
    cluster.close()


# ------------------------------------------------------------------------------------------------------------- refusals


def test_state_without_a_current_key_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvariantError):
        cluster.backend().get_state(COUNT).value()


def test_undeclared_state_is_refused(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    with pytest.raises(UndeclaredStateError) as raised:
        backend.get_state(VISIT)
    assert raised.value.fields == {"operator": "op", "state": "visit"}
    with pytest.raises(UndeclaredStateError):
        backend.get_state(ListStateDescriptor("count", int))
    with pytest.raises(UndeclaredStateError):
        backend.columnar_state(WINDOWS, ["user"])
    with pytest.raises(UndeclaredStateError):
        list(backend.keys("visit"))


def test_a_name_declared_twice_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidConfigError):
        cluster.backend([COUNT, ListStateDescriptor("count", int)])


def test_a_wrong_number_of_key_names_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidConfigError):
        cluster.backend().columnar_state(WINDOWS, ["a", "b"])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        create_keyed_backend(
            "tape",  # type: ignore[arg-type]
            descriptors=ALL,
            key_type=KEY,
            key_groups=KeyGroupRange(0, 1),
            max_parallelism=1,
            operator="op",
            subtask=0,
            local_dir="",
        )


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize(
    "declared",
    [
        ValueStateDescriptor("count", str),
        ListStateDescriptor("count", int),
        MapStateDescriptor("tags", int, int),
        MapStateDescriptor("tags", str, str),
        ColumnarStateDescriptor("windows", (ColumnAggregate("count", None, "rows"),)),
    ],
)
def test_incompatible_state_is_refused_with_both_types(cluster: Cluster, declared: Any, canonical: bool) -> None:
    backend = cluster.backend()
    fill([backend], KEYS[:3])
    snapshot = cluster.take(backend, canonical=canonical)
    others = [descriptor for descriptor in ALL if descriptor.name != declared.name]
    with pytest.raises(IncompatibleStateError) as raised:
        cluster.restored(snapshot, [*others, declared])
    assert raised.value.operator == "op"
    assert raised.value.state == declared.name
    assert raised.value.stored != raised.value.declared


def test_another_key_type_is_refused(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    fill_count(backend, "a", 1)
    snapshot = cluster.take(backend)
    with pytest.raises(IncompatibleStateError):
        cluster.restored(snapshot, [COUNT], key_type=KeyType.of(int))


def test_undeclared_state_in_a_snapshot_is_refused_or_dropped(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS[:5])
    expected = {place: value for place, value in contents(backend).items() if place[0] == "count"}
    snapshot = cluster.take(backend)
    with pytest.raises(UnclaimedStateError) as raised:
        cluster.restored(snapshot, [COUNT])
    assert raised.value.states == ["mean", "seen", "tags", "total", "visit", "windows"]
    assert raised.value.operators["op"] > 0
    restored = cluster.restored(snapshot, [COUNT], allow_unclaimed_state=True)
    assert [(key, _count(restored, KEY.decode(key))) for key in sorted(restored.keys("count"))] == sorted(
        (KEY.encode(place[2]), value) for place, value in expected.items()
    )
    again = cluster.restored(cluster.take(restored), [COUNT])
    assert sorted(again.keys("count")) == sorted(restored.keys("count"))


def test_native_rocksdb_files_are_refused_by_other_backends(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "rocksdb")
    backend = cluster.backend()
    fill([backend], KEYS[:2])
    snapshot = cluster.take(backend)
    for kind in ("memory", "filesystem"):
        with pytest.raises(IncompatibleStateError) as raised:
            cluster.restored(snapshot, kind=kind)
        assert raised.value.stored == "rocksdb"
    cluster.close()


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_damaged_files_are_named(cluster: Cluster, damage: str, canonical: bool) -> None:
    if cluster.kind == "memory" and not canonical:
        return  # writes no files
    backend = cluster.backend()
    fill([backend], KEYS)
    handles, folder = cluster.take(backend, canonical=canonical)
    files = [part for handle in handles for part in handle.parts if isinstance(part, FileHandle)]
    assert files
    for part in files[:3]:
        path = cluster.root / "state" / folder / part.path
        data = path.read_bytes()
        path.unlink()
        if damage == "short":
            path.write_bytes(data[:-1])
        elif damage == "flipped":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(CorruptStateError) as raised:
            cluster.restored((handles, folder))
        assert raised.value.operator == "op"
        assert part.path in str(raised.value.path)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert union([cluster.restored((handles, folder))]) == union([backend])


def test_a_value_of_another_type_fails_the_snapshot_naming_the_state(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    use(backend, "a")
    with pytest.raises(StateValueError, match="state 'count': 'no number' "):
        backend.get_state(COUNT).update("no number")
    smuggle(backend.get_state(COUNT), "no number")
    pending = backend.snapshot(1)
    with pytest.raises(StateValueError) as raised:
        cluster.finish(pending)
    pending.release()
    assert (raised.value.operator, raised.value.state) == ("op", "count")
    fill_count(backend, "a", 5)
    assert _count(cluster.restored(cluster.take(backend), [COUNT]), "a") == 5


# --------------------------------------------------------------------------------------------------------- working state


def fill_count(backend: Any, key: str, value: int, namespace: bytes = b"") -> None:
    use(backend, key)
    backend.get_state(COUNT, namespace).update(value)


def _count(backend: Any, key: str, namespace: bytes = b"") -> Any:
    use(backend, key)
    return backend.get_state(COUNT, namespace).value()


def test_values_follow_the_current_key(cluster: Cluster) -> None:
    backend = cluster.backend()
    state = backend.get_state(COUNT)
    fill_count(backend, "a", 1)
    fill_count(backend, "b", 2)
    assert (_count(backend, "a"), _count(backend, "b"), _count(backend, "c")) == (1, 2, None)
    assert state.value(7) == 7
    use(backend, "a")
    state.clear()
    state.clear()
    assert state.value() is None
    assert backend.get_state(COUNT) is state
    assert backend.current_key == (KEY.encode("a"), KEY.key_group("a", 16))
    assert list(backend.keys("count")) == [KEY.encode("b")]


def test_the_keys_of_a_batch_become_current_one_by_one(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    state = backend.get_state(COUNT)
    names = [f"user-{number % 7}" for number in range(2_000)]  # more than between two checks of limits
    found: list[Any] = []
    for start in (0, 3, 1_500):
        course = backend.each_key(KEY.column_of_values(names[start:], max_parallelism=16))
        for selected in zip(*course.columns, strict=True):
            for name, value in zip(course.names, selected, strict=True):
                assign(course.target, name, value)
            state.update(state.value(0) + 1)
            found.append(backend.current_key)
    expected = [*names, *names[3:], *names[1_500:]]
    assert found == [(KEY.encode(name), KEY.key_group(name, 16)) for name in expected]
    use(backend, "user-0")
    assert {name: _count(backend, name) for name in set(names)} == {name: expected.count(name) for name in set(names)}
    assert list(backend.each_key(KEY.column_of_values([], max_parallelism=16)).columns[0]) == []


def test_namespaces_are_apart(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill_count(backend, "a", 1, b"x")
    fill_count(backend, "a", 2, b"xy")
    fill_count(backend, "a", 3)
    assert [_count(backend, "a", namespace) for namespace in (b"x", b"xy", b"", b"y")] == [1, 2, 3, None]
    restored = cluster.restored(cluster.take(backend))
    assert [_count(restored, "a", namespace) for namespace in (b"x", b"xy", b"", b"y")] == [1, 2, 3, None]
    assert list(restored.keys("count", b"y")) == []


def test_many_short_lived_namespaces_are_forgotten(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    kept = backend.get_state(COUNT, b"kept")
    for number in range(50):
        fill_count(backend, "a", number, b"%d" % number)
        use(backend, "a")
        backend.get_state(COUNT, b"%d" % number).clear()
    cluster.take(backend)
    cluster.take(backend)
    assert len(backend._state_tables) == 1
    kept.update(4)
    assert _count(cluster.restored(cluster.take(backend), [COUNT]), "a", b"kept") == 4


def test_lists(cluster: Cluster) -> None:
    backend = cluster.backend()
    use(backend, "a")
    state = backend.get_state(SEEN)
    assert state.get() == []
    state.add("x")
    state.add_all(["y", "z"])
    state.add_all([])
    state.get().append("not kept")
    assert state.get() == ["x", "y", "z"]
    use(backend, "b")
    assert state.get() == []
    state.update(["q"])
    assert state.get() == ["q"]
    state.update([])
    assert state.get() == []
    use(backend, "a")
    state.clear()
    assert list(backend.keys("seen")) == []


def test_maps(cluster: Cluster) -> None:
    backend = cluster.backend()
    use(backend, "a")
    state = backend.get_state(TAGS)
    assert state.is_empty()
    state.put("x", 1)
    state.put("y", 2)
    state.put("x", 3)
    assert (state.get("x"), state.get("q"), state.get("q", 9), state.contains("y")) == (3, None, 9, True)
    assert sorted(state.items()) == [("x", 3), ("y", 2)]
    for key in state.keys():  # noqa: SIM118 - a state's method
        state.remove(key)
    state.remove("never there")
    assert state.is_empty()
    assert list(backend.keys("tags")) == []
    state.put("z", 1)
    state.clear()
    assert list(state.values()) == []


def test_reducing_and_aggregating(cluster: Cluster) -> None:
    backend = cluster.backend()
    use(backend, "a")
    total, mean = backend.get_state(TOTAL), backend.get_state(MEAN)
    assert total.get() is None
    assert mean.get() is None
    for value in (1, 2, 6):
        total.add(value)
        mean.add(value)
    assert (total.get(), mean.get()) == (9, 3.0)
    total.clear()
    assert total.get() is None


# ------------------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("canonical", [False, True])
def test_restore_gives_back_everything(cluster: Cluster, canonical: bool) -> None:
    backend = cluster.backend()
    fill([backend], KEYS, [b"", b"ns"])
    expected = contents(backend, [b"", b"ns"])
    restored = cluster.restored(cluster.take(backend, canonical=canonical))
    assert contents(restored, [b"", b"ns"]) == expected
    assert contents(backend, [b"", b"ns"]) == expected
    second = cluster.restored(cluster.take(restored, canonical=not canonical))
    assert contents(second, [b"", b"ns"]) == expected


def test_an_empty_backend_is_restored_from_its_snapshot(cluster: Cluster) -> None:
    assert contents(cluster.restored(cluster.take(cluster.backend()))) == {}
    assert contents(cluster.restored(cluster.take(cluster.backend(), canonical=True))) == {}


def test_a_backend_without_keyed_states_has_nothing_to_store(cluster: Cluster) -> None:
    if cluster.kind != "rocksdb":
        assert cluster.take(cluster.backend([]))[0] == ()


def test_a_snapshot_is_of_its_barrier_whatever_happens_later(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS)
    expected = contents(backend)
    pending = backend.snapshot(1)
    _change_everything(backend)
    changed = contents(backend)
    assert changed != expected
    snapshot = cluster.finish(pending)
    assert contents(backend) == changed
    assert contents(cluster.restored(snapshot)) == expected
    assert contents(cluster.restored(cluster.take(backend))) == changed


def _change_everything(backend: Any) -> None:
    for number, key in enumerate([*KEYS[::3], "new"]):
        use(backend, key)
        backend.get_state(COUNT).update(1000)
        backend.get_state(VISIT).clear()
        backend.get_state(SEEN).add("later")
        backend.get_state(TAGS).put("t0", 1000)
        backend.get_state(TAGS).remove("t1")
        if number % 2:
            backend.get_state(TAGS).clear()
            backend.get_state(SEEN).clear()
            backend.get_state(TAGS).put("after", 1)
        backend.get_state(TOTAL).add(1)
        backend.get_state(MEAN).clear()
    columnar_update(backend, 10, [(key, 5) for key in [*KEYS[::3], "new"]])
    backend.columnar_state(WINDOWS, ["user"]).remove(-20)


@pytest.mark.parametrize("first_finishes_first", [True, False])
def test_two_snapshots_in_flight(cluster: Cluster, first_finishes_first: bool) -> None:
    backend = cluster.backend()
    fill([backend], KEYS)
    expected = [contents(backend)]
    pending = [backend.snapshot(1)]
    _change_everything(backend)
    expected.append(contents(backend))
    pending.append(backend.snapshot(2))
    fill([backend], KEYS[10:20])
    expected.append(contents(backend))
    order = (0, 1) if first_finishes_first else (1, 0)
    snapshots = {number: cluster.finish(pending[number]) for number in order}
    assert contents(backend) == expected[2]
    for number in order:
        assert contents(cluster.restored(snapshots[number])) == expected[number]
    assert contents(cluster.restored(cluster.take(backend))) == expected[2]


def test_many_snapshots_pass_while_one_hangs(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS[:10])
    expected = contents(backend)
    hanging = backend.snapshot(1)
    for number in range(5):
        fill_count(backend, "a", number)
        snapshot = cluster.take(backend)
        assert _count(cluster.restored(snapshot), "a") == number
    assert contents(cluster.restored(cluster.finish(hanging))) == expected


def test_an_abandoned_snapshot_changes_nothing(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS)
    for number in range(3):
        backend.snapshot(number + 1).release()
        _change_everything(backend)
    expected = contents(backend)
    backend.notify_checkpoint_aborted(1)
    pending = backend.snapshot(9)
    pending.release()
    pending.release()
    assert contents(backend) == expected
    assert contents(cluster.restored(cluster.take(backend))) == expected
    backend.notify_checkpoint_complete(9)


def test_a_flow_that_fails_at_any_operation_leaves_the_backend_as_it_was(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS)
    expected = contents(backend)
    for failing in range(3):
        pending = backend.snapshot(failing + 1)
        target = cluster.target(inline_threshold=0)
        with pytest.raises((OSError, StopIteration)):
            _run_until(one_by_one(pending.flow(target)), cluster, failing)
        pending.release()
        assert contents(backend) == expected
    assert contents(cluster.restored(cluster.take(backend))) == expected


def _run_until(flow: Any, cluster: Cluster, failing: int) -> None:
    operation = next(flow)
    for _ in range(failing):
        operation = flow.send(cluster.storage.execute(operation))
    flow.throw(OSError("disk gone"))


def test_a_mutable_value_read_after_the_barrier_is_a_copy(cluster: Cluster) -> None:
    backend = cluster.backend()
    use(backend, "a")
    state = backend.get_state(VISIT)
    state.update(Visit(1, ["first"]))
    pending = backend.snapshot(1)
    visit = state.value()
    visit.count += 1
    visit.pages.append("second")
    state.update(visit)
    restored = cluster.restored(cluster.finish(pending))
    use(restored, "a")
    assert restored.get_state(VISIT).value() == Visit(1, ["first"])
    assert state.value() == Visit(2, ["first", "second"])


def test_mutable_members_of_lists_and_maps_read_after_the_barrier_are_copies(cluster: Cluster) -> None:
    members = ListStateDescriptor("members", list[int])
    entries = MapStateDescriptor("entries", str, list[int])
    backend = cluster.backend([members, entries])
    use(backend, "a")
    backend.get_state(members).add([1])
    backend.get_state(entries).put("e", [1])
    backend.get_state(entries).put("f", [5])
    pending = backend.snapshot(1)
    backend.get_state(members).get()[0].append(2)
    backend.get_state(members).add([3])
    backend.get_state(members).get()[0].append(4)
    backend.get_state(entries).get("e").append(2)
    dict(backend.get_state(entries).items())["f"].append(2)
    next(backend.get_state(entries).values()).append(9)
    restored = cluster.restored(cluster.finish(pending), [members, entries])
    use(restored, "a")
    assert restored.get_state(members).get() == [[1]]
    assert dict(restored.get_state(entries).items()) == {"e": [1], "f": [5]}


def test_the_flow_may_run_on_another_thread_while_state_changes(cluster: Cluster) -> None:
    backend = cluster.backend()
    keys = [f"k{number}" for number in range(3000)]
    for number, key in enumerate(keys):
        fill_count(backend, key, number)
        backend.get_state(TAGS).put("x", number)
    expected = contents(backend)
    pending = backend.snapshot(1)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(cluster.finish(pending)))
    thread.start()
    while thread.is_alive():
        for key in keys[::7]:
            use(backend, key)
            backend.get_state(COUNT).update(-1)
            backend.get_state(TAGS).clear()
    thread.join()
    assert contents(cluster.restored(done[0])) == expected
    assert _count(backend, "k7") == -1


# --------------------------------------------------------------------------------------------------------------- rescale


@pytest.mark.parametrize("canonical", [False, True])
def test_rescaling_keeps_the_contents(cluster: Cluster, canonical: bool) -> None:
    backends = [cluster.backend()]
    namespaces = [b"", b"ns"]
    fill(backends, KEYS, namespaces)
    expected = union(backends, namespaces)
    for parallelism in (2, 3, 1, 3, 2, 2):
        backends = cluster.rescaled(backends, parallelism, canonical=canonical)
        assert union(backends, namespaces) == expected
        for key in KEYS:
            assert owner(backends, key).get_state(COUNT).value() is not None
        _change_and_repeat(backends, expected)


def _change_and_repeat(backends: Any, expected: dict[Any, Any]) -> None:
    """State goes on living after a rescale."""
    backend = owner(backends, KEYS[5])
    backend.get_state(TOTAL).add(100)
    backend.get_state(SEEN).add("more")
    expected["total", b"", KEYS[5]] += 100
    expected["seen", b"", KEYS[5]] = [*expected["seen", b"", KEYS[5]], "more"]


@pytest.mark.parametrize("reader", BACKEND_KINDS)
def test_a_savepoint_restores_on_every_backend(cluster: Cluster, reader: Any) -> None:
    backend = cluster.backend()
    fill([backend], KEYS, [b"", b"n"])
    expected = contents(backend, [b"", b"n"])
    snapshot = cluster.take(backend, canonical=True)
    assert {handle.format for handle in snapshot[0]} == {"parquet"}
    restored = cluster.restored(snapshot, kind=reader)
    assert contents(restored, [b"", b"n"]) == expected
    parts = [cluster.restored(snapshot, kind=reader, parallelism=3, subtask=subtask) for subtask in range(3)]
    assert union(parts, [b"", b"n"]) == expected


@pytest.mark.parametrize("canonical", [False, True])
def test_state_of_an_older_compatible_type_is_rewritten(cluster: Cluster, canonical: bool) -> None:
    old: list[Any] = [ValueStateDescriptor("v", int), ListStateDescriptor("l", int), MapStateDescriptor("m", str, int)]
    new: list[Any] = [ValueStateDescriptor("v", float), ListStateDescriptor("l", float), MapStateDescriptor("m", str, float)]
    backends = [cluster.backend(old, parallelism=2, subtask=subtask) for subtask in range(2)]
    for backend in backends:
        key = next(key for key in KEYS if KEY.key_group(key, 16) in backend.key_groups)
        use(backend, key)
        backend.get_state(old[0]).update(3)
        backend.get_state(old[1]).add_all([1, 2])
        backend.get_state(old[2]).put("x", 4)
    taken = [cluster.take(backend, canonical=canonical) for backend in backends]
    for position, (handles, folder) in enumerate(taken):
        restored = cluster.restored((handles, folder), new)
        (encoded,) = restored.keys("v")
        use(restored, KEY.decode(encoded))
        values = (restored.get_state(new[0]).value(), restored.get_state(new[1]).get(), restored.get_state(new[2]).get("x"))
        assert values == (3.0, [1.0, 2.0], 4.0)
        assert [type(value) for value in (values[0], *values[1], values[2])] == [float] * 4
        again = cluster.restored(cluster.take(restored), new, parallelism=2, subtask=position)
        use(again, KEY.decode(encoded))
        assert again.get_state(new[1]).get() == [1.0, 2.0]


# ---------------------------------------------------------------------------------------------------------------- timers


class _Timers:
    def __init__(self) -> None:
        self.table = CopyOnWriteStateTable()
        self.loads = 0

    def provider(self) -> TimerRows:
        return TimerRows(self.table, self._load)

    def _load(self, rows: Any) -> None:
        self.loads += 1
        for row in rows:
            self.table.active[row] = True

    def rows(self) -> list[TimerRow]:
        return sorted(self.table.active)


def _timer(key: str, time: int, namespace: bytes = b"") -> TimerRow:
    return time, KEY.encode(key), namespace, KEY.key_group(key, 16)


@pytest.mark.parametrize("canonical", [False, True])
def test_timers_are_part_of_snapshots_and_of_rescales(cluster: Cluster, canonical: bool) -> None:
    backend = cluster.backend()
    timers = _Timers()
    backend.register_timers("_timers", timers.provider())
    rows = [_timer(key, 2**62 - position, b"w") for position, key in enumerate(KEYS)]
    timers.table.active.update(dict.fromkeys(rows, True))
    pending = backend.snapshot(1)
    timers.table.remove(rows[0])
    timers.table.active[_timer("later", 5)] = True
    snapshot = cluster.finish(pending, canonical=canonical)
    found = []
    for subtask in range(3):
        restored = cluster.restored(snapshot, parallelism=3, subtask=subtask)
        part = _Timers()
        restored.register_timers("_timers", part.provider())
        assert {row[3] in restored.key_groups for row in part.rows()} <= {True}
        found += part.rows()
    assert sorted(found) == sorted(rows)


def test_timers_that_nobody_asked_for_yet_are_handed_on(cluster: Cluster) -> None:
    backend = cluster.backend([COUNT])
    timers = _Timers()
    backend.register_timers("_timers", timers.provider())
    timers.table.active[_timer("a", 7)] = True
    restored = cluster.restored(cluster.take(backend), [COUNT])
    again = cluster.restored(cluster.take(restored), [COUNT])
    part = _Timers()
    again.register_timers("_timers", part.provider())
    assert part.rows() == [_timer("a", 7)]


def test_a_timer_name_that_is_taken_is_refused(cluster: Cluster) -> None:
    backend = cluster.backend()
    backend.register_timers("_timers", _Timers().provider())
    for name in ("_timers", "count"):
        with pytest.raises(InvalidConfigError):
            backend.register_timers(name, _Timers().provider())


# ----------------------------------------------------------------------------------------------------------------- other


def test_sizes_and_disposal(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], KEYS)
    assert backend.state_size() > 1000
    backend.dispose()
    backend.dispose()
    assert not list(cluster.root.glob("local-*"))


# ------------------------------------------------------------------------------------------------- namespaces that come and go


@pytest.mark.parametrize("checkpoint_every", [0, 300])
def test_namespaces_without_rows_are_forgotten_also_between_barriers(
    cluster: Cluster, checkpoint_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As windows leave them behind: each has a row for a while; every tenth stays, and so does the one that is held."""
    monkeypatch.setattr(keyed, "NAMESPACES_MIN", 50)
    backend: Any = cluster.backend([COUNT])
    held = backend.get_state(COUNT, b"held")
    most = 0
    for number in range(1_000):
        use(backend, KEYS[number % 7])
        state = backend.get_state(COUNT, b"w%d" % number)
        if state.value() is None:
            state.update(number)
        if number % 10:
            backend.get_state(COUNT, b"w%d" % number).clear()
        if checkpoint_every and number % checkpoint_every == 250:
            cluster.take(backend)
        most = max(most, len(backend._state_tables))
    held.update(7)
    assert most < 450, "100 are left, and as many may have come since the last look as were there then"
    restored = cluster.restored(cluster.take(backend), [COUNT])
    kept = {b"w%d" % number: [KEY.encode(KEYS[number % 7])] for number in range(0, 1_000, 10)} | {b"held": [KEY.encode(KEYS[5])]}
    assert {namespace: list(restored.keys("count", namespace)) for namespace in kept} == kept

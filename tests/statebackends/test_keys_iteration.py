"""Keys of a state, iterated over while it changes: each that has state all the while exactly once, no other twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable, MapLayer, visible_keys
from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend
from holdfast.statebackends.settings import StateBackendSettings
from tests.statebackends.backend_harness import COUNT, KEY, TAGS, Cluster, use

KINDS: tuple[BackendKind, ...] = ("memory", "filesystem", "rocksdb")
NAMES = tuple("abc")
STATES: dict[str, Any] = {"count": COUNT, "tags": TAGS}


def _put(backend: KeyedBackendBase, state: str, key: str, value: int) -> None:
    use(backend, key)
    if state == "count":
        backend.get_state(COUNT).update(value)
    else:
        backend.get_state(TAGS).put(f"t{value % 2}", value)


def _remove(backend: KeyedBackendBase, state: str, key: str) -> None:
    use(backend, key)
    backend.get_state(STATES[state]).clear()


def test_layers_that_reach_the_database_meanwhile_take_no_keys_along(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "rocksdb")
    backend = cluster.backend([COUNT])
    names = [f"k{number}" for number in range(20_000)]  # more than the front tier holds
    for number, name in enumerate(names):
        _put(backend, "count", name, number)
    found = []
    for key in backend.keys("count"):
        found.append(KEY.decode(key))
        use(backend, found[-1])
    assert sorted(found) == sorted(names)
    cluster.close()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_written_before_its_turn_is_given(tmp_path: Path, kind: BackendKind, state: str) -> None:
    cluster = Cluster(tmp_path, kind)
    backend = cluster.backend([COUNT, TAGS])
    pinned: list[Any] = []
    for name in "abc":
        _put(backend, state, name, 1)
        pinned.append(backend.snapshot(len(pinned) + 1))
    keys = backend.keys(state)
    found = [next(keys)]
    for name in "abc":
        _put(backend, state, name, 2)
    found += keys
    assert sorted(map(KEY.decode, found)) == ["a", "b", "c"]
    for pending in pinned:
        pending.release()
    cluster.close()


class _Watched(dict[Any, Any]):
    """A layer that lets another thread's work happen just before its `turn`-th use."""

    def __init__(self, rows: dict[Any, Any], turn: int, work: Callable[[], None]) -> None:
        super().__init__(rows)
        self._turn, self._work = turn, work

    def _used(self) -> None:
        self._turn -= 1
        if self._turn == 0:
            self._work()

    def __iter__(self) -> Iterator[Any]:
        self._used()
        return super().__iter__()

    def values(self) -> Any:
        self._used()
        return super().values()

    def get(self, key: Any, default: Any = None) -> Any:
        self._used()
        return super().get(key, default)


@pytest.mark.parametrize("turn", range(1, 10))
@pytest.mark.parametrize("maps", [False, True])
def test_a_fold_in_between_shows_nowhere(maps: bool, turn: int) -> None:
    table = CopyOnWriteMapTable() if maps else CopyOnWriteStateTable()
    table.track_since(0)
    layers: tuple[Any, ...] = ()
    table.immutable = (_Watched({key: _row(1, maps) for key in "abc"}, turn, lambda: table.merge(layers)),)
    table.active |= {key: _row(2, maps) for key in "bdf"}
    table.remove("a")
    layers = table.freeze()
    table.active["e"] = _row(3, maps)
    assert _keys(table) == ["b", "c", "d", "e", "f"]
    table.release(len(layers))
    assert _keys(table) == ["b", "c", "d", "e", "f"]


def _row(value: int, maps: bool) -> Any:
    if not maps:
        return value
    entries = MapLayer()
    entries["t"] = value
    return entries


def _keys(table: CopyOnWriteStateTable) -> list[str]:
    return sorted(visible_keys((table.active, *table.immutable), maps=table.maps))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "snapshot", "snapshot", "remove", "next", "finish", "retire"]), st.sampled_from(NAMES)
    ),
    max_size=20,
)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(state=st.sampled_from(sorted(STATES)), before=STEPS, during=STEPS)
def test_keys_with_state_all_the_while_come_once(
    kind: BackendKind, incremental: bool, state: str, before: list[tuple[str, str]], during: list[tuple[str, str]]
) -> None:
    with TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), kind, StateBackendSettings(incremental=incremental))
        backend = cluster.backend([COUNT, TAGS])
        present: set[str] = set()
        pending: list[Any] = []
        keys: Iterator[bytes] = iter(())
        found: list[bytes] = []

        def step(number: int, what: str, name: str) -> None:
            match what:
                case "put":
                    _put(backend, state, name, number)
                    present.add(name)
                case "remove":
                    _remove(backend, state, name)
                    present.discard(name)
                case "next":
                    found.extend(key for key in [next(keys, None)] if key is not None)
                case "snapshot":
                    pending.append(backend.snapshot(number + 1))
                case "finish" if pending:
                    cluster.finish(pending.pop(0))
                case "retire" if isinstance(backend, RocksKeyedBackend):
                    backend.write_buffer.retire()

        for number, (what, name) in enumerate(before):
            step(number, what, name)
        keys = backend.keys(state)
        throughout, ever = set(present), set(present)
        found.extend(key for key in [next(keys, None)] if key is not None)
        for number, (what, name) in enumerate(during, len(before)):
            step(number, what, name)
            throughout &= present
            ever |= present
        found.extend(keys)
        names = [KEY.decode(key) for key in found]
        assert len(set(names)) == len(names)
        assert throughout <= set(names) <= ever
        for each in pending:
            each.release()
        cluster.close()

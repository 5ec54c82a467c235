"""Each backend against a plain dict, through any order of changes, barriers, finished and abandoned snapshots, and restores."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, SEEN, TAGS, TOTAL, WINDOWS, Cluster, columnar_update, union, use

KEYS = ("a", "b", "c")
CHANGES = st.tuples(
    st.sampled_from(["update", "append", "put", "remove", "add", "clear", "fold"]),
    st.sampled_from(KEYS),
    st.sampled_from([b"", b"", b"n"]),
    st.sampled_from(["x", "y"]),
    st.integers(0, 9),
)
IN_FLIGHT_MAX = 3


class BackendMachine(RuleBasedStateMachine):
    """The model maps what harness.contents gives: (state, namespace, key) -> value."""

    kind: BackendKind
    cache_bytes_max: int

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.cluster = Cluster(Path(self._folder.name), self.kind)
        self.cluster.settings = StateBackendSettings(
            memory_snapshot_bytes_max=1 << 30,
            rocksdb=RocksDBConfig(front_tier_bytes_max=1 << 20, cache_bytes_max=self.cache_bytes_max, write_behind_rows=1),
        )
        self.model: dict[Any, Any] = {}
        self.pending: list[tuple[Any, dict[Any, Any]]] = []
        self.snapshots: list[tuple[Any, dict[Any, Any]]] = []

    @initialize()
    def start(self) -> None:
        self.backend = self.cluster.backend()

    def teardown(self) -> None:
        self.cluster.close()
        self._folder.cleanup()

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=8))
    def change(self, changes: list[tuple[Any, ...]]) -> None:
        for kind, key, namespace, tag, number in changes:
            use(self.backend, key)
            getattr(self, f"_{kind}")(key, namespace, tag, number)

    def _update(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        self.backend.get_state(COUNT, namespace).update(number)
        self.model["count", namespace, key] = number

    def _append(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        values = [tag] * (number % 3)
        self.backend.get_state(SEEN, namespace).add_all(values)
        if values:
            self.model.setdefault(("seen", namespace, key), []).extend(values)

    def _put(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        self.backend.get_state(TAGS, namespace).put(tag, number)
        self.model.setdefault(("tags", namespace, key), {})[tag] = number

    def _remove(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        self.backend.get_state(TAGS, namespace).remove(tag)
        place = ("tags", namespace, key)
        self.model.get(place, {}).pop(tag, None)
        if not self.model.get(place, True):
            del self.model[place]

    def _add(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        self.backend.get_state(TOTAL, namespace).add(number)
        place = ("total", namespace, key)
        self.model[place] = self.model.get(place, 0) + number

    def _clear(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        descriptor = (COUNT, SEEN, TAGS, TOTAL)[number % 4]
        self.backend.get_state(descriptor, namespace).clear()
        self.model.pop((descriptor.name, namespace, key), None)

    def _fold(self, key: str, namespace: bytes, tag: str, number: int) -> None:
        window = len(namespace)
        columnar_update(self.backend, window, [(key, number), (KEYS[number % 3], 1)])
        for row_key, value in ((key, number), (KEYS[number % 3], 1)):
            count, total = self.model.get(("windows", window, row_key), (0, 0))
            self.model["windows", window, row_key] = (count + 1, total + value)

    @rule(window=st.integers(0, 1))
    def close_window(self, window: int) -> None:
        self.backend.columnar_state(WINDOWS, ["user"]).remove(window)
        self.model = {place: value for place, value in self.model.items() if place[:2] != ("windows", window)}

    # ---------------------------------------------------------------------------------------------------------- snapshots

    @precondition(lambda self: len(self.pending) < IN_FLIGHT_MAX)
    @rule()
    def barrier(self) -> None:
        self.pending.append((self.backend.snapshot(len(self.snapshots) + 1), copy.deepcopy(self.model)))

    @rule(
        before=st.lists(CHANGES, min_size=2, max_size=8), after=st.lists(CHANGES, min_size=2, max_size=8), canonical=st.booleans()
    )
    def checkpoint(self, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], canonical: bool) -> None:
        """A snapshot with changes on both sides of the barrier; what it restores to is checked at once."""
        self.change(before)
        pending, model = self.backend.snapshot(len(self.snapshots) + 1), copy.deepcopy(self.model)
        self.change(after)
        snapshot = self.cluster.finish(pending, canonical=canonical, inline_threshold=1 << 20)
        self.snapshots.append((snapshot, model))
        restored = self.cluster.restored(snapshot)
        assert union([restored], [b"", b"n"]) == model
        restored.dispose()

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1), canonical=st.booleans())
    def finish(self, which: int, canonical: bool) -> None:
        pending, model = self.pending.pop(which % len(self.pending))
        self.snapshots.append((self.cluster.finish(pending, canonical=canonical, inline_threshold=1 << 20), model))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1))
    def abandon(self, which: int) -> None:
        self.pending.pop(which % len(self.pending))[0].release()

    @precondition(lambda self: self.kind == "rocksdb")
    @rule()
    def evict(self) -> None:
        write_buffer = self.backend.write_buffer  # type: ignore[attr-defined]
        write_buffer.freeze()
        for _ in range(3):
            write_buffer.maintain()

    @precondition(lambda self: self.kind == "rocksdb")
    @rule(turns=st.integers(1, 4))
    def idle(self, turns: int) -> None:
        for _ in range(turns):
            self.backend.write_behind()

    @precondition(lambda self: self.snapshots)
    @rule(parallelism=st.integers(1, 3))
    def restore(self, parallelism: int) -> None:
        """Whatever was restored, at any parallelism, equals the model at the barrier; go on from there."""
        snapshot, model = self.snapshots[-1]
        parts = [self.cluster.restored(snapshot, parallelism=parallelism, subtask=subtask) for subtask in range(parallelism)]
        assert union(parts, [b"", b"n"]) == model
        for part in parts:
            part.dispose()
        self.backend.dispose()
        self.backend = self.cluster.restored(snapshot)
        self.model = copy.deepcopy(model)
        self.pending = []

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        if hasattr(self, "backend"):
            assert union([self.backend], [b"", b"n"]) == self.model


@pytest.mark.parametrize(
    ("kind", "cache_bytes_max", "count"), [("memory", 0, 12), ("filesystem", 0, 3), ("rocksdb", 0, 4), ("rocksdb", 1 << 20, 4)]
)
def test_a_backend_behaves_like_a_dict(kind: BackendKind, cache_bytes_max: int, count: int) -> None:
    machine = type("Machine", (BackendMachine,), {"kind": kind, "cache_bytes_max": cache_bytes_max})
    options = settings(max_examples=examples(count), stateful_step_count=20, deadline=None)
    run_state_machine_as_test(machine, settings=options)

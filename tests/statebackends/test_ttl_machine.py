"""State with TTL on each backend against a model, through any order of changes, reads, jumps of the clock (back, too), barriers,
evictions, savepoints restored by other backends, and downtimes.

The model keeps every value with its stamp. What has expired at some time that the backend was told may be gone from then on,
whatever the clock does; what never has must be there."""

from __future__ import annotations

import copy
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from holdfast.statebackends.factory import BACKEND_KINDS, BackendKind
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    Ttl,
    TtlUpdate,
    TtlVisibility,
    ValueStateDescriptor,
)
from tests.examples import crossed, examples
from tests.statebackends.backend_harness import Cluster, Visit, use

DURATION_MS = 20
KEYS = ("a", "b", "c")
NAMESPACES = (b"", b"n")
KINDS = ("value", "struct", "list", "map", "reducing", "aggregating")
CHANGES = st.tuples(
    st.sampled_from(["write", "write", "write", "read", "read", "clear", "remove"]),
    st.sampled_from(KINDS),
    st.sampled_from(KEYS),
    st.sampled_from(NAMESPACES),
    st.integers(0, 9),
)
JUMPS = st.sampled_from([0, 1, 3, 7, 11, DURATION_MS, 3 * DURATION_MS, -2, -DURATION_MS, -90])
IN_FLIGHT_MAX = 2

Place = tuple[str, str, bytes]


@dataclass
class Kept:
    """A value, an element, or an entry; value, sum and accumulator have one, whose tag is None."""

    tag: Any
    value: Any
    stamp_ms: int
    doomed: bool = False
    """It has expired once: it may have been cleaned up."""


class Totals(AggregateFunction[int, tuple[int, int], tuple[int, int]]):
    """(sum, count)."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator

    def merge(self, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]


class TtlMachine(RuleBasedStateMachine):
    kind: BackendKind
    update: TtlUpdate
    visibility: TtlVisibility
    cleanup_entries: int

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.cluster = Cluster(Path(self._folder.name), self.kind)
        self.cluster.settings = StateBackendSettings(
            memory_snapshot_bytes_max=1 << 30,
            rocksdb=RocksDBConfig(front_tier_bytes_max=1 << 20, cache_bytes_max=1 << 20, write_behind_rows=1),
        )
        ttl = Ttl(DURATION_MS, self.update, self.visibility, self.cleanup_entries)
        self.descriptors: dict[str, Any] = {
            "value": ValueStateDescriptor("value", int, ttl),
            "struct": ValueStateDescriptor("struct", Visit, ttl),
            "list": ListStateDescriptor("list", int, ttl),
            "map": MapStateDescriptor("map", str, int, ttl),
            "reducing": ReducingStateDescriptor("reducing", int, lambda old, added: old + added, ttl),
            "aggregating": AggregatingStateDescriptor("aggregating", tuple[int, int], Totals(), ttl),
        }
        self.model: dict[Place, list[Kept]] = {}
        self.serial = itertools.count()
        self.went_back = False
        self.pending: list[tuple[Any, dict[Place, list[Kept]]]] = []
        self.snapshots: list[tuple[Any, dict[Place, list[Kept]]]] = []

    @initialize()
    def start(self) -> None:
        self.backend = self.cluster.backend(list(self.descriptors.values()))

    def teardown(self) -> None:
        self.cluster.close()
        self._folder.cleanup()

    @property
    def now_ms(self) -> int:
        return self.cluster.now_ms

    def _expired(self, kept: Kept) -> bool:
        return kept.stamp_ms + DURATION_MS <= self.now_ms

    # ------------------------------------------------------------------------------------------------------------- changes

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=10), jump=JUMPS)
    def change(self, changes: list[tuple[Any, ...]], jump: int) -> None:
        self._jump(jump)
        for action, kind, key, namespace, number in changes:
            use(self.backend, key)
            state = self.backend.get_state(self.descriptors[kind], namespace)
            place = (kind, key, namespace)
            if action == "read":
                self._read(state, place)
            elif action == "clear":
                state.clear()
                self.model.pop(place, None)
            elif action == "write":
                getattr(self, f"_write_{kind}")(state, place, number)
            elif kind == "map":
                state.remove("xy"[number % 2])
                self._without(place, "xy"[number % 2])

    def _jump(self, jump: int) -> None:
        self.cluster.now_ms += jump
        self.went_back = self.went_back or jump < 0
        self.backend.set_processing_time(self.now_ms)
        for row in self.model.values():
            for kept in row:
                kept.doomed = kept.doomed or self._expired(kept)

    def _without(self, place: Place, tag: Any) -> None:
        self.model[place] = [kept for kept in self.model.get(place, []) if kept.tag != tag]

    def _write_value(self, state: Any, place: Place, number: int) -> None:
        state.update(number)
        self.model[place] = [Kept(None, number, self.now_ms)]

    def _write_struct(self, state: Any, place: Place, number: int) -> None:
        """A mutable value, changed in place as users do: a frozen generation must not see it."""
        visit = state.value()
        self._check(place, None if visit is None else {None: visit.count})
        if visit is None:
            visit = Visit(0)
        visit.count += number
        visit.pages.append("p")
        state.update(visit)
        self.model[place] = [Kept(None, visit.count, self.now_ms)]

    def _write_list(self, state: Any, place: Place, number: int) -> None:
        """No two elements are equal: of two with different stamps a list would not tell which one is left."""
        row = self.model.setdefault(place, [])
        values = [next(self.serial) for _ in range(2 if number == 9 else number % 3)]
        if number == 9:
            state.update(values)
            row.clear()
        elif len(values) == 1:
            state.add(values[0])
        else:
            state.add_all(values)
        row += [Kept(value, value, self.now_ms) for value in values]

    def _write_map(self, state: Any, place: Place, number: int) -> None:
        tag = "xy"[number % 2]
        state.put(tag, number)
        self._without(place, tag)
        self.model[place].append(Kept(tag, number, self.now_ms))

    def _write_reducing(self, state: Any, place: Place, number: int) -> None:
        state.add(number + 1)
        self._added(place, state.get(), number + 1)

    def _write_aggregating(self, state: Any, place: Place, number: int) -> None:
        state.add(number)
        self._added(place, state.get(), (number, 1))

    def _added(self, place: Place, shown: Any, added: Any) -> None:
        """Nothing is built on what has expired; what expired before the clock went back may have been cleaned up or not. The result
        tells which: nothing that is added leaves a sum as it was."""
        row = self.model.get(place, [])
        old = row[0] if row and not self._expired(row[0]) else None
        sums = [] if old is None else [_sum(old.value, added)]
        if old is None or old.doomed:
            sums.append(added)
        assert shown in sums, f"{place}: {shown} is none of {sums}"
        self.model[place] = [Kept(None, shown, self.now_ms)]

    # --------------------------------------------------------------------------------------------------------------- reads

    def _read(self, state: Any, place: Place) -> None:
        match place[0]:
            case "value":
                value = state.value()
                self._check(place, None if value is None else {None: value})
            case "struct":
                visit = state.value()
                self._check(place, None if visit is None else {None: visit.count})
            case "list":
                self._check_list(place, state.get())
            case "map":
                is_empty = state.is_empty()
                shown = dict(state.items())
                assert is_empty == (not shown)
                self._check(place, shown)
                for tag in "xy":
                    if any(kept.tag == tag for kept in self.model.get(place, [])):
                        assert state.contains(tag)
                    elif self.visibility == "never_expired" and not self.went_back:
                        # else a cache may still show what has expired and is on disk no more
                        assert not state.contains(tag)
            case "reducing" | "aggregating":
                total = state.get()
                self._check(place, None if total is None else {None: total})

    def _check(self, place: Place, shown: dict[Any, Any] | None) -> None:
        shown = shown or {}
        row = self.model.get(place, [])
        assert shown.keys() <= {kept.tag for kept in row}, f"{place}: {shown} of {row}"
        for kept in row:
            if kept.tag in shown:
                assert shown[kept.tag] == kept.value, f"{place}: {shown} of {row}"
            self._check_presence(kept, place, present=kept.tag in shown)
        self._keep(place, [kept for kept in row if kept.tag in shown])

    def _check_list(self, place: Place, shown: list[int]) -> None:
        row = self.model.get(place, [])
        assert shown == [kept.value for kept in row if kept.value in shown], f"{place}: {shown} of {row}"
        self._check(place, {value: value for value in shown})

    def _check_presence(self, kept: Kept, place: Place, *, present: bool) -> None:
        if present:
            assert self.visibility == "until_cleaned" or not self._expired(kept), f"{place}: {kept} has expired"
        else:
            assert kept.doomed, f"{place}: {kept} is gone"

    def _keep(self, place: Place, shown: list[Kept]) -> None:
        """After a read: what has expired was shown for the last time."""
        kept = [each for each in shown if not self._expired(each)]
        for each in kept:
            if self.update == "read" and each.stamp_ms < self.now_ms:
                each.stamp_ms, each.doomed = self.now_ms, False
        if kept:
            self.model[place] = kept
        else:
            self.model.pop(place, None)

    def _read_all(self) -> None:
        for place in [(kind, key, namespace) for kind in KINDS for key in KEYS for namespace in NAMESPACES]:
            use(self.backend, place[1])
            self._read(self.backend.get_state(self.descriptors[place[0]], place[2]), place)

    @rule(jump=JUMPS)
    def read_all(self, jump: int) -> None:
        self._jump(jump)
        self._read_all()

    # ----------------------------------------------------------------------------------------------------------- snapshots

    @precondition(lambda self: len(self.pending) < IN_FLIGHT_MAX)
    @rule()
    def barrier(self) -> None:
        self.pending.append((self.backend.snapshot(len(self.snapshots) + 1), copy.deepcopy(self.model)))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1), canonical=st.booleans())
    def finish(self, which: int, canonical: bool) -> None:
        pending, model = self.pending.pop(which % len(self.pending))
        self.snapshots.append((self.cluster.finish(pending, canonical=canonical, inline_threshold=1 << 20), model))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1))
    def abandon(self, which: int) -> None:
        self.pending.pop(which % len(self.pending))[0].release()

    @precondition(lambda self: self.backend.native_format is not None)
    @rule()
    def evict(self) -> None:
        write_buffer = cast(Any, self.backend).write_buffer
        write_buffer.freeze()
        for _ in range(3):
            write_buffer.maintain()

    @precondition(lambda self: self.backend.native_format is not None)
    @rule(turns=st.integers(1, 4))
    def idle(self, turns: int) -> None:
        for _ in range(turns):
            self.backend.write_behind()

    @precondition(lambda self: self.snapshots)
    @rule(downtime=st.sampled_from([0, 5, DURATION_MS, 1000]), kind=st.sampled_from(BACKEND_KINDS), which=st.integers(0, 3))
    def restore(self, downtime: int, kind: BackendKind, which: int) -> None:
        """At another time, by any backend that reads it: the stored stamps decide."""
        snapshot, model = self.snapshots[-1 - which % min(2, len(self.snapshots))]
        self.backend.dispose()
        self.pending = []
        self.model = copy.deepcopy(model)
        for row in self.model.values():
            for kept in row:
                # the barrier may have left it out, even if the clock goes back from here
                kept.doomed = kept.doomed or self._expired(kept)
        self.cluster.now_ms += downtime
        if any(handle.format == "rocksdb" for handle in snapshot[0]):
            kind = "rocksdb"
        self.backend = self.cluster.restored(snapshot, list(self.descriptors.values()), kind=kind)
        self._jump(0)
        self._read_all()


@pytest.mark.parametrize(
    ("kind", "update", "visibility", "cleanup_entries"),
    crossed(BACKEND_KINDS, ["write", "read"], ["never_expired", "until_cleaned"], [0, 3], every=2),
)
def test_state_with_a_ttl_behaves_like_its_model(
    kind: BackendKind, update: TtlUpdate, visibility: TtlVisibility, cleanup_entries: int
) -> None:
    names = {"kind": kind, "update": update, "visibility": visibility, "cleanup_entries": cleanup_entries}
    machine = type("Machine", (TtlMachine,), names)
    count = examples({"memory": 12, "filesystem": 4, "rocksdb": 6}[kind])
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=25))


def _sum(old: Any, added: Any) -> Any:
    return (old[0] + added[0], old[1] + added[1]) if isinstance(added, tuple) else old + added

"""Rollback in place: what a deployment may take over of an earlier attempt, and that it is what storage would give."""

from __future__ import annotations

import copy
import random
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import holdfast as hf
from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import Deployment, SubtaskDeployment, SubtaskKey
from holdfast.coordinator.ha.shared_state import shared_handles
from holdfast.operators.task.rollback import UNCONFIRMED_MAX, KeptCheckpoints
from holdfast.statebackends.backend import KeptState, SnapshotTarget
from holdfast.statebackends.backends.heap import HeapKeyedBackend
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.heap import slot_states
from holdfast.statebackends.heap.key_slots import KeySlots
from holdfast.statebackends.heap.slot_pages import SlotPages
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, StateDescriptor, Ttl, ValueStateDescriptor
from holdfast.statebackends.storage.port import Operation, ReadFile, run_flow
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, Cluster, use
from tests.statebackends.test_backend_machine import CHANGES, IN_FLIGHT_MAX
from tests.statebackends.test_delta_machine import DeltaMachine

KEY = SubtaskKey("v", 0)
OTHER = SubtaskKey("v", 1)
GROUPS = KeyGroupRange(0, 64)
META = StateMeta("count", "value", "int", "utf8")
SUM = "xxh3_128:" + "0" * 32
GRAPH = JobGraph("job", (), (), JobConfig())


class Memory:
    """A KeptState that says what became of it."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names or ("count",))
        self.log: list[str] = []

    def release(self) -> None:
        self.log.append("release")

    def free(self) -> None:
        self.log.append("free")


def state_of(*parts: StateHandle, groups: KeyGroupRange = GROUPS, meta: StateMeta = META) -> OperatorSubtaskState:
    """One table, and its deltas."""
    handles = [KeyedStateHandle(groups, "arrow", (meta,), parts[:1])]
    if parts[1:]:
        handles.append(KeyedStateHandle(groups, "arrow-delta", (meta,) * len(parts[1:]), parts[1:]))
    return OperatorSubtaskState(keyed=tuple(handles))


def deployment_of(attempt: int, checkpoint_id: int, folder: str | None = None, subtasks: tuple[int, ...] = (0,)) -> Deployment:
    folder = f"job/chk-{checkpoint_id}" if folder is None else folder
    wanted = tuple(SubtaskDeployment("v", subtask) for subtask in subtasks)
    return Deployment(attempt, GRAPH, wanted, {}, restored_checkpoint_id=checkpoint_id, restored_folder=folder)


FILE = FileHandle("op-0-1-n-count.arrow", 100_000, SUM)
STORED = state_of(FILE)


def kept_at(checkpoint_id: int = 7, *, attempt: int = 1, stored: OperatorSubtaskState | None = STORED) -> KeptCheckpoints:
    kept = KeptCheckpoints()
    kept.froze(KEY, attempt, checkpoint_id, {"op": Memory()})
    if stored is not None:
        kept.acknowledged(KEY, checkpoint_id, {"op": stored})
    return kept


def sizes(kept: KeptCheckpoints, deployment: Deployment, restored: OperatorSubtaskState) -> dict[str, int]:
    """State -> bytes that are not read."""
    kept.deployed(deployment)
    return {name: size for claim in kept.claims(KEY, {"op": restored}).values() for name, size in claim.sizes.items()}


# ------------------------------------------------------------------------------------------------------------------- core


def test_the_restored_checkpoint_is_taken_over_if_its_parts_are_those_acknowledged() -> None:
    assert sizes(kept_at(), deployment_of(2, 7), STORED) == {"count": 100_000}


def test_it_is_taken_over_again_by_a_second_restart() -> None:
    kept = kept_at()
    assert sizes(kept, deployment_of(2, 7), STORED)
    assert sizes(kept, deployment_of(3, 7), STORED)


def test_what_was_not_said_to_be_complete_is_taken_over_if_the_deployment_restores_it() -> None:
    kept = kept_at(7)
    kept.completed(KEY, 7)
    kept.froze(KEY, 1, 8, {"op": Memory()})
    newer = state_of(FileHandle("op-0-1-n-2.arrow", 5, SUM))
    kept.acknowledged(KEY, 8, {"op": newer})
    assert sizes(kept, deployment_of(2, 8), newer) == {"count": 5}


@pytest.mark.parametrize(
    ("what", "deployment"),
    [
        ("another id", deployment_of(2, 6)),
        ("a newer id", deployment_of(2, 8)),
        ("nothing", deployment_of(2, 0, "")),
        ("a savepoint of the same number", deployment_of(2, 7, "/savepoints/savepoint-1")),
        ("a snapshot of another directory", deployment_of(2, 7, "s3://bucket/job/chk-7")),
        ("its own attempt", deployment_of(1, 7)),
        ("another subtask", deployment_of(2, 7, subtasks=(1,))),
    ],
    ids=str,
)
def test_any_other_deployment_restores_from_storage(what: str, deployment: Deployment) -> None:
    kept = kept_at()
    assert sizes(kept, deployment, STORED) == {}, what
    assert kept.kept_of(KEY) == (), "nobody will want it any more"


@pytest.mark.parametrize(
    "restored",
    [
        state_of(msgspec.structs.replace(FILE, path="op-0-1-m-count.arrow")),
        state_of(msgspec.structs.replace(FILE, length=99_999)),
        state_of(msgspec.structs.replace(FILE, checksum="xxh3_128:" + "1" * 32)),
        state_of(SegmentHandle(FILE.path, FILE.length, SUM, 0, FILE.length)),
        state_of(InlineHandle(b"")),
        state_of(FILE, FileHandle("../shared/8-1-op-0-n-d", 5, SUM)),
        state_of(FILE, groups=KeyGroupRange(0, 32)),
        state_of(FILE, groups=KeyGroupRange(64, 128)),
        state_of(FILE, meta=StateMeta("count", "value", "float", "utf8")),
        state_of(FILE, meta=StateMeta("other", "value", "int", "utf8")),
        OperatorSubtaskState(keyed=STORED.keyed + state_of(FILE, groups=KeyGroupRange(64, 128)).keyed),
        OperatorSubtaskState(keyed=(KeyedStateHandle(GROUPS, "arrow-delta", (META,), (FILE,)),)),
        OperatorSubtaskState(keyed=(KeyedStateHandle(GROUPS, "parquet", (META,), (FILE,)),)),
        OperatorSubtaskState(),
    ],
)
def test_other_parts_are_read_from_storage(restored: OperatorSubtaskState) -> None:
    assert sizes(kept_at(), deployment_of(2, 7), restored) == {}


def test_inline_tables_are_compared_by_their_bytes() -> None:
    for data, expected in ((b"abc", {"count": 0}), (b"abd", {})):
        assert sizes(kept_at(stored=state_of(InlineHandle(b"abc"))), deployment_of(2, 7), state_of(InlineHandle(data))) == expected


@pytest.mark.parametrize(
    ("acknowledged", "restored", "is_same"),
    [
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9), FileHandle("../shared/6-1-op-0-n-b", 9, SUM), True),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9), FileHandle("../shared/6-1-op-0-n-c", 9, SUM), False),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9), FileHandle("../shared/6-1-op-0-n-b", 8, SUM), False),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9), SegmentHandle("../shared/6-1-op-0-n-b", 9, SUM, 0, 9), False),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9, 4), SegmentHandle("../shared/6-1-op-0-n-b", 9, SUM, 4, 20), True),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9, 4), SegmentHandle("../shared/6-1-op-0-n-b", 9, SUM, 5, 20), False),
        (PlaceholderHandle("../shared/6-1-op-0-n-b", 9), InlineHandle(b"123456789"), False),
    ],
)
def test_a_placeholder_is_the_file_of_the_base(acknowledged: StateHandle, restored: StateHandle, is_same: bool) -> None:
    delta = FileHandle("../shared/7-1-op-0-n-d", 5, SUM)
    found = sizes(kept_at(stored=state_of(acknowledged, delta)), deployment_of(2, 7), state_of(restored, delta))
    assert bool(found) is is_same


def test_what_was_not_acknowledged_is_not_taken_over() -> None:
    assert sizes(kept_at(stored=None), deployment_of(2, 7), STORED) == {}


def test_an_aborted_checkpoint_is_let_go() -> None:
    kept = kept_at()
    (gone,) = kept.aborted(KEY, 7)
    assert gone.checkpoint_id == 7
    assert sizes(kept, deployment_of(2, 7), STORED) == {}


def test_a_completed_checkpoint_takes_the_place_of_older_ones() -> None:
    kept = KeptCheckpoints()
    for number in (5, 6):
        kept.froze(KEY, 1, number, {"op": Memory()})
    kept.froze(OTHER, 1, 5, {"op": Memory()})
    assert [gone.checkpoint_id for gone in kept.completed(KEY, 6)] == [5]
    assert kept.completed(KEY, 6) == []
    assert (kept.kept_of(KEY), kept.kept_of(OTHER)) == ((6,), (5,))


def test_few_are_kept_beside_the_newest_completed_one() -> None:
    kept = kept_at(1)
    kept.completed(KEY, 1)
    gone = [each.checkpoint_id for number in range(2, 10) for each in kept.froze(KEY, 1, number, {"op": Memory()})]
    assert kept.kept_of(KEY) == (1, *range(10 - UNCONFIRMED_MAX, 10))
    assert gone == list(range(2, 10 - UNCONFIRMED_MAX))


def test_a_deployment_lets_go_of_subtasks_that_run_elsewhere() -> None:
    kept = kept_at()
    kept.froze(OTHER, 1, 7, {"op": Memory()})
    kept.acknowledged(OTHER, 7, {"op": STORED})
    assert len(kept.deployed(deployment_of(2, 7, subtasks=(0,)))) == 1
    assert (kept.kept_of(KEY), kept.kept_of(OTHER)) == ((7,), ())


def test_states_of_one_operator_are_claimed_one_by_one() -> None:
    other = StateMeta("total", "reducing", "int", "utf8")
    kept = KeptCheckpoints()
    kept.froze(KEY, 1, 7, {"op": Memory("count", "total")})
    both = OperatorSubtaskState(keyed=STORED.keyed + state_of(FILE, meta=other).keyed)
    kept.acknowledged(KEY, 7, {"op": both})
    rewritten = OperatorSubtaskState(keyed=STORED.keyed + state_of(InlineHandle(b"x"), meta=other).keyed)
    assert sizes(kept, deployment_of(2, 7), rewritten) == {"count": 100_000}


# ----------------------------------------------------------------------------------------------------- what backends keep


class Pair(NamedTuple):
    left: int
    right: int


class Single(NamedTuple):
    only: int


class Reads:
    """A storage that counts what is read."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.paths: list[str] = []

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, ReadFile):
            self.paths.append(operation.path)
        return self._storage.execute(operation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def filled(cluster: Cluster, descriptor: StateDescriptor, values: dict[str, Any]) -> Any:
    backend = cluster.backend([descriptor])
    for key, value in values.items():
        use(backend, key)
        backend.get_state(descriptor).update(value)
    return backend


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 3), (float, -0.0), (str, "ä"), (bytes, b"x" * 100), (bool, True), (date, date(2026, 1, 2)), (int | None, 5),
        (tuple[int, str], (1, "a")), (tuple[int, tuple[float, bytes]], (1, (2.0, b""))), (tuple[int | None, int], (None, 1)),
    ],
)  # fmt: skip
def test_values_that_come_back_as_they_are_are_kept(kind: Any, value: Any, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    state = ValueStateDescriptor("v", kind)
    backend = filled(cluster, state, {"a": value, "b": value})
    pending = backend.snapshot(1)
    kept = backend.keep()
    use(backend, "a")
    backend.get_state(state).clear()
    snapshot = cluster.finish(pending)
    fresh = cluster.backend([state])
    assert fresh.take_over(kept, frozenset({"v"})) == {"v"}
    reads = Reads(cluster.storage)
    fresh.restore(snapshot[0], reads, snapshot[1])
    stored = cluster.restored(snapshot, [state])
    assert reads.paths == []
    for key in ("a", "b"):
        use(fresh, key)
        use(stored, key)
        ours, theirs = fresh.get_state(state).value(), stored.get_state(state).value()
        assert (repr(ours), type(ours)) == (repr(theirs), type(theirs))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (datetime, datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=1)))), (list[int], [1]), (dict[str, int], {"a": 1}),
        (Pair, Pair(1, 2)), (tuple[int, list[int]], (1, [2])),
    ],
)  # fmt: skip
def test_values_that_can_be_changed_or_come_back_otherwise_are_read_from_storage(kind: Any, value: Any, tmp_path: Path) -> None:
    state = ValueStateDescriptor("v", kind)
    backend = filled(Cluster(tmp_path, "memory"), state, {"a": value})
    backend.snapshot(1)
    assert backend.keep() is None


@pytest.mark.parametrize(
    ("kind", "usual", "value"),
    [
        (int, 1, np.int64(3)),
        (int | None, 1, np.int32(1)),
        (tuple[int, int], (1, 1), (1, np.int64(3))),
        (tuple[int], (1,), Single(1)),
    ],
)
def test_one_equal_value_of_another_class_is_read_from_storage(kind: Any, usual: Any, value: Any, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    state = ValueStateDescriptor("v", kind)
    backend = filled(cluster, state, {f"k{number}": value if number == 700 else usual for number in range(1_000)})
    pending = backend.snapshot(1)
    kept = backend.keep()
    snapshot = cluster.finish(pending)
    fresh = cluster.backend([state])
    assert fresh.take_over(kept, frozenset({"v"})) == frozenset()
    fresh.restore(*snapshot[:1], cluster.storage, snapshot[1])
    use(fresh, "k700")
    found = fresh.get_state(state).value()
    assert type(found) is type(usual)
    assert {type(each) for each in (found if isinstance(found, tuple) else (found,))} == {int}


def test_a_subtask_with_other_key_groups_reads_from_storage(tmp_path: Path) -> None:
    """Its share of an old subtask's state may name the very files, for a part of their key groups."""
    cluster = Cluster(tmp_path, "memory")
    state = ValueStateDescriptor("v", int)
    backend = filled(cluster, state, {f"k{number}": number for number in range(100)})
    pending = backend.snapshot(1)
    kept = backend.keep()
    handles, folder = cluster.finish(pending)
    counts = []
    for subtask in (0, 1):
        fresh = cluster.backend([state], parallelism=2, subtask=subtask)
        assert fresh.take_over(kept, frozenset({"v"})) == frozenset()
        fresh.restore(handles, cluster.storage, folder)
        counts.append(len(list(fresh.keys("v"))))
    assert sum(counts) == 100
    assert min(counts) > 0


@pytest.mark.parametrize(
    "state", [ListStateDescriptor("v", int), MapStateDescriptor("v", str, int), ValueStateDescriptor("v", int, ttl=Ttl(60_000))]
)
def test_lists_maps_and_what_expires_are_read_from_storage(state: StateDescriptor, tmp_path: Path) -> None:
    backend = Cluster(tmp_path, "memory").backend([state, COUNT])
    use(backend, "a")
    found = backend.get_state(state)
    match state.kind:
        case "list":
            found.add(1)
        case "map":
            found.put("m", 1)
        case _:
            found.update(1)
    backend.get_state(COUNT).update(1)
    backend.snapshot(1)
    kept = backend.keep()
    assert kept is not None
    assert kept.names == {COUNT.name}


def test_a_state_with_namespaces_is_read_from_storage(tmp_path: Path) -> None:
    backend = filled(Cluster(tmp_path, "memory"), COUNT, {"a": 1})
    backend.get_state(COUNT, b"window").update(2)
    backend.snapshot(1)
    assert backend.keep() is None


def test_pages_are_kept_although_slots_were_numbered_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 16)
    cluster = Cluster(tmp_path, "memory")
    backend = filled(cluster, COUNT, {f"k{number}": number for number in range(20)})
    pending = backend.snapshot(1)
    kept = backend.keep()
    for number in range(20):
        use(backend, f"k{number}")
        backend.get_state(COUNT).clear()
    for number in range(200):
        use(backend, f"new{number}")
        backend.get_state(COUNT).update(-1)
    pending.release()
    backend.dispose()
    fresh = cluster.backend([COUNT])
    fresh.take_over(kept, frozenset({"count"}))
    found = {fresh.key_type.decode(key): key for key in fresh.keys("count")}
    assert set(found) == {f"k{number}" for number in range(20)}
    for number in range(20):
        use(fresh, f"k{number}")
        assert fresh.get_state(COUNT).value() == number


def test_a_state_that_was_let_go_costs_no_copies(tmp_path: Path) -> None:
    backend = filled(Cluster(tmp_path, "memory"), COUNT, {"a": 1})
    pending = backend.snapshot(1)
    kept = backend.keep()
    pending.release()
    table = backend._slots["count"]
    assert table.pinned
    kept.release()
    assert not table.pinned
    kept.free()
    use(backend, "a")
    assert backend.get_state(COUNT).value() == 1


# ------------------------------------------------------------------------------------------------------- crashes on the way


class Counts(hf.ProcessFunction):
    """Two states that are taken over, and one that is read."""

    count = hf.ValueStateDescriptor("count", int)
    total = hf.ReducingStateDescriptor("total", int, lambda old, added: old + added)
    seen = hf.ListStateDescriptor("seen", int)
    states = (count, total, seen)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        count, total, seen = map(ctx.state, self.states)
        count.update(count.value(0) + 1)
        total.add(value["v"])
        seen.add(value["v"])
        out({"k": value["k"], "count": count.value(), "total": total.get(), "seen": len(seen.get())})
        if count.value() == 3:
            count.clear()


def expected_counts(stop: int) -> list[tuple[int, int, int, int]]:
    seen: dict[int, list[int]] = {}
    for number in range(stop):
        seen.setdefault(number % 6, []).append(number)
    return sorted((k, n % 3 + 1, sum(of_key[: n + 1]), n + 1) for k, of_key in seen.items() for n in range(len(of_key)))


def failing_once(patched: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, *, behind: bool) -> None:
    original, left = getattr(owner, name), [error]

    def call(*given: Any, **named: Any) -> Any:
        if left and not behind:
            raise left.pop()
        result = original(*given, **named)
        if left:
            raise left.pop()
        return result

    patched.setattr(owner, name, call)


CRASHES: dict[str, tuple[Any, str, bool] | None] = {
    "nowhere": None,
    "in front of it": (HeapKeyedBackend, "take_over", False),
    "behind it": (HeapKeyedBackend, "take_over", True),
    "at the index of keys": (KeySlots, "load", True),
    "with the pages taken": (SlotPages, "take_over", True),
    "at the files of the other states": (HeapKeyedBackend, "restore", False),
    "with all of it restored": (HeapKeyedBackend, "restore", True),
}


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("kind", ["memory", "filesystem"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_whatever_fails_on_the_way_the_state_is_that_of_the_checkpoint(kind: Any, parallelism: int, crash: str) -> None:
    """Of take over and restore. Behind it a second failure is rolled back in place, which what has failed before must not spoil."""
    strategy = hf.RestartStrategy(kind="fixed_delay", delay_ms=0)
    settings = {"parallelism": parallelism, "state_backend": kind, "restart": strategy}
    with hf.testing.Job(**settings) as job, pytest.MonkeyPatch.context() as patched:
        feed = job.input("rows", {"k": int, "v": int})
        returns = {"k": int, "count": int, "total": int, "seen": int}
        out = job.output(feed.stream.key_by("k").process(Counts(), returns=returns).uid("counts"))
        job.start()
        taken: list[frozenset[str]] = []
        original = HeapKeyedBackend.take_over

        def take_over(self: Any, kept: Any, names: frozenset[str]) -> frozenset[str]:
            taken.append(original(self, kept, names))
            return taken[-1]

        patched.setattr(HeapKeyedBackend, "take_over", take_over)
        rows = [{"k": number % 6, "v": number} for number in range(80)]  # those of one key come from one subtask
        feed.add(rows[:30])
        job.checkpoint()
        feed.add(rows[30:40])
        if (place := CRASHES[crash]) is not None:
            failing_once(patched, place[0], place[1], StorageUnavailableError("away"), behind=place[2])
        job.fail()
        feed.add(rows[40:50])
        taken.clear()
        job.fail()
        assert taken == [{"count", "total"}] * parallelism
        feed.add(rows[50:60])
        job.checkpoint()
        feed.add(rows[60:])
        job.fail()
        job.checkpoint()
        found = sorted((row["k"], row["count"], row["total"], row["seen"]) for row, _ in out.committed())
    assert found == expected_counts(80)


# ----------------------------------------------------------------------------------- in place is as if it were from storage


class RollbackMachine(DeltaMachine):
    """A restore at the same parallelism takes over what it may, as two attempts in one process would."""

    inline_threshold = 500
    taken = 0
    """States that were taken over, of all runs of the machine."""
    attempt = 1

    def __init__(self) -> None:
        super().__init__()
        self.kept = KeptCheckpoints()
        inline = random.Random(self.newest).choice((0, 1_500))
        self.cluster.settings = StateBackendSettings(memory_snapshot_bytes_max=1 << 30, memory_inline_bytes=inline)

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=8))
    def change(self, changes: list[tuple[Any, ...]]) -> None:
        """Values in namespaces are in no slots, and keep the others of their state from being kept: few."""
        super().change(
            [(kind, key, namespace if number == 9 else b"", tag, number) for kind, key, namespace, tag, number in changes]
        )

    @rule(before=st.lists(CHANGES, max_size=4), after=st.lists(CHANGES, max_size=4), later=st.lists(CHANGES, max_size=4))
    def fail(self, before: Any, after: Any, later: Any) -> None:
        """An exception behind a completed checkpoint."""
        self.checkpoint(before, after or before, "c")
        self.change(later)
        self.restore(1)

    def let_go(self, gone: Any) -> None:
        for each in gone:
            for state in each.states.values():
                state.release()
                state.free()

    @precondition(lambda self: len(self.started) < IN_FLIGHT_MAX)
    @rule(has_base=st.sampled_from([True, True, True, False]))
    def barrier(self, has_base: bool = True) -> None:
        super().barrier(has_base)
        state: KeptState | None = self.backend.keep()
        self.let_go(self.kept.froze(KEY, self.attempt, self.newest, {} if state is None else {"op": state}))

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, IN_FLIGHT_MAX - 1), fate=st.sampled_from("ccad"))
    def finish(self, which: int, fate: str) -> None:
        number, base, pending, model = self.started.pop(which % len(self.started))
        packs = 1 << 20 if number % 3 else 0
        target = SnapshotTarget(number, f"job/chk-{number}", "op-0-1-n", False, 500, f"{number}-1-op-0-n", base, packs)
        handles = run_flow(pending.flow(target), self.cluster.storage)
        pending.release()
        acknowledged = OperatorSubtaskState(keyed=handles)
        self.kept.acknowledged(KEY, number, {"op": acknowledged})
        if fate == "a" or number < max(self.completed, default=0):
            self.backend.notify_checkpoint_aborted(number)
            self.let_go(self.kept.aborted(KEY, number))
        elif fate == "c":
            resolved = self.registry.resolve(number, base, {KEY: {"op": acknowledged}})[KEY]["op"]
            self.registry.register(number, shared_handles([resolved]))
            self.completed[number] = (resolved.keyed, model)
            if number % 4:  # else the notice is lost
                self.let_go(self.kept.completed(KEY, number))

    @precondition(lambda self: self.completed)
    @rule(parallelism=st.integers(1, 3), continues=st.booleans())
    def restore(self, parallelism: int, continues: bool = True) -> None:
        number = max(self.completed)
        self.check(number, parallelism)  # from storage
        self.backend.dispose()
        self.started = []
        self.attempt += 1
        handles, model = self.completed[number]
        backend = self.cluster.backend()
        self.let_go(self.kept.deployed(deployment_of(self.attempt, number)))
        restored = msgspec.json.decode(msgspec.json.encode(OperatorSubtaskState(keyed=handles)), type=OperatorSubtaskState)
        for claim in self.kept.claims(KEY, {"op": restored}).values():
            taken = backend.take_over(claim.kept, claim.names)
            assert taken == claim.names
            type(self).taken += len(taken)
        backend.restore(handles, self.cluster.storage, f"job/chk-{number}", checkpoint_id=number if continues else None)
        self.start_over(backend)
        self.model = copy.deepcopy(model)
        if not continues:
            self.completed = {}


@pytest.mark.parametrize(("kind", "count"), [("memory", 12), ("filesystem", 12), ("rocksdb", 1)])
def test_a_rollback_in_place_is_as_a_restore_from_storage(kind: BackendKind, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 2)
    machine: Any = type("Machine", (RollbackMachine,), {"kind": kind, "cache_bytes_max": 0})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(count), stateful_step_count=30, deadline=None))
    assert bool(machine.taken) is (kind != "rocksdb")

"""State in slots beside the same state in dicts: any sequence of batches, single keys, removals, expiries, barriers, increments,
aborts, restores and compactions gives the same."""

from __future__ import annotations

import copy
import sys
import tempfile
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.heap import FilesystemKeyedBackend, HeapKeyedBackend, MemoryKeyedBackend
from holdfast.statebackends.backends.keyed import KeyedBackendConfig
from holdfast.statebackends.errors import InvalidKeyError, InvariantError, StateValueError
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange, PlaceholderHandle
from holdfast.statebackends.heap import key_slots, slot_collections, slot_pages, slot_states, state_table
from holdfast.statebackends.heap.slot_pages import GATHERED_MAX, PAGE_SLOTS, FrozenPages, PagedValues, SlotPages
from holdfast.statebackends.heap.slot_states import SlotTables
from holdfast.statebackends.heap.state_table import MISSING
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, Ttl, ValueStateDescriptor
from holdfast.statebackends.storage.port import run_flow
from tests.examples import examples
from tests.operators.ports import DictStorage
from tests.statebackends.backend_harness import COUNT, MEAN, SEEN, TOTAL, VISIT, Visit, assign

GROUPS = 16
EXPIRING = ValueStateDescriptor("expiring", int, Ttl(100))
LASTING = ValueStateDescriptor("lasting", list[int], Ttl(150, update="read", visibility="until_cleaned"))
TRACES = ListStateDescriptor("traces", Visit)
TAGS = MapStateDescriptor("tags", str, int)
VISITS = MapStateDescriptor("visits", int, Visit)
OLD_LIST = ListStateDescriptor("old list", str, Ttl(80))
OLD_MAP = MapStateDescriptor("old map", str, list[int], Ttl(120, update="read"))
STATES: tuple[Any, ...] = (COUNT, VISIT, TOTAL, MEAN, SEEN, EXPIRING, LASTING, TRACES, TAGS, VISITS, OLD_LIST, OLD_MAP)
TIMED = {state.name for state in STATES if state.ttl is not None}
NAMESPACES = (b"", b"n")
KEYS: dict[str, list[Any]] = {
    "int64": [5, -3, 2**62, 0, 70, 1 << 40],
    "utf8": ["", "a", "b", "ä", "a long text indeed", "c"],
    "float64": [0.0, -0.0, float("nan"), float("inf"), -2.0, 7.0],  # the first two are one key
    "tuple<int64,utf8>": [(1, "a"), (1, "b"), (2, "a"), (-1, ""), (3, "x"), (4, "x")],
    "date32": [date(2020, 1, day) for day in range(1, 7)],
}


class InDicts(FilesystemKeyedBackend):
    """The same backend without slots."""

    def _slot_tables(self) -> None:
        return None


class One:
    """One backend and its checkpoints, which complete or are aborted as the test says."""

    def __init__(self, kind: Any, key_type: KeyType, root: Path) -> None:
        self.kind, self.key_type, self.root = kind, key_type, root
        self.storage = DictStorage()
        self.files: dict[str, FileHandle] = {}
        self.start(())

    def start(self, handles: tuple[KeyedStateHandle, ...], number: int | None = None, *, now_ms: int = 0) -> None:
        config = KeyedBackendConfig(
            STATES, self.key_type, KeyGroupRange(0, GROUPS), GROUPS, "op", 0, now_ms=now_ms, local_dir=str(self.root / "local")
        )
        self.backend: HeapKeyedBackend = self.kind(config, incremental=True)
        if number is not None:
            self.backend.restore(handles, self.storage, f"job/chk-{number}", checkpoint_id=number)

    def store(self, pending: Any, number: int, base: int | None) -> tuple[KeyedStateHandle, ...]:
        target = SnapshotTarget(number, f"job/chk-{number}", f"op-0-1-{number}", False, 0, f"{number}-1-op-0-n", base)
        acked = run_flow(pending.flow(target), self.storage)
        pending.release()
        self.files |= {part.path: part for handle in acked for part in handle.parts if isinstance(part, FileHandle)}
        return tuple(
            msgspec.structs.replace(
                handle, parts=tuple(self.files[part.path] if isinstance(part, PlaceholderHandle) else part for part in handle.parts)
            )
            for handle in acked
        )


def select(backend: HeapKeyedBackend, key: Any) -> None:
    key_type = backend.key_type
    backend.set_current_key(key_type.encode(key), key_type.key_group(key, GROUPS))


def found(backend: HeapKeyedBackend) -> dict[Any, Any]:
    contents: dict[Any, Any] = {}
    for state in STATES:
        for namespace in NAMESPACES:
            for encoded in sorted(backend.keys(state.name, namespace)):
                select(backend, backend.key_type.decode(encoded))
                one = backend.get_state(state, namespace)
                value = one.value() if state.kind == "value" else dict(one.items()) if state.kind == "map" else one.get()
                contents[state.name, namespace, encoded] = copy.deepcopy(value)
    return contents


def write(backend: HeapKeyedBackend, what: str, number: int, namespace: bytes, *, in_flight: bool) -> None:
    """`in_flight`: a snapshot is that has all values as they are."""
    match what:
        case "update":
            backend.get_state(COUNT, namespace).update(number)
        case "increment":
            state = backend.get_state(COUNT, namespace)
            state.update(state.value(0) + 1)
        case "change":
            state = backend.get_state(VISIT, namespace)
            visit = state.value() or Visit(0, [])
            visit.count += number
            visit.pages.append("x")
            state.update(visit)
        case "add":
            backend.get_state(TOTAL, namespace).add(number)
            backend.get_state(MEAN, namespace).add(number)
        case "append":
            backend.get_state(SEEN, namespace).add(str(number))
            backend.get_state(TRACES, namespace).add_all(
                [Visit(number, ["x"]) for _ in range(number)]  # an object that is in a list twice is two once it was copied
            )
        case "replace":
            seen = backend.get_state(SEEN, namespace)
            seen.update(seen.get()[number:])
            changed = backend.get_state(TRACES, namespace).get()
            for visit in changed:
                visit.pages.append("changed")
            backend.get_state(TRACES, namespace).update(changed[:2])
        case "put":
            tags, visits = backend.get_state(TAGS, namespace), backend.get_state(VISITS, namespace)
            tags.put(str(number), tags.get(str(number), 0) + 1)
            visit = visits.get(number) or Visit(0, [])
            visit.pages.append("y")
            visits.put(number, visit)
        case "drop":
            for state, entry in ((TAGS, str(number)), (VISITS, number), (OLD_MAP, str(number))):
                one = backend.get_state(state, namespace)
                one.remove(entry)
                assert not one.contains(entry)
        case "look":
            for _, visit in backend.get_state(VISITS, namespace).items():
                if in_flight:  # else the change is made to the state, and an increment lacks it, or has it
                    visit.pages.append("never stored")
                break
            backend.get_state(TAGS, namespace).is_empty()
            backend.get_state(OLD_MAP, namespace).is_empty()
            backend.get_state(LASTING, namespace).value()
            backend.get_state(OLD_LIST, namespace).get()
        case "stamp":
            backend.get_state(EXPIRING, namespace).update(number)
            lasting = backend.get_state(LASTING, namespace)
            lasting.update([*(lasting.value() or []), number])
            backend.get_state(OLD_LIST, namespace).add(str(number))
            old_map = backend.get_state(OLD_MAP, namespace)
            old_map.put(str(number), [*(old_map.get(str(number)) or []), number])
        case "clear":
            backend.get_state(STATES[number * 3 % len(STATES)], namespace).clear()
            backend.get_state(STATES[number * 3 % len(STATES) + 1], namespace).clear()
        case "remove":
            for state in STATES:
                backend.get_state(state, namespace).clear()
        case "read":
            backend.get_state(COUNT, namespace).value()


KINDS_OF_WRITES = (
    *("update", "increment", "increment", "change", "add", "append", "replace", "put", "put", "drop", "look", "stamp"),
    *("clear", "remove", "read"),
)
WRITES = st.tuples(
    st.sampled_from(KINDS_OF_WRITES),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from([b"", b"", b"", b"n"]),
)
STEPS = st.one_of(
    st.tuples(st.just("single"), st.lists(WRITES, min_size=1, max_size=5)),
    st.tuples(st.just("batch"), st.lists(WRITES, min_size=1, max_size=8)),
    st.tuples(st.just("barrier"), st.booleans()),
    st.tuples(st.just("barrier"), st.booleans()),
    st.tuples(st.just("finish"), st.sampled_from("cca")),
    st.tuples(st.just("finish"), st.sampled_from("cca")),
    st.tuples(st.just("abandon"), st.none()),
    st.tuples(st.just("restore"), st.booleans()),
    st.tuples(st.just("passes"), st.integers(1, 120)),
    st.tuples(st.just("erase"), st.integers(0, 5)),
)


class SideBySide:
    """A backend in slots and one in dicts, which take the same steps."""

    def __init__(self, root: Path, key_type: str) -> None:
        kinds = (FilesystemKeyedBackend, InDicts)
        self.keys = KEYS[key_type]
        self.both = [One(kind, KeyType.parse(key_type), root / str(number)) for number, kind in enumerate(kinds)]
        self.now_ms = 1_000
        self.number = 0
        self.pending: list[tuple[int, int | None, list[Any], dict[Any, Any]]] = []
        self.completed: dict[int, tuple[list[Any], dict[Any, Any]]] = {}
        self.is_frozen = False
        """The newest snapshot is in flight, and nothing was written since."""
        self.pass_time(0)

    def take(self, what: str, argument: Any) -> None:
        match what:
            case "single" | "batch":
                self.is_frozen = self.is_frozen and bool(self.pending) and all(kind in ("look", "read") for kind, *_ in argument)
                for one in self.both:
                    (self.single if what == "single" else self.batch)(one.backend, argument)
            case "barrier" if len(self.pending) < 3:
                self.number += 1
                base = max(self.completed, default=None) if argument else None
                self.pending.append((self.number, base, [one.backend.snapshot(self.number) for one in self.both], self.alike()))
                self.is_frozen = True
            case "finish" if self.pending:
                self.finish(argument)
            case "abandon" if self.pending:
                self.is_frozen = False
                for each in self.pending.pop()[2]:
                    each.release()
            case "restore" if self.completed:
                self.restore(crossed=argument)
            case "passes":
                self.pass_time(argument)
            case "erase":
                for one in self.both:
                    key = self.keys[argument]
                    assert one.backend.erase(KeyOf(one.key_type, key, one.key_type.encode(key)))

    def single(self, backend: HeapKeyedBackend, writes: Any) -> None:
        for kind, key, number, namespace in writes:
            select(backend, self.keys[key])
            write(backend, kind, number, namespace, in_flight=self.is_frozen)

    def batch(self, backend: HeapKeyedBackend, writes: Any) -> None:
        names = [self.keys[key] for _, key, _, _ in writes]
        course = backend.each_key(backend.key_type.column_of_values(names, max_parallelism=GROUPS))
        for (kind, key, number, namespace), *selected in zip(writes, *course.columns, strict=True):
            for name, value in zip(course.names, selected, strict=True):
                assign(course.target, name, value)
            write(backend, kind, number, namespace, in_flight=self.is_frozen)
            if number == 3:
                assert backend.current_key[0] == backend.key_type.encode(self.keys[key])
        assert backend.current_key == (backend.key_type.encode(names[-1]), backend.key_type.key_group(names[-1], GROUPS))

    def alike(self) -> dict[Any, Any]:
        slots, dicts = (found(one.backend) for one in self.both)
        assert slots == dicts
        return dicts

    def finish(self, fate: str) -> None:
        number, base, pending, expected = self.pending.pop(0)
        handles = [one.store(each, number, base) for one, each in zip(self.both, pending, strict=True)]
        if fate == "a" or number < max(self.completed, default=0):
            for one in self.both:
                one.backend.notify_checkpoint_aborted(number)
        else:
            self.completed[number] = (handles, expected)

    def restore(self, *, crossed: bool) -> None:
        """What one has stored, restored by itself or by the other; both go on from there."""
        number = max(self.completed)
        handles, expected = self.completed[number]
        for one, own in zip(self.both, handles, strict=True):
            one.backend.dispose()
            one.start(own, number, now_ms=self.now_ms)
        if crossed:
            for one, kind in zip(self.both, (InDicts, FilesystemKeyedBackend), strict=True):
                kind_before, one.kind = one.kind, kind
                one.start(handles[self.both.index(one)], number, now_ms=self.now_ms)
                assert self.unexpired(found(one.backend)) == self.unexpired(expected)
                one.kind = kind_before
                one.start(handles[self.both.index(one)], number, now_ms=self.now_ms)
        for each in self.pending:
            for snapshot in each[2]:
                snapshot.release()
        self.pending = []
        assert self.unexpired(self.alike()) == self.unexpired(expected)

    @staticmethod
    def unexpired(contents: dict[Any, Any]) -> dict[Any, Any]:
        return {place: value for place, value in contents.items() if place[0] not in TIMED}

    def pass_time(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        for one in self.both:
            one.backend.set_processing_time(self.now_ms)


def run(steps: list[tuple[str, Any]], key_type: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        both = SideBySide(Path(folder), key_type)
        for what, argument in steps:
            both.take(what, argument)
        both.alike()
        while both.pending:
            both.finish("c")
        if both.completed:
            both.restore(crossed=True)


@pytest.mark.parametrize("bounds", ["as they are", "small"])
@given(steps=st.lists(STEPS, max_size=25), key_type=st.sampled_from(sorted(KEYS)))
@settings(max_examples=examples(60), deadline=None)
def test_sequences_give_the_same_in_slots_and_in_dicts(bounds: str, steps: list[tuple[str, Any]], key_type: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if bounds == "small":
            shrink(patched)
        run(steps, key_type)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounds", ["as they are", "small"])
@given(steps=st.lists(STEPS, min_size=5, max_size=40), key_type=st.sampled_from(sorted(KEYS)))
@settings(max_examples=10_000, deadline=None, database=None)
def test_long_sequences_give_the_same_in_slots_and_in_dicts(bounds: str, steps: list[tuple[str, Any]], key_type: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if bounds == "small":
            shrink(patched)
        run(steps, key_type)


class BesideDicts:
    """Slots beside a dict for each state, without a backend around them: what a barrier froze, and what changed since its base."""

    def __init__(self, key_type: str) -> None:
        self.key_type = KeyType.parse(key_type)
        self.names = KEYS[key_type]
        self.keys = [self.key_type.encode(key) for key in self.names]
        self.slots = SlotTables(("a", "b"), self.key_type, self._column_of)
        self.model: dict[str, dict[bytes, int]] = {"a": {}, "b": {}}
        self.barrier = 0
        self.frozen: list[tuple[int, int, Any, Any]] = []
        self.completed: dict[int, Any] = {}

    def _column_of(self, arrays: list[pa.Array]) -> Any:
        return self.key_type.column(arrays, max_parallelism=GROUPS)

    def take(self, what: str, numbers: list[int], value: int) -> None:
        match what:
            case "batch" if numbers:
                column = self.key_type.column_of_values([self.names[number] for number in numbers], max_parallelism=GROUPS)
                for number, slot in zip(numbers, self.slots.slots_of(column).tolist(), strict=True):
                    self.write(self.keys[number], slot, value)
            case "single":
                for number in numbers:
                    self.write(self.keys[number], self.slots._slot_of(self.keys[number]), value)
            case "remove":
                for number in numbers:
                    for name, states in self.model.items():
                        self.slots.remove(name, self.keys[number])
                        states.pop(self.keys[number], None)
            case "barrier":
                self.freeze()
            case "finish" | "abort" if self.frozen:
                self.end(completes=what == "finish")

    def write(self, key: bytes, slot: int, value: int) -> None:
        name = "ab"[value % 2]
        if value % 5 == 4:
            self.slots[name].put(slot, MISSING)
            self.model[name].pop(key, None)
        else:
            self.slots[name].put(slot, value)
            self.model[name][key] = value

    def freeze(self) -> None:
        self.barrier += 1
        frozen, base = self.slots.freeze(), max(self.completed, default=0)
        for each in frozen.values():
            each.checkpoint_started(self.barrier, base)
        self.frozen.append((self.barrier, base, frozen, copy.deepcopy(self.model)))

    def end(self, *, completes: bool) -> None:
        barrier, base, frozen, model = self.frozen.pop(0)
        for name, pages in frozen.items():
            keys = pages.keys()
            rows = {key: value for slots, values in pages.batches(PAGE_SLOTS) for key, value in self.rows(keys, slots, values)}
            assert rows == model[name]
            if base and pages.complete_from <= base:
                found = dict(self.completed[base][name])
                for slots, values in pages.changes(base, 3):
                    found.update(self.rows(keys, slots, values))
                assert {key: value for key, value in found.items() if value is not MISSING} == model[name]
            pages.written()
            pages.release()
        if completes and barrier > max(self.completed, default=0):
            self.completed[barrier] = model

    @staticmethod
    def rows(keys: Any, slots: Any, values: list[Any]) -> Any:
        return zip(keys.take(slots).encoded() if len(slots) else [], values, strict=True)

    def check(self) -> None:
        for name, states in self.model.items():
            assert {key: self.slots.find(name, key) for key in self.slots.keys_of(name)} == states


LIGHT = st.tuples(
    st.sampled_from(["batch", "batch", "single", "remove", "barrier", "barrier", "finish", "finish", "abort"]),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 19),
)


def run_light(steps: list[tuple[str, list[int], int]], key_type: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if len(steps) % 2:
            shrink(patched)
        both = BesideDicts(key_type)
        for step in steps:
            both.take(*step)
        both.check()
        while both.frozen:
            both.end(completes=True)


@given(steps=st.lists(LIGHT, max_size=30), key_type=st.sampled_from(sorted(KEYS)))
@settings(max_examples=examples(600), deadline=None)
def test_pages_give_what_dicts_give(steps: list[tuple[str, list[int], int]], key_type: str) -> None:
    run_light(steps, key_type)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("key_type", sorted(KEYS))
@given(steps=st.lists(LIGHT, min_size=4, max_size=40))
@settings(max_examples=4_000, deadline=None, database=None)
def test_pages_give_what_dicts_give_twenty_thousand_times(key_type: str, steps: list[tuple[str, list[int], int]]) -> None:
    run_light(steps, key_type)


def shrink(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(slot_states, "SLOTS_MIN", 2)
    patched.setattr(key_slots, "ALONE_MAX", 2)
    patched.setattr(state_table, "KEYS_MIN", 3)
    patched.setattr(state_table, "EPOCHS_MAX", 2)
    patched.setattr(slot_collections, "ENTRIES_COPIED_MAX", 1)
    patched.setattr(slot_collections, "LAYERS_MAX", 2)


# ------------------------------------------------------------------------------------------------------------------ one by one


def backend_of(key_type: str = "int64", kind: Any = FilesystemKeyedBackend, states: tuple[Any, ...] = (COUNT,)) -> Any:
    config = KeyedBackendConfig(states, KeyType.parse(key_type), KeyGroupRange(0, GROUPS), GROUPS, "op", 0, now_ms=0)
    if kind is MemoryKeyedBackend:
        return kind(config, inline_bytes=1 << 16, snapshot_bytes_max=1 << 30)
    return kind(config, incremental=True)


def fill(backend: Any, numbers: Any, value: int) -> None:
    course = backend.each_key(backend.key_type.column([pa.array(numbers, pa.int64())], max_parallelism=GROUPS))
    state = backend.get_state(COUNT)
    for selected in zip(*course.columns, strict=True):
        for name, each in zip(course.names, selected, strict=True):
            assign(course.target, name, each)
        state.update(value)


def pages_of(backend: Any) -> SlotPages:
    pages: SlotPages = backend._slots["count"]
    return pages


def test_a_barrier_takes_pages_by_reference_and_the_first_write_copies_one() -> None:
    backend = backend_of()
    fill(backend, range(3 * PAGE_SLOTS), 1)
    pages = pages_of(backend)
    before = list(pages.pages)
    pending = backend.snapshot(1)
    assert all(one is other for one, other in zip(pages.pages, before, strict=True))
    fill(backend, [PAGE_SLOTS, PAGE_SLOTS + 1, PAGE_SLOTS], 2)
    assert [one is other for one, other in zip(pages.pages, before, strict=True)] == [True, False, True]
    copied = pages.pages[1]
    fill(backend, [PAGE_SLOTS + 5], 3)
    assert pages.pages[1] is copied
    assert before[1].count(1) == PAGE_SLOTS
    pending.release()
    fill(backend, [0], 4)
    assert pages.pages[0] is before[0], "no snapshot reads it any more"


@pytest.mark.parametrize("count", [0, 1, PAGE_SLOTS, 5 * PAGE_SLOTS, 9 * PAGE_SLOTS - 3])
def test_values_in_pages_are_those_of_a_list(count: int) -> None:
    pages = [list(range(start, start + PAGE_SLOTS)) for start in range(0, 9 * PAGE_SLOTS, PAGE_SLOTS)]
    values, expected = PagedValues(pages[: -(-count // PAGE_SLOTS)], count), list(range(count))
    assert (list(values), len(values)) == (expected, count)
    for start in (0, 1, PAGE_SLOTS, 2 * PAGE_SLOTS, 8 * PAGE_SLOTS):
        for size in (0, 1, PAGE_SLOTS, GATHERED_MAX, GATHERED_MAX + 1, 7 * PAGE_SLOTS, 20 * PAGE_SLOTS):
            some = values[start : start + size]
            assert list(some) == expected[start : start + size]
            assert isinstance(some, list) or (len(some) > GATHERED_MAX and list(some[:3]) == expected[start : start + 3])
    assert list(values[::-2]) == expected[::-2]
    assert [values[place] for place in range(-count, count)] == expected + expected
    with pytest.raises(IndexError):
        values[count]


def test_keys_that_come_and_go_leave_no_slots_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 64)
    backend = backend_of()
    state = backend.get_state(COUNT)
    fill(backend, range(10), 7)
    for number in range(10, 5_000):
        select(backend, number)
        state.update(number)
        state.clear()
    assert backend._slots.keys.count <= 64 + 1
    assert len(pages_of(backend).pages) == 1
    assert sorted(map(backend.key_type.decode, backend.keys("count"))) == list(range(10))
    select(backend, 3)
    assert state.value() == 7


def test_a_removed_key_that_an_increment_must_tell_of_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 64)
    backend = backend_of()
    fill(backend, range(100), 1)
    backend.snapshot(1).release()
    for number in range(100):
        select(backend, number)
        backend.get_state(COUNT).clear()
    fill(backend, range(1_000, 1_200), 2)
    assert backend._slots.keys.count == 300, "what was removed since the barrier is not stored yet"
    frozen = backend._slots.freeze()["count"]
    frozen.checkpoint_started(2, 1)
    changed = [slot for slots, _ in frozen.changes(1, 1_000) for slot in slots.tolist()]
    assert changed == list(range(300))
    frozen.release()


def test_a_batch_may_be_under_way_when_slots_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that came alone, such as that of another operator's call in between, must not move the slot of the current one."""
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 4)
    backend = backend_of()
    state = backend.get_state(COUNT)
    course = backend.each_key(backend.key_type.column([pa.array([1, 2, 3])], max_parallelism=GROUPS))
    steps = zip(*course.columns, strict=True)
    for name, each in zip(course.names, next(steps), strict=True):
        assign(course.target, name, each)
    state.update(11)
    for number in range(10, 40):
        select(backend, number)
        state.update(1)
        state.clear()
    select(backend, 1)
    assert state.value() == 11


def test_the_current_key_is_that_of_the_record_and_stays_it_behind_the_batch() -> None:
    backend = backend_of("utf8", states=(COUNT,))
    column = backend.key_type.column_of_values(["a", "b"], max_parallelism=GROUPS)
    for _ in range(2):  # keys are made when they are asked for, then for whole batches
        course = backend.each_key(column)
        seen = []
        for selected in zip(*course.columns, strict=True):
            for name, each in zip(course.names, selected, strict=True):
                assign(course.target, name, each)
            seen.append(backend.current_key)
        assert seen == [(backend.key_type.encode(key), backend.key_type.key_group(key, GROUPS)) for key in "ab"]
        assert backend.current_key == seen[-1]
    backend.each_key(backend.key_type.column_of_values([], max_parallelism=GROUPS))
    assert backend.current_key == seen[-1]


def test_there_is_no_current_key_at_first() -> None:
    backend = backend_of()
    for ask in (lambda: backend.current_key, lambda: backend.get_state(COUNT).value(), lambda: backend.get_state(COUNT).update(1)):
        with pytest.raises(InvariantError, match="there is no current key"):
            ask()
    with pytest.raises(AttributeError, match="has no attribute"):
        backend.get_state(COUNT).nothing  # noqa: B018


def test_a_text_that_is_none_names_the_operator() -> None:
    backend = backend_of("utf8")
    broken = pa.Array.from_buffers(pa.utf8(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")])
    column = backend.key_type.column([pa.array(["a"])], max_parallelism=GROUPS, operator="op")
    column._arrays = [broken]
    with pytest.raises(InvalidKeyError, match="operator 'op': a key is not valid UTF-8"):
        backend.each_key(column)


def test_single_values_are_found_and_removed_by_key() -> None:
    backend = backend_of()
    fill(backend, [1, 2, 3], 5)
    slots = backend._slots
    one, missing = (backend.key_type.encode(number) for number in (1, 9))
    assert slots.find("count", one) == 5
    assert slots.find("count", missing) is MISSING
    slots.remove("count", one)
    slots.remove("count", missing)
    assert slots.find("count", one) is MISSING
    assert sorted(map(backend.key_type.decode, backend.keys("count"))) == [2, 3]
    assert slots.keys.count == 3


@pytest.mark.parametrize(
    ("declared", "right", "wrong"),
    [(int, 1, "1"), (int, -(2**63), 2**63), (str, "a", b"a"), (int | None, None, 1.5), (tuple[int, str], (1, "ä"), (1, 2))],
)
def test_a_value_of_another_type_is_refused_and_changes_nothing(declared: Any, right: Any, wrong: Any) -> None:
    state = ValueStateDescriptor("count", declared)
    backend = backend_of(states=(state,))
    select(backend, 1)
    one = backend.get_state(state)
    one.update(right)
    with pytest.raises(StateValueError, match="state 'count'"):
        one.update(wrong)
    assert one.value() == right


FULL_STEPS = st.one_of(
    st.tuples(st.just("clear"), st.integers(0, 2 * PAGE_SLOTS - 1)),
    st.tuples(st.just("fill"), st.none()),
    st.tuples(st.just("barrier"), st.none()),
    st.tuples(st.just("barrier"), st.none()),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 2 * PAGE_SLOTS - 1)),
)


@given(steps=st.lists(FULL_STEPS, min_size=10, max_size=30))
@settings(max_examples=examples(150), deadline=None)
def test_pages_that_were_full_are_looked_at_again_when_a_value_is_gone(steps: list[tuple[str, Any]]) -> None:
    count = 2 * PAGE_SLOTS + 10
    pages = SlotPages()
    pages.reserve(count)
    model = dict.fromkeys(range(count), 1)
    pages.load(np.arange(count), [1] * count)
    frozen: list[tuple[FrozenPages, dict[int, int]]] = []
    for what, argument in [*steps, *[("read", True)] * 4]:
        match what:
            case "clear" if argument in model:
                pages.put(argument, MISSING)
                del model[argument]
            case "fill":
                for slot in range(count):
                    pages.put(slot, 2)
                    model[slot] = 2
            case "barrier":
                frozen.append((FrozenPages(pages, count, list), dict(model)))
            case "read" if frozen:
                one, expected = frozen.pop(0 if argument else -1)
                read = [zip(slots.tolist(), values, strict=True) for slots, values in one.batches(PAGE_SLOTS)]
                assert dict(chain.from_iterable(read)) == expected
                one.release()
            case "drop" if argument < count:  # all behind this one
                kept = np.arange(argument + 1)
                pages.keep(kept, np.concatenate([kept, np.full(count - argument - 1, -1)]))
                model = {slot: value for slot, value in model.items() if slot <= argument}
                count = argument + 1
    full = [page for page, is_full in enumerate(pages.full) if is_full]
    assert all(set(range(page * PAGE_SLOTS, (page + 1) * PAGE_SLOTS)) <= model.keys() for page in full)


def test_a_page_that_is_known_to_be_full_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of()
    fill(backend, range(3 * PAGE_SLOTS - 5), 1)
    looks: list[int] = []
    original = slot_pages.present

    def look(pages: Any, count: int) -> Any:
        looks.append(len(pages))
        return original(pages, count)

    monkeypatch.setattr(slot_pages, "present", look)
    for _ in range(2):
        frozen = backend._slots.freeze()["count"]
        assert sum(len(values) for _, values in frozen.batches(1 << 17)) == 3 * PAGE_SLOTS - 5
        frozen.release()
    assert looks == [3, 1]


def test_a_large_map_is_not_copied_behind_a_barrier_and_its_layers_are_folded_when_nobody_reads_them() -> None:
    backend = backend_of(states=(TAGS,))
    select(backend, 1)
    tags = backend.get_state(TAGS)
    for number in range(slot_collections.ENTRIES_COPIED_MAX + 1):
        tags.put(str(number), number)
    whole = backend._slots["tags"].get(0)
    first, second = backend.snapshot(1), None
    tags.put("0", -1)
    tags.remove("1")
    tags.put("new", 5)
    layered = backend._slots["tags"].get(0)
    assert isinstance(layered, slot_collections.LayeredEntries)
    assert layered.layers == (whole,)
    assert (whole["0"], whole["1"], "new" in whole) == (0, 1, False)
    assert (tags.get("0"), tags.get("1"), tags.get("new"), len(dict(tags.items()))) == (-1, None, 5, len(whole))
    second = backend.snapshot(2)
    tags.put("2", -2)
    frozen = layered.flat()
    assert (frozen["2"], tags.get("2")) == (2, -2)
    first.release()
    tags.put("3", -3)
    second.release()
    backend.snapshot(3).release()
    tags.put("4", -4)
    assert backend._slots["tags"].get(0) is whole, "in place"
    assert [whole.get(name) for name in ("0", "1", "2", "3", "4", "new")] == [-1, None, -2, -3, -4, 5]


def test_a_map_that_snapshots_overlap_on_is_copied_after_some_layers() -> None:
    backend = backend_of(states=(VISITS,))
    select(backend, 1)
    visits = backend.get_state(VISITS)
    visits.put(0, Visit(0, []))
    pending = []
    for number in range(1, 2 * slot_collections.LAYERS_MAX):
        pending.append((backend._slots["visits"].freeze(1), dict(visits.items())))
        visit = visits.get(0)
        visit.pages.append(str(number))
        visits.put(number % 3, visit)
        held = backend._slots["visits"].get(0)
        assert not isinstance(held, slot_collections.LayeredEntries) or len(held.layers) <= slot_collections.LAYERS_MAX
    for pages, expected in pending:
        assert slot_collections.plain([pages[0][0]]) == [expected]


@pytest.mark.parametrize("state", [EXPIRING, OLD_LIST, OLD_MAP], ids=lambda state: state.name)
def test_cleanup_knows_slots_that_were_numbered_anew(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 16)
    backend = backend_of(states=(state, COUNT))
    for number in range(64):  # those that are dropped are in front of those that stay, and expire with them
        select(backend, number)
        one = backend.get_state(state)
        one.put("x", [1]) if state.kind == "map" else one.add("x") if state.kind == "list" else one.update(1)
        if number < 40:
            one.clear()
    for number in range(100, 140):
        select(backend, number)
        backend.get_state(COUNT).value()
    assert backend._slots.keys.count < 80
    left = sorted(map(backend.key_type.decode, backend.keys(state.name)))
    assert left == list(range(40, 64))
    backend.set_processing_time(1_000)
    select(backend, 7)
    for _ in range(64):
        backend.get_state(state).clear()
    assert not list(backend.keys(state.name)), "cleaned up, though nobody has read them"


def test_what_a_list_gives_is_not_what_it_keeps() -> None:
    backend = backend_of(states=(SEEN, TRACES))
    select(backend, 1)
    seen, traces = backend.get_state(SEEN), backend.get_state(TRACES)
    seen.add_all(["a", "b"])
    traces.add(Visit(1, []))
    seen.get().append("c")
    assert seen.get() == ["a", "b"]
    frozen = [backend._slots[name].freeze(1) for name in (SEEN.name, TRACES.name)]
    traces.get()[0].pages.append("given away")
    seen.add("c")
    traces.add(Visit(2, []))
    traces.get()[0].pages.append("own")
    assert [pages[0][0] for pages in frozen] == [["a", "b"], [Visit(1, [])]]
    assert (seen.get(), traces.get()) == (["a", "b", "c"], [Visit(1, ["own"]), Visit(2, [])])
    seen.update([])
    assert not list(backend.keys(SEEN.name))


def test_states_by_key_stay_beside_those_in_slots() -> None:
    tags = MapStateDescriptor("tags", str, int)
    backend = backend_of(states=(COUNT, tags, EXPIRING))
    assert [name in backend._slots for name in ("count", "tags", "expiring")] == [True, True, True]
    assert backend_of(states=())._slots is None
    fill(backend, [4], 1)
    select(backend, 4)
    backend.get_state(tags).put("x", 1)
    backend.get_state(COUNT, b"n").update(2)
    assert list(backend.keys("tags")) == list(backend.keys("count")) == list(backend.keys("count", b"n"))
    assert backend.get_state(COUNT) is not backend.get_state(COUNT, b"n")


@pytest.mark.parametrize("kind", [MemoryKeyedBackend, FilesystemKeyedBackend])
def test_a_million_slots_are_not_made_for_a_key_that_is_large(kind: Any) -> None:
    backend = backend_of(kind=kind)
    fill(backend, [sys.maxsize, -sys.maxsize], 1)
    assert len(pages_of(backend).pages) == 1
    assert backend.state_size() > 0
    backend.dispose()
    assert backend._slots.keys.count >= 0


@pytest.mark.parametrize("kind", [MemoryKeyedBackend, FilesystemKeyedBackend])
def test_a_snapshot_that_ends_late_says_nothing_of_pages_made_since(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots were numbered anew behind its barrier: a page of the same number is another one, and has slots without a value."""
    monkeypatch.setattr(slot_states, "SLOTS_MIN", 4)
    backend = backend_of(kind=kind)
    state, storage = backend.get_state(COUNT), DictStorage()

    def use(number: int) -> None:
        backend.set_current_key(KeyType.parse("int64").encode(number), 0)

    for number in range(4 * PAGE_SLOTS):
        use(number)
        state.update(number)
    pending = backend.snapshot(1)
    run_flow(pending.flow(SnapshotTarget(1, "chk-1", "a", False, 0)), storage)
    for number in range(4 * PAGE_SLOTS):
        use(number)
        state.clear()
    backend._slots._slots_max = backend._slots.keys.count
    for number in range(10_000, 10_000 + 2 * PAGE_SLOTS):
        use(number)
        if number % 3:
            state.update(number)
        else:
            assert state.value() is None
    pending.release()
    again = backend.snapshot(2)
    run_flow(again.flow(SnapshotTarget(2, "chk-2", "b", False, 0)), storage)
    again.release()
    pages = backend._slots[COUNT.name]
    for page, is_full in enumerate(pages.full):
        assert not is_full or MISSING not in pages.pages[page]

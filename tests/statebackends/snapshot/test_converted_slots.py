"""Whole snapshots that take from the one before what was not written since, beside those that convert all of it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.backends.heap import FilesystemKeyedBackend, MemoryKeyedBackend
from holdfast.statebackends.backends.keyed import KeyedBackendConfig
from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.heap import slot_states
from holdfast.statebackends.heap.slot_pages import WRITTEN_MAX
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot import converted_slots
from holdfast.statebackends.state import ListStateDescriptor, StateDescriptor, Ttl, ValueStateDescriptor
from tests.examples import examples

GROUPS = 16
PAIR: Any = ValueStateDescriptor("pair", tuple[int, float])
MAYBE: Any = ValueStateDescriptor("maybe", bool | None)
STATES = (PAIR, MAYBE)


def backend_of(*states: StateDescriptor) -> Any:
    config = KeyedBackendConfig(states, KeyType.of(int), KeyGroupRange(0, GROUPS), GROUPS, "op", 0, now_ms=0)
    return MemoryKeyedBackend(config, inline_bytes=1 << 16, snapshot_bytes_max=1 << 30)


def select(backend: Any, key: int) -> None:
    backend.set_current_key(backend.key_type.encode(key), backend.key_type.key_group(key, GROUPS))


def tables(pending: Any) -> list[pa.Table]:
    return [source.stream().table() for source in pending._sources]


class Both:
    """One backend that keeps columns, and one that never does."""

    def __init__(self) -> None:
        self.backends = [backend_of(*STATES), backend_of(*STATES)]
        self.backends[1]._converted.clear()
        self.pending: list[list[Any]] = []
        self.barriers = 0

    def do(self, what: str, first: int, number: int) -> None:
        match what:
            case "write" | "remove":
                for key in range(first, first + number):
                    for backend in self.backends:
                        select(backend, key)
                        self._change(backend, key * number, removes=what == "remove")
            case "barrier" if len(self.pending) < 3:
                self.barriers += 1
                self.pending.append([backend.snapshot(self.barriers) for backend in self.backends])
            case "read" if self.pending:
                pending = self.pending.pop(first % len(self.pending))
                found, expected = map(tables, pending)
                assert all(table.equals(other) for table, other in zip(found, expected, strict=True))
                for each in pending:
                    each.release()
            case "abort" if self.pending:
                for each in self.pending.pop(0):
                    each.release()

    def _change(self, backend: Any, value: int, *, removes: bool) -> None:
        pair, maybe = map(backend.get_state, STATES)
        if removes:
            pair.clear()
            maybe.clear()
        else:
            pair.update((value, value / 2))
            if value % 3:
                maybe.update(None if value % 3 == 1 else value % 2 == 0)


STEPS = st.tuples(
    st.sampled_from(["write", "write", "remove", "barrier", "read", "barrier", "read", "abort"]),
    st.integers(0, 900),
    st.integers(1, 400),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=30))
@settings(max_examples=examples(150), deadline=None)
def test_tables_are_those_of_a_backend_that_keeps_no_columns(steps: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(converted_slots, "CHUNK_PAGES", 2)
        patched.setattr(slot_states, "SLOTS_MIN", 400)
        both = Both()
        for step in [("write", 0, 700), *[("barrier", 0, 1), ("read", 0, 1)] * 2, *steps, *[("barrier", 0, 1), ("read", 0, 1)] * 3]:
            both.do(*step)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each call of a serializer has converted."""
    counts: list[int] = []
    original = StateSerializer.to_arrays

    def to_arrays(self: Any, values: Any) -> Any:
        counts.append(len(values))
        return original(self, values)

    monkeypatch.setattr(StateSerializer, "to_arrays", to_arrays)
    return counts


def snapshot(backend: Any, number: int, converted: list[int]) -> tuple[pa.Table, int]:
    converted.clear()
    pending = backend.snapshot(number)
    table = tables(pending)[0]
    pending.release()
    return table, sum(converted)


def write(backend: Any, keys: range, value: int) -> None:
    for key in keys:
        select(backend, key)
        backend.get_state(PAIR).update((value, 0.5))


def test_what_was_written_since_alone_is_converted(converted: list[int]) -> None:
    backend = backend_of(PAIR)
    write(backend, range(1_000), 1)
    assert snapshot(backend, 1, converted)[1] == 1_000  # all of it was written: nothing is kept
    write(backend, range(10), 2)
    assert snapshot(backend, 2, converted)[1] == 1_000
    write(backend, range(5, 30), 3)
    table, count = snapshot(backend, 3, converted)
    assert count == 25
    assert dict(zip(*(table.column(name).to_pylist() for name in ("key", "value")), strict=True)) == {
        key: {"0": 2 if key < 5 else 3 if key < 30 else 1, "1": 0.5} for key in range(1_000)
    }
    assert snapshot(backend, 4, converted) == (table, 0)


def test_snapshots_that_were_never_read_are_made_up_for_up_to_some_of_them(converted: list[int]) -> None:
    backend = backend_of(PAIR)
    for number, keys in enumerate((range(1_000), range(1), range(2, 4)), 1):
        write(backend, keys, number)
        backend.snapshot(number).release() if number == 3 else snapshot(backend, number, converted)
    write(backend, range(3, 6), 4)
    assert snapshot(backend, 4, converted)[1] == 4
    for number in range(5, 5 + WRITTEN_MAX):
        backend.snapshot(number).release()
    assert snapshot(backend, 20, converted)[1] == 1_000


def test_a_value_that_is_refused_leaves_the_columns_before(converted: list[int]) -> None:
    backend = backend_of(PAIR)
    write(backend, range(100), 1)
    for number in (1, 2):
        before, _ = snapshot(backend, number, converted)
    slot = backend._slots.keys.find(backend.key_type.encode(7))
    backend._slots["pair"].put(slot, (1, "no number"))
    pending = backend.snapshot(3)
    with pytest.raises(StateValueError, match="'pair'"):
        tables(pending)
    pending.release()
    write(backend, range(7, 8), 1)
    assert snapshot(backend, 4, converted) == (before, 1)


@pytest.mark.parametrize(
    "state",
    [
        ValueStateDescriptor("text", str),
        ValueStateDescriptor("wide", tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]),
        ValueStateDescriptor("expiring", int, Ttl(100)),
        ValueStateDescriptor("changed in place", list[int]),
        ListStateDescriptor("list", int),
    ],
)
def test_no_columns_are_kept_of_values_that_are_wide_or_expire_or_change_in_place(state: Any) -> None:
    assert backend_of(state)._converted == {}


def test_increments_need_no_kept_columns() -> None:
    config = KeyedBackendConfig((PAIR,), KeyType.of(int), KeyGroupRange(0, GROUPS), GROUPS, "op", 0, now_ms=0)
    backend: Any = FilesystemKeyedBackend(config, incremental=True)
    assert backend._converted == {}
    assert not backend._slots["pair"].remembers_written

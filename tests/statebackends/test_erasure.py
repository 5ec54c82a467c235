"""Erasing a key from live state: what is gone, what stays, and that no file of later snapshots has a byte of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from holdfast.operators.task.timers import TimerQueue
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.factory import BACKEND_KINDS
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import RowTableStateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.port import run_flow
from tests.statebackends.backend_harness import (
    ALL,
    COUNT,
    KEY,
    SEEN,
    TAGS,
    VISIT,
    WINDOWS,
    Cluster,
    contents,
    fill,
    use,
)

OTHERS = [f"user-{number}" for number in range(60)]
NAMESPACES = (b"", b"w", b"window-2")


@pytest.fixture(params=BACKEND_KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, request.param)
    yield cluster
    cluster.close()


def key_of(text: str) -> KeyOf:
    return KeyOf.parse(text, KEY)


def checkpoint(cluster: Cluster, backend: KeyedBackendBase, number: int, base: int | None, *, canonical: bool = False) -> Any:
    """As a job's own: files may be shared with `base`."""
    target = msgspec.structs.replace(
        cluster.target(canonical=canonical),
        checkpoint_id=number,
        folder=f"job/chk-{number}",
        base=base,
        shared_prefix=f"{number}-1-op-0-nonce",
    )
    pending = backend.snapshot(number)
    handles = run_flow(pending.flow(target), cluster.storage)
    pending.release()
    return handles, target.folder


def files_with(root: Path, secret: bytes) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and secret in path.read_bytes()}


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "written before"])
def test_every_row_of_the_key_goes_and_no_other(cluster: Cluster, stored: bool) -> None:
    backend = cluster.backend()
    fill([backend], [*OTHERS, "gone", "gone too", "gon"], NAMESPACES)
    if stored:
        cluster.take(backend)
    expected = {where: value for where, value in contents(backend, NAMESPACES).items() if where[-1] != "gone"}
    assert backend.erase(key_of("gone"))
    assert contents(backend, NAMESPACES) == expected
    canonical = cluster.take(backend, canonical=True)
    assert contents(cluster.restored(canonical), NAMESPACES) == expected
    assert contents(cluster.restored(cluster.take(backend)), NAMESPACES) == expected


def test_named_states_alone_are_erased(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], ["gone", "b"], NAMESPACES)
    backend.erase(key_of("gone"), frozenset({"seen", "windows", "no such state"}))
    found = contents(backend, NAMESPACES)
    assert not any(where[0] in ("seen", "windows") and where[-1] == "gone" for where in found)
    assert all((name, namespace, "gone") in found for name in ("count", "visit") for namespace in NAMESPACES)


def test_a_key_of_another_subtask_is_left_to_it(cluster: Cluster) -> None:
    group = KEY.key_group("gone", 16)
    for subtask in range(2):
        backend = cluster.backend(parallelism=2, subtask=subtask)
        fill([backend], [key for key in OTHERS if KEY.key_group(key, 16) in backend.key_groups])
        before = contents(backend)
        assert backend.erase(key_of("gone")) is (group in backend.key_groups)
        assert contents(backend) == before


def test_a_key_that_comes_again_begins_anew(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], ["gone", "b"])
    cluster.take(backend)
    backend.erase(key_of("gone"))
    cluster.take(backend, canonical=True)
    use(backend, "gone")
    assert backend.get_state(COUNT).value() is None
    assert backend.get_state(SEEN).get() == []
    assert dict(backend.get_state(TAGS).items()) == {}
    backend.get_state(TAGS).put("new", 1)
    restored = cluster.restored(cluster.take(backend))
    use(restored, "gone")
    assert dict(restored.get_state(TAGS).items()) == {"new": 1}
    assert restored.get_state(VISIT).value() is None


def test_a_snapshot_under_way_keeps_what_it_had(cluster: Cluster) -> None:
    backend = cluster.backend()
    fill([backend], ["gone", "b"], NAMESPACES)
    before = contents(backend, NAMESPACES)
    pending = backend.snapshot(1)
    backend.erase(key_of("gone"))
    assert contents(cluster.restored(cluster.finish(pending)), NAMESPACES) == before


@pytest.mark.parametrize("columns_only", [False, True])
def test_no_file_of_later_checkpoints_has_a_byte_of_the_key(cluster: Cluster, tmp_path: Path, columns_only: bool) -> None:
    """Replaced rows, names of tables' bounds in manifests and deltas included."""
    secret = f"~~~{secrets.token_hex(16)}"  # the last key of its database: a bound of its tables
    backend = cluster.backend((WINDOWS,) if columns_only else ALL)
    keys = [*OTHERS, secret]
    base: int | None = None
    for number in (1, 2, 3):
        if columns_only:
            column = KEY.column([pa.array(keys)], max_parallelism=16)
            backend.columnar_state(WINDOWS, ["user"]).update(column, 5, [None, pa.array([1] * len(keys), pa.int64())])
        else:
            fill([backend], keys, NAMESPACES)
        checkpoint(cluster, backend, number, base)
        base = number
    backend.erase(key_of(secret))
    checkpoint(cluster, backend, 4, None, canonical=True)
    for number in (5, 6):
        if not columns_only:
            fill([backend], OTHERS[:20], NAMESPACES)
        handles, folder = checkpoint(cluster, backend, number, number - 1)
        if not columns_only and number == 5:  # it refers to no file of others
            restored = cluster.restored((handles, folder))
            use(restored, secret)
            assert restored.get_state(COUNT).value() is None
    known = files_with(tmp_path / "state", secret.encode())
    assert cluster.kind == "memory" or known  # what is looked for is found where it is
    late = {path for path in known if "chk-" in path and int(path.partition("chk-")[2].partition("/")[0]) >= 4}
    late |= {path for path in known if "/shared/" in path and int(path.rpartition("/")[2].partition("-")[0]) >= 4}
    assert late == set()
    assert not any(secret.encode() in repr(handle).encode() for handle in (handles,))


def test_a_checkpoint_that_is_given_up_leaves_the_compaction_to_the_next_one(cluster: Cluster, tmp_path: Path) -> None:
    """And not to the loop, which writes what an abandoned snapshot leaves."""
    if cluster.kind != "rocksdb":
        pytest.skip("heap state has no database")
    secret = f"~~~{secrets.token_hex(16)}"
    backend = cluster.backend(ALL)
    fill([backend], [*OTHERS, secret], NAMESPACES)
    checkpoint(cluster, backend, 1, None)
    backend.erase(key_of(secret))
    given_up = backend.snapshot(2)
    later = backend.snapshot(3)  # so that the rows of the one before can't become active again
    given_up.release()
    later.release()
    buffer = backend._write_buffer  # type: ignore[attr-defined]
    assert buffer.purges
    assert not any(each.purges for each in buffer._immutable)
    checkpoint(cluster, backend, 4, None)
    known = files_with(tmp_path / "state", secret.encode())
    assert any("/shared/1-" in path for path in known)
    assert not any("/shared/4-" in path or "chk-4" in path for path in known)


def test_timers_of_the_key_go_with_all_states_or_by_name(cluster: Cluster) -> None:
    def timer(key: str, time: int, namespace: bytes = b"") -> tuple[int, bytes, bytes, int]:
        return time, KEY.encode(key), namespace, KEY.key_group(key, 16)

    rows = [timer("gone", 5), timer("b", 5), timer("gone", 7, b"w"), timer("b", 9)]
    for states, left in ((None, [rows[1], rows[3]]), (frozenset({"_timers"}), [rows[1], rows[3]]), (frozenset({"count"}), rows)):
        backend, queue = cluster.backend(), TimerQueue()
        backend.register_timers("_timers", TimerRows(queue.table, queue.load, queue.remove))
        queue.load(rows)
        cluster.take(backend)
        backend.erase(key_of("gone"), states)
        restored = cluster.restored(cluster.take(backend, canonical=True))
        restored.erase(key_of("never there"))
        again = cluster.restored(cluster.take(restored))  # timers that nobody has asked for yet
        again.erase(key_of("b"), frozenset({"_timers"}))
        for each, expected in ((restored, left), (again, [row for row in left if row[1] != KEY.encode("b")])):
            part = TimerQueue()
            each.register_timers("_timers", TimerRows(part.table, part.load, part.remove))
            found = []
            while (due := part.take_due(10)) is not None:
                found.append(due)
            assert sorted(found) == sorted(expected)
        assert len(queue) == len(left)


def test_rows_of_a_row_table_go_in_head_and_runs(cluster: Cluster) -> None:
    table = RowTableStateDescriptor("rows", pa.schema([("v", pa.int64())]))
    backend = cluster.backend((table,))

    def append(keys: list[str], values: list[int], namespace: int) -> None:
        column = KEY.column([pa.array(keys)], max_parallelism=16)
        backend.row_table(table, ["user"]).append(column, namespace, [pa.array(values, pa.int64())])

    append(["gone", "b", "gone"], [1, 2, 3], 1)
    cluster.take(backend)
    append(["gone", "c"], [4, 5], 2)
    backend.erase(key_of("gone"))
    append(["gone"], [6], 1)
    restored = cluster.restored(cluster.take(backend, canonical=True), (table,)).row_table(table, ["user"])
    everyone = KEY.column([pa.array(["gone", "b", "c"])], max_parallelism=16)
    assert sorted(restored.rows_of(everyone).take(["v"]).column(0).to_pylist()) == [2, 5, 6]


@pytest.mark.parametrize(
    ("key_type", "gone", "text", "other"),
    [
        (KeyType.of(int), 7, "7", 70),
        (KeyType.of(float), float("nan"), "nan", 0.5),
        (KeyType.of(tuple[str, int]), ("a", 1), '["a", 1]', ("a", 2)),
        (KeyType.of(bytes), b"\x00\x01", "0001", b"\x00"),
    ],
)
def test_keys_of_other_types(cluster: Cluster, key_type: KeyType, gone: Any, text: str, other: Any) -> None:
    backend = cluster.backend((COUNT,), key_type=key_type)
    for key in (gone, other):
        use(backend, key)
        backend.get_state(COUNT).update(1)
    backend.erase(KeyOf.parse(text, key_type))
    assert list(backend.keys("count")) == [key_type.encode(other)]
    assert text not in repr(KeyOf.parse(text, key_type)) or text == "7"


@pytest.mark.parametrize(
    ("key_type", "text"),
    [
        (KeyType.of(int), "4111111111111111111119"),
        (KeyType.of(datetime), "2024-01-01"),
        (KeyType.of(datetime), "0001-01-01T00:00:00+14:00"),
        (KeyType.of(str), "\ud800abc"),
        (KeyType.of(tuple[int, str]), '["9223372036854775808", "a"]'),
        (KeyType.of(tuple[int, str]), "[" * 100_000),
        (KeyType.of(pa.decimal128(4, 2)), "12345.67"),
    ],
)
def test_a_text_that_no_key_of_the_type_has_is_refused_without_being_repeated(key_type: KeyType, text: str) -> None:
    """One of several operators may have it: for the others there is nothing to erase, and no reason to fail."""
    with pytest.raises(InvalidConfigError) as raised:
        KeyOf.parse(text, key_type)
    assert text not in str(raised.value)
    assert raised.value.fields == {"setting": "key"}


def test_a_decimal_key_is_found_however_it_is_spelt() -> None:
    """pyarrow (26.0) ends the process when it makes a scalar of the last one."""
    column = pa.array([Decimal("0.00"), Decimal("1000.00")], pa.decimal128(10, 2))
    for text, expected in (("1E+3", [False, True]), ("-0", [True, False]), ("0E-999999999", [True, False])):
        key = KeyOf.parse(text, KeyType.of(column.type))
        assert key.mask(pa.record_batch([column], ["key"])).to_pylist() == expected


def test_namespaces_of_a_key_are_found_among_those_of_others(tmp_path: Path) -> None:
    """RocksDB: keys and namespaces of all lengths, before and behind."""
    cluster = Cluster(tmp_path, "rocksdb")
    state = ValueStateDescriptor("s", int)
    backend = cluster.backend((state,))
    rng = np.random.default_rng(1)
    wanted = {b"", b"n", b"nn", b"long namespace"}
    for key in ("a", "b", "bb", "c", "k"):
        use(backend, key)
        for namespace in wanted | {bytes(rng.integers(97, 123, int(rng.integers(1, 9)), np.uint8)) for _ in range(5)}:
            if key != "b" or namespace in wanted:
                backend.get_state(state, namespace).update(1)
    cluster.take(backend)
    store = backend.write_buffer.store  # type: ignore[attr-defined]
    found = store.namespaces_of(KEY.key_group("b", 16), store.state_id("s"), KEY.encode("b"))
    assert set(found) == wanted
    assert store.namespaces_of(KEY.key_group("bx", 16), store.state_id("s"), KEY.encode("bx")) == []
    cluster.close()

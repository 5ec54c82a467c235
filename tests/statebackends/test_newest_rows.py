"""The newest row of each key of a base and its deltas, as a restore loads them: a few key groups at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot import deltas as deltaruns
from holdfast.statebackends.snapshot import rows as keyedrows
from holdfast.statebackends.snapshot.deltas import delta_table, merged_deltas, newest_rows
from holdfast.statebackends.snapshot.tables import keyed_table_schema, sort_by_key_group
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, TAGS, Cluster, owner
from tests.statebackends.test_increments import Job, read, write

GROUPS = 8
NAN = float("nan")
KEYS: dict[KeyType, Sequence[Any]] = {
    KeyType.of(int): [*range(-3, 20), 2**62, 2**62 + 2**32],
    KeyType.of(str): ["", "a", "b", "ab", "é", *map(str, range(20))],
    KeyType.of(float): [0.0, -0.0, 1.0, -1.0, NAN, float("inf")],
    KeyType.of(tuple[int, str]): [(number, text) for number in range(5) for text in ("", "a")],
}
"""Of floats, two pairs have one key each."""
Rows = Mapping[tuple[bytes, Any], bytes | None]
"""(namespace, key) -> value; None of what is gone."""


def table(key_type: KeyType, rows: Sequence[tuple[tuple[bytes, Any], bytes | None]]) -> pa.Table:
    column = key_type.column_of_values([key for (_, key), _ in rows], max_parallelism=GROUPS)
    schema = keyed_table_schema(key_type, StateMeta("s", "value", "bytes", key_type.text), pa.binary())
    namespaces = pa.array([namespace for (namespace, _), _ in rows], pa.binary())
    values = pa.array([value for _, value in rows], pa.binary())
    return pa.Table.from_arrays([pa.array(column.key_groups), *column.arrays, namespaces, values], schema=schema)


def run_of(key_type: KeyType, rows: Rows) -> pa.Table:
    gone = table(key_type, [row for row in rows.items() if row[1] is None])
    return delta_table(table(key_type, [row for row in rows.items() if row[1] is not None]), gone.columns[:-1])


def by_key(key_type: KeyType, tables: Sequence[pa.Table]) -> dict[tuple[bytes, bytes], bytes]:
    """What a dict has that takes one table after the other: no key may come twice where all are told apart."""
    found: dict[tuple[bytes, bytes], bytes] = {}
    for some in tables:
        keys = key_type.column(some.columns[1 : 1 + len(key_type.fields)], max_parallelism=GROUPS).encoded()
        rows = list(zip(some.column("namespace").to_pylist(), keys, strict=True))
        assert len(found.keys() | set(rows)) == len(found) + len(rows), "a value was made for nothing"
        found |= dict(zip(rows, some.column("value").to_pylist(), strict=True))
    return found


@st.composite
def chains(draw: st.DrawFn) -> tuple[KeyType, list[Rows]]:
    key_type = draw(st.sampled_from(list(KEYS)))
    unique = {key_type.encode(key): key for key in KEYS[key_type]}
    places = st.tuples(st.sampled_from([b"", b"w"]), st.sampled_from(list(unique.values())))
    base = draw(st.dictionaries(places, st.binary(max_size=3)))
    return key_type, [base, *draw(st.lists(st.dictionaries(places, st.none() | st.binary(max_size=3)), max_size=4))]


@given(chain=chains(), rows=st.sampled_from([1, 3, 1000]), buckets=st.sampled_from([1, 64]), together=st.sampled_from([0, 1 << 30]),
       seed=st.none() | st.integers(0, 9), moved=st.integers(0, 4))  # fmt: skip
@settings(max_examples=examples(80), deadline=None)
def test_each_key_has_what_its_newest_row_says(
    chain: tuple[KeyType, list[Rows]], rows: int, buckets: int, together: int, seed: int | None, moved: int
) -> None:
    """Whatever a batch is, however many buckets collide, and where another tool has moved rows of one table."""
    key_type, contents = chain
    expected: dict[tuple[bytes, bytes], bytes | None] = {}
    for some in contents:
        expected |= {(namespace, key_type.encode(key)): value for (namespace, key), value in some.items()}
    base, *runs = [sort_by_key_group(table(key_type, list(contents[0].items()))), *[run_of(key_type, run) for run in contents[1:]]]
    tables = [base, *runs]
    if seed is not None and moved < len(tables):
        order = list(range(len(tables[moved])))
        random.Random(seed).shuffle(order)
        tables[moved] = tables[moved].take(pa.array(order, pa.int64()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltaruns, "_BATCH_ROWS", rows)
        patch.setattr(deltaruns, "_BATCH_BUCKETS", buckets)
        patch.setattr(deltaruns, "_TOGETHER_BYTES_MAX", together)
        found = by_key(key_type, list(newest_rows(tables[0], tables[1:], key_type, GROUPS)))
    assert found == {place: value for place, value in expected.items() if value is not None}
    assert found == by_key(key_type, [merged_deltas(tables[0], tables[1:], key_type, GROUPS)])


def test_a_base_in_pieces_gives_whole_key_groups_and_is_not_copied_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    key_type = KeyType.of(int)
    base = sort_by_key_group(table(key_type, [((b"", number), b"old") for number in range(80)]))
    changed = next(key for group, key in zip(base["key_group"].to_pylist(), base["key"].to_pylist(), strict=True) if group == 3)
    monkeypatch.setattr(deltaruns, "_BATCH_ROWS", 10)
    pieces = list(newest_rows(base, [run_of(key_type, {(b"", changed): b"new"})], key_type, GROUPS))
    groups = [set(piece["key_group"].to_pylist()) for piece in pieces]
    assert sum(len(piece) for piece in pieces) == 80
    assert len(pieces) > 4
    assert all(not left & right - {3} for left, right in pairwise(groups))
    whole = [piece for piece, of_piece in zip(pieces, groups, strict=True) if 3 not in of_piece]
    addresses = {chunk.buffers()[1].address for chunk in base["key_group"].chunks}
    assert whole
    assert all(chunk.buffers()[1].address in addresses for piece in whole for chunk in piece["key_group"].chunks)


@pytest.mark.parametrize("damage", ["no tombstones", "null tombstones"])
def test_a_run_that_is_none_is_refused(damage: str) -> None:
    key_type = KeyType.of(int)
    base, run = table(key_type, [((b"", 1), b"a")]), run_of(key_type, {(b"", 1): b"b"})
    if damage == "no tombstones":
        run = base
    else:
        index = run.schema.get_field_index("tombstone")
        run = run.set_column(index, "tombstone", pa.array([None], pa.bool_()))
    with pytest.raises((KeyError, ValueError)):
        list(newest_rows(base, [run], key_type, GROUPS))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    cluster = Cluster(tmp_path, "filesystem")
    yield Job(cluster)
    cluster.close()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_runs_that_change_and_delete_the_same_keys_again_and_again(
    job: Job, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltaruns, "_BATCH_ROWS", 40)
    monkeypatch.setattr(keyedrows, "ROWS_PER_BATCH", 16)
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(600), 1)
    job.checkpoint(backends, 1, None)
    rng = random.Random(5)
    for number in range(2, 9):
        write(backends, rng.sample(range(620), 30), number)
        for gone in rng.sample(range(40), 12):
            backend = owner(backends, f"key{gone}")
            backend.get_state(COUNT).clear()
            backend.get_state(TAGS).clear()
        write(backends, rng.sample(range(40), 6), 100 + number)
        job.checkpoint(backends, number, number - 1)
    assert any(handle.format == "arrow-delta" for handle in job.completed[8])
    assert 560 < len(read(backends)) < 620
    assert read(job.restored(8, parallelism)) == read(backends)

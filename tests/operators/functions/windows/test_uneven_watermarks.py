"""A cut at which one subtask had gone further in event time than another, as behind an input that returned from idleness: after the
restore nothing fires twice, and nothing that had not fired is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast import CorruptStateError
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.aggregates import count, sum
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.columnar import FiredUntil
from holdfast.operators.functions.windows.columnar_operators import columnar_window
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.operators.harness import HarnessSnapshot, OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
MAX_PARALLELISM = 8
FAR, NEAR = 19, 14
"""Watermarks of the two subtasks."""


SELECTOR = key_selector("k", None, ROWS, "op")


def operator(windows: Any) -> Any:
    selector = key_selector("k", None, ROWS, "op")
    return columnar_window(windows, RowWindowOptions(), {"n": count(), "total": sum("v")}, selector, ROWS).operator


def owned_by(subtask: int) -> str:
    """A key of one of two subtasks."""
    selector = key_selector("k", None, ROWS, "op")
    for number in range(100):
        key = f"k{number}"
        (group,) = selector.key_type.column([pa.array([key])], max_parallelism=MAX_PARALLELISM, operator="op").key_groups.tolist()
        if subtask_of_key_group(group, MAX_PARALLELISM, 2) == subtask:
            return key
    raise AssertionError("no key")


def without_fired_until(snapshots: list[HarnessSnapshot]) -> list[HarnessSnapshot]:
    """As those of releases that did not store for each key group up to where it had fired."""
    old = ("fired_until", "assigner")
    return [replace(each, lists={name: kept for name, kept in each.lists.items() if name not in old}) for each in snapshots]


def batch(key: str, *values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": key, "v": value} for value in values], schema=ROWS.schema)


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    rows = [(row["k"], round(row["window_end"].timestamp() * 1000), row["n"], row["total"]) for row in harness.output.rows()]
    harness.output.elements.clear()
    return sorted(rows)


@pytest.mark.parametrize("windows", [Tumbling(20), Sliding(20, 20), Sliding(20, 10), Session(7)], ids=repr)
def test_what_one_subtask_fired_stays_fired_and_what_the_other_had_not_fires(windows: Any) -> None:
    keys, snapshots, before = [owned_by(0), owned_by(1)], [], []
    for subtask, (key, watermark) in enumerate(zip(keys, (FAR, NEAR), strict=True)):
        harness = OperatorHarness(
            operator(windows), key_type="utf8", parallelism=2, subtask=subtask, max_parallelism=MAX_PARALLELISM
        ).open()
        harness.process(batch(key, 1, 2), [12, 12])
        harness.watermark(watermark)
        before += shown(harness)
        snapshots.append(harness.snapshot())
    assert (keys[0], 19 if isinstance(windows, Session) else 20, 2, 3) in before
    assert not [row for row in before if row[0] == keys[1]]
    restored = OperatorHarness.restored(
        operator(windows), snapshots, parallelism=1, subtask=0, key_type="utf8", max_parallelism=MAX_PARALLELISM
    ).open()
    restored.snapshot()  # at once: what is due is kept
    restored.process(batch(keys[0], 5), [11])  # was late
    restored.watermark(FAR)
    after = shown(restored)
    assert [row for row in after if row[0] == keys[0]] == []
    assert (keys[1], 19 if isinstance(windows, Session) else 20, 2, 3) in after
    restored.watermark(100)
    total = before + after + shown(restored)
    assert len({row[:2] for row in total}) == len(total), "each window of a key once"


@pytest.mark.parametrize("lateness", [0, 100])
@pytest.mark.parametrize("time", ["event", "processing"])
def test_sessions_that_one_subtask_had_not_fired_come_out_of_an_old_snapshot(time: Any, lateness: int) -> None:
    windows, keys, snapshots = Session(7, time=time), [owned_by(0), owned_by(1)], []
    options = RowWindowOptions() if time == "processing" else RowWindowOptions(lateness_ms=lateness)

    def made() -> Any:
        return columnar_window(windows, options, {"n": count(), "total": sum("v")}, SELECTOR, ROWS).operator

    for subtask, (key, now_ms) in enumerate(zip(keys, (FAR, NEAR), strict=True)):
        harness = OperatorHarness(
            made(), key_type="utf8", parallelism=2, subtask=subtask, max_parallelism=MAX_PARALLELISM, now_ms=12
        ).open()
        harness.process(batch(key, 1, 2), [12, 12])
        if time == "event":
            harness.watermark(now_ms)
        else:
            harness.processing_time(now_ms)
        assert len(shown(harness)) == (subtask == 0)
        snapshots.append(harness.snapshot())
    restored = OperatorHarness.restored(
        made(), without_fired_until(snapshots), key_type="utf8", max_parallelism=MAX_PARALLELISM, now_ms=FAR
    ).open()
    restored.processing_time(FAR)
    found = shown(restored)
    restored.watermark(FAR + 10)
    restored.processing_time(FAR + 10)
    found += shown(restored)
    assert found.count((keys[1], 19, 2, 3)) == 1
    assert found.count((keys[0], 19, 2, 3)) <= 1, "it is not known whether it had fired"


@pytest.mark.parametrize("windows", [Tumbling(20), Sliding(20, 10), Session(7)], ids=repr)
@pytest.mark.parametrize(
    "entry",
    [b"\xc1", b"", [0, 8], ["a", 8, 5], [0, 8, 5, "drain"], [0, 8, 2**64 - 1], {"first": 0}, [0, 9, 5], [-1, 8, 5], [3, 3, 5]],
    ids=repr,
)
def test_an_entry_of_another_form_or_of_other_key_groups_is_refused(windows: Any, entry: Any) -> None:
    harness = OperatorHarness(operator(windows), key_type="utf8", max_parallelism=MAX_PARALLELISM).open()
    snapshot = harness.snapshot()
    stored = entry if isinstance(entry, bytes) else msgspec.msgpack.encode(entry)
    broken = replace(snapshot, lists={**snapshot.lists, "fired_until": [stored]})
    restored = OperatorHarness.restored(operator(windows), [broken], key_type="utf8", max_parallelism=MAX_PARALLELISM)
    with pytest.raises(CorruptStateError, match=r"operator 'op'.*'fired_until'") as found:
        restored.open()
    assert (found.value.operator, found.value.state) == ("op", "fired_until")


@pytest.mark.parametrize(("windows", "until"), [(Tumbling(20), -(2**63)), (Sliding(20, 20), 0), (Session(7), 20)], ids=repr)
def test_up_to_where_windows_have_fired_is_stored_as_ever(windows: Any, until: int) -> None:
    harness = OperatorHarness(operator(windows), key_type="utf8", max_parallelism=MAX_PARALLELISM).open()
    harness.watermark(FAR)
    before = harness.snapshot().lists["fired_until"]
    assert before == ([] if isinstance(windows, Tumbling) else [msgspec.msgpack.encode([0, MAX_PARALLELISM, until])])
    harness.process(batch("a", 1), [FAR + 5])
    next(harness.watermark_slices(MAX_WATERMARK))
    (middle,) = harness.snapshot().lists["fired_until"]
    assert msgspec.msgpack.decode(middle)[3:] == [True]


@pytest.mark.parametrize("windows", [Tumbling(4), Sliding(4, 4), Session(4)], ids=repr)
def test_a_drain_of_one_subtask_fires_nothing_in_front_of_records_in_flight_to_another(windows: Any) -> None:
    snapshots = []
    for subtask in range(2):
        harness = OperatorHarness(
            operator(windows), key_type="utf8", parallelism=2, subtask=subtask, max_parallelism=MAX_PARALLELISM
        ).open()
        harness.process(batch(owned_by(subtask), 5), [17])
        harness.watermark(NEAR)
        snapshots.append(harness.snapshot())
    cut_off = [FiredUntil(0, MAX_PARALLELISM // 2, MAX_WATERMARK, True).encoded()]
    snapshots[0] = replace(snapshots[0], lists={**snapshots[0].lists, "fired_until": cut_off})
    restored = OperatorHarness.restored(operator(windows), snapshots, key_type="utf8", max_parallelism=MAX_PARALLELISM)
    restored.context.restores_in_flight = True
    restored.open().process(batch(owned_by(1), 7), [17])
    restored.watermark(100)
    assert (2, 12) in [row[2:] for row in shown(restored)]

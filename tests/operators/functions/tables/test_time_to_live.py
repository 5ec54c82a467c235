"""One row of each key that is forgotten after a while, at the moments that decide."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.tables.one_row import deduplication, one_row_operator
from tests.operators.harness import HarnessSnapshot, OperatorHarness

ROWS = RowType(pa.schema({"k": pa.int64()}))


def harness_of(ttl_ms: int, *, now_ms: int, snapshots: Sequence[HarnessSnapshot] = ()) -> OperatorHarness:
    selector = key_selector("k", None, ROWS, "key_by")
    operator = one_row_operator("op", deduplication("first", None, ttl_ms), selector, ROWS, is_timed=False)
    return OperatorHarness.restored(operator, snapshots, key_type="int64", now_ms=now_ms)


def kept(harness: OperatorHarness, key: int) -> bool:
    """Whether a row of the key passes now."""
    harness.output.clear()
    harness.process(pa.record_batch({"k": [key]}, schema=ROWS.schema))
    return bool(harness.output.elements)


@pytest.mark.parametrize(("old_ms", "new_ms"), [(2_000, 500), (500, 2_000), (2_000, 700), (1_000, 1_000)])
def test_another_ttl_at_a_restore_holds_for_what_was_kept_before(old_ms: int, new_ms: int) -> None:
    """By the stamp of each row, wherever stretches of either length end."""
    with harness_of(old_ms, now_ms=3_900) as harness:
        assert kept(harness, 1)
        snapshot = harness.snapshot()
    for now_ms in range(4_000, 3_900 + new_ms, 100):
        with harness_of(new_ms, now_ms=now_ms, snapshots=[snapshot]) as harness:
            assert not kept(harness, 1), now_ms
            assert kept(harness, now_ms)
            harness.clock.now_ms += 50
            snapshot = harness.snapshot()
    with harness_of(new_ms, now_ms=3_900 + new_ms, snapshots=[snapshot]) as harness:
        assert kept(harness, 1)


def test_a_clock_that_goes_back_forgets_nothing() -> None:
    with harness_of(1_000, now_ms=5_500) as harness:
        assert kept(harness, 1)
        harness.clock.now_ms = 3_000
        assert not kept(harness, 1)
        assert kept(harness, 2)
        harness.clock.now_ms = 3_999
        assert not kept(harness, 2)
        harness.clock.now_ms = 4_000
        assert kept(harness, 2)
        harness.clock.now_ms = 6_499
        assert not kept(harness, 1)
        harness.clock.now_ms = 6_500
        assert kept(harness, 1)

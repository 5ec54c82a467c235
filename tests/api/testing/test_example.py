"""A program with most of the vocabulary of time, windows and joins, as its first reader would type it: it runs as it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.sources.generator import GeneratorSource

PROGRAM = """
times = hf.WatermarkStrategy.for_bounded_out_of_orderness(4_000).with_timestamp_assigner("at").with_watermark_alignment("group", 60_000)
bids = env.from_source(source).uid("bids").assign_timestamps_and_watermarks(times).uid("times")
hot = (bids.key_by("auction").window(hf.Sliding(seconds=10, slide=2_000)).allowed_lateness(500).side_output_late("late")
       .aggregate(n=hf.count(), bidders=hf.count_distinct("bidder"), cheap=hf.count(where="price < 10000")).uid("hot"))   # hot.side_output("late")
paid = orders.interval_join(payments, on="id", lower=-1_000, upper=600_000, how="left").uid("paid")
"""  # noqa: E501

TEST = """
job = hf.testing.Job(parallelism=2)
feed = job.input("bids", {"auction": int}); out = job.output(pipeline(feed.stream)); job.start()
feed.add({"auction": 1}, at=10); feed.watermark(1_999); feed.idle(); job.advance(to_ms=5_000)
job.checkpoint(); job.restart(parallelism=3, state_backend="rocksdb", at_ms=9_000); feed.end(); out.take()   # [(row, time)]; out.watermark
"""  # noqa: E501

BIDS = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("at", "auction", "bidder", "price")])
ROWS, LATE = 40, 30
"""Bids, one a second; the one of index LATE is older than any window that is still kept."""


def make_bids(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    at = np.where(indices == LATE, 0, indices * 1_000)
    columns = [at, indices % 2, indices % 3, np.where(indices % 4 == 0, 5_000, 20_000)]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=BIDS)


def expected_windows() -> list[tuple[int, int, int, int, int]]:
    """(auction, end, n, bidders, cheap), by the definition of a window."""
    bids = [(index * 1_000, index % 2, index % 3, index % 4 == 0) for index in range(ROWS) if index != LATE]
    rows = []
    for end in range(2_000, ROWS * 1_000 + 10_000, 2_000):
        for auction in (0, 1):
            inside = [bid for bid in bids if bid[1] == auction and end - 10_000 <= bid[0] < end]
            if inside:
                rows.append((auction, end, len(inside), len({bid[2] for bid in inside}), sum(bid[3] for bid in inside)))
    return sorted(rows)


@pytest.mark.parametrize("batch_rows", [1, 65_536])
def test_the_program_runs_as_it_stands(batch_rows: int) -> None:
    pytest.importorskip("duckdb")
    with hf.testing.Job(parallelism=1, batch_rows=batch_rows) as job:
        sides = {name: job.input(name, {"id": int}) for name in ("orders", "payments")}
        names: dict[str, Any] = {"hf": hf, "env": job.environment, "source": GeneratorSource(make_bids, ROWS, BIDS, batch_rows=1)}
        names |= {name: feed.stream for name, feed in sides.items()}
        exec(PROGRAM, names)
        hot, late, paid = (job.output(each) for each in (names["hot"], names["hot"].side_output("late"), names["paid"]))
        job.start()
        last = {(row["auction"], row["window_end"]): row for row, _ in hot.take()}
        found = [
            (auction, round(end.timestamp() * 1_000), row["n"], row["bidders"], row["cheap"])
            for (auction, end), row in last.items()
        ]
        assert sorted(found) == expected_windows()
        assert late.rows() == [{"at": 0, "auction": 0, "bidder": 0, "price": 20_000}]
        sides["orders"].add([{"id": 1}, {"id": 2}], at=[10_000, 10_000])
        sides["payments"].add([{"id": 1}, {"id": 1}, {"id": 1}], at=[8_999, 9_000, 610_000])
        assert [time for _, time in paid.take()] == [10_000, 610_000], "within the bounds, which are inclusive"
        for feed in sides.values():
            feed.end()
        assert [time for _, time in paid.take()] == [610_000], "the order that was not paid, when no payment can follow"
        assert job.status == "FINISHED"


def test_the_test_runs_as_it_stands() -> None:
    def pipeline(bids: hf.Stream) -> hf.Stream:
        return bids.key_by("auction").window(hf.Tumbling(seconds=2)).aggregate(n=hf.count())

    names: dict[str, Any] = {"hf": hf, "pipeline": pipeline}
    exec(TEST, names)
    with names["job"] as job:
        out = names["out"]
        assert (job.status, out.take(), out.watermark) == ("FINISHED", [], MAX_WATERMARK)
        assert [(row["auction"], row["n"], time) for row, time in out.committed()] == [(1, 1, 1_999)]

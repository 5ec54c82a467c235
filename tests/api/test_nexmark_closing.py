"""Auctions that close, where subtasks of sources are not equally far."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

import holdfast as hf
from holdfast.api.nexmark.closing import winning_bids
from holdfast.api.nexmark.events import SCHEMAS
from holdfast.api.nexmark.query import Auctions

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AUCTION = pa.schema([SCHEMAS["auction"].field(name) for name in ("id", "dateTime", "expires", "category")])
BID = pa.schema([SCHEMAS["bid"].field(name) for name in ("auction", "price", "dateTime", "bidder")])


def at(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def auction(number: int, opens: int, closes: int) -> dict[str, Any]:
    return {"id": number, "dateTime": at(opens), "expires": at(closes), "category": number % 5}


def bid(number: int, price: int, when: int, bidder: int = 0) -> dict[str, Any]:
    return {"auction": number, "price": price, "dateTime": at(when), "bidder": bidder}


def test_no_bid_is_late_where_one_subtask_of_the_sources_is_far_ahead() -> None:
    with hf.testing.Job(parallelism=2) as job:
        house = Auctions(job.environment, 0)
        auctions, bids = job.input("auctions", AUCTION), job.input("bids", BID)
        out = job.output(winning_bids(house, auctions.stream, bids.stream, "category"))
        job.start()
        for opens, subtask in ((60_000, 0), (1_000, 1)):
            numbers = range(opens, opens + 10)  # on either subtask of the join, and of the windows
            auctions.add([auction(number, opens, opens + 20) for number in numbers], at=opens, to=subtask)
            bids.add([bid(number, 7, opens + 5) for number in numbers], at=opens + 5, to=subtask)
            for feed in (auctions, bids):
                feed.watermark(opens + 5, to=subtask)
        assert job.progress("winning").late_dropped == 0
        auctions.end()
        bids.end()
        assert sorted(row["auction"] for row in out.rows()) == [*range(1_000, 1_010), *range(60_000, 60_010)]


def test_the_highest_bid_wins_then_the_earliest_and_none_counts_before_or_behind_the_auction() -> None:
    with hf.testing.Job(batch_rows=3) as job:
        house = Auctions(job.environment, 0)
        auctions, bids = job.input("auctions", AUCTION), job.input("bids", BID)
        out = job.output(winning_bids(house, auctions.stream, bids.stream, bidder="bidder"))
        job.start()
        early, late = (999, 90, 1), (1_021, 90, 2)
        found = [early, (1_000, 5, 3), (1_004, 8, 4), (1_004, 7, 5), (1_006, 8, 6), (1_020, 8, 7), late]
        bids.add([bid(1, price, when, bidder) for when, price, bidder in found], at=[when for when, *_ in found])
        auctions.add([auction(1, 1_000, 1_020), auction(2, 1_010, 1_011)], at=[1_000, 1_010])
        for feed in (auctions, bids):
            feed.watermark(1_030)
        assert out.rows() == []  # its session may go on
        for feed in (auctions, bids):
            feed.watermark(5_000)
        ((row, time),) = out.take()
        assert (row["auction"], row["price"], row["bidder"], row["expires"]) == (1, 8, 4, at(1_020))
        assert (time or 0) >= 1_020

"""Top-N and deduplication over the bids of Nexmark: one worker, blackhole, `filesystem`, checkpoints of 1 s; aim: 1 M events/s.

    python -m benchmarks.run --only tables
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast as hf
from benchmarks.harness import Bench
from holdfast.api.nexmark import events

AIM = 1_000_000
"""Events a second."""
Table = Callable[[hf.Stream], hf.Stream]

TABLES: dict[str, Table] = {
    "top 10 by price per auction (q19)": lambda bids: bids.key_by("auction").top(10, by="price"),
    "last per bidder and auction (q18)": lambda bids: bids.key_by(["bidder", "auction"]).deduplicate(keep="last", by="dateTime"),
    "first per auction": lambda bids: bids.key_by("auction").deduplicate(),
    "greatest per auction": lambda bids: bids.key_by("auction").max_by("price"),
}


def job(table: Table, count: int) -> hf.Environment:
    environment = hf.Environment("tables", parallelism=1, checkpoint_interval_ms=1_000, state_backend="filesystem")
    bids = environment.from_source(events.source("bid", count)).uid("bids")
    timed = bids.assign_timestamps("dateTime", 4_000).uid("times")
    table(timed).uid("table").sink_to(hf.Blackhole(), uid="out")
    return environment


def measure(bench: Bench, quick: bool) -> list[dict[str, Any]]:
    """A line for each table; events count the persons and auctions that Nexmark has beside the bids."""
    count, found = 5_000_000 if quick else 20_000_000, []
    for name, table in TABLES.items():
        measured = bench.run(job(table, count), count)
        found.append(
            {
                "workload": name,
                "events_per_second": round(measured.records_per_second),
                "aim": AIM,
                "cpu_s_per_million": round(measured.cpu_per_million, 3),
                "checkpoints": f"{measured.checkpoints}/{measured.checkpoints_expected}",
            }
        )
    return found

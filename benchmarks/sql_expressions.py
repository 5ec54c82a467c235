"""How fast rows are selected and filtered on one core: by SQL expressions, by pyarrow.compute, by a function of the row.

Run `python -m benchmarks.sql_expressions`; prints rows/s per way and rows of a batch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.expressions import Expressions, predicate_of

SCHEMA = pa.schema({"auction": pa.int64(), "price": pa.int64(), "channel": pa.string()})
EURO = "price * 0.908::double"
CHEAP = "price < 5000 and channel = 'Apple'"


def batch_of(row_count: int) -> pa.RecordBatch:
    generator = np.random.default_rng(42)
    prices = generator.integers(1, 10_001, row_count)
    channels = np.array(["Apple", "Google", "Facebook", "Baidu"])[generator.integers(0, 4, row_count)]
    return pa.RecordBatch.from_arrays([pa.array(np.arange(row_count)), pa.array(prices), pa.array(channels)], schema=SCHEMA)


def rows_per_second(work: Callable[[pa.RecordBatch], Any], columns: pa.RecordBatch, seconds: float) -> float:
    work(columns)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work(columns)
        count += columns.num_rows
    return count / (time.perf_counter() - start)


def ways() -> dict[str, Callable[[pa.RecordBatch], Any]]:
    select = Expressions({"euro": EURO}, SCHEMA, "select")
    condition = predicate_of(CHEAP, SCHEMA, "filter")
    return {
        "select, SQL": select.evaluate,
        "select, pyarrow.compute": lambda columns: pc.multiply(columns.column("price"), 0.908),
        "select, map of a row": lambda columns: [{"euro": row["price"] * 0.908} for row in Batch(columns=columns).rows()],
        "filter, SQL": lambda columns: columns.filter(pa.array(condition.mask(columns))),
        "filter, pyarrow.compute": lambda columns: columns.filter(
            pc.and_(pc.less(columns.column("price"), 5000), pc.equal(columns.column("channel"), "Apple"))
        ),
        "filter, of a row": lambda columns: Batch(columns=columns).filter(
            np.array([row["price"] < 5000 and row["channel"] == "Apple" for row in Batch(columns=columns).rows()])
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    seconds = parser.parse_args().seconds
    for row_count in (100, 4_096, 65_536):
        columns = batch_of(row_count)
        for name, work in ways().items():
            print(f"{row_count:>7,} rows a batch  {name:<26} {rows_per_second(work, columns, seconds) / 1e6:8.2f} M rows/s")


if __name__ == "__main__":
    main()

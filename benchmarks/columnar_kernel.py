"""Speed of columnar state on one core: count, sum and max per key over batches of 64k rows, in one row of each key, and in windows
of so many records.

Run `python -m benchmarks.columnar_kernel`; it prints records per second of CPU time, per number of keys and kind of key."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.statebackends.columnar.state import NumpyColumnarState
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, KeyColumn

BATCH_ROWS = 1 << 16
DESCRIPTOR = ColumnarStateDescriptor(
    "totals",
    (
        ColumnAggregate("count", None, "n"),
        ColumnAggregate("sum", "price", "total", pa.int64()),
        ColumnAggregate("max", "price", "highest", pa.int64()),
    ),
)


def _column_of(key_type: KeyType) -> Callable[[Sequence[pa.Array]], KeyColumn]:
    return lambda arrays: key_type.column(arrays, max_parallelism=128)


def columnar_kernel(key_count: int, batches: int, *, stride: int = 1, text: bool = False, freeze_every: int = 0) -> float:
    """Records per second of CPU time of `update`, without the making of batches.

    Keys are uniform over 0, stride, 2 stride ...: a stride of 1 is direct-addressed, a large one hashed. `freeze_every`: batches
    between two barriers whose asynchronous part never runs (the most expensive case); 0 = none."""
    key_type = KeyType.of(str if text else int)
    state = NumpyColumnarState(DESCRIPTOR, key_type.arrow_types, _column_of(key_type), "benchmark")
    pool = _batches(key_type, key_count, min(batches, 64), stride=stride)
    for keys_of_batch, prices in pool:  # warm: every key has its slot
        state.update(keys_of_batch, 0, [None, prices, prices])
    frozen = None
    start = time.process_time()
    for number in range(batches):
        if freeze_every and number % freeze_every == 0:
            if frozen is not None:
                frozen.release()
            frozen = state.freeze()
        keys_of_batch, prices = pool[number % len(pool)]
        state.update(keys_of_batch, 0, [None, prices, prices])
    return batches * BATCH_ROWS / (time.process_time() - start)


def _batches(key_type: KeyType, key_count: int, count: int, *, stride: int = 1) -> list[tuple[KeyColumn, pa.Array]]:
    generator = np.random.default_rng(42)
    found: list[tuple[KeyColumn, pa.Array]] = []
    for _ in range(count):
        keys = pa.array(generator.integers(0, key_count, BATCH_ROWS) * stride)
        prices = pa.array(generator.integers(1, 10_001, BATCH_ROWS))
        text = pa.types.is_string(key_type.arrow_types[0])
        found.append((key_type.column([keys.cast(pa.string()) if text else keys], max_parallelism=128), prices))
    return found


def count_windows_kernel(key_count: int, batches: int, *, count: int, slide: int) -> float:
    """Records per second of CPU time, in windows of `count` records, one every `slide`."""
    key_type = KeyType.of(int)
    descriptor = ColumnarStateDescriptor("windows", (ColumnAggregate("count", None, "window_records"), *DESCRIPTOR.aggregates))
    state = NumpyColumnarState(descriptor, key_type.arrow_types, _column_of(key_type), "benchmark")
    windows = state.count_windows(count, slide)
    pool = _batches(key_type, key_count, min(batches, 64))
    for keys, prices in pool:  # warm: every key has its rows
        windows.take(keys, [None, prices, prices])
    start = time.process_time()
    for number in range(batches):
        keys, prices = pool[number % len(pool)]
        windows.take(keys, [None, prices, prices])
    return batches * BATCH_ROWS / (time.process_time() - start)


COUNT_WINDOWS = ((10, 10), (100, 100), (1_000, 1_000), (100, 50), (100, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200, help="batches of 65,536 rows per measurement")
    batches = parser.parse_args().batches
    cases: list[tuple[str, dict[str, Any]]] = [
        ("int64, dense", {}),
        ("int64, dense, barrier every 50 batches", {"freeze_every": 50}),
        ("int64, hashed", {"stride": 1_000_003}),
        ("utf8", {"text": True}),
    ]
    for key_count in (10_000, 1_000_000):
        for name, options in cases:
            rate = columnar_kernel(key_count, max(1, batches // 10) if "text" in options else batches, **options)
            print(f"{key_count:>9,} keys  {name:<40} {rate / 1e6:8.1f} M records/s")
        for count, slide in COUNT_WINDOWS:
            rate = count_windows_kernel(key_count, max(1, batches // 4), count=count, slide=slide)
            print(f"{key_count:>9,} keys  {f'windows of {count} records, every {slide}':<40} {rate / 1e6:8.1f} M records/s")


if __name__ == "__main__":
    main()

"""The benchmark streams, defined for comparison with other engines.

Record i (0-based, global) = auction, bidder, price, ts: h = splitmix64(i); auction = h & 1023;
bidder = (h >> 10) mod K; price = 1 + (h >> 20) mod 10000; ts = i / 1000 (1 ms per 1,000 records, unless said otherwise)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA = pa.schema([("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("ts", pa.int64())])
KEYED_SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.binary())])
RECORD_BYTES = 32


def splitmix64(index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 over (i + 1) times the golden ratio; wraps mod 2^64."""
    z = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Bids:
    """The W0, W1 and W1b stream over `keys` bidders."""

    keys: int
    per_ms: int = 1000
    """Records in a ms of event time."""

    def __call__(self, index: npt.NDArray[np.int64]) -> pa.RecordBatch:
        h = splitmix64(index)
        columns = [
            (h & np.uint64(1023)).view(np.int64),
            ((h >> np.uint64(10)) % np.uint64(self.keys)).view(np.int64),
            (np.uint64(1) + (h >> np.uint64(20)) % np.uint64(10_000)).view(np.int64),
            index // self.per_ms,
        ]
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)


@dataclass(frozen=True)
class KeyedUpdates:
    """The W2 and W3 stream: every key once, in order, then random keys; 100-byte values."""

    keys: int
    value_size: int = 100

    def __call__(self, index: npt.NDArray[np.int64]) -> pa.RecordBatch:
        h = splitmix64(index)
        key = np.where(index < self.keys, index, (h % np.uint64(self.keys)).view(np.int64))
        words = -(-self.value_size // 8)
        # independent words: repeated values would be compressed, and the snapshot smaller than the state
        noise = splitmix64((index[:, None] * words + np.arange(words)).ravel())
        bytes_ = noise.view(np.uint8).reshape(len(index), words * 8)[:, : self.value_size]
        offsets = pa.py_buffer(np.arange(len(index) + 1, dtype=np.int32) * np.int32(self.value_size))
        values = pa.Array.from_buffers(
            pa.binary(), len(index), [None, offsets, pa.py_buffer(np.ascontiguousarray(bytes_))]
        )
        return pa.RecordBatch.from_arrays([pa.array(key), values], schema=KEYED_SCHEMA)

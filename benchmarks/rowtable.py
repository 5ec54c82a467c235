"""A row table of 1 M rows of 100 bytes: append, probe, delete, scan; checkpoints, full and with 1 % new rows; restore; and the key
index of several columns.

Run `python -m benchmarks.rowtable [--rows N]`. Rates are rows per second of one core in batches of 65,536; `raw` is what NumPy and
the disk take for the same bytes in the same run: a gather of the rows, and a write with fsync."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from benchmarks.harness import raw_write_ms, spread
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.columnar.key_index import EncodedKeyIndex, create_key_index
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange, PlaceholderHandle
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import ROW_TABLE_BYTES_MAX, StateBackendSettings
from holdfast.statebackends.state import KeyColumn, RowTableStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

BATCH_ROWS = 1 << 16
MAX_PARALLELISM = 128
INCREMENTS = 20
INCREMENT_SHARE = 100
"""One of so many rows is new at each."""
TEXT_BYTES = 76
STATE = RowTableStateDescriptor("rows", pa.schema([("price", pa.int64()), ("amount", pa.float64()), ("text", pa.string())]))
KEY = KeyType.of(int)
PAIR = KeyType.parse("tuple<int64,int64>")
Row = dict[str, Any]


class Rig:
    """One backend with one table, and checkpoints that complete at once."""

    def __init__(self, rows: int, folder: Path, *, bytes_max: int = ROW_TABLE_BYTES_MAX) -> None:
        self.rows = rows
        self.folder = folder
        self.storage = LocalStorage(folder / "state")
        self.generator = np.random.default_rng(42)
        self.settings = StateBackendSettings(row_table_bytes_max=bytes_max)
        self.files: dict[str, FileHandle] = {}
        self.handles: tuple[KeyedStateHandle, ...] = ()
        self.number = self._backends = 0
        self.backend = self.new_backend()
        self.table = self.backend.row_table(STATE, ["id"])
        text = self.generator.integers(97, 123, (BATCH_ROWS, TEXT_BYTES), np.uint8)
        self._texts = pa.array([row.tobytes().decode() for row in text])

    def new_backend(self) -> KeyedBackendBase:
        self._backends += 1
        return create_keyed_backend(
            "filesystem",
            descriptors=[STATE],
            key_type=KEY,
            key_groups=KeyGroupRange(0, MAX_PARALLELISM),
            max_parallelism=MAX_PARALLELISM,
            operator="op",
            subtask=0,
            local_dir=str(self.folder / f"local-{self._backends}"),
            settings=self.settings,
        )

    def batch(self, count: int) -> tuple[KeyColumn, list[pa.Array]]:
        """Rows of uniform keys, two of a key on the average; their key groups are known, as those of rows from an exchange are."""
        column = KEY.column([pa.array(self.generator.integers(0, max(1, self.rows // 2), count))], max_parallelism=MAX_PARALLELISM)
        _ = column.key_groups
        prices, amounts = self.generator.integers(0, 1 << 40, count), self.generator.random(count)
        return column, [pa.array(prices), pa.array(amounts), self._texts.slice(0, count)]

    def append(self, rows: int) -> float:
        """Rows per second, and the largest pause of one batch in ms."""
        spent = 0.0
        for start in range(0, rows, BATCH_ROWS):
            keys, columns = self.batch(min(BATCH_ROWS, rows - start))
            began = time.perf_counter()
            self.table.append(keys, start // (BATCH_ROWS * 4), columns)
            spent += time.perf_counter() - began
        return rows / spent

    def probe(self, batches: int = 10) -> tuple[float, float, float]:
        """(keys looked up, rows found) per second with their columns, and the rows that a plain gather of NumPy takes."""
        found = 0
        spent = 0.0
        for _ in range(batches):
            keys, _ = self.batch(BATCH_ROWS)
            began = time.perf_counter()
            matches = self.table.rows_of(keys)
            matches.take()
            spent += time.perf_counter() - began
            found += len(matches)
        flat = np.zeros((self.rows, 100), np.uint8)
        places = self.generator.integers(0, self.rows, found // batches)
        began = time.perf_counter()
        _ = flat[places]
        return batches * BATCH_ROWS / spent, found / spent, len(places) / (time.perf_counter() - began)

    def scan(self) -> float:
        """Rows per second of a pass with all columns."""
        began = time.perf_counter()
        scan = self.table.scan()
        count = 0
        while (some := scan.next(BATCH_ROWS // 4)) is not None:
            count += some.take().num_rows
        if count != self.table.count():
            raise AssertionError("rows are missing")
        return count / (time.perf_counter() - began)

    def delete(self) -> float:
        """Rows per second that are looked up and deleted."""
        keys, _ = self.batch(BATCH_ROWS // 4)
        began = time.perf_counter()
        deleted = self.table.delete(self.table.rows_of(keys))
        return deleted / (time.perf_counter() - began)

    def checkpoint(self) -> Row:
        self.number += 1
        base = self.number - 1 if self.number > 1 else None
        target = SnapshotTarget(self.number, f"job/chk-{self.number}", "op-0-1-n", False, 20_480, f"{self.number}-1-op-0-n", base)
        began = time.perf_counter()
        pending = self.backend.snapshot(self.number)
        frozen = time.perf_counter()
        acked = run_flow(pending.flow(target), self.storage)
        stored = time.perf_counter()
        pending.release()
        released = time.perf_counter()
        parts = [part for handle in acked for part in handle.parts]
        self.files |= {part.path: part for part in parts if isinstance(part, FileHandle)}
        self.handles = tuple(
            msgspec.structs.replace(
                handle, parts=tuple(self.files[part.path] if isinstance(part, PlaceholderHandle) else part for part in handle.parts)
            )
            for handle in acked
        )
        size = sum(handle.new_size for handle in acked)
        return {
            "sync_ms": (frozen - began) * 1000 + (released - stored) * 1000,
            "async_ms": (stored - frozen) * 1000,
            "bytes": size,
            "runs": sum(len(handle.parts) for handle in self.handles) - 1,
            "raw_ms": raw_write_ms(self.folder, size),
        }

    def restore_s(self) -> float:
        backend = self.new_backend()
        began = time.perf_counter()
        backend.restore(self.handles, self.storage, f"job/chk-{self.number}", checkpoint_id=self.number)
        duration = time.perf_counter() - began
        if backend.row_table(STATE, ["id"]).count() != self.table.count():
            raise AssertionError("rows are missing")
        backend.dispose()
        return duration


def measure(rows: int = 1_000_000) -> list[Row]:
    """What happens to a table, in memory and mapped, one figure a line."""
    found: list[Row] = []
    for where, bytes_max in (("memory", ROW_TABLE_BYTES_MAX), ("mapped", 1 << 20)):
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
            rig = Rig(rows, Path(name), bytes_max=bytes_max)
            found += [{"rows": where, **row} for row in _measured(rig, rows)]
            if rig.table.is_mapped != (where == "mapped"):
                raise AssertionError(f"the rows are not in {where}")
            rig.backend.dispose()
    return found + _index_rates()


def _measured(rig: Rig, rows: int) -> list[Row]:
    appended = rig.append(rows)
    full = rig.checkpoint()
    increments = []
    for _ in range(INCREMENTS):
        rig.append(rows // INCREMENT_SHARE)
        increments.append(rig.checkpoint())
    keys, matches, raw = rig.probe()
    shares = [each["bytes"] / full["bytes"] for each in increments]
    return [
        {"what": "append", "per_second": round(appended), "runs": rig.table.run_count},
        {"what": "probe", "keys_per_second": round(keys), "rows_per_second": round(matches), "raw_rows_per_second": round(raw)},
        {"what": "scan", "per_second": round(rig.scan())},
        {"what": "full", **{name: round(value, 1) for name, value in full.items()}},
        {
            "what": "1 % new",
            "sync_ms": spread([each["sync_ms"] for each in increments]),
            "async_ms": spread([each["async_ms"] for each in increments]),
            "share_first": round(shares[0], 4),
            "share_of_all": spread(shares),
            "runs_max": max(each["runs"] for each in increments),
            "raw_ms": spread([each["raw_ms"] for each in increments]),
        },
        {"what": "restore", "seconds": round(rig.restore_s(), 2)},
        {"what": "delete", "per_second": round(rig.delete())},
    ]


def _index_rates() -> list[Row]:
    """Lookups per second of keys of two columns, by the index and by the dict that it took the place of."""
    generator = np.random.default_rng(42)

    def column_of(arrays: list[pa.Array]) -> KeyColumn:
        return PAIR.column(arrays, max_parallelism=MAX_PARALLELISM)

    makers: dict[str, Callable[[], Any]] = {
        "numpy": lambda: create_key_index(PAIR.arrow_types, column_of),
        "dict": lambda: EncodedKeyIndex(PAIR.arrow_types, column_of),
    }
    found = []
    for keys in (10_000, 1_000_000):
        batches = []
        for _ in range(16):
            numbers = generator.integers(0, keys, BATCH_ROWS)
            batches.append(column_of([pa.array(numbers % 1_000), pa.array(numbers // 1_000)]))
        for name, make in makers.items():
            index = make()
            for batch in batches:
                index.slots(batch)
            began = time.perf_counter()
            for batch in batches:
                index.slots(batch)
            rate = len(batches) * BATCH_ROWS / (time.perf_counter() - began)
            found.append({"rows": "-", "what": f"index of two columns, {keys:,} keys, {name}", "per_second": round(rate)})
    return found


def main() -> int:
    """Print the figures, a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    for row in measure(parser.parse_args().rows):
        sys.stdout.write(f"{json.dumps(row)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

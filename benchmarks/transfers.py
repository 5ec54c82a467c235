"""A snapshot's files up to storage and down again, one at a time and several: 64 files of 1 MiB, on a directory and on S3.

S3 is moto's server in a process of its own, with a wait before each answer as in a real store (`latency_ms`); it serves one request
at a time otherwise. `peak_mb`: memory above that of the process before. `raw_s`: 64 x write and fsync of 1 MiB, in turn. Small
tables, 64 of 64 KiB, follow: with a file each, and packed.

    python -m benchmarks.transfers [--quick]"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.snapshot.parts import PartsWriter, read_parts
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import (
    DownloadFile,
    Flow,
    InParallel,
    Operation,
    StatFile,
    Storage,
    UploadFile,
    perform,
    run_flow,
    transfers_of,
)
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import S3Connection, S3Settings
from holdfast.statebackends.storage.transfers import TransferPool
from tests.s3_server import CREDENTIALS, S3Server

Row = dict[str, Any]

FILES = 64
FILE_BYTES = 1 << 20
TABLE_BYTES = 64 << 10
REPEATS = 3
LATENCIES_MS = (0, 30)
"""30 ms is about S3's latency for a small PUT or GET within its region."""


class WaitingServer(S3Server):
    """Answers late, several requests at a time."""

    latency_s = 0.0

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        time.sleep(self.latency_s)
        self.requests.clear()
        return super()._serve(environ, start)


class Files:
    """Local files, and their storage paths, new ones for each round."""

    def __init__(self, folder: Path, files: int) -> None:
        self._folder = folder
        self._rounds = 0
        self._names = [f"{number}.sst" for number in range(files)]
        for name in self._names:
            (folder / name).write_bytes(os.urandom(FILE_BYTES))

    def round(self, storage: Storage) -> tuple[float, float, float, float, float]:
        """(seconds up, down, to stat all of them, bytes of memory up, down). Raises RuntimeError if other bytes come back."""
        self._rounds += 1
        path = f"job/chk-{self._rounds}"
        ups = [_one(UploadFile(str(self._folder / name), f"{path}/{name}")) for name in self._names]
        downs = [_one(DownloadFile(f"{path}/{name}", str(self._folder / f"back-{name}"))) for name in self._names]
        looks = [_one(StatFile(f"{path}/{name}")) for name in self._names]
        sent, up_s, up_bytes = _measured(storage, ups)
        sizes, look_s, _ = _measured(storage, looks)
        fetched, down_s, down_bytes = _measured(storage, downs)
        if sent != fetched or set(sizes) != {FILE_BYTES}:
            raise RuntimeError("other bytes came back")
        return up_s, down_s, look_s, up_bytes, down_bytes

    def raw_s(self) -> float:
        """Seconds to write and sync as many files in turn."""
        data = os.urandom(FILE_BYTES)
        began = time.perf_counter()
        for number in range(len(self._names)):
            with open(self._folder / f"raw-{number}", "wb") as file:
                file.write(data)
                os.fsync(file.fileno())
        return time.perf_counter() - began


def _one(operation: Operation) -> Flow[Any]:
    return (yield operation)


def _measured(storage: Storage, flows: list[Flow[Any]]) -> tuple[list[Any], float, float]:
    ctypes.CDLL(None).malloc_trim(0)  # memory left by earlier rows would hide this one's
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    began = time.perf_counter()
    results: list[Any] = perform(InParallel(flows, [FILE_BYTES] * len(flows)), storage)
    return results, time.perf_counter() - began, _peak_bytes() - before


def _peak_bytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell the most memory that a process had")


def _row(place: str, transfers: int, files: Files, storage: Storage, repeats: int, **more: Any) -> Row:
    files.round(storage)  # connections, folders, imports
    rounds = [files.round(storage) for _ in range(repeats)]
    up_s, down_s, look_s, up_bytes, down_bytes = zip(*rounds, strict=True)
    return {
        "workload": "transfers",
        "storage": place,
        "at_one_time": transfers,
        "upload_s": round(statistics.median(up_s), 3),
        "download_s": round(statistics.median(down_s), 3),
        "look_s": round(statistics.median(look_s), 3),
        "upload_peak_mb": round(max(up_bytes) / 1e6, 1),
        "download_peak_mb": round(max(down_bytes) / 1e6, 1),
        **more,
        "load_average": round(os.getloadavg()[0], 1),
    }


class Tables:
    """Tables of one subtask, each round for a checkpoint of its own."""

    def __init__(self, tables: int) -> None:
        self._tables = [os.urandom(TABLE_BYTES) for _ in range(tables)]
        self._rounds = 0

    def round(self, storage: Storage, pack_threshold: int) -> tuple[float, float, int]:
        """(seconds to store, seconds to read, files). Raises RuntimeError if other bytes come back."""
        self._rounds += 1
        folder = f"job/chk-{self._rounds}"
        writer = PartsWriter(SnapshotTarget(1, folder, f"{self._rounds}-n", False, 0, pack_threshold=pack_threshold))
        began = time.perf_counter()
        parts = [writer.add(table, f"{number}.arrow") for number, table in enumerate(self._tables)]
        run_flow(writer.store(), storage)
        stored_s = time.perf_counter() - began
        handles = [part.handle for part in parts]
        began = time.perf_counter()
        if run_flow(read_parts(handles, folder), storage) != self._tables:
            raise RuntimeError("other bytes came back")
        return stored_s, time.perf_counter() - began, len({handle.path for handle in handles if isinstance(handle, FileHandle)})


def _table_rows(place: str, tables: Tables, storage: Storage, repeats: int, **more: Any) -> Iterator[Row]:
    for pack_threshold in (0, 1 << 20):
        tables.round(storage, pack_threshold)
        stored_s, read_s, files = zip(*[tables.round(storage, pack_threshold) for _ in range(repeats)], strict=True)
        yield {
            "workload": "small tables",
            "storage": place,
            "at_one_time": transfers_of(storage).transfers_max,
            "files": files[0],
            "store_s": round(statistics.median(stored_s), 3),
            "read_s": round(statistics.median(read_s), 3),
            **more,
            "load_average": round(os.getloadavg()[0], 1),
        }


@contextmanager
def served(latency_ms: int) -> Iterator[str]:
    """URL of a server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transfers", "--serve", "--latency-ms", str(latency_ms)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def serve(latency_ms: int) -> None:
    """Serve until the standard input ends."""
    server = WaitingServer()
    server.latency_s = latency_ms / 1000
    print(server.url, flush=True)
    sys.stdin.read()
    server.close()


def measure(*, quick: bool = False) -> list[Row]:
    """64 files of 1 MiB; with --quick 16."""
    count, repeats = (16, 1) if quick else (FILES, REPEATS)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    rows: list[Row] = []
    try:
        (folder / "local").mkdir()
        files = Files(folder / "local", count)
        for transfers in (1, 2, 4, 8):
            directory = LocalStorage(folder / f"state-{transfers}")
            directory.transfers = TransferPool(transfers, 1 << 30, 2 << 20)
            rows.append(_row("directory", transfers, files, directory, repeats, raw_s=round(files.raw_s(), 3)))
        tables = Tables(count)
        rows += _table_rows("directory", tables, LocalStorage(folder / "tables"), repeats)
        with patch.dict(os.environ, CREDENTIALS):
            for latency_ms in LATENCIES_MS:
                for transfers in (1, 4, 8, 16):
                    with served(latency_ms) as url:
                        connection = S3Connection(S3Settings(endpoint_url=url, transfers_in_flight_max=transfers))
                        connection.call("create_bucket", Bucket="bench")
                        storage = S3Storage("s3://bench/state", connection)
                        rows.append(_row("s3", transfers, files, storage, repeats, latency_ms=latency_ms))
                        if transfers == S3Settings().transfers_in_flight_max:
                            rows += _table_rows("s3", tables, storage, repeats, latency_ms=latency_ms)
                        connection.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 files")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--latency-ms", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.latency_ms)
        return
    for row in measure(quick=arguments.quick):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

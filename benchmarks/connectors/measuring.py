"""What the connectors' benchmarks share: rows to send, runs that alternate, and the line of a result.

A job and its raw client handle the same rows, of the same servers, one after the other, several times: each line has the median and
the spread of both. `cpu_us` is the CPU of the process that does the work (the worker; for the raw client, this one), per row, and
means something on a busy machine, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench
from benchmarks.jobs import environment

Row = dict[str, Any]

REPEATS = 3
ROW_BYTES = 100
COLUMNS = ("row", "rows_per_s", "beside", "beside_per_s", "ratio", "aim", "met", "cpu_us", "beside_cpu_us", "how")
FAILED = "failed"
"""In place of yes and no: of what has no figures."""
VALUE = pa.schema([pa.field("value", pa.binary(), nullable=False)])


def values(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Rows of `ROW_BYTES` bytes: the row's number, big-endian, and filling."""
    block = np.full((len(indices), ROW_BYTES), ord("x"), np.uint8)
    block[:, :8] = np.asarray(indices).astype(">i8").view(np.uint8).reshape(-1, 8)
    offsets = np.arange(0, (len(indices) + 1) * ROW_BYTES, ROW_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block)]
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary(), len(indices), buffers)], schema=VALUE)


def all_values(rows: int) -> list[bytes]:
    """The same rows for a raw client."""
    found: list[bytes] = []
    for start in range(0, rows, 65_536):
        found += values(np.arange(start, min(start + 65_536, rows))).column(0).to_pylist()
    return found


def numbers_of(found: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Of such rows."""
    return np.array([int.from_bytes(each[:8], "big") for each in found], np.int64)


def check_numbers(found: npt.NDArray[np.int64], rows: int, what: str) -> None:
    """AssertionError unless each row is there once."""
    assert len(found) == rows, f"{what}: {len(found)} rows, not {rows}"
    assert np.array_equal(np.sort(found), np.arange(rows)), f"{what}: not each row once"


@dataclass(frozen=True, slots=True)
class Timed:
    """One run."""

    rows: int
    seconds: float
    cpu_seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


def timed(rows: int, act: Callable[[], Any]) -> Timed:
    """Of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return Timed(rows, time.perf_counter() - began, time.process_time() - cpu)


def timed_job(bench: Bench, env: hf.Environment, rows: int) -> Timed:
    """From RUNNING to FINISHED, the last checkpoint and its commit included."""
    measured = bench.run(env, rows)
    return Timed(rows, measured.seconds, measured.cpu_seconds)


def job_into(name: str, sink: Any, rows: int) -> hf.Environment:
    """Generated rows of 100 bytes; one worker, a checkpoint each second."""
    env = environment(name, 1, "memory", 1_000)
    env.from_source(hf.GeneratorSource(values, rows, VALUE)).uid("values").sink_to(sink).uid("out")
    return env


def alternating(ways: Mapping[str, Callable[[int], Timed]], repeats: int = REPEATS) -> dict[str, list[Timed]]:
    """Each way in turn, `repeats` times; they get the number of the turn."""
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            found[name].append(way(turn))
    return found


def spread_of(numbers: Sequence[float], digits: int = 0) -> str:
    """`median (least-most)`."""
    return f"{statistics.median(numbers):,.{digits}f} ({min(numbers):,.{digits}f}-{max(numbers):,.{digits}f})"


def compared(
    row: str, ours: Sequence[Timed], raw: Sequence[Timed], *, ratio_min: float, speed_min: int = 0, beside: str, how: str = ""
) -> Row:
    """The line of a job beside a raw client. beside: what it is compared with; how: server and sizes."""
    ratio = _speed(ours) / _speed(raw)
    turns = [one.rows_per_second / other.rows_per_second for one, other in zip(ours, raw, strict=True)]
    aim = f">= {ratio_min:g}" + (f", >= {speed_min:,}/s" if speed_min else "")
    return {
        "row": row,
        "rows_per_s": spread_of([each.rows_per_second for each in ours]),
        "beside": beside,
        "beside_per_s": spread_of([each.rows_per_second for each in raw]),
        "ratio": f"{ratio:.2f} ({min(turns):.2f}-{max(turns):.2f})",
        "aim": aim,
        "met": "yes" if ratio >= ratio_min and _speed(ours) >= speed_min else "no",
        "cpu_us": _cpu(ours),
        "beside_cpu_us": _cpu(raw),
        "how": how,
    }


def seconds_line(row: str, seconds: Sequence[float], judged: float, most: float, how: str) -> Row:
    """The line of a duration. judged: what of the durations the aim is for."""
    said = {"row": row, "rows_per_s": f"{spread_of(seconds, 3)} s", "ratio": f"{judged:.3f} s", "aim": f"<= {most:g} s"}
    met = "yes" if judged <= most else "no"
    return {**dict.fromkeys(COLUMNS, ""), **said, "met": met, "how": f"n={len(seconds)}; {how}"}


def percentile(numbers: Sequence[float], share: float) -> float:
    """The least number that as large a share of them does not exceed."""
    return sorted(numbers)[max(0, int(np.ceil(len(numbers) * share)) - 1)]


def _speed(runs: Sequence[Timed]) -> float:
    return statistics.median(each.rows_per_second for each in runs)


def _cpu(runs: Sequence[Timed]) -> str:
    return f"{statistics.median(each.cpu_seconds / each.rows for each in runs) * 1e6:.2f}"

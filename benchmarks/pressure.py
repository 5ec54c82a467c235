"""W4, W6 and W7: checkpoints while every queue is full, latency of records beside checkpoints, checkpoints of many subtasks; and
what bounded queues and unaligned checkpoints cost where there is no pressure.

A checkpoint of W4 and W7 is triggered by hand over REST; its duration is the coordinator's own, from the trigger to COMPLETED.
Beside it the raw write of the bytes that it stored, in the same folder, and a profile: where the time of the subtask went that
acknowledged last, and what the coordinator took behind it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from benchmarks.harness import Bench, raw_write_ms, spread, wait_until
from benchmarks.jobs import environment, w1
from benchmarks.workloads import SCHEMA, Bids
from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import CheckpointFailedError

Row = dict[str, Any]

ENDLESS = 2**40
"""Rows of a source that outlasts every measurement."""
ROW_COST_S = 0.0009
FILL_S = 5.0
"""Queues are full from the first moments on; so much later the first checkpoint is triggered."""
W4_TIMEOUT_MS = 20_000
"""A checkpoint that takes longer counts as so long, and is the last one: what is in front of it only grows."""
W4_IN_FLIGHT_BYTES = 100_000
"""Most that a checkpoint may store in flight."""

MODES_KEYS, MODES_INTERVAL_MS = 10_000, 1_000
MODES_AIM = 0.98
"""Least records a second with a setting, as a share of those without."""
MODES = (("debloating on : off", "buffer_debloat"), ("unaligned on : off", "unaligned_checkpoints"))

COUNTED = pa.schema([("bidder", pa.int64()), ("count", pa.int64())])
CREATED = pa.schema([("bidder", pa.int64()), ("created", pa.float64())])

W6_RATE, W6_KEYS = 10_000, 10_000
W6_SKIPPED_S, W6_S = 5.0, 20.0
W6_AIMS_MS = (1.0, 5.0)
W7_RATE = 10
W7_AIMS_MS = {128: 80.0, 0: 5.0}
"""Unchained pairs of subtasks -> most that a checkpoint may take; 0: a single subtask."""


@dataclass(frozen=True)
class Way:
    """A way to take W4's checkpoint."""

    name: str
    aim_ms: float | None
    settings: dict[str, Any]


WAYS = (
    Way("aligned", 1_000, {}),
    Way("aligned, buffer_debloat=False", None, {"buffer_debloat": False}),
    Way("unaligned", 20, {"unaligned_checkpoints": True}),
    Way("unaligned, buffer_debloat=False", 20, {"unaligned_checkpoints": True, "buffer_debloat": False}),
    Way("timeout 100 ms", 150, {"unaligned_checkpoints": True, "aligned_checkpoint_timeout_ms": 100}),
)


def measure_w4(bench: Bench, quick: bool) -> list[Row]:
    """A line for each way that there is, on one worker and on two."""
    ways = [way for way in WAYS if way.settings.keys() <= set(JobConfig.__struct_fields__)]
    return _with_profiles([_w4(bench, workers, way, 3 if quick else 20) for workers in (1, 2) for way in ways])


def _with_profiles(measured: Sequence[tuple[Row, Row]]) -> list[Row]:
    """Profiles have columns of their own, and follow in a table of their own."""
    return [line for line, _ in measured] + [profile for _, profile in measured]


def _slow(row: dict[str, int]) -> dict[str, int]:
    time.sleep(ROW_COST_S)
    return row


def _count(row: dict[str, int], count: int | None) -> tuple[dict[str, int], int]:
    count = (count or 0) + 1
    return {"bidder": row["bidder"], "count": count}, count


def _w4(bench: Bench, workers: int, way: Way, repeats: int) -> tuple[Row, Row]:
    given = {"checkpoint_timeout_ms": W4_TIMEOUT_MS, "tolerable_failed_checkpoints": repeats, **way.settings}
    env = environment("w4", workers, "memory", None, **given)
    bids = env.from_source(hf.GeneratorSource(Bids(10_000), ENDLESS, SCHEMA)).uid("bids")
    counts = bids.key_by("bidder").map_with_state(_count, int, returns=COUNTED).uid("count")
    counts.rebalance().map(_slow, returns=COUNTED).uid("slow").sink_to(hf.Blackhole()).uid("out")
    with bench.launched(env) as handle:
        _wait_for_records(handle, 1)
        time.sleep(FILL_S)
        found = _checkpoints(bench, handle, repeats, W4_TIMEOUT_MS)
    name = {"workload": "W4", "way": way.name, "workers": workers}
    stored = max((each.in_flight_bytes for each in found), default=0)
    line = {**name, **_durations(found), "in_flight_bytes": stored, **_judged(found, way.aim_ms)}
    line["bytes_met"] = "yes" if stored <= W4_IN_FLIGHT_BYTES else "no"
    return line, {**name, **_profile(found)}


@dataclass(frozen=True)
class Spent:
    """Where the time of one checkpoint went, in ms: of the subtask that acknowledged last, then of the coordinator."""

    start_delay: int = 0
    """From the trigger to its first barrier."""
    alignment: int = 0
    """From there to its last one. Where barriers overtook, these are awaited in the asynchronous part."""
    sync: int = 0
    asynchronous: int = 0
    """Encodes and writes."""
    answer: int = 0
    """The rest, until the acknowledgement had come."""
    complete: int = 0
    """From there to COMPLETED: `_metadata` is written."""

    @staticmethod
    def of(checkpoint: Mapping[str, Any], subtasks: Sequence[Mapping[str, Any]]) -> Spent:
        """`subtasks`: of the vertex that acknowledged last, as in REST."""
        last = max(subtasks, key=lambda each: each["ack_timestamp"])
        aligned_ms = 0 if last["unaligned_checkpoint"] else last["alignment"]["duration"]
        parts = (last["start_delay"], aligned_ms, last["checkpoint"]["sync"], last["checkpoint"]["async"])
        acknowledged_ms = last["end_to_end_duration"]
        rest_ms = max(0, acknowledged_ms - sum(parts))
        return Spent(*parts, rest_ms, max(0, checkpoint["end_to_end_duration"] - acknowledged_ms))


@dataclass(frozen=True)
class _Taken:
    """One checkpoint; times in ms."""

    duration_ms: float
    in_flight_bytes: int
    raw_ms: float
    is_complete: bool = True
    spent: Spent = Spent()


def _checkpoints(bench: Bench, handle: Any, repeats: int, timeout_ms: float) -> list[_Taken]:
    found: list[_Taken] = []
    for _ in range(repeats):
        try:
            number = handle.client.trigger_checkpoint(handle.job_id, timeout_s=2 * timeout_ms / 1000)
        except CheckpointFailedError:
            return [*found, _Taken(timeout_ms, 0, 0.0, is_complete=False)]
        told = handle.client.checkpoint(handle.job_id, number)
        raw_ms = raw_write_ms(bench.folder, int(told["checkpointed_size"]))
        last = max(told["tasks"], key=lambda vertex: told["tasks"][vertex]["latest_ack_timestamp"])
        spent = Spent.of(told, handle.client.checkpoint_subtasks(handle.job_id, number, last)["subtasks"])
        found.append(_Taken(float(told["end_to_end_duration"]), int(told["persisted_data"]), raw_ms, spent=spent))
    return found


def _profile(found: Sequence[_Taken]) -> Row:
    """Medians over the complete ones."""
    complete = [asdict(each.spent) for each in found if each.is_complete]
    return {f"{name}_ms": statistics.median([each[name] for each in complete] or [0]) for name in asdict(Spent())}


def _durations(found: Sequence[_Taken]) -> Row:
    times = [each.duration_ms for each in found]
    p95_ms = float(np.percentile(times, 95))
    complete = sum(each.is_complete for each in found)
    return {
        "median_ms": round(statistics.median(times), 1),
        "p95_ms": round(p95_ms, 1),
        "complete": f"{complete}/{len(found)}",
        "raw_write_ms": spread([each.raw_ms for each in found]),
    }


def _judged(found: Sequence[_Taken], aim_ms: float | None) -> Row:
    if aim_ms is None:
        return {"aim_ms": "-", "met": "-"}
    is_met = all(each.is_complete for each in found) and statistics.median(each.duration_ms for each in found) <= aim_ms
    return {"aim_ms": aim_ms, "met": "yes" if is_met else "no"}


def _wait_for_records(handle: Any, records: int) -> None:
    def processed() -> bool:
        return bool(handle.progress().records_in >= records)

    wait_until(f"{records} records", processed, 60, every_s=0.1)


# ------------------------------------------------------------------------------------------------- W1, without pressure


def measure_modes(bench: Bench, quick: bool) -> list[Row]:
    """W1 with a setting and without, on one worker and on two."""
    return [_mode(bench, name, setting, workers, quick) for workers in (1, 2) for name, setting in MODES]


def _mode(bench: Bench, name: str, setting: str, workers: int, quick: bool) -> Row:
    """Runs in turn, so that what else the machine does falls on both; the setting is first in every other pair."""
    rows, pairs = (60_000_000, 3) if quick else (240_000_000, 5)
    ratios, cpu_ratios, speeds = [], [], []
    for number in range(pairs):
        found = {}
        for is_on in (True, False) if number % 2 else (False, True):
            env = w1(rows, MODES_KEYS, workers, "memory", MODES_INTERVAL_MS, **{setting: is_on})
            found[is_on] = bench.run(env, rows)
        speeds.append(found[True].records_per_second)
        ratios.append(found[True].records_per_second / found[False].records_per_second)
        cpu_ratios.append(found[True].cpu_seconds / found[False].cpu_seconds)
    line = {
        "workload": "W1",
        "way": name,
        "workers": workers,
        "keys": MODES_KEYS,
        "records_per_second": round(statistics.median(speeds)),
    }
    line |= {"ratio": spread(ratios), "cpu_ratio": spread(cpu_ratios), "aim": MODES_AIM}
    return {**line, "met": "yes" if statistics.median(ratios) >= MODES_AIM else "no"}


# -------------------------------------------------------------------------------------------------------------- W6


def _created(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Runs in the source's subtask: a record's time of creation is when it leaves the generator."""
    stamps = np.full(batch.num_rows, time.time())
    return pa.RecordBatch.from_arrays([batch.column("bidder"), pa.array(stamps)], schema=CREATED)


def _counted(row: dict[str, Any], count: int | None) -> tuple[dict[str, Any], int]:
    return row, (count or 0) + 1


class Latencies:
    """Appends (time, latency) of each record to a file of its process; float64, seconds."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        now = time.time()
        latencies = now - batch.column("created").to_numpy()
        with open(f"{self._folder}/{os.getpid()}", "ab") as file:
            file.write(np.column_stack([np.full(batch.num_rows, now), latencies]).tobytes())
        return batch


def measure_w6(bench: Bench, quick: bool) -> list[Row]:
    """Paced records over two shuffles, two workers, all settings but the interval as by default."""
    folder = bench.folder / f"latencies-{time.monotonic_ns()}"
    folder.mkdir()
    rows = int(W6_RATE * ((8.0 if quick else W6_S) + W6_SKIPPED_S))
    env = environment("w6", 2, "memory", 1_000)
    bids = env.from_source(hf.GeneratorSource(Bids(W6_KEYS), rows, SCHEMA, rows_per_second=W6_RATE)).uid("bids")
    stamped = bids.map_batches(_created, returns=CREATED).uid("created")
    counts = stamped.key_by("bidder").map_with_state(_counted, int, returns=CREATED).uid("count")
    timed = counts.rebalance().map_batches(Latencies(str(folder)), returns=CREATED).uid("latencies")
    timed.sink_to(hf.Blackhole()).uid("out")
    measured = bench.run(env, rows)
    found_ms = _latencies_ms(folder)
    p50_ms, p99_ms = (float(np.percentile(found_ms, share)) for share in (50, 99))
    is_met = p50_ms <= W6_AIMS_MS[0] and p99_ms <= W6_AIMS_MS[1]
    checkpoints = f"{measured.checkpoints}/{measured.checkpoints_expected}"
    aims = " / ".join(f"{aim:g}" for aim in W6_AIMS_MS)
    line = {"workload": "W6", "workers": 2, "records": len(found_ms), "p50_ms": round(p50_ms, 2), "p99_ms": round(p99_ms, 2)}
    most = {"longest_ms": round(float(found_ms.max()), 1), "checkpoints": checkpoints}
    return [{**line, **most, "aims_ms": aims, "met": "yes" if is_met else "no"}]


def _latencies_ms(folder: Path) -> Any:
    """Of all records behind the first seconds."""
    found = np.concatenate([np.frombuffer(path.read_bytes()).reshape(-1, 2) for path in folder.iterdir()])
    kept = found[found[:, 0] > found[:, 0].min() + W6_SKIPPED_S]
    return kept[:, 1] * 1000


# -------------------------------------------------------------------------------------------------------------- W7


def measure_w7(bench: Bench, quick: bool) -> list[Row]:
    """Checkpoints of 256 subtasks with tiny state in one worker, and of one."""
    return _with_profiles([_w7(bench, pairs, 5 if quick else 20) for pairs in W7_AIMS_MS])


def _same(row: dict[str, int]) -> dict[str, int]:
    return row


def _w7(bench: Bench, pairs: int, repeats: int) -> tuple[Row, Row]:
    env = environment("w7", 1, "memory", None)
    for number in range(pairs or 1):
        bids = env.from_source(hf.GeneratorSource(Bids(100), ENDLESS, SCHEMA, rows_per_second=W7_RATE)).uid(f"bids-{number}")
        if pairs:
            bids = bids.rebalance()
        bids.map(_same, returns=SCHEMA).uid(f"same-{number}").sink_to(hf.Blackhole()).uid(f"out-{number}")
    with bench.launched(env) as handle:
        _wait_for_records(handle, 10 * (pairs or 1))
        _checkpoints(bench, handle, 1, 10_000)  # the first one imports
        found = _checkpoints(bench, handle, repeats, 10_000)
    name = {"workload": "W7", "subtasks": 2 * pairs or 1}
    return {**name, **_durations(found), **_judged(found, W7_AIMS_MS[pairs])}, {**name, **_profile(found)}

"""Joins of whole jobs against DuckDB: disorder, duplicates, nulls, wherever batches end, restored at another parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from tests.examples import examples

SIDES = ("l", "r")
COLUMNS = [("k", pa.int64()), ("text", pa.string()), ("v", pa.int64()), ("t", pa.int64())]


@dataclass(frozen=True)
class Rows:
    """Rows of one side, in one batch: (key, event time)."""

    side: int
    rows: list[tuple[int | None, int]]


@dataclass(frozen=True)
class Time:
    """A watermark of one side."""

    side: int
    ms: int


@dataclass(frozen=True)
class Restart:
    parallelism: int


KEYS = st.sampled_from([None, 0, 1, 1, 2, -7])
BATCHES = st.builds(Rows, st.integers(0, 1), st.lists(st.tuples(KEYS, st.integers(0, 60)), min_size=1, max_size=8))
TIMES = st.builds(Time, st.integers(0, 1), st.integers(-5, 70))
RESTARTS = st.builds(Restart, st.integers(1, 3))
BACKENDS = st.sampled_from(["memory", "filesystem", "filesystem", "rocksdb"])
STEPS = st.lists(st.one_of(BATCHES, BATCHES, BATCHES, TIMES, TIMES, RESTARTS), min_size=3, max_size=14)
BOUNDS = st.tuples(st.integers(-20, 20), st.integers(-20, 20)).map(lambda pair: (min(pair), max(pair)))


def in_duckdb(kept: list[list[tuple[Any, ...]]], lower: int, upper: int, how: str) -> Counter[tuple[Any, ...]]:
    """Rows that were not late, joined at once, with the time of each result."""
    connection = duckdb.connect()
    for side, rows in zip(SIDES, kept, strict=True):
        columns = {name: pa.array([row[at] for row in rows], kind) for at, (name, kind) in enumerate(COLUMNS)}
        connection.register(side, pa.table(columns))
    condition = f"l.k = r.k and l.text = r.text and r.t between l.t + ({lower}) and l.t + ({upper})"
    parts = [f"select l.k, l.text, l.v, r.v, greatest(l.t, r.t) from l join r on {condition}"]
    if how in ("left", "full"):
        time = f"greatest(l.t, l.t + ({upper}))"
        parts.append(f"select l.k, l.text, l.v, null, {time} from l where not exists (select 1 from r where {condition})")
    if how in ("right", "full"):
        time = f"greatest(r.t, r.t - ({lower}))"
        parts.append(f"select r.k, r.text, null, r.v, {time} from r where not exists (select 1 from l where {condition})")
    return Counter(connection.execute(" union all ".join(parts)).fetchall())


def values(found: list[Any]) -> list[tuple[Any, ...]]:
    return [(row["k"], row["text"], row["v"], row["v_right"], time) for row, time in found]


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    how=st.sampled_from(["inner", "left", "right", "full"]),
    steps=STEPS,
    bounds=BOUNDS,
    batch_rows=st.sampled_from([1, 7, 65_536]),
    parallelism=st.integers(1, 3),
    backend=BACKENDS,
)
def test_a_join_is_duckdbs(
    how: Any, steps: list[Any], bounds: tuple[int, int], batch_rows: int, parallelism: int, backend: Any
) -> None:
    lower, upper = bounds
    kept: list[list[tuple[Any, ...]]] = [[], []]
    times, number = [-(2**63)] * 2, 0
    with hf.testing.Job(parallelism=parallelism, batch_rows=batch_rows, state_backend=backend) as job:
        feeds = [job.input(side, {"k": int | None, "text": str | None, "v": int}) for side in SIDES]
        joined = feeds[0].stream.interval_join(
            feeds[1].stream, on=("k", "text"), lower=lower, upper=upper, how=how, suffixes=("", "_right")
        )
        out = job.output(joined.uid("join"))
        job.start()
        for step in steps:
            match step:
                case Rows(side, rows):
                    made = [{"k": key, "text": None if key == -7 else "x", "v": number + at} for at, (key, _) in enumerate(rows)]
                    number += len(rows)
                    feeds[side].add(made, at=[time for _, time in rows])
                    in_time = zip(made, rows, strict=True)
                    kept[side] += [(*row.values(), time) for row, (_, time) in in_time if time > min(times)]
                case Time(side, ms):
                    if ms > times[side]:
                        times[side] = ms
                        feeds[side].watermark(ms)
                case Restart(parallelism=wanted):
                    job.checkpoint()
                    job.restart(parallelism=wanted)
                    for side, ms in enumerate(times):  # event time begins anew at a restore
                        if ms > -(2**63):
                            feeds[side].watermark(ms)
        for feed in feeds:
            feed.end()
        assert Counter(values(out.committed())) == in_duckdb(kept, lower, upper, how)


@settings(max_examples=examples(6), deadline=None, suppress_health_check=list(HealthCheck))
@given(batches=st.lists(BATCHES, min_size=2, max_size=10), bounds=BOUNDS, seed=st.integers(0, 3))
def test_nothing_comes_behind_a_watermark_that_was_forwarded(batches: list[Rows], bounds: tuple[int, int], seed: int) -> None:
    with hf.testing.Job(parallelism=2, seed=seed) as job:
        feeds = [job.input(side, {"k": int | None, "v": int}) for side in SIDES]
        joined = feeds[0].stream.interval_join(
            feeds[1].stream, on="k", lower=bounds[0], upper=bounds[1], how="full", suffixes=("", "_right")
        )
        out = job.output(joined.uid("join"))
        job.start()
        for step, batch in enumerate(batches):
            passed = out.watermark
            feeds[batch.side].add([{"k": key, "v": 0} for key, _ in batch.rows], at=[time for _, time in batch.rows])
            assert all(time is not None and (passed is None or time > passed) for _, time in out.take())
            feeds[batch.side].watermark(step * 6)
            assert all(time is not None and (passed is None or time > passed) for _, time in out.take())

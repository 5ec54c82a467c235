"""A branch on real Spark: it goes on from a savepoint of its parent, exactly, and what its parent wrote stays as it was."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from tests.spark.test_slots import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(280)]

ROWS, KEYS = 12_000, 7
HELD_BACK = ROWS * 3 // 4
"""From this row on the parent waits until the test lets it go on."""


class Counted(hf.ProcessFunction):
    """Emits every record with how many of its key came before it."""

    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def __init__(self, gate: Path) -> None:
        self._gate = str(gate)

    def process_element(self, value: dict[str, Any], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        import os
        import time

        if value["id"] >= HELD_BACK and not os.path.exists(self._gate):
            time.sleep(0.004)
        state = ctx.state(self.seen)
        count = (state.value() or 0) + 1
        state.update(count)
        out({"k": value["k"], "id": value["id"], "nth": count})


def build(spark: SparkSession, folder: Path, gate: Path) -> tuple[hf.Environment, hf.ParquetSink]:
    import pyarrow as pa

    frame = spark.range(0, ROWS, 1, 2).selectExpr("id", f"id % {KEYS} as k").orderBy("id")
    env = hf.Environment("counting", parallelism=1, checkpoint_interval_ms=300, state_dir=str(folder / "state"))
    sink = hf.ParquetSink(folder / "out")
    returns = pa.schema([("k", pa.int64()), ("id", pa.int64()), ("nth", pa.int64())])
    counted = env.from_dataframe(frame, rows_per_second=ROWS / 2).uid("source").key_by("k").process(Counted(gate), returns=returns)
    counted.uid("counted").sink_to(sink).uid("out")
    return env, sink


def rows_of(spark: SparkSession, path: Path) -> Counter[tuple[int, int, int]]:
    found = hf.ParquetSink(path).dataframe(spark).select("k", "id", "nth").collect()
    return Counter((row.k, row.id, row.nth) for row in found)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_branch_and_its_parent_both_end_exactly_and_apart(spark: SparkSession, tmp_path: Path) -> None:
    wanted = Counter((row % KEYS, row, row // KEYS + 1) for row in range(ROWS))
    shut, open_ = tmp_path / "gate", tmp_path / "open"
    open_.touch()
    env, _ = build(spark, tmp_path, shut)
    parent = env.execute()
    try:
        wait_for(lambda: (tmp_path / "out").exists() and rows_of(spark, tmp_path / "out"), 60)
        saved = parent.stop(str(tmp_path / "savepoints"))
        before = files_of(tmp_path / "out")
        written = rows_of(spark, tmp_path / "out")
        assert 0 < written.total() < ROWS
        program, _ = build(spark, tmp_path, open_)
        program.execute(branch="trial", branch_output=tmp_path / "trials", restore=saved).wait(120)
        assert files_of(tmp_path / "out") == before, "nothing of the parent's output changed"
    finally:
        shut.touch()
    assert rows_of(spark, tmp_path / "trials" / "out") == wanted - written
    again, _ = build(spark, tmp_path, open_)
    again.execute(restore=saved).wait(120)
    assert rows_of(spark, tmp_path / "out") == wanted

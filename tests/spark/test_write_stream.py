"""`hf.write_stream` on a real session: a query that stops, goes on, fails behind a commit and runs its batch again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import holdfast as hf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class JsonTarget(hf.CommitTarget):
    """Rows and position in one file, replaced at once. Fails behind a commit while `<path>.fail` is there."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def _load(self) -> dict[str, Any]:
        return json.loads(Path(self.path).read_text()) if os.path.exists(self.path) else {"rows": [], "position": None}

    def _store(self, rows: list[int], position: hf.CommitPosition) -> None:
        Path(f"{self.path}.new").write_text(json.dumps({"rows": rows, "position": position.encode().decode()}))
        os.replace(f"{self.path}.new", self.path)

    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        held = self._load()
        if os.path.exists(f"{self.path}.fail"):
            raise hf.InvalidConfigError("the target fails", setting="fail")
        position = owner.take(None if held["position"] is None else hf.CommitPosition.decode(held["position"]))
        self._store(held["rows"], position)
        return position

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        held = self._load()
        if hf.CommitPosition.decode(held["position"]) != expected:
            raise hf.FencedError("taken", sink=expected.sink_id, owner="", job_id="", held=0, newer=0)
        self._store(held["rows"] + [row for batch in batches for row in batch.column("i").to_pylist()], position)
        if os.path.exists(f"{self.path}.fail"):
            raise OSError("the answer was lost")


def test_each_row_is_in_the_target_once(spark: SparkSession, tmp_path: Path) -> None:
    given, out, checkpoint = tmp_path / "in", tmp_path / "out.json", str(tmp_path / "checkpoint")
    given.mkdir()

    def run(*rows: int) -> None:
        if rows:
            (given / f"{rows[0]}.json").write_text("".join(f'{{"i": {row}}}\n' for row in rows))
        stream = spark.readStream.schema("i bigint").json(str(given))
        sink = hf.StagedSink(JsonTarget(out), "out", rows_per_commit=2)
        query = hf.write_stream(stream, sink, checkpoint, trigger={"availableNow": True})
        assert query.awaitTermination(120)

    def rows() -> list[int]:
        return sorted(json.loads(out.read_text())["rows"])

    run(1, 2, 3)
    assert rows() == [1, 2, 3]
    (tmp_path / "out.json.fail").touch()
    with pytest.raises(Exception, match="the target fails"):
        run(4)
    (tmp_path / "out.json.fail").unlink()
    run()
    assert rows() == [1, 2, 3, 4]
    last = max(int(path.name) for path in (tmp_path / "checkpoint" / "commits").iterdir() if path.name.isdecimal())
    for path in (tmp_path / "checkpoint" / "commits").iterdir():  # as if the driver had died before Spark's own commit
        if str(last) in path.name:
            path.unlink()
    run()
    run(5)
    assert rows() == [1, 2, 3, 4, 5]
    assert not [*(tmp_path / "checkpoint" / "holdfast").rglob("part-*")]


def test_what_cannot_be_written_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.readStream.schema("i bigint").json(str(tmp_path))
    target = JsonTarget(tmp_path / "out")
    with pytest.raises(hf.InvalidConfigError, match="this one is a batch"):
        hf.write_stream(spark.range(3), hf.StagedSink(target), str(tmp_path / "c"))
    with pytest.raises(hf.InvalidConfigError, match="not to a ParquetSink"):
        hf.write_stream(stream, hf.ParquetSink(tmp_path), str(tmp_path / "c"))  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidConfigError, match="trigger"):
        hf.write_stream(stream, hf.StagedSink(target, commit_interval_ms=5), str(tmp_path / "c"))
    with pytest.raises(hf.InvalidConfigError, match="checkpoint"):
        hf.write_stream(stream, hf.StagedSink(target), "")

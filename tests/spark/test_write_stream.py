"""`hf.write_stream` and `writeStream.format("holdfast")` on a real session: queries that stop, go on, fail behind a commit and run
their batches again."""

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


def forget_last_batch(checkpoint: Path) -> None:
    """As if the driver had died between the sink's commit and Spark's own."""
    commits = checkpoint / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for path in commits.iterdir():
        if str(last) in path.name:
            path.unlink()


def give(folder: Path, *rows: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{rows[0]}.json").write_text("".join(f'{{"i": {row}}}\n' for row in rows))


def test_each_row_is_in_the_target_once(spark: SparkSession, tmp_path: Path) -> None:
    given, out, checkpoint = tmp_path / "in", tmp_path / "out.json", str(tmp_path / "checkpoint")
    given.mkdir()

    def run(*rows: int) -> None:
        if rows:
            give(given, *rows)
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
    forget_last_batch(tmp_path / "checkpoint")
    run()
    run(5)
    assert rows() == [1, 2, 3, 4, 5]
    assert not [*(tmp_path / "checkpoint" / "holdfast").rglob("part-*")]


def test_what_cannot_be_written_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.readStream.schema("i bigint").json(str(tmp_path))
    target = JsonTarget(tmp_path / "out")
    with pytest.raises(hf.InvalidConfigError, match="this one is a batch"):
        hf.write_stream(spark.range(3), hf.StagedSink(target), str(tmp_path / "c"))
    with pytest.raises(hf.InvalidConfigError, match="not to a Blackhole"):
        hf.write_stream(stream, hf.Blackhole(), str(tmp_path / "c"))  # type: ignore[arg-type]
    with pytest.raises(hf.InvalidConfigError, match="not to a Blackhole"):
        hf.register_formats(spark, sinks={"out": hf.Blackhole()})  # type: ignore[dict-item]
    with pytest.raises(hf.InvalidConfigError, match="trigger"):
        hf.write_stream(stream, hf.StagedSink(target, commit_interval_ms=5), str(tmp_path / "c"))
    with pytest.raises(hf.InvalidConfigError, match="checkpoint"):
        hf.write_stream(stream, hf.StagedSink(target, "out"), "")


@pytest.mark.timeout(180)
def test_queries_write_to_registered_sinks_and_to_files_once(spark: SparkSession, tmp_path: Path) -> None:
    given, out, files = tmp_path / "in", tmp_path / "out.json", hf.FileSink(tmp_path / "files", "json")
    hf.register_formats(spark, sinks={"json": hf.StagedSink(JsonTarget(out), rows_per_commit=2)})
    hf.register_formats(spark, sinks={"files": files})

    def run(sink: str, checkpoint: str, **options: str) -> None:
        stream = spark.readStream.schema("i bigint").json(str(given))
        writer = stream.writeStream.format("holdfast").option("sink", sink).options(**options).trigger(availableNow=True)
        assert writer.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination(120)

    give(given, 1, 2, 3)
    give(given, 4)
    run("json", "json")
    run("files", "files")
    for sink in ("json", "files"):
        forget_last_batch(tmp_path / sink)
    give(given, 5)
    run("json", "json")
    run("files", "files")
    assert sorted(json.loads(out.read_text())["rows"]) == [1, 2, 3, 4, 5]
    assert not [*tmp_path.rglob("staged/*part-*")]
    with pytest.raises(Exception, match=r"FencedError: sink json .*is owned by job"):
        run("json", "other")
    stream = spark.readStream.schema("i bigint").json(str(given))
    query = hf.write_stream(stream, hf.FileSink(files.path, "json", "files"), str(tmp_path / "another"))
    with pytest.raises(Exception, match="owned by job"):
        query.awaitTermination(60)
    assert sorted(row.i for row in spark.read.format("holdfast").load(files.path).collect()) == [1, 2, 3, 4, 5]

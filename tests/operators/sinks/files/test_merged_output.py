"""Merged output in its formats, to every reader: rows and their order stay, whenever a reader began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.sinks import reading as sinkreading
from holdfast.barriers.sinks.log import CommitEntry, LogEntry, MergeEntry, OwnerEntry, SinkPaths, StagedFile
from holdfast.barriers.sinks.reading import current_files, find_replaced, replaced_in
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.operators.sinks.files.combining import combiner_of
from holdfast.operators.sinks.files.committed import FileRows, rows_of
from holdfast.operators.sinks.files.formats import decode, encode
from holdfast.operators.sinks.files.log import MergeSettings
from holdfast.operators.sinks.files.merging import Runs
from holdfast.operators.sinks.files.parquet import committed_files, read_committed, read_log
from holdfast.operators.spark.datasource.batch_read import OutputOptions, partitions_of, read_rows
from holdfast.operators.spark.datasource.stream_read import OutputStreamReader
from holdfast.statebackends.state_processor.external import check_external
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.operators.sinks.files.written import Written

SCHEMA = pa.schema([pa.field("i", pa.int64(), nullable=False), ("text", pa.string()), ("day", pa.string())])


def rows(number: int) -> dict[str, list[Any]]:
    numbers = [3 * number, 3 * number + 1, 3 * number + 2]
    return {"i": numbers, "text": ['a "b"\n', "", None], "day": ["x", "y", "x"]}


def write(path: Path, commits: int, *, kept_ms: int = 0, **options: Any) -> Written:
    """Commits 10 ms apart; every third merges."""
    sink = hf.FileSink(path, sink_id="out", target_file_size=1 << 16, roll_interval_ms=20, merged_files_kept_ms=kept_ms, **options)
    written = Written(path, SCHEMA, sink=sink)
    for number in range(commits):
        written.commit(rows(number))
        written.wait(10)
    return written


def merges_of(path: Path) -> list[MergeEntry]:
    return [entry for entry in read_log(LocalStorage(str(path)), "out") if isinstance(entry, MergeEntry)]


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
@pytest.mark.parametrize("by", [(), ("day",)])
def test_merged_files_have_the_rows_in_their_order(tmp_path: Path, format: Any, by: tuple[str, ...]) -> None:
    write(tmp_path, 7, format=format, partition_by=by)
    merged = merges_of(tmp_path)
    assert len(merged) == (4 if by else 2)
    assert {len(entry.replaced) for entry in merged} == {3}
    for entry in merged:
        content = (tmp_path / SinkPaths("out").data(entry.file.name)).read_bytes()
        assert len(content) == entry.size
    found = read_committed(tmp_path)
    expected = [row for number in range(7) for row in pa.table(rows(number), SCHEMA).to_pylist()]
    for day in ("x", "y"):
        assert [row for row in found.to_pylist() if row["day"] == day] == [row for row in expected if row["day"] == day]
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("part-*.*") if "_holdfast" not in str(file)} == {
        file.rpartition("/data/")[2] for file in committed_files(LocalStorage(str(tmp_path)), "out")
    }


def in_batches(path: Path, limit: int) -> list[list[int]]:
    """What a stream over the log reads, batch by batch, of so many files at most."""
    options = OutputOptions.parse({"path": str(path), "maxFilesPerTrigger": str(limit)}, streaming=True)
    schema = options.open().schema(("i",))
    reader, start, batches = OutputStreamReader(options, schema), {"sequence": 0, "entry": ""}, []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        parts = reader.partitions(start, end)
        batches.append([i for part in parts for batch in read_rows(options, part, schema) for i in batch.column("i").to_pylist()])
        start = end
    return [batch for batch in batches if batch]


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_stream_that_is_behind_reads_the_rows_of_each_commit_from_merged_files(tmp_path: Path, format: Any) -> None:
    write(tmp_path, 7, format=format)
    assert in_batches(tmp_path, 1) == [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(7)]
    assert [i for batch in in_batches(tmp_path, 2) for i in batch] == list(range(21))
    assert len(in_batches(tmp_path, 100)) == 1


def test_a_plan_from_before_a_merge_is_read_behind_it(tmp_path: Path) -> None:
    written = write(tmp_path, 2)
    options = OutputOptions.parse({"path": str(tmp_path)})
    output, schema = options.open(), options.open().schema(None)
    parts = partitions_of(output.storage, read_log(output.storage, "out"), "out", 2)
    listed = committed_files(output.storage, "out")
    for number in range(2, 7):
        written.commit(rows(number))
        written.wait(10)
    assert not any(Path(file).exists() for file in listed)
    found = [batch.column("i").to_pylist() for part in parts for batch in read_rows(options, part, schema)]
    assert [i for some in found for i in some] == list(range(6))


def test_replaced_files_are_there_until_their_time_is_over(tmp_path: Path) -> None:
    written = write(tmp_path, 2, kept_ms=1_000)
    listed = committed_files(LocalStorage(str(tmp_path)), "out")
    written.wait(980)
    written.commit(rows(2))  # merges
    written.wait(999)
    written.commit(rows(3))
    assert all(Path(file).exists() for file in listed)
    written.wait(1)
    written.commit(rows(4))
    assert not any(Path(file).exists() for file in listed)


def test_what_a_snapshot_names_may_be_merged_and_gone(tmp_path: Path) -> None:
    """Of a file that was committed, and that a merge replaced, a restore needs nothing; one that is lost is still missed."""
    write(tmp_path, 4)
    paths, (merged,) = SinkPaths("out"), merges_of(tmp_path)
    names = [merged.replaced[0].name, "part-lost.parquet"]
    entries = [f"{tmp_path}/{paths.staged(name)}|{tmp_path}/{paths.data(name)}" for name in names]
    report = run_flow(check_external(entries, find_replaced=find_replaced), RoutedStorage(LocalStorage(str(tmp_path))))
    assert [problem.path for problem in report.problems] == entries[1:]
    assert len(run_flow(check_external(entries), RoutedStorage(LocalStorage(str(tmp_path)))).problems) == 2


def merge(sequence: int, name: str, *files: StagedFile) -> MergeEntry:
    file = StagedFile(name, sum(each.rows for each in files))
    return MergeEntry(2, sequence, 1, "n", "job", 1, 1, file, 9, "c", files, 9, "w", 9)


def commit(sequence: int, *files: StagedFile) -> CommitEntry:
    return CommitEntry(1, sequence, 1, "n", "job", 1, sequence, sum(file.rows for file in files), files, "w", 10 * sequence)


def test_a_merged_file_is_one_piece_in_place_of_its_first() -> None:
    a, b, c, d = (StagedFile(name, number + 1) for number, name in enumerate("abcd"))
    owner, last = OwnerEntry(1, 0, 1, "n", "job", 1, 0, "", 9), commit(4, StagedFile("e", 9))
    log: list[LogEntry] = [owner, commit(1, a, b), commit(2, c, d), merge(3, "m", a, c), last]
    assert [file.name for file in current_files(log)] == ["m", "b", "d", "e"]
    assert rows_of(log, replaced_in(log)) == [FileRows("m", 0, 4), FileRows("b", 0, 2), FileRows("d", 0, 4), FileRows("e", 0, 9)]
    assert rows_of(log[2:3], replaced_in(log)) == [FileRows("m", 1, 4), FileRows("d", 0, 4)]


def test_runs_end_at_large_files_and_are_of_one_folder_and_format() -> None:
    runs = Runs(MergeSettings(100, None, 0))
    small, names = 30, ["k=1/a.parquet", "k=2/b.parquet", "k=1/c.parquet", "k=1/d.csv", "k=1/large.parquet", "k=1/e.parquet"]
    for number, name in enumerate(names):
        runs.follow(commit(number, StagedFile(name, 1)), {name: 50 if "large" in name else small})
    assert [each.file.name for each in runs.due(10**9)] == ["k=1/a.parquet", "k=1/c.parquet"]
    runs.follow(merge(9, "k=1/m.parquet", StagedFile("k=1/a.parquet", 1), StagedFile("k=1/c.parquet", 1)), {})
    assert runs.due(10**9) == ()
    for number in range(10, 14):
        runs.follow(commit(number, StagedFile(f"k=2/{number}.parquet", 1)), {f"k=2/{number}.parquet": small})
    assert [each.file.name for each in runs.due(0)] == ["k=2/b.parquet", *(f"k=2/{number}.parquet" for number in (10, 11, 12))]
    runs.drop(names)
    assert runs.count == 4


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_what_does_not_fit_is_not_merged(format: Any) -> None:
    table = pa.table(rows(1), SCHEMA)
    content = b"".join(encode(format, table.to_batches(), SCHEMA))
    other = b"".join(encode(format, table.select(["i"]).to_batches(), pa.schema([SCHEMA.field("i")])))
    combiner = combiner_of(format)
    assert combiner.add(content, 3)
    assert not combiner.add(content, 4)  # the log says otherwise
    assert not combiner.add(content[:-3], 3)
    assert format == "json" or not combiner.add(other, 3)
    assert combiner.add(content, 3)
    assert decode(format, b"".join(combiner.finish()), SCHEMA).equals(pa.concat_tables([table, table]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_file_size": 1_000}, "target_file_size"),
        ({"target_file_size": 2 << 30}, "target_file_size"),
        ({"target_file_size": "1MB"}, "target_file_size"),
        ({"roll_interval_ms": 1_000}, "roll_interval_ms"),
        ({"merged_files_kept_ms": 1_000}, "merged_files_kept_ms"),
        ({"target_file_size": 1 << 20, "roll_interval_ms": 0}, "roll_interval_ms"),
        ({"target_file_size": 1 << 20, "merged_files_kept_ms": -1}, "merged_files_kept_ms"),
    ],
)
def test_settings_that_can_not_be_are_refused_by_sink_and_name(settings: Any, named: str) -> None:
    for make in (hf.FileSink, hf.ParquetSink):
        with pytest.raises(hf.InvalidConfigError, match=f"/shop/out.*{named}") as found:
            make("/shop/out", **settings)
        assert found.value.setting == named


def test_a_merge_in_a_long_log_is_in_its_summaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.barriers.sinks import log as sinklog
    from holdfast.operators.sinks.files import summaries

    for module in (sinklog, sinkreading, summaries):
        monkeypatch.setattr(module, "SUMMARY_ENTRIES", 4)
    monkeypatch.setattr(sinkreading, "SINGLES_MIN", 2)
    write(tmp_path, 9)
    assert len(list((tmp_path / SinkPaths("out").summaries_folder).iterdir())) == 3
    assert read_committed(tmp_path).column("i").to_pylist() == list(range(27))

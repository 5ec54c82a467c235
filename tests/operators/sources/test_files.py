"""Folders as sources: each row once, whatever the format, over restarts and rescales; files that come, change or don't fit."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.operators.sources import file_formats, files

COLUMNS = {"i": int, "name": str}


def rows_of(first: int, count: int) -> list[dict[str, Any]]:
    return [{"i": i, "name": f"row {i}"} for i in range(first, first + count)]


def write(path: Path, rows: list[dict[str, Any]], modified_s: int = 1_000) -> None:
    """A file of the format that its suffix says, as if it had been written at this time."""
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        is_csv = ".csv" in path.name
        lines = ["i,name", *(f'{row["i"]},"{row["name"]}"' for row in rows)] if is_csv else [json.dumps(row) for row in rows]
        text = "\n".join(lines).encode() + b"\n"
        path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    os.utime(path, (modified_s, modified_s))


def output_of(job: hf.testing.Job, source: hf.FileSource) -> Any:
    return job.output(job.environment.from_source(source).uid("files"))


def committed(out: Any) -> list[int]:
    return sorted(row["i"] for row, _ in out.committed())


def batches_of(path: Path, kind: str, schema: pa.Schema, position: tuple[int, ...] = ()) -> list[Any]:
    """What a reader gives of one file behind a position."""
    info = path.stat()
    reader = file_formats.FileSplitReader(str(path.parent), kind, schema, "files")
    reader.open()
    reader.add_splits([hf.AssignedSplit(file_formats.FileSplit(str(path), info.st_size, info.st_mtime_ns), position)])
    found = []
    while records := reader.fetch():
        found += [each for each in records if each.columns is not None]
    return found


def discovered(enumerator: Any, times: int = 1) -> list[str]:
    """Names of the files that so many listings find."""
    return [
        Path(split.split_id).name for _ in range(times) for split in enumerator.handle_discovered(enumerator.discover())
    ]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 40)


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_every_row_is_read_once_whatever_the_format(tmp_path: Path, suffix: str, parallelism: int) -> None:
    for number in range(5):
        write(tmp_path / f"part-{number}.{suffix}", rows_of(10 * number, 10))
    with hf.testing.Job(parallelism=parallelism, batch_rows=4) as job:
        schema = pa.schema([("i", pa.int64()), ("name", pa.string())])
        out = output_of(job, hf.FileSource(tmp_path, pattern=f"*.{suffix}", schema=schema))
        job.start()
        assert job.status == "FINISHED"
        assert committed(out) == list(range(50))


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "jsonl", "parquet"])
def test_a_reader_goes_on_at_any_row(tmp_path: Path, suffix: str) -> None:
    """Read to each position, and from there: together the file, exactly."""
    path = tmp_path / f"a.{suffix}"
    write(path, rows_of(0, 11))
    kind = {"csv": "csv", "csv.gz": "csv", "jsonl": "json", "parquet": "parquet"}[suffix]
    schema = pa.schema([("i", pa.int64()), ("name", pa.string())])

    def read(position: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        found: list[tuple[int, tuple[int, ...]]] = []
        for each in batches_of(path, kind, schema, position):
            assert each.positions is not None
            behind = [tuple(row) if isinstance(row, list) else (row,) for row in each.positions.tolist()]
            found += zip(each.columns.column("i").to_pylist(), behind, strict=True)
        return found

    whole = read(())
    assert [i for i, _ in whole] == list(range(11))
    for number, (_, position) in enumerate(whole):
        assert read(position) == whole[number + 1 :]


def test_files_that_come_are_read_once_they_are_settled(tmp_path: Path) -> None:
    with hf.testing.Job(parallelism=2) as job:
        out = output_of(job, hf.FileSource(tmp_path, format="csv", schema=COLUMNS, watch_interval=100))
        job.start()
        write(tmp_path / "a.csv", rows_of(0, 5))
        write(tmp_path / "_b.csv", rows_of(5, 5))
        job.advance(by_ms=150)
        assert [row["i"] for row, _ in out.emitted] == []  # seen once
        write(tmp_path / "a.csv", rows_of(0, 6), modified_s=1_001)
        job.advance(by_ms=100)
        assert [row["i"] for row, _ in out.emitted] == []  # it was still being written
        job.advance(by_ms=100)
        assert sorted(row["i"] for row, _ in out.emitted) == list(range(6))
        job.checkpoint()
        write(tmp_path / "c.csv", rows_of(6, 5), modified_s=1_002)
        job.advance(by_ms=100)
        job.restart(parallelism=3)
        job.advance(by_ms=300)
        job.checkpoint()
        assert committed(out) == list(range(11))


def test_a_file_that_changes_after_it_was_found_ends_the_job_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", rows_of(0, 5))
    with hf.testing.Job() as job:
        output_of(job, hf.FileSource(tmp_path, format="csv", schema=COLUMNS, watch_interval=100))
        job.start()
        job.advance(by_ms=250)
        job.checkpoint()
        write(tmp_path / "a.csv", rows_of(0, 6), modified_s=1_001)
        with pytest.raises(hf.InputChangedError) as found:
            job.advance(by_ms=200)
        assert found.value.path.endswith("a.csv")
        assert found.value.operator == "files-enumerator"


def watched(folder: Path, **settings: Any) -> Any:
    return hf.FileSource(folder, format="csv", schema=COLUMNS, **{"watch_interval": 100, **settings}).create_enumerator()


@pytest.fixture
def _forgets_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FORGET_MS", 400)


@pytest.mark.usefixtures("_forgets_soon")
def test_memory_is_of_the_files_that_are_there_or_lately_were(tmp_path: Path) -> None:
    enumerator = watched(tmp_path)
    sizes = []
    for number in range(9):
        write(tmp_path / f"{number}.csv", rows_of(0, 1), modified_s=1_000 + number)
        if number > 2:
            (tmp_path / f"{number - 3}.csv").unlink()
        assert discovered(enumerator, 2) == [f"{number}.csv"]
        sizes.append(len(enumerator.snapshot_state(1)))
    assert sizes[4:] == [sizes[4]] * 5
    again = watched(tmp_path)
    again.restore_state(enumerator.snapshot_state(2))
    assert discovered(again, 2) == []
    assert again.snapshot_state(3) != enumerator.snapshot_state(2)  # a file was forgotten, over the restore


@pytest.mark.usefixtures("_forgets_soon")
@pytest.mark.parametrize("left", ["_other.txt", None])
def test_what_a_listing_lacks_is_not_read_again_when_it_is_back(tmp_path: Path, left: str | None) -> None:
    """Beside other files for less than the time to forget; in an empty folder, where another one may be mounted, for any time."""
    folder, away = tmp_path / "in", tmp_path / "away"
    folder.mkdir()
    write(folder / "a.csv", rows_of(0, 2))
    enumerator = watched(folder)
    assert discovered(enumerator, 2) == ["a.csv"]
    if left is not None:
        (folder / left).touch()
    for restored in (False, True):
        shutil.move(folder / "a.csv", away)
        assert discovered(enumerator, 3 if left else 20) == []
        if restored:
            state = enumerator.snapshot_state(1)
            enumerator = watched(folder)
            enumerator.restore_state(state)
        shutil.move(away, folder / "a.csv")
        assert discovered(enumerator, 3) == []


def test_a_folder_that_was_there_and_is_not_is_an_error_and_nothing_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    with hf.testing.Job() as job:
        out = output_of(job, hf.FileSource(folder, format="csv", schema=COLUMNS, watch_interval=100))
        job.start()
        job.advance(by_ms=250)  # a folder that is still to be made
        folder.mkdir()
        write(folder / "a.csv", rows_of(0, 2))
        job.advance(by_ms=250)
        folder.rename(tmp_path / "away")
        job.advance(by_ms=300)
        (tmp_path / "away").rename(folder)
        job.advance(by_ms=300)
        job.checkpoint()
        assert committed(out) == [0, 1]
        assert job.status == "RUNNING"
    enumerator = watched(folder)
    assert discovered(enumerator, 2) == ["a.csv"]
    folder.rename(tmp_path / "away")
    with pytest.raises(hf.StorageUnavailableError, match="was there, and is not"):
        enumerator.discover()


def test_a_file_made_anew_is_new_once_listings_were_without_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for missed in (files.FORGET_LISTINGS_MIN, files.FORGET_LISTINGS_MIN - 1):
        write(path, rows_of(0, 2), modified_s=1_000)
        write(tmp_path / "other.csv", rows_of(0, 2), modified_s=1_000)
        enumerator = watched(tmp_path)
        assert len(discovered(enumerator, 2)) == 2
        path.unlink()
        discovered(enumerator, missed)
        write(path, rows_of(2, 3), modified_s=1_002)
        if missed == files.FORGET_LISTINGS_MIN:
            assert discovered(enumerator, 3) == ["a.csv"]
        else:
            with pytest.raises(hf.InputChangedError, match=r"a\.csv"):
                discovered(enumerator, 2)


def test_a_time_in_the_future_leaves_nothing_out(tmp_path: Path) -> None:
    now_s = int(time.time())
    write(tmp_path / "future.csv", rows_of(0, 1), modified_s=now_s + 10_000_000)
    write(tmp_path / "now.csv", rows_of(0, 1), modified_s=now_s - 10)
    enumerator = watched(tmp_path, max_file_age=3_600_000)
    assert discovered(enumerator, 2) == ["now.csv", "future.csv"]
    write(tmp_path / "later.csv", rows_of(0, 1), modified_s=now_s)
    assert discovered(enumerator, 2) == ["later.csv"]


def test_a_name_that_is_not_utf8_is_no_input_or_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", rows_of(0, 1))
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).touch()
    enumerator = watched(tmp_path)
    assert discovered(enumerator, 2) == ["a.csv"]
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")).touch()
    with pytest.raises(hf.InvalidConfigError, match=r"\\xff.csv") as found:
        enumerator.discover()
    assert found.value.fields["path"].endswith(r"\xff.csv")


def test_what_is_older_than_its_bound_is_neither_read_nor_remembered(tmp_path: Path) -> None:
    write(tmp_path / "old.csv", rows_of(0, 1), modified_s=1_000)
    write(tmp_path / "new.csv", rows_of(0, 1), modified_s=2_000)
    enumerator = watched(tmp_path, watch_interval=None, max_file_age=500_000)
    assert discovered(enumerator) == ["new.csv"]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "i,name\n1,a\nx,b\n", "conversion error"),
        ("a.csv", "i,other\n1,a\n", "no column 'name'"),
        ("a.csv", 'i,name\n1,a\n2,"b\n3,c\n', "no closing"),
        ("a.csv", "i,name\r1,a\r2,b\r", "carriage return"),
        ("a.jsonl", '{"i": 1, "name": "a"}\n{"i": "x"}\n', "JSON"),
        ("a.jsonl", 'null\n{"i": 1, "name": "a"}\n', "a record is null"),  # which ends the process in Arrow
        ("a.jsonl", '{"i": 1, "name": "a"}\nnull \n', "a record is null"),
        ("a.jsonl", '{"i": 1, "name": "\udcff"}\n', "utf-8"),
        ("a.parquet", "no such thing", "Parquet"),
    ],
)
def test_a_record_that_does_not_fit_names_file_and_place(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with hf.testing.Job() as job:
        output_of(job, hf.FileSource(tmp_path, pattern=f"*{Path(name).suffix}", schema=COLUMNS))
        with pytest.raises(hf.InvalidRecordError, match=reason) as found:
            job.start()
        assert found.value.split.endswith(name)


TEXTS = ["", 'say ""so""', "three\n\nlines\n", '"', '\n"\n', 'x,"y"\n,"', "\r\n"]


@pytest.mark.parametrize("block_bytes", [1, 3, 8, 21, 89])
def test_line_ends_and_quotes_in_fields_are_cut_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Wherever a block ends: rows, and positions to go on from, are those of Python's own reader."""
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", block_bytes)
    rows = [(i, first, second) for i, (first, second) in enumerate((one, other) for one in TEXTS for other in TEXTS)]
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerow(["i", "first\nname", "second"])
        writer.writerows(rows)
    schema = pa.schema([("i", pa.int64()), ("first\nname", pa.string()), ("second", pa.string())])

    def read(position: tuple[int, ...] = ()) -> tuple[list[Any], list[tuple[int, ...]]]:
        batches = batches_of(path, "csv", schema, position)
        values = [tuple(row.values()) for each in batches for row in each.columns.to_pylist()]
        return values, [tuple(row) for each in batches for row in each.positions.tolist()]

    values, positions = read()
    assert values == rows
    for number in (0, 17, 40, len(rows) - 1):
        assert read(positions[number])[0] == rows[number + 1 :]


def test_quotes_within_a_field_that_began_without_one_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("i,name\n" + "".join(f'{i},{i}" of pipe\n' for i in range(20)) + '20,"a"b"\n21,"c\nd"\n')
    schema = pa.schema([("i", pa.int64()), ("name", pa.string())])
    found = [row for each in batches_of(path, "csv", schema) for row in each.columns.to_pylist()]
    assert [row["i"] for row in found] == list(range(22))
    assert [row["name"] for row in found[-3:]] == ['19" of pipe', 'ab"', "c\nd"]


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in ("a.csv", "a.csv.gz") for where in ("header", "line", "quoted", "open")]
    + [(name, "line") for name in ("a.jsonl", "a.jsonl.gz")],
)
def test_a_line_without_end_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    monkeypatch.setattr(file_formats, "LINE_BYTES_MAX", 1_000)
    reads: list[int] = []
    original = file_formats._Watched.readinto

    def readinto(self: file_formats._Watched, target: Any) -> int:
        reads.append(len(target))
        return original(self, target)

    monkeypatch.setattr(file_formats, "_BUFFER_BYTES", 64)
    monkeypatch.setattr(file_formats._Watched, "readinto", readinto)
    text = {"header": b"i,name,", "line": b"i,name\n1,", "quoted": b'i,name\n1,"\n\n', "open": b'i,name\n1,"' + b"x\n" * 505}[where]
    text += b"x" * 2_000_000
    path = tmp_path / name
    path.write_bytes(gzip.compress(text, 0) if name.endswith(".gz") else text)
    with pytest.raises(hf.InvalidRecordError, match="a line of more than 1,000 bytes"):
        batches_of(path, "csv" if "csv" in name else "json", pa.schema([("i", pa.int64()), ("name", pa.string())]))
    assert sum(reads) < 200_000


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in ("a.parquet", "a.csv.gz", "a.jsonl.gz") for damage in ("cut", "flip")] + [("a.csv.gz", "")],
)
def test_a_damaged_file_is_an_invalid_record_and_a_read_that_fails_is_the_storages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    path = tmp_path / name
    table = pa.table({"i": range(20_000), "name": [f"row {i * 7919 % 20_000}" for i in range(20_000)]})
    if name.endswith(".parquet"):
        pq.write_table(table, path, compression="zstd", row_group_size=5_000, write_page_checksum=True)
    else:
        lines = ["i,name", *(f"{i},row {i * 7919 % 20_000}" for i in range(20_000))]
        if "json" in name:
            lines = [json.dumps(row) for row in table.to_pylist()]
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    kind, schema = {"parquet": "parquet", "gz": "csv" if "csv" in name else "json"}[name.rpartition(".")[2]], table.schema
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 4_096)
    assert sum(each.num_rows for each in batches_of(path, kind, schema)) == 20_000
    whole = path.read_bytes()
    with monkeypatch.context() as patched:
        calls: list[int] = []

        def fail_later(self: Any, call: Any, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) > 6:
                self.error = OSError(5, "Input/output error")
                raise self.error
            return call(*arguments)

        patched.setattr(file_formats._Watched, "_kept", fail_later)
        patched.setattr(file_formats, "_BUFFER_BYTES", 4_096)
        with pytest.raises(hf.StorageUnavailableError) as unavailable:
            batches_of(path, kind, schema)
        assert unavailable.value.fields["path"] == str(path)
    middle = len(whole) // 2
    damaged = {"cut": whole[:middle], "flip": whole[:middle] + bytes(64) + whole[middle + 64 :], "": b"i,name\n1,a\n"}
    path.write_bytes(damaged[damage])
    with pytest.raises(hf.InvalidRecordError) as found:
        batches_of(path, kind, schema)
    assert found.value.split == str(path)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).touch()
        assert batches_of(tmp_path / name, "csv" if "csv" in name else "json", pa.schema([("i", pa.int64())])) == []


@pytest.mark.parametrize("value", [" ", "\t", "\x0b"])
def test_a_text_of_spaces_is_a_row(tmp_path: Path, value: str) -> None:
    """Also where a block has nothing else."""
    (tmp_path / "a.csv").write_text(f"name\n{value}\n{value}\n\n")
    (batch,) = batches_of(tmp_path / "a.csv", "csv", pa.schema([("name", pa.string())]))
    assert batch.columns.to_pylist() == [{"name": value}] * 2


def test_of_what_is_not_read_the_types_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "i=3").mkdir()
    (tmp_path / "i=3" / "a.jsonl").write_text('{"x": 1}\n{"x": "one"}\n{}\n')
    with hf.testing.Job() as job:
        out = output_of(job, hf.FileSource(tmp_path, format="json", schema={"i": int}))
        job.start()
        assert committed(out) == [3, 3, 3]


def test_links_that_lead_above_themselves_show_no_file_again(tmp_path: Path) -> None:
    for name in ("root/one", "root/two", "linked"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "root/a.csv", rows_of(0, 1))
    write(tmp_path / "root/one/b.csv", rows_of(1, 1))
    write(tmp_path / "linked/c.csv", rows_of(2, 1))
    for link, target in {"self": ".", "up": "..", "linked": "../linked", "one/to": "../two", "two/to": "../one"}.items():
        (tmp_path / "root" / link).symlink_to(target)
    source = hf.FileSource(tmp_path / "root", format="csv", schema=COLUMNS)
    listed = {Path(file.path).relative_to(tmp_path / "root").as_posix() for file in files.list_folder(source, "in").files}
    assert listed == {"a.csv", "one/b.csv", "linked/c.csv", "two/to/b.csv"}


def test_a_column_of_folders_may_begin_with_an_underscore(tmp_path: Path) -> None:
    for name in ("_day=1/a.csv", "_day=1/_hidden.csv", "_other/a.csv", ".day=1/a.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, rows_of(0, 1))
    source = hf.FileSource(tmp_path, format="csv", schema=COLUMNS)
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in files.list_folder(source, "in").files] == ["_day=1/a.csv"]


def test_a_barrier_and_a_listing_cost_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop nothing is hashed, compared or encoded for files that are known."""
    for number in range(20):
        write(tmp_path / f"{number}.csv", rows_of(0, 1))
    enumerator = watched(tmp_path)
    assert len(discovered(enumerator, 2)) == 20
    state = enumerator.snapshot_state(1)
    found = enumerator.discover()
    monkeypatch.setattr(files, "xxhash", None)
    assert enumerator.handle_discovered(found) == []
    assert enumerator.snapshot_state(2) is state


def test_text_holds_dates_times_and_words_that_others_take_for_null(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    schema = pa.schema([("country", pa.string()), ("f", pa.float64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC"))])
    (tmp_path / "a.csv").write_text(f'country,f,day,at\nNA,NaN,2026-01-02,{when.isoformat()}\n,,,\n"",inf,,\n')
    lines = [{"country": "NA", "f": None, "day": "2026-01-02", "at": when.isoformat()}, dict.fromkeys(schema.names)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = {kind: batches_of(tmp_path / f"a.{suffix}", kind, schema) for kind, suffix in (("csv", "csv"), ("json", "jsonl"))}
    rows = {kind: [tuple(row.values()) for each in batches for row in each.columns.to_pylist()] for kind, batches in read.items()}
    assert repr(rows["csv"][0][1]) == "nan"
    assert [row[:1] + row[2:] for row in rows["csv"]] == [("NA", date(2026, 1, 2), when), (None, None, None), ("", None, None)]
    assert rows["json"] == [("NA", None, date(2026, 1, 2), when), (None, None, None, None)]


def test_bad_settings_say_which(tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "xml"}, "format"),
        ({"format": "csv"}, "schema"),
        ({"format": "parquet"}, "schema"),
        ({"format": "csv", "schema": COLUMNS, "watch_interval": 1}, "watch_interval"),
    )
    for settings, setting in cases:
        with pytest.raises(hf.InvalidConfigError) as found:
            hf.FileSource(tmp_path, **settings)
        assert found.value.fields["setting"] == setting

"""Files of a sink: every format and partition gives back the rows that went in, to us and to others, once, over restarts."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import holdfast as hf
from holdfast.barriers.sinks.log import SinkPaths, place_of_staged
from holdfast.operators.sinks.files import partitions
from holdfast.operators.sinks.files.committer import candidates_flow
from holdfast.operators.sinks.files.formats import decode, encode
from holdfast.operators.sinks.files.log import FileName, parse_name
from holdfast.operators.sinks.files.parquet import read_committed, read_log
from holdfast.operators.sinks.files.partitions import split_rows
from holdfast.operators.sources.hive import values_of, with_partition
from holdfast.operators.spark.datasource.batch_read import OutputOptions, partitions_of, read_rows
from holdfast.statebackends.storage.port import run_flow
from tests.operators.ports import DictStorage

WHEN = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        pa.field("i", pa.int64(), nullable=False),
        ("text", pa.string()),
        ("f", pa.float64()),
        ("flag", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("ms")),
        ("amount", pa.decimal128(10, 2)),
        ("big", pa.uint64()),
    ]
)
TEXTS = ("", "a", None, 'say "x",\nthen y\\', "NA", "null", "é", " ")


def row_of(i: int) -> dict[str, Any]:
    if i % 5 == 4:
        return {**dict.fromkeys(SCHEMA.names), "i": i, "day": date(2026, 1, 1 + i % 3)}
    return {
        "i": i,
        "text": TEXTS[i % len(TEXTS)],
        "f": [0.1, -0.0, 1e300, 2.0][i % 4],
        "flag": i % 2 == 0,
        "day": date(2026, 1, 1 + i % 3),
        "at": WHEN,
        "local": datetime(1969, 12, 31, 23, 59, 59, 999_000),
        "amount": Decimal("-1.20"),
        "big": 2**64 - 1 - i,
    }


TABLE = pa.Table.from_pylist([row_of(i) for i in range(40)], SCHEMA)


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_a_format_gives_back_what_it_was_given(format: Any) -> None:
    written = encode(format, TABLE.to_batches(max_chunksize=7), SCHEMA)
    assert b"".join(written) == b"".join(encode(format, TABLE.to_batches(), SCHEMA))
    assert decode(format, b"".join(written), SCHEMA).equals(TABLE)
    assert decode(format, b"".join(encode(format, [], SCHEMA)), SCHEMA).num_rows == 0
    if format != "parquet":  # what the source of such files reads is the same
        more = pa.schema([*SCHEMA, ("later", pa.int64())])
        assert decode(format, b"".join(written), more).column("later").null_count == 40


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_a_moment_is_the_same_whatever_its_zone(format: Any) -> None:
    """Amsterdam was 19 minutes and 32 seconds ahead of Greenwich until 1937."""
    moments = pa.table({"at": pa.array([-1_577_923_200_000_000, None, 0], pa.timestamp("us", "Europe/Amsterdam")), "i": [1, 2, 3]})
    written = b"".join(encode(format, moments.to_batches(), moments.schema))
    assert decode(format, written, moments.schema).equals(moments)
    if format != "parquet":
        assert b"1920-01-01 00:00:00.000000Z" in written.replace(b"T", b" ")


def test_numbers_that_json_lacks_are_null() -> None:
    numbers = pa.table({"f": [float("nan"), float("inf"), 1.5]})
    kind: Any
    for kind, wanted in (("json", "[None, None, 1.5]"), ("csv", "[nan, inf, 1.5]")):
        back = decode(kind, b"".join(encode(kind, numbers.to_batches(), numbers.schema)), numbers.schema)
        assert str(back.column("f").to_pylist()) == wanted


@pytest.mark.parametrize("by", [("text",), ("day",), ("flag", "text"), ("day", "flag", "big")])
def test_partitions_hold_each_row_once_in_order(by: tuple[str, ...]) -> None:
    found = list(split_rows(TABLE, by, "out"))
    names = [f"{folder}/part-x.parquet" for folder, _ in found]
    for name, part in zip(names, (part for _, part in found), strict=True):
        assert list(values_of(name)) == list(by)
        assert part.column("i").to_pylist() == sorted(part.column("i").to_pylist())
    parts = [with_partition(part, name, SCHEMA) for name, (_, part) in zip(names, found, strict=True)]
    back = pa.concat_tables([part.select(SCHEMA.names) for part in parts])
    as_read = [{**row, "text": row["text"] or None if "text" in by else row["text"]} for row in TABLE.to_pylist()]
    assert back.sort_by("i").to_pylist() == as_read


def test_names_of_partitions_are_those_of_hive() -> None:
    texts = ["a b", "a/b", "..", "x=y", "é", "100%", "p|q", "1:2", "t\n", None]
    folders = [folder for folder, _ in split_rows(pa.table({"k": texts, "i": range(len(texts))}), ["k"], "out")]
    assert folders == [
        *("k=a b", "k=a%2Fb", "k=..", "k=x%3Dy", "k=é", "k=100%25", "k=p%7Cq", "k=1%3A2", "k=t%0A"),
        "k=__HIVE_DEFAULT_PARTITION__",
    ]
    assert [values_of(f"{folder}/x")["k"] for folder in folders] == texts


def test_a_folder_is_not_hidden_from_readers() -> None:
    ((folder, _),) = split_rows(pa.table({".k": ["a"], "i": [1]}), [".k"], "out")
    assert folder == "%2Ek=a"
    assert values_of(f"{folder}/x") == {".k": "a"}


TIMES = [
    (pa.array([0, None, 2**62], pa.timestamp("us")), str(2**62)),
    (pa.array([0, None, -(2**62)], pa.timestamp("us", "UTC")), str(-(2**62))),
    (pa.array([0, None, 253_402_300_800], pa.timestamp("s")), "253402300800"),
    (pa.array([0, None, 2_932_897], pa.date32()), "2932897"),
    (pa.array([0, None, 253_402_300_800_000], pa.date64()), "253402300800000"),
]


@pytest.mark.parametrize("format", ["json", "csv"])
@pytest.mark.parametrize(("times", "told"), TIMES, ids=[str(times.type) for times, _ in TIMES])
def test_a_time_that_no_text_stands_for_is_refused_in_front_of_the_checkpoint(
    tmp_path: Path, format: Any, times: pa.Array, told: str
) -> None:
    """Arrow writes years of five digits, which nobody reads, and `<value out of range>`."""
    rows = pa.record_batch({"i": pa.array([1, 2, 3]), "t": times})
    sink = hf.FileSink(tmp_path, format, sink_id="out")
    with hf.testing.Job() as job:
        given = job.environment.from_collection([{"n": 1}])
        given.map_batches(lambda batch: rows, returns=rows.schema).sink_to(sink)
        with pytest.raises(hf.InvalidRowError, match=rf"column t of row \{{'i': 3, .*: {told} is a ") as found:
            job.start()
    assert found.value.column == "t"
    least = decode(format, b"".join(encode(format, [rows.slice(0, 2)], rows.schema)), rows.schema)
    assert least.to_pylist() == rows.slice(0, 2).to_pylist()


def test_what_a_partition_can_not_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"k": ["x" * 300], "i": [1]})
    with pytest.raises(hf.InvalidRowError, match="200 bytes") as found:
        list(split_rows(table, ["k"], "out"))
    assert found.value.column == "k"
    with pytest.raises(hf.InvalidRowError, match="k: a folder of that name stands for null"):
        list(split_rows(pa.table({"k": ["a", "__HIVE_DEFAULT_PARTITION__"], "i": [1, 2]}), ["k"], "out"))
    for days in (2_932_897, -719_163, 2**31 - 1):
        with pytest.raises(hf.InvalidRowError, match=f"k: {days} days since 1970 are no date"):
            list(split_rows(pa.table({"k": pa.array([None, 1, days], pa.date32()), "i": [1, 2, 3]}), ["k"], "out"))
    monkeypatch.setattr(partitions, "PARTITIONS_MAX", 2)
    with pytest.raises(hf.InvalidConfigError, match="3 partitions"):
        list(split_rows(pa.table({"k": [1, 2, 3], "i": [1, 2, 3]}), ["k"], "out"))


@pytest.mark.parametrize(
    ("settings", "columns", "named"),
    [
        ({"format": "json"}, {"b": pa.binary()}, "b"),
        ({"format": "json"}, {"b": pa.list_(pa.binary())}, "b"),
        ({"format": "json"}, {"b": pa.duration("us")}, "b"),
        ({"format": "csv"}, {"b": pa.list_(pa.int64())}, "b"),
        ({"format": "json"}, {"b": pa.list_(pa.float16())}, "column b is list.*halffloat"),
        ({"format": "csv"}, {"b": pa.decimal256(40, 2)}, "column b is decimal256"),
        ({"format": "parquet"}, {"b": pa.decimal128(5, -2)}, "negative scale"),
        ({"format": "json"}, {"b": pa.decimal128(5, -2)}, "negative scale"),
        ({"format": "parquet"}, {"b": pa.list_(pa.decimal128(5, -2))}, "column b is list.*Parquet files can't hold"),
        ({"format": "parquet"}, {"b": pa.struct([])}, "column b is struct.*Parquet files can't hold"),
        ({"format": "parquet"}, {"b": pa.month_day_nano_interval()}, "column b is month_day.*Parquet files can't hold"),
        ({"partition_by": ["c"]}, {"b": pa.int64()}, "c"),
        ({"partition_by": "b"}, {"b": pa.float64()}, "b"),
        ({"partition_by": ("a", "b")}, {"b": pa.int64()}, "every column"),
        ({"format": "csv", "partition_by": ("a",)}, {"b": pa.int64()}, "column b is the only one of its CSV files"),
    ],
)
def test_columns_that_files_or_partitions_do_not_preserve_are_refused(settings: Any, columns: Any, named: str) -> None:
    schema = pa.schema([("a", pa.int64()), *columns.items()])
    with pytest.raises(hf.GraphError, match=named):
        hf.FileSink("/out", sink_id="out", **settings).create_writer(schema)
    for wrong in ({"format": "xml"}, {"partition_by": ("a", "a")}, {"file_size_max": 0}, {"path": ""}):
        with pytest.raises(hf.InvalidConfigError):
            hf.FileSink(**{"path": "/out", **wrong})  # type: ignore[arg-type]


def test_names_of_files_can_be_parsed_and_places_be_found() -> None:
    name = FileName("out", "0123abcd", 3, 1, 7, "n1", 12, "jsonl", "day=2026-01-01/k=a b")
    assert parse_name(name.text) == name
    staged = f"s3://b/in=1/{SinkPaths('out/x').staged(name.text)}"
    assert place_of_staged(staged) == "s3://b/in=1/_holdfast/out%2Fx"
    storage = DictStorage({SinkPaths("out").staged(name.text): b"", SinkPaths("out").staged("k=1/other"): b""})
    flow = candidates_flow(SinkPaths("out"), "0123abcd", 4, frozenset(), has_folders=True)
    assert run_flow(flow, storage) == {name.text: name}


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
@pytest.mark.parametrize("by", [(), ("day", "text")])
def test_rows_are_committed_once_over_restarts(tmp_path: Path, format: Any, by: tuple[str, ...]) -> None:
    """What is emitted twice is staged twice, and committed once; other readers find the same rows."""
    path = tmp_path / "out"
    with hf.testing.Job(parallelism=2) as job:
        rows = job.input("rows", SCHEMA)
        rows.stream.sink_to(hf.FileSink(path, format, "out", partition_by=by, file_size_max=500), uid="files")
        job.start()
        for turn, start in enumerate(range(0, 40, 10)):
            rows.add([row_of(i) for i in range(start, start + 10)])
            if turn == 1:
                job.checkpoint()
            elif turn == 2:
                job.restart(parallelism=3)
                job.fail()
        job.checkpoint()
        assert list((path / SinkPaths("out").staged_folder).rglob("part-*")) == []
    expected = [{**row, "text": row["text"] or None} if by else row for row in map(row_of, range(40))]
    found = read_committed(path)
    assert found.schema.names == SCHEMA.names
    assert sorted(found.to_pylist(), key=lambda row: row["i"]) == expected
    _others_agree(path, format, by, found)
    _spark_agrees(path, found)
    _source_agrees(path, format, found)


def rows_of(table: pa.Table, names: list[str]) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _source_agrees(path: Path, format: Any, found: pa.Table) -> None:
    """What the source of such files reads, columns of partitions included, and also those alone."""
    for names in (SCHEMA.names, ["day"], ["i", "day"]):
        with hf.testing.Job() as job:
            source = hf.FileSource(path, format=format, schema=SCHEMA).with_columns(names)
            out = job.output(job.environment.from_source(source).uid("again"))
            job.start()
            rows = [row for row, _ in out.committed()]
        assert Counter(tuple(row[name] for name in names) for row in rows) == rows_of(found, names)


def _spark_agrees(path: Path, found: pa.Table) -> None:
    """The rows that the tasks of `format("holdfast")` give, also without the columns that are in the files."""
    for names in (SCHEMA.names, ["text", "i", "day"], ["day"]):
        options = OutputOptions.parse({"path": str(path)})
        output = options.open()
        schema = output.schema(tuple(names))
        parts = partitions_of(output.storage, read_log(output.storage, output.sink_id), output.sink_id, 2)
        batches = [batch for part in parts for batch in read_rows(options, part, schema)]
        assert sum(batch.num_rows for batch in batches) == found.num_rows
        table = pa.Table.from_batches(batches)
        assert rows_of(table, names) == rows_of(found, names)


def _others_agree(path: Path, format: str, by: tuple[str, ...], found: pa.Table) -> None:
    suffix = {"json": "jsonl"}.get(format, format)
    read = {"parquet": "read_parquet", "json": "read_json", "csv": "read_csv"}[format]
    glob = f"{path}/{'*/' * len(by)}part-*.{suffix}"
    rows = duckdb.sql(f"SELECT i, day::TEXT FROM {read}('{glob}', hive_partitioning=true) ORDER BY i").fetchall()
    assert rows == sorted((row["i"], row["day"].isoformat()) for row in found.to_pylist())
    if format == "parquet":
        table = ds.dataset(path, partitioning="hive").to_table(columns=["i"])
        assert sorted(table.column("i").to_pylist()) == [i for i, _ in rows]


def test_an_only_column_of_csv_may_not_be_null_since_other_readers_pass_over_blank_lines() -> None:
    def writer(format: str, *, nullable: bool) -> object:
        return hf.FileSink("/out", format, sink_id="out").create_writer(pa.schema([pa.field("a", pa.string(), nullable)]))

    with pytest.raises(hf.GraphError, match="column a is the only one of its CSV files, where null is a blank line"):
        writer("csv", nullable=True)
    assert writer("csv", nullable=False) is not None
    assert writer("json", nullable=True) is not None


def test_null_in_the_only_column_of_csv_is_a_row_of_files_of_before() -> None:
    schema = pa.schema([("text", pa.string())])
    table = pa.table({"text": ["a", None, "", "x\n\ny", None]}, schema)
    assert decode("csv", b"".join(encode("csv", table.to_batches(), schema)), schema).equals(table)

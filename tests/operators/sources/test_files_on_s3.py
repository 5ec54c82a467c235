"""Folders of a bucket as sources: listed, read to any position and watched as others are."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.operators.sources import file_formats
from holdfast.statebackends.storage.s3_connection import S3Connection
from tests.s3_server import S3Server, answer
from tests.statebackends.s3_fixtures import clock, connection, first, server

__all__ = ["clock", "connection", "first", "server"]

SCHEMA = pa.schema([("i", pa.int64()), ("name", pa.string())])


def content(suffix: str, start: int) -> bytes:
    rows = [{"i": i, "name": f"row\n{i}"} for i in range(start, start + 10)]
    if suffix == "parquet":
        target = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), target, row_group_size=3)
        return target.getvalue()
    lines = [json.dumps(row) for row in rows]
    if "csv" in suffix:
        lines = ["i,name", *(f'{row["i"]},"{row["name"]}"' for row in rows)]
    text = "\n".join(lines).encode()
    return gzip.compress(text) if suffix.endswith(".gz") else text


@pytest.fixture
def bucket(server: S3Server, connection: S3Connection, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 40)
    return server.new_bucket(connection)


@pytest.mark.parametrize("suffix", ["csv", "jsonl.gz", "parquet"])
def test_files_of_a_bucket_are_read_once_over_restarts(bucket: str, connection: S3Connection, suffix: str) -> None:
    def put(name: str, start: int) -> None:
        connection.call("put_object", Bucket=bucket, Key=f"in/{name}.{suffix}", Body=content(suffix, start))

    put("a", 0)
    with hf.testing.Job(parallelism=2, batch_rows=4) as job:
        source = hf.FileSource(f"s3://{bucket}/in", pattern=f"*.{suffix}", schema=SCHEMA, watch_interval=100)
        out = job.output(job.environment.from_source(source).uid("files"))
        job.start()
        job.advance(by_ms=150)
        job.checkpoint()
        put("day=1/b c%20", 10)
        job.advance(by_ms=250)
        job.restart(parallelism=3)
        job.advance(by_ms=250)
        job.checkpoint()
        assert sorted(row["i"] for row, _ in out.committed()) == list(range(20))
        assert {row["name"] for row, _ in out.committed()} == {f"row\n{i}" for i in range(20)}


def test_a_bucket_that_is_not_there_is_named_and_an_empty_folder_is_none(bucket: str) -> None:
    def discover(path: str) -> Any:
        return hf.FileSource(path, format="csv", schema=SCHEMA, watch_interval=100).create_enumerator().discover()

    assert discover(f"s3://{bucket}/none").splits == []
    with pytest.raises(hf.InvalidConfigError, match="no bucket 'no-such-bucket'"):
        discover("s3://no-such-bucket/in")


def test_a_store_that_refuses_is_no_empty_folder(bucket: str, server: S3Server) -> None:
    server.fail(answer(403, "AccessDenied"), on="GET list-type", times=-1)
    with pytest.raises(hf.StorageUnavailableError, match=bucket):
        hf.FileSource(f"s3://{bucket}/in", format="csv", schema=SCHEMA, watch_interval=100).create_enumerator().discover()

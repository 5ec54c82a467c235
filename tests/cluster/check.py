"""The result, compared with DuckDB's own computation: `python -m tests.cluster.check <rows> <output>`, on a host that reaches S3.

It looks at what is there for any reader of Parquet, and at what the sinks' log has committed: both must be exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.operators.sinks.files.parquet import read_committed
from tests.cluster.job import ROWS_SQL, WINDOW_S

EXPECTED = {
    "counts": "SELECT key, id FROM rows",
    "nths": "SELECT key, row_number() OVER (PARTITION BY key) AS nth FROM rows",
    "windows": f"SELECT key, time_ms // {WINDOW_S * 1000} * {WINDOW_S} AS start, count(*) AS n, sum(value)::BIGINT AS total "
    "FROM rows GROUP BY ALL",
}
FOUND = {
    "counts": "SELECT key, id FROM counts",
    "nths": "SELECT key, nth FROM counts",
    "windows": "SELECT key, epoch(window_start)::BIGINT AS start, n, total::BIGINT AS total FROM windows",
}
"""Which of a key's rows is the n-th is open: several subtasks read them. That each n and each row comes once is not."""


def differences(rows: int, tables: dict[str, pa.Table]) -> dict[str, dict[str, int]]:
    """For each comparison that fails: rows that are missing, and rows that are too many."""
    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE rows AS {ROWS_SQL.format(rows=rows)}")
    for name, table in tables.items():
        connection.register(name, table)
    wrong = {}
    for name, expected in EXPECTED.items():
        counted = [_count(connection, f"({first}) EXCEPT ALL ({second})") for first, second in _both(expected, FOUND[name])]
        if any(counted):
            wrong[name] = {"missing": counted[0], "extra": counted[1]}
    connection.close()
    return wrong


def _both(expected: str, found: str) -> list[tuple[str, str]]:
    return [(expected, found), (found, expected)]


def _count(connection: Any, query: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM ({query})").fetchone()[0])


def published(location: str, folder: Path) -> pa.Table:
    """All Parquet files below a location that no convention hides, read as any program would."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    names = [
        entry["Key"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        for entry in page.get("Contents", ())
    ]
    shown = [name for name in names if name.endswith(".parquet") and not _is_hidden(name.removeprefix(f"{prefix}/"))]
    tables = []
    for number, name in enumerate(shown):
        path = folder / f"{number}.parquet"
        client.download_file(bucket, name, str(path))
        tables.append(pq.read_table(path))
    return pa.concat_tables(tables)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def main(arguments: list[str]) -> None:
    rows, output = int(arguments[0]), arguments[1]
    names = ("counts", "windows")
    with TemporaryDirectory() as folder:
        shown = {name: published(f"{output}/{name}", Path(folder)) for name in names}
    committed = {name: read_committed(f"{output}/{name}") for name in names}
    wrong = {
        "published": differences(rows, shown),
        "committed": differences(rows, committed),
    }
    told = {"wrong": {kind: found for kind, found in wrong.items() if found}, "rows": shown["counts"].num_rows}
    print(json.dumps(told), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])

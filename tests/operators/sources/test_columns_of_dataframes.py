"""The sealed input of a DataFrame, of which a job reads some columns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sources.dataframe import DataFrameSource
from holdfast.operators.sources.materialised import ChunkFile, checksum_of, make_manifest
from tests.operators.ports import DictStorage, ManualContext

SCHEMA = pa.schema([("k", pa.int64()), ("text", pa.string()), ("at", pa.int64())])
ROWS = [{"k": n % 3, "text": f"text {n}", "at": n} for n in range(40)]


def source() -> DataFrameSource:
    """As it is behind the pickling: there is no Spark here."""
    found = DataFrameSource.__new__(DataFrameSource)
    found.__dict__ |= {"name": "rows", "rows_per_second": None, "manifest_path": "", "_schema": SCHEMA, "_dataframe": None}
    return found


def sealed(schema: pa.Schema) -> DictStorage:
    """Two chunks, the second of two batches."""
    storage, files = DictStorage(), []
    for number, cuts in enumerate(((0, 25), (25, 30, 40))):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            for start, stop in pairwise(cuts):
                writer.write_batch(pa.RecordBatch.from_pylist(ROWS[start:stop], schema=schema))
        data = sink.getvalue().to_pybytes()
        files.append(ChunkFile(f"w/{number}", 0, cuts[-1] - cuts[0], len(data), checksum_of(data)))
        storage.files[f"in/w/{number}"] = data
    storage.files["in/manifest.json"] = msgspec.json.encode(make_manifest(schema, files, "w"))
    return storage


@pytest.mark.parametrize(
    ("columns", "schema"), [(["text"], SCHEMA), (["at", "k"], SCHEMA), (["text", "k"], pa.schema(list(SCHEMA)[:1]))]
)
def test_readers_give_the_columns_that_are_read(columns: list[str], schema: pa.Schema) -> None:
    """Those of them that input sealed by an older version of the job has."""
    narrow = source().with_columns(columns)
    narrow.manifest_path = "in/manifest.json"
    storage = sealed(schema)
    found: list[dict[str, Any]] = []
    for subtask in (0, 1):
        context = ManualContext(storage, subtask=subtask, parallelism=2)
        reader = narrow.create_reader(subtask, 2, 8)
        reader.open(context, None)
        while not (poll := reader.poll(7, 0)).finished:
            context.run_pool()
            found += [] if poll.batch is None else poll.batch.rows()
    there = [name for name in columns if name in schema.names]
    assert [list(row) for row in found] == [there] * 40
    assert sorted(map(str, found)) == sorted(str({name: row[name] for name in there}) for row in ROWS)


def test_a_job_says_which_columns_it_reads() -> None:
    env = Environment("job", parallelism=2)
    rows = env.from_source(source()).uid("rows")
    rows.assign_timestamps("at", 5).key_by("k").window(hf.Tumbling(10)).aggregate(n=hf.count()).print()
    narrow = env.build().sources["rows"]
    assert isinstance(narrow, DataFrameSource)
    assert narrow.columns_read == ("k", "at")
    assert narrow.schema == pa.schema([SCHEMA.field("k"), SCHEMA.field("at")])
    assert narrow._schema == SCHEMA, "which all is written with"

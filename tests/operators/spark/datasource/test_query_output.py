"""The checkpoint folder of a stock query, as its driver and its tasks find it, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.sources.spark_checkpoint import place_of_spark
from holdfast.operators.spark.datasource import write_stream as module
from holdfast.operators.spark.datasource.batch_read import OutputOptions
from holdfast.operators.spark.datasource.query_output import FirstBatch, QueryCheckpoint, QueryOutput, check_sink
from holdfast.statebackends.errors import FencedError


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("/a b/%20#?[x]", "/a b/%20#?[x]"),
        ("file:/a%20b/", "/a%20b"),
        ("file:///a/s3a://b", "/a/s3a://b"),
        ("s3a://bucket/s3a://x", "s3://bucket/s3a://x"),
        ("s3://bucket/c//", "s3://bucket/c"),
        ("c", "c"),
    ],
)
def test_places_are_those_that_spark_means(given: str, place: str) -> None:
    assert place_of_spark(given) == place


def test_an_output_is_found_by_each_spelling_of_its_place(tmp_path: Path) -> None:
    for spelling in (f"{tmp_path}/a%20b", f"file:{tmp_path}/a%20b", f"file://{tmp_path}/a%20b"):
        assert OutputOptions.parse({"path": spelling}).path == f"{tmp_path}/a%20b"


def checkpoint(folder: Path, metadata: bytes = b'{"id":"7a3c"}', **files: bytes) -> str:
    for name, content in {"metadata": metadata, **files}.items():
        path = folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def test_a_driver_that_slept_before_its_first_batch_takes_nothing_from_its_successor(tmp_path: Path) -> None:
    place = QueryCheckpoint(checkpoint(tmp_path / "c", offsets_4=b"v1", commits_4=b"v1"))
    sink = hf.FileSink(str(tmp_path / "out"), "json", "out")
    schema = pa.schema([("i", pa.int64())])
    with pytest.raises(FencedError, match="batch 4 is done: another driver"):
        QueryOutput(sink, schema, place, FirstBatch(place.query_id(), 4, place.plan(4)), "n")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "c" / "holdfast").exists()
    QueryOutput(sink, schema, place, FirstBatch(place.query_id(), 5, "plan"), "n").close()
    with pytest.raises(hf.InvalidConfigError, match="no offsets of batch 5"):
        place.plan(5)


class Streaming:
    isStreaming = True


def refused(sink: Any, place: Any, name: str = "") -> hf.HoldfastError:
    with pytest.raises(hf.HoldfastError) as caught:
        module._check(Streaming(), sink, place, name)
    return caught.value


def test_a_query_is_checked_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = hf.FileSink(str(tmp_path / "out"), "json", "out")
    contents = [b"", b"{", b'{"id":null}', b"[" * 100_000, b'{"id":"../x"}', b'{"id":"' + b"a" * 900 + b'"}']
    for number, damaged in enumerate(contents):
        found = refused(sink, checkpoint(tmp_path / f"c{number}", damaged))
        assert isinstance(found, hf.CorruptStateError)
        assert found.path == f"{tmp_path}/c{number}/metadata"
    nameless = hf.FileSink(str(tmp_path / "out"), "json")
    assert "another sink, and repeat all rows" in str(refused(nameless, str(tmp_path / "c")))
    assert module._check(Streaming(), nameless, str(tmp_path / "c"), "orders") == str(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    assert module._check(Streaming(), sink, "c", "") == str(tmp_path / "c")
    with pytest.raises(hf.InvalidConfigError, match="not merged"):
        check_sink(hf.FileSink("/o", target_file_size=1 << 20), "write_stream")

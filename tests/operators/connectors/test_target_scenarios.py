"""Scenario group Q, and those of Z that need no outside that forgets, on each target that Holdfast has, at real servers. The
steps, and the job that takes them, are those of `tests/operators/sinks/targets/test_target_scenarios.py`."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

import holdfast as hf
from tests.operators.connectors.kafka.conftest import kafka as kafka
from tests.operators.connectors.kafka.conftest import kafka_server as kafka_server
from tests.operators.connectors.kafka.conftest import new_topic as new_topic
from tests.operators.connectors.kafka.conftest import objects
from tests.operators.connectors.nats.conftest import create_stream, messages_of
from tests.operators.connectors.nats.conftest import nats_server as nats_server
from tests.operators.sinks.files.minijob import SCHEMA
from tests.operators.sinks.targets.targetjob import Outside
from tests.operators.sinks.targets.test_target_scenarios import play
from tests.scenarios.targets import POSITIONS, SINKS, Case
from tests.servers.process import HOST

FORGETS = {"empty", "keep", "backup"}
CASES = [case for case in SINKS + POSITIONS if not FORGETS & set(case.steps.split())]
SOME = {"Q03", "Q05", "Q07", "Q19", "Q20", "Q21", "Z04", "Z11", "Z25"}
"""In `make test`; the others are left to `make chaos`."""

_NUMBERS = itertools.count(1)


class At(Outside):
    """What a target of ours has written, as others read it."""

    def __init__(self, sink: hf.StagedSink, read: Callable[[], list[int]]) -> None:
        super().__init__()
        self.sink = sink
        self.read = read
        self.targets: list[hf.CommitTarget] = []

    @property
    def seen(self) -> list[int]:
        return self.read()

    def sink_of(self, options: dict[str, Any]) -> hf.StagedSink:
        """As one attempt gets it."""
        self.sink.target.check(SCHEMA)
        target = pickle.loads(pickle.dumps(self.sink.target))
        self.targets.append(target)
        return hf.StagedSink(_Called(self, target), self.sink.sink_id, **options)

    def close(self) -> None:
        for target in self.targets:
            target.close()


class _Called(hf.CommitTarget):
    """A target whose calls may have no answer."""

    def __init__(self, outside: At, target: hf.CommitTarget) -> None:
        self._outside = outside
        self._target = target

    @property
    def place(self) -> str:
        return self._target.place

    @property
    def identity(self) -> str:
        return self._target.identity

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        return self._target.staged_schema(schema)

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        return self._target.stage(columns)

    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        taken: hf.CommitPosition = self._outside.call(lambda: self._target.open(owner))
        return taken

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        self._outside.call(lambda: self._target.apply(batches, expected, position))
        self._outside.commits += 1


def _delta(request: pytest.FixtureRequest, folder: Path) -> At:
    table = str(folder / "table")

    def read() -> list[int]:
        return sorted(DeltaTable(table).to_pyarrow_table()["i"].to_pylist()) if DeltaTable.is_deltatable(table) else []

    return At(hf.DeltaSink(table, "out"), read)


def _iceberg(request: pytest.FixtureRequest, folder: Path) -> At:
    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}

    def read() -> list[int]:
        with closing(load_catalog("default", **properties)) as catalog:
            try:
                return sorted(catalog.load_table("shop.rows").scan().to_arrow()["i"].to_pylist())
            except NoSuchTableError:
                return []

    return At(hf.IcebergSink("shop.rows", "out", properties=properties), read)


def _postgres(request: pytest.FixtureRequest, folder: Path) -> At:
    server = request.getfixturevalue("postgres")
    table = f"scene{next(_NUMBERS)}"
    server.execute(f"CREATE TABLE {table} (n serial, i int8)")
    dsn = f"postgresql://postgres@{HOST}:{server.port}/postgres"
    sink = hf.PostgresSink(dsn, table, password=hf.Secret("TEST_PG_PASSWORD"), sink_id=table)
    return At(sink, lambda: [row[0] for row in server.execute(f"SELECT i FROM {table} ORDER BY n")])


def _kafka(request: pytest.FixtureRequest, folder: Path) -> At:
    server = request.getfixturevalue("kafka")
    topic = request.getfixturevalue("new_topic")(name=f"scene-{next(_NUMBERS)}")
    return At(hf.KafkaSink(server.bootstrap, topic, topic), lambda: [row["i"] for row in objects(server, topic)])


def _nats(request: pytest.FixtureRequest, folder: Path) -> At:
    server = request.getfixturevalue("nats_server")
    stream = create_stream(server.url, f"SCENE{next(_NUMBERS)}")
    subject = f"{stream.lower()}.rows"
    sink = hf.NatsSink(server.url, stream, "out", subject=subject)
    return At(sink, lambda: [json.loads(row)["i"] for row in messages_of(server.url, stream, subject)])


KINDS = {"delta": _delta, "iceberg": _iceberg, "postgres": _postgres, "kafka": _kafka, "nats": _nats}


def cases(kind: str) -> Iterator[Any]:
    for case in CASES:
        marks = () if case.id in SOME else (pytest.mark.endurance,)
        yield pytest.param(kind, case, id=f"{kind}-{case.id}", marks=marks)


@pytest.mark.parametrize(("kind", "case"), [each for kind in KINDS for each in cases(kind)])
def test_a_row_of_the_table(kind: str, case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    expected = " | ".join(part.strip() for part in case.outside.split("|"))
    with closing(KINDS[kind](request, tmp_path)) as outside:
        assert play(case, outside) == expected, case.what

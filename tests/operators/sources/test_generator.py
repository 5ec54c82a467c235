from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from operators.sources.generator import GeneratorReader, GeneratorSource
from statebackends.errors import InvalidConfigError, UserFunctionError
from tests.operators.ports import ManualContext

SCHEMA = pa.schema([("i", pa.int64())])


def numbers(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices)], schema=SCHEMA)


def opened(source: GeneratorSource, subtask: int, parallelism: int, entries: list[bytes] | None = None) -> GeneratorReader:
    reader = source.create_reader(subtask, parallelism, 128)
    reader.open(ManualContext(), entries)
    return reader


def drain(reader: GeneratorReader, rows_max: int = 1000) -> list[int]:
    values: list[int] = []
    while not (poll := reader.poll(rows_max, 0)).finished:
        assert poll.batch is not None
        values += poll.batch.columns().column("i").to_pylist()
    return values


def test_a_raising_function_names_operator_subtask_and_records() -> None:
    def bad(indices: Any) -> pa.RecordBatch:
        raise ValueError("no")

    with pytest.raises(UserFunctionError) as caught:
        opened(GeneratorSource(bad, 10, SCHEMA), 1, 2).poll(3, 0)
    assert (caught.value.operator, caught.value.subtask, caught.value.record) == ("op", 1, "indices 1..5")


def test_wrong_rows_or_types_are_refused() -> None:
    with pytest.raises(InvalidConfigError):
        opened(GeneratorSource(lambda indices: numbers(indices[:1]), 10, SCHEMA), 0, 1).poll(3, 0)


def test_nonsense_settings_are_refused() -> None:
    for settings in ({"rows": -1}, {"rows": 1, "batch_rows": 0}, {"rows": 1, "rows_per_second": 0}):
        with pytest.raises(InvalidConfigError):
            GeneratorSource(numbers, schema=SCHEMA, **settings)  # type: ignore[arg-type]


def test_subtask_s_of_p_emits_every_pth_record() -> None:
    source = pickle.loads(pickle.dumps(GeneratorSource(numbers, 1000, SCHEMA)))
    assert drain(opened(source, 2, 3)) == list(range(2, 1000, 3))


def test_rescaling_loses_and_repeats_nothing() -> None:
    source = GeneratorSource(numbers, 5000, SCHEMA)
    seen, entries = [], []
    for subtask in range(2):
        reader = opened(source, subtask, 2)
        for _ in range(subtask + 1):
            seen += reader.poll(700, 0).batch.columns().column("i").to_pylist()  # type: ignore[union-attr]
        entries += reader.snapshot()
    for part in (entries[:40], entries[40:90], entries[90:]):
        seen += drain(opened(source, 0, 3, part))
    assert sorted(seen) == list(range(5000))


def test_a_subtask_restored_without_stripes_is_finished() -> None:
    assert opened(GeneratorSource(numbers, 10, SCHEMA), 3, 4, []).poll(10, 0).finished


def test_a_paced_source_waits_and_finishes() -> None:
    reader = opened(GeneratorSource(numbers, 3, SCHEMA, rows_per_second=1000), 0, 1)
    got, now = 0, 0
    while not (poll := reader.poll(100, now)).finished:
        if poll.batch is None:
            assert poll.ready_at_ms is not None
            assert poll.ready_at_ms > now
            now = poll.ready_at_ms
        else:
            got += len(poll.batch)
    assert (got, now >= 2) == (3, True)


def test_a_trivial_generator_is_no_bottleneck() -> None:
    for parallelism in (1, 2):
        reader = opened(GeneratorSource(numbers, 200_000_000, SCHEMA), 0, parallelism)
        best = 0.0
        for _ in range(5):
            start, rows = time.perf_counter(), 0
            for _ in range(40):
                rows += len(reader.poll(65_536, 0).batch)  # type: ignore[arg-type]
            best = max(best, rows / (time.perf_counter() - start))
        # Its goal is 30 M/s; the bound here only catches a per-record path on a crowded machine.
        assert best > 10e6

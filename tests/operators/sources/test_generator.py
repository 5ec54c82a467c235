from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from holdfast.operators.sources.generator import GeneratorReader, GeneratorSource
from holdfast.statebackends.errors import InvalidConfigError, UserFunctionError
from tests.operators.ports import ManualContext

SCHEMA = pa.schema([("i", pa.int64())])


def numbers(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices)], schema=SCHEMA)


def opened(source: GeneratorSource, subtask: int, parallelism: int, entries: list[bytes] | None = None) -> GeneratorReader:
    reader = source.create_reader(subtask, parallelism, 128)
    reader.open(ManualContext(), entries)
    return reader


def drain(reader: GeneratorReader, rows_max: int = 1000, now_ms: int = 0) -> list[int]:
    values: list[int] = []
    while not (poll := reader.poll(rows_max, now_ms)).finished:
        if poll.batch is not None:
            values += poll.batch.columns().column("i").to_pylist()
        else:
            assert poll.ready_at_ms is not None
            now_ms = poll.ready_at_ms
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


def test_rows_below_the_bound_are_not_paced_and_none_is_lost() -> None:
    source = GeneratorSource(numbers, 100, SCHEMA, rows_per_second=10, unpaced_rows=61)
    for parallelism in (1, 2):
        for subtask in range(parallelism):
            reader = opened(source, subtask, parallelism)
            polls = []
            while (batch := reader.poll(40, 0).batch) is not None:
                polls.append(batch.columns().column("i").to_pylist())
            at_once = [index for poll in polls for index in poll]
            mine = list(range(subtask, 100, parallelism))
            below = sum(index < 61 for index in mine)
            assert at_once == mine[: below + 1], "the first paced row comes at once, and waits do not"
            rest = drain(opened(source, subtask, parallelism, reader.snapshot()), now_ms=10**7)
            assert at_once + rest == mine


def test_a_restored_source_paces_what_lies_above_the_bound() -> None:
    source = GeneratorSource(numbers, 100, SCHEMA, rows_per_second=10, unpaced_rows=20)
    reader = opened(source, 0, 1)
    reader.poll(50, 0)
    restored = opened(source, 0, 1, reader.snapshot())
    assert [restored.poll(50, 0).batch is None for _ in range(2)] == [False, True]
    with pytest.raises(InvalidConfigError):
        GeneratorSource(numbers, 1, SCHEMA, unpaced_rows=-1)


def test_a_reader_processes_a_backlog_while_it_has_rows_that_are_not_paced() -> None:
    source = GeneratorSource(numbers, 100, SCHEMA, rows_per_second=10, unpaced_rows=61)
    for parallelism, below in ((1, 61), (2, 31)):
        reader, seen = opened(source, 0, parallelism), []
        for _ in range(below):
            seen.append(reader.is_processing_backlog)
            reader.poll(1, 0)
        assert seen == [True] * below
        assert not reader.is_processing_backlog, "also in front of the first paced row"
        assert not opened(source, 0, parallelism, reader.snapshot()).is_processing_backlog
    assert not opened(GeneratorSource(numbers, 100, SCHEMA, rows_per_second=10), 0, 1).is_processing_backlog
    assert not opened(GeneratorSource(numbers, 0, SCHEMA, unpaced_rows=61), 0, 1).is_processing_backlog

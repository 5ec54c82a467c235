from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.operators.base import Poll
from holdfast.operators.sources.parquet import ParquetReader, ParquetSource
from holdfast.statebackends.errors import CorruptStateError, InputChangedError, InvalidConfigError, UnknownColumnError
from tests.operators.ports import ManualContext


def write_files(folder: Path, files: int = 4, rows: int = 250) -> Path:
    for number in reversed(range(files)):
        values = list(range(number * rows, (number + 1) * rows))
        table = pa.table({"i": values, "text": [str(value) for value in values]})
        pq.write_table(table, folder / f"f{number}.parquet", row_group_size=100)
    return folder


def opened(
    source: ParquetSource, subtask: int = 0, parallelism: int = 1, entries: list[bytes] | None = None
) -> tuple[ParquetReader, ManualContext]:
    context = ManualContext(subtask=subtask, parallelism=parallelism)
    reader = source.create_reader(subtask, parallelism, 128)
    reader.open(context, entries)
    return reader, context


def step(reader: ParquetReader, context: ManualContext, rows_max: int) -> Poll:
    context.run_pool()
    return reader.poll(rows_max, context.time_ms)


def drain(reader: ParquetReader, context: ManualContext, rows_max: int = 70) -> list[int]:
    values: list[int] = []
    while not (poll := step(reader, context, rows_max)).finished:
        values += [] if poll.batch is None else poll.batch.columns().column("i").to_pylist()
        context.time_ms = poll.ready_at_ms or context.time_ms
    return values


def test_no_file_and_unknown_column_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError):
        ParquetSource(tmp_path)
    with pytest.raises(InvalidConfigError, match="missing: there is no such file or folder"):
        ParquetSource(tmp_path / "missing")
    with pytest.raises(UnknownColumnError) as caught:
        ParquetSource(write_files(tmp_path), columns=["nope"])
    assert caught.value.column == "nope"


def test_nanoseconds_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": pa.array([1], pa.timestamp("ns"))}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfigError, match="nanoseconds"):
        ParquetSource(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    reader, context = opened(ParquetSource(write_files(tmp_path)))
    (tmp_path / "f0.parquet").unlink()
    with pytest.raises(InputChangedError) as caught:
        step(reader, context, 10)
    assert caught.value.path.endswith("f0.parquet")
    assert caught.value.operator == "op"


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    source = ParquetSource(write_files(tmp_path))
    pq.write_table(pa.table({"i": [1], "text": ["x"]}), tmp_path / "f0.parquet")
    reader, context = opened(source)
    with pytest.raises(InputChangedError):
        step(reader, context, 10)


def test_a_file_rewritten_behind_a_position_is_refused(tmp_path: Path) -> None:
    source = ParquetSource(write_files(tmp_path))
    reader, context = opened(source)
    step(reader, context, 10)
    data = bytearray((tmp_path / "f0.parquet").read_bytes())
    data[-20] ^= 0xFF
    (tmp_path / "f0.parquet").write_bytes(bytes(data))
    again, context = opened(source, entries=reader.snapshot())
    with pytest.raises(InputChangedError, match="footer"):
        step(again, context, 10)


def test_a_bad_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError):
        opened(ParquetSource(write_files(tmp_path)), entries=[b"\xc1"])


def test_files_are_read_in_sorted_order_with_chosen_columns(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(ParquetSource(write_files(tmp_path), columns=["text", "i"], batch_rows=64)))
    assert source.schema.names == ["text", "i"]
    assert drain(*opened(source)) == list(range(1000))


def test_files_are_dealt_round_robin(tmp_path: Path) -> None:
    source = ParquetSource(write_files(tmp_path))
    assert drain(*opened(source, 1, 3)) == list(range(250, 500))
    assert drain(*opened(source, 0, 3)) == [*range(250), *range(750, 1000)]


@pytest.mark.parametrize("polls", [0, 1, 3, 4, 11])
def test_restored_positions_are_exact_at_another_parallelism(tmp_path: Path, polls: int) -> None:
    source = ParquetSource(write_files(tmp_path), batch_rows=90)
    entries: list[bytes] = []
    seen: list[Any] = []
    for subtask in range(2):
        reader, context = opened(source, subtask, 2)
        for _ in range(polls):
            poll = step(reader, context, 60)
            seen += [] if poll.batch is None else poll.batch.columns().column("i").to_pylist()
        entries += reader.snapshot()
    for part in (entries[:1], entries[1:2], entries[2:]):
        seen += drain(*opened(source, 0, 3, part))
    assert sorted(seen) == list(range(1000))


def test_the_rate_is_shared_by_the_subtasks(tmp_path: Path) -> None:
    reader, context = opened(ParquetSource(write_files(tmp_path), rows_per_second=1000), 0, 2)
    assert drain(reader, context) == [*range(250), *range(500, 750)]
    assert 900 <= context.time_ms <= 1100


def test_a_column_that_a_file_lacks_is_null(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    pq.write_table(pa.table({"i": pa.array([-1], pa.int32())}), tmp_path / "g.parquet")
    reader, context = opened(ParquetSource(tmp_path))
    rows = []
    while not (poll := step(reader, context, 1000)).finished:
        rows += [] if poll.batch is None else list(poll.batch.rows())
    assert rows[-1] == {"i": -1, "text": None}


def test_batches_ahead_are_bounded(tmp_path: Path) -> None:
    reader, context = opened(ParquetSource(write_files(tmp_path), batch_rows=10))
    context.run_pool()
    assert len(reader._ahead) == 2

"""Tables that unpack to more than they may are refused before they are unpacked: by pages of Parquet, by batches of Arrow."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.snapshot import unpacking
from holdfast.statebackends.snapshot import unpacking as parquetpages
from holdfast.statebackends.snapshot.table_file import TableFile, decode_keyed_table
from holdfast.statebackends.snapshot.unpacking import (
    DICTIONARY_PAGE,
    Unpacked,
    blocks_of,
    check_arrow,
    check_parquet,
    checked_batch,
    pages_of,
    row_groups_of,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the tests' files: 8 MiB, or 1,000 times the file."""
    monkeypatch.setattr(unpacking, "UNPACKED_BYTES_MAX", 8 * MIB)


def parquet(table: pa.Table, **options: Any) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return sink.getvalue()


def arrow(table: pa.Table, compression: str | None = "zstd") -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def repeated(value: Any, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


LARGE = b"\0" * (10 * MIB)
WORDS = pa.ListArray.from_arrays(pa.array([0, 20_000], pa.int32()), repeated("y" * 1_000, 20_000))
BOMBS: dict[str, Callable[[], pa.Buffer]] = {
    "a page": lambda: parquet(pa.table({"v": [LARGE]}), use_dictionary=False),
    "pages in brotli": lambda: parquet(pa.table({"v": [b"\0" * MIB] * 100}), use_dictionary=False, compression="brotli"),
    "a dictionary's page": lambda: parquet(pa.table({"v": [LARGE]}), dictionary_pagesize_limit=100 * MIB),
    "one value many times": lambda: parquet(pa.table({"v": repeated(b"x" * 10_000, 20_000)})),
    "one value many times in a list": lambda: parquet(pa.table({"v": WORDS})),
    "one value many times in a struct": lambda: parquet(
        pa.table({"v": pa.StructArray.from_arrays([repeated("y" * 10_000, 20_000)], ["a"])})
    ),
    "beginnings of the value before": lambda: parquet(
        pa.table({"v": ["p" * 20_000 + str(number) for number in range(3_000)]}),
        use_dictionary=False,
        column_encoding={"v": "DELTA_BYTE_ARRAY"},
    ),
    "rows of nothing": lambda: parquet(pa.table({"v": pa.nulls(10_000_000, pa.int64())})),
    "numbers that are all the same": lambda: parquet(pa.table({"v": np.zeros(10_000_000, np.int64)}), compression="brotli"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_parquet_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(name: str) -> None:
    data = BOMBS[name]()
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="bytes that unpack to more than"):
        check_parquet(pa.BufferReader(data))
    assert pa.total_allocated_bytes() - before < 8 * MIB


PACKED: dict[str, Callable[[], pa.Buffer]] = {
    "a buffer": lambda: arrow(pa.table({"v": [LARGE]})),
    "zeros": lambda: arrow(pa.table({"v": np.zeros(4_000_000, np.int64)})),
    "rows of nothing": lambda: arrow(pa.table({"v": pa.nulls(10_000_000)})),
    "nothing many times in a list": lambda: arrow(
        pa.table({"v": pa.ListArray.from_arrays(pa.array([0, 10_000_000], pa.int32()), pa.nulls(10_000_000))})
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_arrow_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(name: str) -> None:
    with pytest.raises(ValueError, match="bytes that unpack to more than"):
        check_arrow(pa.BufferReader(PACKED[name]()))


@pytest.mark.parametrize(
    "column",
    [
        repeated("x" * 10_000, 20_000),
        repeated(pa.scalar(b"x" * 10_000, pa.binary(10_000)), 20_000),
        repeated(["x" * 10_000], 20_000),
        repeated("x" * 10_000, 20_000).cast(pa.utf8()).cast(pa.string_view()),
    ],
    ids=["dictionary", "dictionary of fixed size", "dictionary of lists", "views"],
)
def test_arrow_of_one_value_many_times_is_refused_before_each_gets_its_own(column: pa.Array) -> None:
    data = arrow(pa.table({"key_group": pa.array(np.zeros(len(column), np.int32)), "value": column}), "lz4")
    file = TableFile.open(pa.BufferReader(data), "arrow")
    if data.size < 100_000:  # views are written out by some versions of Arrow
        with pytest.raises(ValueError, match="bytes that unpack to more than"):
            list(file.batches())


def with_footer(data: pa.Buffer, old: bytes, new: bytes) -> pa.Buffer:
    """A Parquet file whose footer says something else in its last such place."""
    start = data.size - 8 - int.from_bytes(data[data.size - 8 : data.size - 4].to_pybytes(), "little")
    footer = data[start:].to_pybytes()
    place = footer.rindex(old)
    return pa.py_buffer(data[:start].to_pybytes() + footer[:place] + new + footer[place + len(old) :])


def test_a_column_that_is_another_one_in_its_schema_is_refused() -> None:
    """Its bytes are counted by what it is, and a reader goes by the schema."""
    texts = parquet(pa.table({"v": repeated("x" * 10_000, 20_000), "w": ["small"] * 20_000}))
    column_type, path = b"\x15%b\x19", b"\x19\x18\x01%b"  # fields 1 and 3 of ColumnMetaData
    for name, damaged in {
        "v": with_footer(texts, path % b"v", path % b"w"),
        "w": with_footer(texts, column_type % b"\x0c", column_type % b"\x04"),
    }.items():
        with pytest.raises(ValueError, match=f"column '{name}' is another one in its schema"):
            check_parquet(pa.BufferReader(damaged))


def parquet_of_footer(footer: bytes) -> pa.BufferReader:
    return pa.BufferReader(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def test_flags_in_a_list_have_a_byte_each() -> None:
    assert parquetpages._Compact(b"\x19\x21\x01\x02\x15\x04\x00").struct() == {1: [True, False], 2: 2}
    lists = b"\xf1\xa0\x1f" * 2_000  # each says that 4,000 flags follow
    tracemalloc.start()
    with pytest.raises(ValueError, match="type 0"):
        row_groups_of(parquet_of_footer(b"\x19\xf9\xd0\x0f" + lists))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MIB


def test_a_footer_longer_than_any_state_needs_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="not a Parquet file"):
        row_groups_of(parquet_of_footer(b"\0" * (16 * MIB + 1)))


def test_a_footer_of_more_values_than_any_state_needs_is_refused_while_it_is_read() -> None:
    """A byte of it may be an object of 150."""
    with pytest.raises(ValueError, match="more than 2,000,000 values"):
        row_groups_of(parquet_of_footer(b"\x19\xfc\xc0\x8d\xb7\x01" + b"\0" * 3_000_000))


def test_columns_that_overlap_are_refused() -> None:
    """Each would be read from its beginning to its end, however many there are."""
    data = parquet(pa.table({"v": np.arange(100_000)}), use_dictionary=False, compression="none")
    (group,) = row_groups_of(pa.BufferReader(data))
    length = _zigzag(group.chunks[0].length)
    with pytest.raises(ValueError, match="columns are longer than it is"):
        row_groups_of(pa.BufferReader(with_footer(data, b"\x16" + length + b"\x26", b"\x16" + _zigzag(data.size + 1) + b"\x26")))


def _zigzag(number: int) -> bytes:
    found, left = bytearray(), number << 1
    while left >= 128:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found, left])


def test_a_restore_refuses_it_by_name() -> None:
    for table_format, data in (("parquet", BOMBS["one value many times"]()), ("arrow", PACKED["a buffer"]())):
        with pytest.raises(CorruptStateError, match=r"'op': job/a: .*HOLDFAST_UNPACKED_BYTES_MAX") as caught:
            decode_keyed_table(data, table_format, KeyGroupRange(0, 8), path="job/a", operator="op")
        assert caught.value.path == "job/a"


def test_what_is_to_be_trusted_may_be_allowed_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unpacking.SETTING, str(1 << 30))
    for make in BOMBS.values():
        check_parquet(pa.BufferReader(make()))
    for make in PACKED.values():
        check_arrow(pa.BufferReader(make()))


@pytest.mark.parametrize("text", ["", "1 GiB", "-5", "0"])
def test_a_setting_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    packed = PACKED["zeros"]()
    monkeypatch.setenv(unpacking.SETTING, text)
    with pytest.raises(InvalidConfigError, match=r"HOLDFAST_UNPACKED_BYTES_MAX is .* a number of bytes"):
        check_arrow(pa.BufferReader(packed))


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"compression": "snappy"}])
def test_what_a_job_writes_is_no_bomb(options: dict[str, Any]) -> None:
    rows = 200_000
    table = pa.table(
        {
            "key_group": pa.array(np.sort(np.arange(rows) % 128).astype(np.int32)),
            "key": [f"user-{number}" for number in range(rows)],
            "namespace": pa.array([b""] * rows, pa.binary()),
            "value": [f"plan-{number % 300}" * 4 for number in range(rows)],
            "tags": [["a", "b"]] * rows,
        }
    )
    check_parquet(pa.BufferReader(parquet(table, row_group_size=1 << 16, **options)))
    for compression in (None, "lz4"):
        data = arrow(table, compression)
        unpacked = check_arrow(pa.BufferReader(data))
        reader = pa.ipc.open_file(data)
        for index in range(reader.num_record_batches):
            checked_batch(reader.get_batch(index), unpacked)


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"write_page_index": True}])
def test_pages_are_those_that_were_written(options: dict[str, Any]) -> None:
    table = pa.table({"v": [f"{number % 1_000}" for number in range(50_000)], "n": pa.array([None, 7] * 25_000)})
    data = parquet(table, data_page_size=4_096, **options)
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    (group,) = row_groups_of(pa.BufferReader(data))
    assert group.rows == 50_000
    for index, chunk in enumerate(group.chunks):
        said = metadata.row_group(0).column(index)
        assert (chunk.path, chunk.values, chunk.length) == (said.path_in_schema, said.num_values, said.total_compressed_size)
        pages = list(pages_of(pa.BufferReader(data), chunk.start, chunk.length, chunk.values))
        assert sum(page.values for page in pages if page.kind != DICTIONARY_PAGE) == 50_000
        assert sum(page.kind == DICTIONARY_PAGE for page in pages) == said.has_dictionary_page
        assert len(pages) >= 3
        packed = sum(page.packed_bytes for page in pages)
        assert packed < chunk.length < packed + 200 * len(pages)
        assert said.total_uncompressed_size - chunk.length == sum(page.unpacked_bytes - page.packed_bytes for page in pages)


def test_batches_are_those_that_were_written() -> None:
    table = pa.table({"v": np.arange(1_000), "d": pa.array(["a", "b"] * 500).dictionary_encode()})
    for compression in (None, "lz4", "zstd"):
        blocks = list(blocks_of(pa.BufferReader(arrow(table, compression))))
        assert [block.rows for block in blocks] == [2, 1_000]
        assert 12_000 <= blocks[1].unpacked_bytes < 12_100


def test_damage_is_an_error_of_ours_and_nothing_else() -> None:
    """Every byte of a file's ends, and some of the others, in turn."""
    table = pa.table({"v": [f"{number % 9}" for number in range(50)], "n": np.arange(50)})
    checks: list[tuple[bytes, Callable[[pa.NativeFile], object]]] = [
        (parquet(table).to_pybytes(), check_parquet),
        (arrow(table).to_pybytes(), check_arrow),
    ]
    for data, check in checks:
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 0x55
            with contextlib.suppress(ValueError, OSError, pa.ArrowException):
                check(pa.BufferReader(bytes(damaged)))


def test_a_count_of_what_has_been_unpacked() -> None:
    unpacked = Unpacked(1)
    unpacked.add(8 * MIB)
    assert not unpacked.copy().allows(1)
    with pytest.raises(ValueError, match="1 bytes that unpack to more than 8388608"):
        unpacked.copy().add(1)
    assert Unpacked(MIB).allowed == 1_000 * MIB



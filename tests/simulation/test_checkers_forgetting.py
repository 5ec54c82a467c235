"""I46: behind a certificate nothing that is stored decodes to the key, in whatever form; before it nothing is judged."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.chaos.checkers.forgetting import ForgettingChecker
from holdfast.chaos.checkers.observations import Forgotten
from holdfast.chaos.workloads.forgetting import GUEST
from holdfast.chaos.workloads.scenario import Forgetting
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.statebackends.serialization.keys import KeyType

JOB = derive_job_id("forgotten")


class Store:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def paths(self, prefix: str = "") -> list[str]:
        return sorted(self.files)

    def peek(self, path: str) -> bytes | None:
        return self.files.get(path)


class World:
    job_id = JOB

    def __init__(self, files: dict[str, bytes]) -> None:
        self.state = Store(files)


class Scenario:
    forgetting = Forgetting("in", "count", GUEST, 1, 1)


def table(keys: list[int], *, parquet: bool) -> bytes:
    made, sink = pa.table({"key": pa.array(keys, pa.int64())}), io.BytesIO()
    if parquet:
        pq.write_table(made, sink)
    else:
        with pa.ipc.new_file(sink, made.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(made)
    return sink.getvalue()


def found_in(content: bytes, *, erased: bool = True) -> list[str]:
    problems: list[str] = []
    files = {f"{JOB}/shared/9-1-count-0-x.arrow": content}
    made: Any = ForgettingChecker(World(files), Scenario(), lambda invariant, message: problems.append(invariant), None)
    if erased:
        made.observe(Forgotten(5, 7))
    made.at_end()
    return problems


@pytest.mark.parametrize("content", [table([1, GUEST], parquet=True), table([1, GUEST] * 99, parquet=False),
                                     b"sst" + KeyType.of(int).encode(GUEST) + b"..."])  # fmt: skip
def test_a_file_that_holds_the_key_is_told(content: bytes) -> None:
    assert found_in(content) == ["I46"]
    assert found_in(content, erased=False) == []


OTHERS = [table([1, 2], parquet=True), table([GUEST + 1], parquet=False), b"", b"ARROW1 torn", b"PAR1PAR1"]


@pytest.mark.parametrize("content", OTHERS)
def test_other_files_and_damaged_ones_are_not(content: bytes) -> None:
    assert found_in(content) == []

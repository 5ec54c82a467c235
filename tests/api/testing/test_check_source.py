"""The conformance check of sources: it passes what is right, and finds what is wrong, wherever that shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])
SIZES = (7, 0, 12, 3)
ALL = [(100 * number + n,) for number, size in enumerate(SIZES) for n in range(size)]


_CURSORS: dict[int, int] = {}
"""Of a client that goes on where its last fetch ended, whatever was assigned."""


class Part(hf.SourceSplit, frozen=True):
    number: int


class Parts(hf.SplitEnumerator[Part]):
    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def discover(self) -> list[Part]:
        return [Part(str(number), number) for number in range(len(SIZES))]

    def restore_state(self, state: bytes) -> None:
        if self.wrong != "forgets":
            super().restore_state(state)

    @property
    def finds_more(self) -> bool:
        return self.wrong == "forgets" and len(self._known) < len(SIZES)


class PartReader(hf.SplitReader[Part]):
    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.reading: list[tuple[Part, int]] = []
        self.cursors: dict[int, int] = {}

    def add_splits(self, splits: Sequence[hf.AssignedSplit[Part]]) -> None:
        for each in splits:
            self.reading.append((each.split, each.position[0] if each.position and self.wrong != "from the start" else 0))

    def open(self) -> None:
        if self.wrong == "of the client":
            self.cursors = _CURSORS

    def fetch(self) -> Sequence[hf.SplitRecords]:
        split, at = self.reading.pop(0)
        at = self.cursors.get(split.number, at)
        stop = self.cursors[split.number] = min(SIZES[split.number], at + 4)
        numbers = np.arange(at, stop, dtype=np.int64)
        if stop < SIZES[split.number]:
            self.reading.append((split, stop))
        columns = pa.RecordBatch.from_arrays([pa.array(100 * split.number + numbers)], schema=SCHEMA)
        behind = np.full(len(numbers), stop, np.int64) if self.wrong == "of the batch" else numbers + 1
        return [hf.SplitRecords(split.split_id, columns, behind, finished=stop == SIZES[split.number])]


class PartSource(hf.Source[Part]):
    split_type = Part
    schema = SCHEMA

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def create_enumerator(self) -> Parts:
        return Parts(self.wrong)

    def create_split_reader(self, context: hf.ReaderContext) -> PartReader:
        return PartReader(self.wrong)


def test_a_source_that_is_right_passes() -> None:
    hf.testing.check_source(PartSource, ALL, points_max=3)


@pytest.mark.parametrize("wrong", ["from the start", "of the batch", "forgets"])
def test_what_is_wrong_is_found_and_the_run_named(wrong: str) -> None:
    with pytest.raises((AssertionError, hf.InvalidSplitError), match=r"parallelism|split"):
        hf.testing.check_source(lambda: PartSource(wrong), ALL)


def test_a_client_that_goes_on_behind_a_lost_answer_is_found_and_its_run_can_be_made_again() -> None:
    def make() -> PartSource:
        _CURSORS.clear()
        return PartSource("of the client")

    with pytest.raises(AssertionError, match="missing") as found:
        hf.testing.check_source(make, ALL, points_max=2, only="a failed fetch behind 0 reads, parallelism 3, batch_rows 7")
    name = str(found.value).partition("only='")[2].partition("')")[0]
    assert name in str(found.value).partition("again")[0]
    hf.testing.check_source(PartSource, ALL, points_max=2, only=name)
    with pytest.raises(hf.InvalidConfigError, match="no run 'of nothing'"):
        hf.testing.check_source(PartSource, ALL, points_max=2, only="of nothing")


class DoubtfulReader(PartReader):
    """Half of its records can't be read."""

    def fetch(self) -> Sequence[hf.SplitRecords]:
        (found,) = super().fetch()
        if not found.num_rows:
            return [found]
        assert found.columns is not None
        assert found.positions is not None
        kept = np.arange(found.num_rows) % 2 == 0
        letters = [
            hf.DeadLetter((int(behind) - 1,), (int(behind),), "odd", row=1 + row // 2)
            for row, behind in enumerate(found.positions)
            if not kept[row]
        ]
        position = (int(found.positions[-1]),)
        columns = found.columns.filter(pa.array(kept))
        return [
            hf.SplitRecords(
                found.split_id, columns, found.positions[kept], position=position, finished=found.finished, dead_letters=letters
            )
        ]


class DoubtfulSource(PartSource):
    def create_split_reader(self, context: hf.ReaderContext) -> PartReader:
        return DoubtfulReader(self.wrong)


def test_records_that_cant_be_read_are_cut_with_the_others() -> None:
    """Dead letters stand between the rows: a fetch that passes in two halves has those of each half."""
    with pytest.raises(hf.InvalidRecordError, match="odd"):
        hf.testing.check_source(DoubtfulSource, ALL)


@pytest.mark.parametrize("points_max", [2, pytest.param(100, marks=pytest.mark.endurance)])
def test_files_pass(tmp_path: Path, points_max: int) -> None:
    wanted: list[Any] = []
    for number in range(3):
        rows = [(10 * number + i, f"r{i}") for i in range(4)]
        (tmp_path / f"{number}.csv").write_text("i,s\n" + "".join(f"{i},{s}\n" for i, s in rows))
        wanted += rows
    schema = {"i": int, "s": str}
    hf.testing.check_source(lambda: hf.FileSource(tmp_path, format="csv", schema=schema), wanted, points_max=points_max)

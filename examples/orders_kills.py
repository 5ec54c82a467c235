"""Kills in the middle of a commit, for `orders.py`: a target whose process dies between two calls of a commit, where it is told to.

An order to die is a file, so that one that was carried out is not carried out again by a successor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

import holdfast as hf

POINTS = {
    "before": "before the rows of a commit",
    "within": "between two rows of a commit",
    "between": "between two commits of one checkpoint",
    "behind": "behind a commit, before it is known to have taken place",
}


@dataclass(frozen=True)
class DeathWarrants:
    """The orders below a folder that all processes of the job see: `<sink>` holds a point; `<sink>.<pid>` was carried out."""

    folder: str

    def write(self, sink: str, point: str) -> None:
        """The process that commits for this sink dies when it next comes to this point."""
        os.makedirs(self.folder, exist_ok=True)
        path = Path(self.folder, f".{sink}")
        path.write_text(point)
        path.replace(Path(self.folder, sink))

    def victim(self, sink: str) -> int | None:
        """Who has carried the order out; None: nobody so far. It is then forgotten."""
        for path in Path(self.folder).glob(f"{sink}.*"):
            path.unlink()
            return int(path.suffix[1:])
        return None

    def meet(self, sink: str, point: str) -> None:
        """Called at each point. Does not return if the order is to die here."""
        path = Path(self.folder, sink)
        try:
            if path.read_text() != point:
                return
        except FileNotFoundError:
            return
        path.rename(f"{path}.{os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)


class MortalTarget(hf.CommitTarget):
    """Another target, in whose calls the process may be told to die."""

    def __init__(self, target: hf.CommitTarget, sink: str, warrants: DeathWarrants) -> None:
        self._target = target
        self._sink = sink
        self._warrants = warrants

    @property
    def place(self) -> str:
        return self._target.place

    @property
    def identity(self) -> str:
        return self._target.identity

    def check(self, schema: pa.Schema) -> None:
        self._target.check(schema)

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        return self._target.staged_schema(schema)

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        return self._target.stage(columns)

    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        return self._target.open(owner)

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        self._warrants.meet(self._sink, "before")
        if not expected.has_all_of(expected.checkpoint_id):
            self._warrants.meet(self._sink, "between")
        self._target.apply(self._rows(batches), expected, position)
        self._warrants.meet(self._sink, "behind")

    def close(self) -> None:
        self._target.close()

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            half = (batch.num_rows + 1) // 2
            yield batch.slice(0, half)
            self._warrants.meet(self._sink, "within")  # the client has taken half, and the rest is still to come
            if half < batch.num_rows:
                yield batch.slice(half)

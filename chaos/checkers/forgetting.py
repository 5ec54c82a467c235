"""Erasures (I46, docs/invariants.md): behind a certificate no snapshot of the job decodes to the key, nor any file at the end.

Tables are decoded with Arrow alone; of what is no table its bytes are searched, for the key as tables and databases have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.observations import Forgotten, Lifecycle, Observation
from holdfast.coordinator.ha.recorded_job import Completed, decode_decision
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import InlineHandle
from holdfast.statebackends.layout import METADATA_NAME, parse_checkpoint_name, part_path
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata


class ForgettingChecker(Checker):
    """Looks when there is a certificate, now and then, and at the end."""

    invariants: ClassVar[tuple[str, ...]] = ("I46",)
    hears: ClassVar[tuple[type, ...]] = (Forgotten, Lifecycle)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._erased_at = 0
        self._looked_at: set[str] = set()

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Forgotten) and not self._erased_at:
            self._erased_at = observation.checkpoint_id
            self.look()

    def look(self) -> None:
        if not self._erased_at:
            return
        for path in self.world.state.paths(self.world.job_id):
            number = self._snapshot_of(path)
            if number is not None and path not in self._looked_at:
                self._looked_at.add(path)
                self._check(number, path)

    def at_end(self) -> None:
        if not self._erased_at:
            return
        self.look()
        for path in self.world.state.paths(self.world.job_id):
            content = self.world.state.peek(path)
            if content is not None and self._holds(content):
                self.report("I46", f"{path} has the key, which was erased at the barrier of checkpoint {self._erased_at}")

    def _snapshot_of(self, path: str) -> int | None:
        folder, _, name = path.removeprefix(f"{self.world.job_id}/").partition("/")
        return parse_checkpoint_name(folder) if name == METADATA_NAME else None

    def _check(self, number: int, path: str) -> None:
        content = self.world.state.peek(path) or b""
        if not isinstance(decode_decision(content, path), Completed):
            return
        try:
            metadata = decode_metadata(content, path)
        except HoldfastError:
            return  # I11
        for what, part in self._parts(metadata, path.rpartition("/")[0]):
            if self._holds(part):
                message = f"checkpoint {number}: {what} has the key, erased at the barrier of checkpoint {self._erased_at}"
                self.report("I46", message)
                return

    def _parts(self, metadata: SnapshotMetadata, folder: str) -> Iterator[tuple[str, bytes]]:
        handles = [part for each in metadata.operators for task in each.subtasks for keyed in task.keyed for part in keyed.parts]
        for part in handles:
            if isinstance(part, InlineHandle):
                yield "a part within its record", part.data
            else:
                yield part.path, self.world.state.peek(part_path(folder, part.path)) or b""

    def _holds(self, content: bytes) -> bool:
        assert self.scenario.forgetting is not None
        key = self.scenario.forgetting.key
        if key.to_bytes(8, "little") in content or KeyType.of(int).encode(key) in content:
            return True
        table: pa.Table | None = None
        try:
            if content[:4] == b"PAR1" == content[-4:]:
                table = pq.read_table(pa.BufferReader(content))
            elif content[:6] == b"ARROW1":
                table = pa.ipc.open_file(content).read_all()
        except (pa.ArrowException, OSError):
            return False  # damage is for I11
        return table is not None and "key" in table.column_names and key in table["key"].to_pylist()

"""The crash world with workers that write increments: tables come, are merged and go, and what the base has is not stored again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.barriers.messages import Deployment, SubtaskKey, TriggerCheckpoint
from holdfast.coordinator.ha.recorded_job import Completed
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    StateHandle,
)
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import shared_name, shared_path
from holdfast.statebackends.snapshot.increments import StoredFiles
from holdfast.statebackends.storage.checksums import checksum_of
from tests.coordinator.doubles import COUNTS, MAX_PARALLELISM
from tests.coordinator.world import JOB, Leader, Worker, World, decoded

SHARED = f"{JOB}/shared/"


@dataclass
class Database:
    """Tables of one subtask of one attempt."""

    tables: list[str] = field(default_factory=list)
    stored: StoredFiles = field(default_factory=StoredFiles)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class SharedWorld(World):
    """Checks after each step that no completed checkpoint has a hole (I11, I23)."""

    def __init__(self, seed: int, *, deaths: float = 0.02, **settings: Any) -> None:
        """`deaths`: how often a worker says nothing more of a checkpoint behind an upload."""
        self.deaths = deaths
        self.databases: dict[tuple[int, int], Database] = {}
        """(slot, attempt) -> what a worker has on its own disk."""
        self.placeholders = 0
        super().__init__(seed, state_backend="rocksdb", **settings)

    def _deploy(self, leader: Leader, worker: Worker, deployment: Deployment) -> None:
        database = self.databases[worker.slot, deployment.attempt] = Database()
        for task in deployment.subtasks:
            if task.vertex == self.graph.vertices[1].vertex_id and "count" in task.restore:
                (handle,) = task.restore["count"].keyed
                parts = dict(zip(handle.names, handle.parts, strict=True))
                del parts["CURRENT"], parts["M"]
                assert all(isinstance(part, FileHandle) for part in parts.values()), "a placeholder was restored"
                database.tables = list(parts)
                database.numbers = itertools.count(1 + max((int(name.partition(".")[0]) for name in parts), default=0))
                files = {name: part for name, part in parts.items() if isinstance(part, FileHandle)}
                database.stored.remember(deployment.restored_checkpoint_id, files)
        super()._deploy(leader, worker, deployment)

    def _states(self, worker: Worker, key: SubtaskKey, command: TriggerCheckpoint) -> dict[str, OperatorSubtaskState] | None:
        if key.vertex != self.graph.vertices[1].vertex_id:
            return super()._states(worker, key, command)
        database = self.databases[worker.slot, worker.attempt]
        if len(database.tables) > 2 and self.random.random() < 0.3:  # compaction
            database.tables = database.tables[self.random.randrange(1, len(database.tables)) :]
        database.tables.append(f"{next(database.numbers):06}.sst")
        known, parts, files = database.stored.of_base(command.base), list[StateHandle](), {}
        for name in database.tables:
            handle = known.get(name)
            if handle is not None:
                self.placeholders += 1
                parts.append(PlaceholderHandle(handle.path, handle.length))
            else:
                written = f"{command.checkpoint_id}-{worker.attempt}-count-{key.subtask}-{worker.nonce}-{name}"
                self.storage.files[SHARED + written] = written.encode()
                if self.random.random() < self.deaths:
                    return None
                handle = FileHandle(shared_path(written), len(written), checksum_of(written.encode()))
                parts.append(handle)
            files[name] = handle
        database.stored.remember(command.checkpoint_id, files)
        groups = assign_key_groups(MAX_PARALLELISM, 2, key.subtask)
        names = (*database.tables, "CURRENT", "M")
        keyed = KeyedStateHandle(groups, "rocksdb", (COUNTS,), (*parts, InlineHandle(b"M\n"), InlineHandle(b"")), names)
        return {"count": OperatorSubtaskState(keyed=(keyed,))}

    def check(self) -> None:
        super().check()
        for number, handle in self.references():
            assert self._path(handle) in self.storage.files, f"checkpoint {number} has lost {handle.path} (I23)"

    def references(self) -> Iterator[tuple[int, FileHandle]]:
        """Shared files of the completed checkpoints that are claimed."""
        for number, folder in self.storage.completed(JOB).items():
            decision = decoded(self.storage.files[f"{folder}/_metadata"])
            for handle in decision.shared if isinstance(decision, Completed) else ():
                yield number, handle

    def orphans(self) -> list[str]:
        """Shared files to which no completed checkpoint refers."""
        needed = {self._path(handle) for _, handle in self.references()}
        return sorted(path for path in self.storage.files if path.startswith(SHARED) and path not in needed)

    @staticmethod
    def _path(handle: FileHandle) -> str:
        return f"{SHARED}{shared_name(handle.path)}"

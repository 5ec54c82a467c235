"""What a two-phase file sink's operators share: where its output is, the names of its staged files, and what writers tell their
committer. Its log, and what the committer keeps in state, are in `holdfast.barriers.sinklog`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec
import xxhash

from holdfast.barriers.sinklog import StagedFile, place_of, split_place
from holdfast.statebackends.storage.locations import open_output
from holdfast.statebackends.storage.port import Storage


class Committable(msgspec.Struct, frozen=True):
    """What one writer staged for one checkpoint: travels to the committer before the barrier."""

    version: int
    checkpoint_id: int
    subtask: int
    files: tuple[StagedFile, ...]


@dataclass(slots=True)
class SinkSettings:
    """What a sink's operators share; the sink id may be set after they were made, until the plan is shipped."""

    path: str
    """The sink's own storage root: a folder or a URL."""
    sink_id: str
    file_size_max: int
    """Bytes of rows in memory, after which a file is closed."""
    open_storage: Callable[[str], Storage] | None = None
    """None: beside the state directory in a worker, by the path's own form elsewhere."""

    def storage(self, beside: Storage | None = None) -> Storage:
        """The sink's storage. `beside`: the storage whose reach it shares; None: whatever the path names."""
        if self.open_storage is not None:
            return self.open_storage(self.path)
        return open_output(self.path, beside)

    @property
    def place(self) -> str:
        """Where its log is."""
        return place_of(self.path, self.sink_id)

    def at(self, place: str) -> SinkSettings:
        """The same sink where it was before."""
        path, sink_id = split_place(place)
        return replace(self, path=path, sink_id=sink_id)


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a staged file says; names are never used twice."""

    sink_id: str
    job: str
    """`job_tag` of the job id."""
    attempt: int
    subtask: int
    first_checkpoint: int
    """The lowest checkpoint id that can refer to the file."""
    nonce: str
    sequence: int

    @property
    def text(self) -> str:
        sink = quote(self.sink_id, safe="")
        writer = f"a{self.attempt}-s{self.subtask}-c{self.first_checkpoint}"
        return f"part-{sink}-{self.job}-{writer}-{self.nonce}-{self.sequence:05d}.parquet"


_NAME = re.compile(r"part-(.+)-([0-9a-f]{8})-a(\d+)-s(\d+)-c(\d+)-([^-]+)-(\d+)\.parquet")


def job_tag(job_id: str) -> str:
    """8 hex digits that stand for a job in file names."""
    return xxhash.xxh3_64_hexdigest(job_id.encode())[:8]


def nonce_tag(nonce: str) -> str:
    """A nonce as part of a file name: letters and digits only."""
    return nonce if nonce.isalnum() and nonce.isascii() else xxhash.xxh3_64_hexdigest(nonce.encode())


def parse_name(name: str) -> FileName | None:
    """None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    sink, job, attempt, subtask, checkpoint, nonce, sequence = match.groups()
    return FileName(sink, job, int(attempt), int(subtask), int(checkpoint), nonce, int(sequence))

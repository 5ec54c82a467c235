"""What stands in a job's directory, read with a JSON decoder and a hash: nothing of the product says what is complete and whole."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from holdfast.chaos.checkers.observations import StoreView

RECORDS = ("leader", "submissions", "attempts", "results", "sources")


@dataclass(frozen=True)
class Checkpoint:
    """One id. `decision`: completed | aborted | savepoint, or empty."""

    claimed: bool
    decision: str
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Path in the state directory -> length and checksum, of a completed checkpoint."""


def checkpoints(view: StoreView, job_id: str) -> dict[int, Checkpoint]:
    """By id, all that a folder is there for."""
    folders = sorted({path.split("/")[1] for path in view.paths(job_id) if path.split("/")[1].startswith("chk-")})
    return {int(folder.removeprefix("chk-")): _read(view, f"{job_id}/{folder}") for folder in folders}


def _read(view: StoreView, folder: str) -> Checkpoint:
    claimed, content = view.size(f"{folder}/_claim") is not None, view.peek(f"{folder}/_metadata")
    if content is None:
        return Checkpoint(claimed, "")
    decoded: dict[str, Any] = json.loads(content)
    if "snapshot" not in decoded:
        return Checkpoint(claimed, decoded["decision"])
    named = [decoded["snapshot"]["operators"], decoded["snapshot"].get("channels", [])]
    files = {posixpath.normpath(f"{folder}/{path}"): facts for path, facts in _files(named)}
    return Checkpoint(claimed, "completed", files)


def _files(found: Any) -> Iterator[tuple[str, tuple[int, str]]]:
    if isinstance(found, dict):
        if found.get("type") == "file":
            yield found["path"], (found["length"], found["checksum"])
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from _files(each)


def completed(view: StoreView, job_id: str) -> list[int]:
    """Ids that are claimed and completed: checkpoints that a recovery may begin with."""
    return [number for number, each in checkpoints(view, job_id).items() if each.claimed and each.decision == "completed"]


def missing(view: StoreView, job_id: str) -> list[str]:
    """Files of completed checkpoints that are not there, or not what was stored."""
    wrong = []
    for each in checkpoints(view, job_id).values():
        for path, (length, checksum) in each.files.items() if each.claimed else ():
            content = view.peek(path)
            if content is None or len(content) != length or f"xxh3_128:{xxhash.xxh3_128(content).hexdigest()}" != checksum:
                wrong.append(path)
    return wrong


def unowned(view: StoreView, job_id: str) -> list[str]:
    """Files that no record, and no id that is claimed, accounts for."""
    owned: set[str] = set()
    for number, each in checkpoints(view, job_id).items():
        if each.claimed:
            owned |= {f"{job_id}/chk-{number}/_claim", f"{job_id}/chk-{number}/_metadata", *each.files}
    return [path for path in view.paths(job_id) if path.split("/")[1] not in RECORDS and path not in owned]

"""Names of files that checkpoints of one job share: `<job>/shared/<id>-<attempt>-<uid>-<subtask>-<nonce>-<file>`.

A name says who wrote the file, never what is in it. In `_metadata` of `chk-N` it is the path `../shared/<name>`, the only
path that leads out of a snapshot's folder. Pure; who refers to which file is the coordinator's business."""

from __future__ import annotations

import re

SHARED_FOLDER = "shared"
TASK_OWNED_FOLDER = "taskowned"
"""Beside `shared` in a job's directory: files there belong to tasks, and the coordinator deletes none of them (Flink's layout)."""
_PREFIX = f"../{SHARED_FOLDER}/"
_CHECKPOINT_FOLDER = re.compile(r"(?:.*/)?chk-[0-9]+")
_WRITER = re.compile(r"([1-9][0-9]{0,17})-")


def shared_path(name: str) -> str:
    """Path of a shared file relative to a checkpoint's folder."""
    return _PREFIX + name


def shared_name(path: str) -> str | None:
    """The name in `../shared/<name>`; None for any other path."""
    name = path.removeprefix(_PREFIX)
    if name == path or "/" in name or "\0" in name or name in ("", ".", ".."):
        return None
    return name


def writer_of(name: str) -> int | None:
    """Id of the checkpoint that a shared file was written for; None for a name that no checkpoint made."""
    found = _WRITER.match(name)
    return int(found[1]) if found is not None else None


def is_checkpoint_folder(folder: str) -> bool:
    """Whether a folder is a checkpoint's within its job's directory: `<job>/chk-42`."""
    return _CHECKPOINT_FOLDER.fullmatch(folder) is not None

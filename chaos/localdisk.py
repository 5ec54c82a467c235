"""What goes wrong with the copies of state that workers keep on their host's own disk: cut off, changed, mixed up, gone.

A copy of a table may be another name of a file that a database has open, so nothing is changed in place: a damaged copy takes the
name of the good one."""

from __future__ import annotations

import os
import random
from pathlib import Path

from statebackends.localcopies import LOCK_NAME, RECOVERY_FOLDER

SPARED_SHARE = 0.2
"""Of the copies, those that stay as they are."""


def damage_copies(local_directory: str, rng: random.Random) -> int:
    """Damage most copies of all jobs and workers of this host; how many."""
    root = Path(local_directory, RECOVERY_FOLDER)
    copies = sorted(path for path in root.glob("*/*/*") if path.name != LOCK_NAME)
    chosen = [path for path in copies if rng.random() >= SPARED_SHARE]
    contents = [path.read_bytes() for path in chosen]
    for path, content in zip(chosen, contents, strict=True):
        damaged = _damaged(content, contents, rng)
        if damaged is None:
            path.unlink()
        else:
            beside = path.with_name(f"{path.name}.damaged")
            beside.write_bytes(damaged)
            os.replace(beside, path)
    return len(chosen)


def _damaged(content: bytes, others: list[bytes], rng: random.Random) -> bytes | None:
    """None: it is gone."""
    match rng.randrange(5):
        case 0:
            return None
        case 1:
            return content[: rng.randrange(len(content) + 1)]
        case 2:
            return rng.choice(others)
        case 3:
            return bytes(len(content))
        case _:
            at = rng.randrange(max(1, len(content)))
            return content[:at] + bytes(byte ^ 0x20 for byte in content[at : at + 1]) + content[at + 1 :]

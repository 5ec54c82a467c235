"""Mistakes with the copies of state on a worker's own disk: they are believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import statebackends.localrecovery as localrecovery_module
from chaos.sabotage.base import Mutant, Sabotage
from statebackends.localcopies import LINKED_SUFFIX, bring


def _is_what_is_there(original: Any) -> Any:
    return lambda copy, handle: Path(copy).read_bytes()


def _are_what_is_there(original: Any) -> Any:
    def pieces_content(copy: str, pieces: Any) -> bytes:
        start, stop = pieces[0].offset, max(piece.offset + piece.length for piece in pieces)
        return Path(copy).read_bytes()[start:stop]

    return pieces_content


def _places_what_is_there(original: Any) -> Any:
    def place(copy: str, local_path: str, handle: Any) -> bytes:
        Path(local_path).unlink(missing_ok=True)
        bring(copy, local_path, link=local_path.endswith(LINKED_SUFFIX))
        return b""

    return place


SABOTAGES = (
    Sabotage(
        "believed_copy",
        "a restore takes the copy of a file from its host's disk as it is there",
        ("I30", "I7", "I8", "I1", "I2"),
        (
            Mutant(localrecovery_module, "_content", _is_what_is_there),
            Mutant(localrecovery_module, "_pieces_content", _are_what_is_there),
            Mutant(localrecovery_module, "_place", _places_what_is_there),
        ),
        kinds=("damage_copies",),
    ),
)

"""Members of a state directory that a client on this machine sees, by their signs of life there.

A hint, as `_coordinator.json` is, and read like it: whoever writes into the directory may put anything in their places."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.barriers.run_record import read_small_file
from holdfast.coordinator.standby.records import SignOfLife
from holdfast.operators.worker.leader_retrieval import MEMBERS_MAX, URL_CHARACTERS_MAX, is_safe_step
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.layout import MEMBERS_FOLDER, parse_sign_name

FRESH_S = 600.0
"""Older signs are of members that are gone: another program may listen at their ports by now."""


def known_members(directory: Path, recorded: str) -> tuple[str, ...]:
    """URLs at which members gave signs of life lately, the newest sign first; of those where a token for `recorded` may go. None
    for a coordinator without `--ha`, and where the state is on S3."""
    found: dict[str, tuple[float, str]] = {}
    try:
        with os.scandir(directory / MEMBERS_FOLDER) as entries:
            for entry in entries:
                member, _ = parse_sign_name(entry.name)
                written_s = entry.stat().st_mtime if member else 0.0
                if written_s > found.get(member, (time.time() - FRESH_S, ""))[0] and len(found) < MEMBERS_MAX:
                    found[member] = written_s, entry.path
    except OSError:
        return ()
    urls = (_url_of(path) for _, path in sorted(found.values(), reverse=True))
    return tuple(dict.fromkeys(url for url in urls if url and url != recorded and is_safe_step(recorded, url)))


def _url_of(path: str) -> str:
    """Empty for what is no sign of life, one of a member that leaves, or one that has been replaced meanwhile."""
    try:
        sign = decode_json(read_small_file(path), SignOfLife)
    except (OSError, ValueError, *UNDECODABLE):
        return ""
    url = sign.url.rstrip("/")
    is_one = url.startswith(("http://", "https://")) and "," not in url and len(url) <= URL_CHARACTERS_MAX
    return url if is_one and not sign.is_leaving else ""

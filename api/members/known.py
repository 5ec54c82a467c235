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

LOOKS = 3
"""At a directory whose signs go while they are read."""


def known_members(directory: Path, recorded: str) -> tuple[str, ...]:
    """URLs at which members gave signs of life lately, the newest sign first; of those where a token for `recorded` may go. None
    for a coordinator without `--ha`, and where the state is on S3."""
    found: dict[str, tuple[float, str]] = {}
    for _ in range(LOOKS):
        if _look(directory / MEMBERS_FOLDER, found):
            break
    urls = (url for _, url in sorted(found.values(), reverse=True))
    return tuple(dict.fromkeys(url for url in urls if url and url != recorded and is_safe_step(recorded, url)))


def _look(folder: Path, found: dict[str, tuple[float, str]]) -> bool:
    """Add to `found`, member -> (time of its newest sign, URL). False: a sign that was listed is gone, since each takes the place
    of the one before, and a listing may be some seconds old (NFS)."""
    is_whole = True
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                member, _ = parse_sign_name(entry.name)
                if not member or (member not in found and len(found) >= MEMBERS_MAX):
                    continue
                try:
                    written_s = entry.stat().st_mtime
                    if written_s > found.get(member, (time.time() - FRESH_S, ""))[0]:
                        found[member] = written_s, _url_of(entry.path)
                except FileNotFoundError:
                    is_whole = False
    except OSError:
        return True
    return is_whole


def _url_of(path: str) -> str:
    """Empty for what is no sign of life, and for that of a member that leaves. Raises FileNotFoundError."""
    try:
        sign = decode_json(read_small_file(path), SignOfLife)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, *UNDECODABLE):
        return ""
    url = sign.url.rstrip("/")
    is_one = url.startswith(("http://", "https://")) and "," not in url and len(url) <= URL_CHARACTERS_MAX
    return url if is_one and not sign.is_leaving else ""

"""Members of a state directory that a client on this machine sees, by their signs of life there.

A hint, as `_coordinator.json` is, and read like it: whoever writes into the directory may put anything in their places."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.barriers.run_record import RUN_RECORD_BYTES_MAX, read_small_file
from holdfast.coordinator.standby.records import SignOfLife
from holdfast.operators.worker.leader_retrieval import MEMBERS_MAX, URL_CHARACTERS_MAX, is_safe_step
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.layout import MEMBERS_FOLDER, parse_sign_name
from holdfast.statebackends.storage.port import DescribeFiles, FileFacts, ReadFile, Storage

FRESH_S = 600.0
"""Older signs are of members that are gone: another program may listen at their ports by now."""

LOOKS = 3
"""At a directory whose signs go while they are read."""


def known_members(directory: Path, recorded: str) -> tuple[str, ...]:
    """URLs at which members gave signs of life lately, the newest sign first; of those where a token for `recorded` may go. None
    for a coordinator without `--ha`."""
    found: dict[str, tuple[float, str]] = {}
    for _ in range(LOOKS):
        if _look(directory / MEMBERS_FOLDER, found):
            break
    return _fit(found, recorded)


def known_members_in(storage: Storage, recorded: str) -> tuple[str, ...]:
    """As `known_members`, of a state directory that is no folder of this machine: a listing and a few small reads. Raises errors of
    storage."""
    found: dict[str, tuple[float, str]] = {}
    for _ in range(LOOKS):
        if _look_in(storage, found):
            break
    return _fit(found, recorded)


def _fit(found: dict[str, tuple[float, str]], recorded: str) -> tuple[str, ...]:
    urls = (url for _, url in sorted(found.values(), reverse=True))
    return tuple(dict.fromkeys(url for url in urls if url and url != recorded and is_safe_step(recorded, url)))


def _look_in(storage: Storage, found: dict[str, tuple[float, str]]) -> bool:
    """As `_look`: the newest sign of each member, those of the members that were seen last."""
    newest: dict[str, tuple[int, int, FileFacts]] = {}
    listed: list[FileFacts] = storage.execute(DescribeFiles(MEMBERS_FOLDER))
    for facts in listed:
        member, beat = parse_sign_name(facts.path.rpartition("/")[2])
        if member:  # a bucket's clock has seconds: of two signs of one second the higher counts
            newest[member] = max((facts.modified_ms, beat, facts), newest.get(member, (0, 0, facts)))
    is_whole = True
    for member, (at_ms, _, facts) in sorted(newest.items(), key=lambda item: item[1], reverse=True)[:MEMBERS_MAX]:
        written_s = at_ms / 1000
        if written_s <= found.get(member, (time.time() - FRESH_S, ""))[0] or facts.size > RUN_RECORD_BYTES_MAX:
            continue
        try:
            found[member] = written_s, _url_in(storage.execute(ReadFile(facts.path, length=RUN_RECORD_BYTES_MAX)))
        except ObjectMissingError:
            is_whole = False
    return is_whole


def _look(folder: Path, found: dict[str, tuple[float, str]]) -> bool:
    """Add to `found`, member -> (time of its newest sign, URL), of the members that were seen last. False: a sign that was listed
    is gone, since each takes the place of the one before, and a listing may be some seconds old (NFS)."""
    newest: dict[str, tuple[float, int, str]] = {}
    is_whole = True
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                member, beat = parse_sign_name(entry.name)
                try:
                    if member:
                        newest[member] = max((entry.stat().st_mtime, beat, entry.path), newest.get(member, (0.0, 0, "")))
                except FileNotFoundError:
                    is_whole = False
    except OSError:
        return True
    for member, (written_s, _, path) in sorted(newest.items(), key=lambda item: item[1], reverse=True)[:MEMBERS_MAX]:
        try:
            if written_s > found.get(member, (time.time() - FRESH_S, ""))[0]:
                found[member] = written_s, _url_of(path)
        except FileNotFoundError:
            is_whole = False
    return is_whole


def _url_of(path: str) -> str:
    """Empty for what is no sign of life, and for that of a member that leaves. Raises FileNotFoundError."""
    try:
        return _url_in(read_small_file(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return ""


def _url_in(content: bytes) -> str:
    try:
        sign = decode_json(content, SignOfLife)
    except UNDECODABLE:
        return ""
    url = sign.url.rstrip("/")
    is_one = url.startswith(("http://", "https://")) and "," not in url and len(url) <= URL_CHARACTERS_MAX
    return url if is_one and not sign.is_leaving else ""

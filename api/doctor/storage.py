"""A state directory, on a disk or in a bucket, by the operations that everything rests on. What is written is deleted again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.api.doctor.findings import Finding, fault, ok, warning
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import doctor_folder
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import (
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    LinkFile,
    PutIfAbsent,
    ReadFile,
    Storage,
    copies_links,
)

RACERS = 8
"""Creates of one name at one time."""
WRITES = 5
WRITE_SLOW_MS = 250
SKEW_MS_MAX, SKEW_MS_FAULT = 2_000, 60_000
SPACE_WARNING, SPACE_FAULT = 5 << 30, 256 << 20
"""Free bytes."""
INODES_WARNING = 10_000
_VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERED = frozenset({"overlay", "aufs"})


def storage_of(location: str, nonce: str) -> Iterator[Finding]:
    """All that is wrong with a state directory. `nonce`: names the files of this run."""
    storage = open_storage(location)
    folder = doctor_folder(nonce)
    try:
        yield from _conditional_create(storage, folder)
        yield from _links(storage, folder)
        yield from _durable_writes(storage, folder)
        yield from _clock(storage, folder)
    except HoldfastError as error:
        yield fault("storage", f"{type(error).__name__}: {error.message}", _FIXES.get(type(error).__name__, _FIX))
    finally:
        try:
            storage.execute(DeleteFolder(folder))
        except HoldfastError as error:
            yield warning("storage", f"{folder} can't be deleted: {error.message}", "delete it by hand; nothing rests on it")
    if "://" not in storage.root:
        yield from space(Path(storage.root))


_FIX = "docs/storage.md says what a store must do, and which rights it needs"
_FIXES = {
    "PermissionDeniedError": "give the user of this process the right to write there (docs/storage.md, who may read it)",
    "OutOfSpaceError": "make room: `holdfast snapshot fsck` says what takes it",
    "StorageAccessError": "correct credentials, region or endpoint: AWS_PROFILE, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3",
    "StorageThrottledError": "ask the store for a higher rate, or give the directory a bucket of its own",
    "TooManyFilesError": "raise the limit of open files (ulimit -n)",
}


def _conditional_create(storage: Storage, folder: str) -> Iterator[Finding]:
    """Of several creates of one name one wins, and what it wrote stays."""
    path = f"{folder}/race"
    contents = [f"racer {number}".encode() for number in range(RACERS)]
    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(lambda content: bool(storage.execute(PutIfAbsent(path, content))), contents))
    found = bytes(storage.execute(ReadFile(path)))
    if sum(won) != 1 or found != contents[won.index(True)]:
        text = f"{sum(won)} of {RACERS} creates of one file said that they made it: leadership and commits can't rest on this"
        fix = "use a file system with hard links, or a store with If-None-Match (docs/storage.md)"
        yield fault("conditional create", text, fix)
    else:
        yield ok("conditional create", f"of {RACERS} at one time one made the file")


def _links(storage: Storage, folder: str) -> Iterator[Finding]:
    name = "copies in the store" if copies_links(storage) else "hard links"
    storage.execute(PutIfAbsent(f"{folder}/source", b"linked"))
    made = storage.execute(LinkFile(f"{folder}/source", f"{folder}/target"))
    if not made or bytes(storage.execute(ReadFile(f"{folder}/target"))) != b"linked":
        yield fault(name, "a second name of a file does not have its content", "use a file system with hard links")
    else:
        yield ok(name, "a file has a second name")


def _durable_writes(storage: Storage, folder: str) -> Iterator[Finding]:
    times_ms = []
    for number in range(WRITES):
        began_s = time.monotonic()
        storage.execute(PutIfAbsent(f"{folder}/write-{number}", b"x" * 4_096))
        times_ms.append((time.monotonic() - began_s) * 1000)
    median_ms = sorted(times_ms)[WRITES // 2]
    kind = file_system_of(Path(storage.root)) if "://" not in storage.root else ""
    if kind in _VOLATILE:
        yield fault("fsync", f"{storage.root} is on {kind}: all is lost with this machine", "put the state directory on a disk")
    elif kind in _LAYERED:
        yield warning("fsync", f"{storage.root} is on {kind}: it is lost with its container", "mount a volume there")
    elif median_ms > WRITE_SLOW_MS:
        text = f"a durable write takes {median_ms:.0f} ms: a checkpoint waits for two of them"
        yield warning("fsync", text, "use a faster disk or a nearer store; look for what else writes there")
    else:
        yield ok("fsync", f"a durable write takes {median_ms:.1f} ms" + (f" on {kind}" if kind else ""))


def _clock(storage: Storage, folder: str) -> Iterator[Finding]:
    before_ms = _wall_ms()
    storage.execute(PutIfAbsent(f"{folder}/clock", b""))
    after_ms = _wall_ms()
    facts: list[FileFacts] = storage.execute(DescribeFiles(folder))
    times_ms = [fact.modified_ms for fact in facts if fact.path.endswith("/clock")]
    if not times_ms:
        text = "a listing does not show a file that was just written"
        yield fault("storage clock", text, "use a store whose listings see writes")
        return
    off_ms = max(before_ms - 1_000 - times_ms[0], times_ms[0] - after_ms, 0)  # some stores round down to seconds
    yield skew("storage clock", off_ms, "the clock of the storage")


def skew(check: str, off_ms: int, whose: str) -> Finding:
    """A finding about a clock that is off by this much."""
    fix = "run NTP (chrony, systemd-timesyncd) on both: `timedatectl` shows whether it does"
    text = f"{whose} and this host's differ by {off_ms / 1000:.1f} s"
    if off_ms >= SKEW_MS_FAULT:
        return fault(check, f"{text}: safety ages and expiries are wrong", fix)
    return warning(check, text, fix) if off_ms > SKEW_MS_MAX else ok(check, f"{whose} and this host's agree")


def space(folder: Path) -> Iterator[Finding]:
    usage = shutil.disk_usage(folder)
    free = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB are free at {folder}"
    fix = "make room: `holdfast snapshot fsck` says what takes it; keep fewer checkpoints (retained_checkpoints)"
    if usage.free < SPACE_FAULT:
        yield fault("space", free, fix)
    elif usage.free < SPACE_WARNING:
        yield warning("space", free, fix)
    else:
        yield ok("space", free)
    status = os.statvfs(folder)
    if status.f_files and status.f_favail < INODES_WARNING:
        text = f"{status.f_favail:,} files can still be made at {folder}"
        yield warning("inodes", text, "a file system with more inodes; `df -i`")


def file_system_of(folder: Path) -> str:
    """Type of the file system that a folder is on; empty if that can't be told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000

"""A state directory, on a disk or in a bucket, by the operations that everything rests on. What is written is deleted again.

A folder that does not exist is not made: a path with a typing error, and one below a mount that is missing, look like a directory
before its first start, and whoever made it would find it sound. Which of them it is, only a person can tell."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.api.doctor.findings import Finding, fault, ok, warning
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import DIRECTORY_FILE, DOCTOR_FOLDER, SERVICE_FOLDER, doctor_folder
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER, folder_of
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import (
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    LinkFile,
    ListFolder,
    PutIfAbsent,
    ReadFile,
    StatFile,
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
    if not is_there(location):
        yield from _absent(Path(storage.root))
        return
    folder, made = doctor_folder(nonce), folders_of_trials(storage)
    try:
        yield _served(storage)
        yield from _conditional_create(storage, folder)
        yield from _links(storage, folder)
        yield from _durable_writes(storage, folder)
        yield from _clock(storage, folder)
    except HoldfastError as error:
        yield fault("storage", f"{type(error).__name__}: {error.message}", _FIXES.get(type(error).__name__, _FIX))
    finally:
        try:
            remove_trials(storage, folder, made)
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


def is_there(location: str) -> bool:
    """Whether a state directory is a folder that exists; of a bucket always. Raises OSError where that can't be told."""
    return "://" in location.removeprefix("file://") or Path(folder_of(location)).is_dir()


def _absent(folder: Path) -> Iterator[Finding]:
    """A folder that is not there: what a first start makes in a folder that is, or a fault."""
    wrong = f"correct the path, or mount what belongs there: `findmnt -T {shlex.quote(str(folder))}` says what is"
    if os.path.lexists(folder):
        yield fault("state directory", f"{folder} is no folder, or a link to none", wrong)
    elif not folder.parent.is_dir():
        text = f"{folder} does not exist, nor does the folder that it would be in: no first start looks so"
        yield fault("state directory", text, wrong)
    else:
        first = f"before a first start make it, `mkdir {shlex.quote(str(folder))}`, and ask again"
        text = f"{folder} does not exist; it was not made, so nothing was tried"
        yield warning("state directory", text, f"{first}; at any other time {wrong}")
        yield from space(folder.parent)


def _served(storage: Storage) -> Finding:
    """Whether it is the directory of a coordinator. An empty one may be that of a mount that is missing."""
    if storage.execute(StatFile(DIRECTORY_FILE)) is not None:
        return ok("state directory", f"{storage.root} is a coordinator's")
    if "://" in storage.root:
        text, look = f"no coordinator has served {storage.root}", "correct bucket and prefix"
    else:
        found = set(storage.execute(ListFolder(""))) - {f"{TEMPORARY_FOLDER}/", "lost+found/"}
        text = f"no coordinator has served {storage.root}, which {'has other files' if found else 'is empty'}"
        look = f"correct the path, or mount what belongs there: `findmnt -T {shlex.quote(storage.root)}` says what is"
    return warning("state directory", text, f"nothing before a first start; at any other time {look}")


def folders_of_trials(storage: Storage) -> list[Path]:
    """Folders that are made for a run's files, and have to go with them, innermost first."""
    if "://" in storage.root:
        return []
    root = Path(storage.root)
    return [root / name for name in (DOCTOR_FOLDER, SERVICE_FOLDER, TEMPORARY_FOLDER) if not (root / name).exists()]


def remove_trials(storage: Storage, folder: str, made: Iterable[Path]) -> None:
    """Delete a run's files, and the folders that were made for them. Raises HoldfastError."""
    storage.execute(DeleteFolder(folder))
    for each in made:
        with contextlib.suppress(OSError):  # it holds files of another run, or of a coordinator that has started meanwhile
            each.rmdir()


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

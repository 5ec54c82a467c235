"""What the files of one job take: bytes, numbers, requests and, by a file of prices, money.

A flow lists the job's directory and the folders of its savepoints; all else is pure. Requests are estimated from what a checkpoint
writes and how often one completes, since workers write most of them: storage is not asked to count."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedCheckpoint, RecordedJob, derive_config
from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.files import SMALL_FILE_BYTES
from holdfast.coordinator.ownership.labels import read_labels
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError
from holdfast.statebackends.layout import SHARED_FOLDER, JobPaths, parse_checkpoint_name, shared_name, writer_of
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import DescribeFiles, FileFacts, Flow

SAVEPOINTS_MAX = 100
"""Savepoints whose folders are listed: the newest."""
HOUR_MS = 3_600_000
HOURS_A_MONTH = 730
GIB = 1 << 30
PUTS_BESIDE_FILES = 3
"""Of one checkpoint: `_claim`, `_metadata`, and the register that its deletion takes."""
GETS = 3
"""Of one checkpoint: looks whether another leader leads."""
DELETES_BESIDE_FILES = 3
LISTS = 1
PRICE_MAX = 1e9
PRICES_BYTES_MAX = 64 << 10


class CheckpointCost(msgspec.Struct, frozen=True):
    """Files of one completed snapshot."""

    checkpoint_id: int
    kind: str
    labels: tuple[str, ...]
    exclusive_size: int
    """Bytes that go with it; -1, as the numbers of files: its folder was not read."""
    shared_size: int
    """Bytes of files that it names and that other checkpoints may name, too."""
    files: int
    small_files: int


class Requests(msgspec.Struct, frozen=True):
    """Requests to storage for checkpoints, an hour: an estimate, from the files that the newest checkpoint wrote and the interval
    that holds. Restores, savepoints, sinks and sources are not in it."""

    checkpoints_per_hour: float
    puts_per_hour: float
    gets_per_hour: float
    lists_per_hour: float
    deletes_per_hour: float


class Money(msgspec.Struct, frozen=True):
    """By a price file: what is stored now, kept for a month of 730 hours, and a month of such requests."""

    currency: str
    storage_per_month: float
    requests_per_month: float
    total_per_month: float
    prices: str
    """Name in the price file."""


class Cost(msgspec.Struct, frozen=True):
    """What the files of a job take. Sizes in bytes."""

    job_id: str
    as_of_ms: int
    total_size: int
    exclusive_size: int
    """In the folders of completed checkpoints: the sum of what they have of their own."""
    shared_size: int
    savepoint_size: int
    """Of its savepoints, wherever they are; those that can't be listed are in `unread`."""
    other_size: int
    """Records, history, inputs, sinks' records, and what the job's directory has of savepoints and of ids that are not complete."""
    files: int
    small_files: int
    """Of less than 128 KiB: cheaper classes of object stores bill them as if they had that size."""
    small_file_size: int
    checkpoints: tuple[CheckpointCost, ...]
    """Newest first, savepoints included, but for those that were disposed of."""
    requests: Requests | None = None
    """None: the job has ended, takes no periodic checkpoints, or has none yet."""
    money: Money | None = None
    unread: tuple[str, ...] = ()


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price file, JSON or TOML. Nothing is assumed of prices that are not in it: they are 0."""

    name: str
    """What the prices are of, and when: shown beside the sums."""
    currency: str
    storage_gib_month: float = 0.0
    puts_per_1000: float = 0.0
    gets_per_1000: float = 0.0
    lists_per_1000: float = 0.0
    deletes_per_1000: float = 0.0
    least_file_size: int = 0
    """Smaller files are billed as if they had so many bytes."""

    def check(self, path: str) -> Prices:
        """Raise InvalidConfigError naming what can't be a price."""
        for name in ("storage_gib_month", "puts_per_1000", "gets_per_1000", "lists_per_1000", "deletes_per_1000"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= PRICE_MAX):
                raise InvalidConfigError(f"{path}: {name} must be 0..{PRICE_MAX:g}, got {value}", setting=name, path=path)
        if not 0 <= self.least_file_size <= GIB:
            raise InvalidConfigError(f"{path}: least_file_size must be 0..{GIB}", setting="least_file_size", path=path)
        for name in ("name", "currency"):
            text = getattr(self, name)
            if not (0 < len(text) <= 100 and text.isprintable()):
                raise InvalidConfigError(f"{path}: {name} must be 1 to 100 printable characters", setting=name, path=path)
        return self


def decode_prices(content: bytes, path: str) -> Prices:
    """Prices from the bytes of a file: JSON if it begins so, else TOML. Raises InvalidConfigError."""
    if len(content) > PRICES_BYTES_MAX:
        text = f"{path} is longer than {PRICES_BYTES_MAX} bytes: it is no price file"
        raise InvalidConfigError(text, setting="prices", path=path)
    try:
        if content.lstrip().startswith(b"{"):
            return decode_json(content, Prices).check(path)
        return msgspec.convert(tomllib.loads(content.decode("utf-8")), Prices).check(path)
    except (*UNDECODABLE, msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"{path} is no price file: {error}", setting="prices", path=path) from error


def measure_cost(paths: JobPaths, now_ms: int) -> Flow[Cost]:
    """Look at the files of a job. `now_ms`: wall clock. Raises CorruptStateError for records that can't be read."""
    files: list[FileFacts] = yield DescribeFiles(paths.job_id)
    job: RecordedJob = yield from read_job(paths)
    known = yield from read_labels(paths, job.labelled)
    labels: dict[int, tuple[str, ...]] = {}
    for view in known.labels:
        labels[view.checkpoint_id] = (*labels.get(view.checkpoint_id, ()), view.label)
    savepoints: dict[int, list[FileFacts]] = {}
    unread = list(known.damage)
    completed = job.with_fact(CheckpointFact.COMPLETED)
    owned = [each for each in completed if _is_elsewhere(each) and is_absolute_folder(each.folder)]
    for each in owned[-SAVEPOINTS_MAX:]:
        try:
            savepoints[each.checkpoint_id] = yield DescribeFiles(each.folder)
        except HoldfastError as error:
            unread.append(f"{each.folder}: {error.message}")
    if len(owned) > SAVEPOINTS_MAX:
        unread.append(f"{len(owned) - SAVEPOINTS_MAX} older savepoints")
    return derive_cost(job, files, savepoints, labels, now_ms=now_ms, unread=unread)


def derive_cost(
    job: RecordedJob,
    files: Sequence[FileFacts],
    savepoints: Mapping[int, Sequence[FileFacts]],
    labels: Mapping[int, tuple[str, ...]],
    *,
    now_ms: int,
    unread: Sequence[str] = (),
) -> Cost:
    """`files`: of the job's directory; `savepoints`: those in the folders of its savepoints, by id."""
    placed = _place(job.job_id, files)
    gone = {number for number, facts in savepoints.items() if not facts}  # disposed of by their user
    completed = job.with_fact(CheckpointFact.COMPLETED)
    gone |= {each.checkpoint_id for each in completed if not _is_elsewhere(each) and each.checkpoint_id not in placed.folders}
    points = [each for each in reversed(completed) if each.checkpoint_id not in gone]
    found = [_of_checkpoint(each, placed, savepoints, labels.get(each.checkpoint_id, ())) for each in points]
    everything = [*files, *(fact for facts in savepoints.values() for fact in facts)]
    small = [fact for fact in everything if fact.size < SMALL_FILE_BYTES]
    exclusive_size = sum(each.exclusive_size for each, point in zip(found, points, strict=True) if not _is_elsewhere(point))
    return Cost(
        job_id=job.job_id,
        as_of_ms=now_ms,
        total_size=_size(everything),
        exclusive_size=exclusive_size,
        shared_size=_size(placed.shared.values()),
        savepoint_size=sum(map(_size, savepoints.values())),
        other_size=placed.other_size + sum(map(_size, placed.folders.values())) - exclusive_size,
        files=len(everything),
        small_files=len(small),
        small_file_size=_size(small),
        checkpoints=tuple(found),
        requests=_requests(job, points, placed),
        unread=tuple(unread),
    )


class _Placed(NamedTuple):
    """Files of a job's directory by what they are of."""

    folders: dict[int, list[FileFacts]]
    """Of checkpoints, by id."""
    shared: dict[str, FileFacts]
    """By name."""
    other_size: int


def _place(job_id: str, files: Sequence[FileFacts]) -> _Placed:
    folders: dict[int, list[FileFacts]] = {}
    shared: dict[str, FileFacts] = {}
    other_size = 0
    for fact in files:
        top, _, rest = fact.path.removeprefix(f"{job_id}/").partition("/")
        number = parse_checkpoint_name(top)
        if number is not None:
            folders.setdefault(number, []).append(fact)
        elif top == SHARED_FOLDER and rest:
            shared[rest] = fact
        else:
            other_size += fact.size
    return _Placed(folders, shared, other_size)


def _of_checkpoint(
    each: RecordedCheckpoint, placed: _Placed, savepoints: Mapping[int, Sequence[FileFacts]], labels: tuple[str, ...]
) -> CheckpointCost:
    if _is_elsewhere(each) and each.checkpoint_id not in savepoints:
        return CheckpointCost(each.checkpoint_id, each.kind.value, labels, -1, 0, -1, -1)
    own = (savepoints if _is_elsewhere(each) else placed.folders).get(each.checkpoint_id, ())
    named: list[FileFacts] = []
    if isinstance(each.decision, Completed):
        names = {shared_name(handle.path) or "" for handle in each.decision.shared}
        named = [placed.shared[name] for name in sorted(names) if name in placed.shared]
    both = [*own, *named]
    small = sum(fact.size < SMALL_FILE_BYTES for fact in both)
    return CheckpointCost(each.checkpoint_id, each.kind.value, labels, _size(own), _size(named), len(both), small)


def _is_elsewhere(each: RecordedCheckpoint) -> bool:
    """Whether its files are in a folder of its own, and the job's directory has only a pointer to it."""
    return isinstance(each.decision, SavepointRecord)


def _size(facts: Iterable[FileFacts]) -> int:
    return sum(fact.size for fact in facts)


def _requests(job: RecordedJob, points: Sequence[RecordedCheckpoint], placed: _Placed) -> Requests | None:
    """By the interval that holds, settings that were changed since the submission included: what is on record of the times of
    checkpoints is of before the last change, or of a single one. `points`: completed ones that were listed, newest first."""
    points = [each for each in points if isinstance(each.decision, Completed)]
    if not points or not job.is_live or job.newest_submission is None:
        return None
    config = derive_config(job, job.newest_submission)
    if config.checkpoint_interval_ms is None:
        return None
    newest, interval_ms = points[0], max(config.checkpoint_interval_ms, config.min_pause_ms)
    own = [fact for fact in placed.folders[newest.checkpoint_id] if not fact.path.rpartition("/")[2].startswith("_")]
    written = len(own) + sum(writer_of(name) == newest.checkpoint_id for name in placed.shared)
    rate = HOUR_MS / interval_ms
    return Requests(
        checkpoints_per_hour=rate,
        puts_per_hour=rate * (written + PUTS_BESIDE_FILES),
        gets_per_hour=rate * GETS,
        lists_per_hour=rate * LISTS,
        deletes_per_hour=rate * (written + DELETES_BESIDE_FILES),
    )


def priced(cost: Cost, prices: Prices) -> Cost:
    """With money. Small files are billed by `least_file_size`, at their average size."""
    billed = cost.total_size + max(0, prices.least_file_size * cost.small_files - cost.small_file_size)
    if prices.least_file_size > SMALL_FILE_BYTES:
        billed = max(billed, prices.least_file_size * cost.small_files + cost.total_size - cost.small_file_size)
    storage = billed / GIB * prices.storage_gib_month
    requests = 0.0
    if cost.requests is not None:
        pairs = (
            (cost.requests.puts_per_hour, prices.puts_per_1000),
            (cost.requests.gets_per_hour, prices.gets_per_1000),
            (cost.requests.lists_per_hour, prices.lists_per_1000),
            (cost.requests.deletes_per_hour, prices.deletes_per_1000),
        )
        requests = sum(HOURS_A_MONTH * rate / 1000 * price for rate, price in pairs)
    money = Money(prices.currency, storage, requests, storage + requests, prices.name)
    return msgspec.structs.replace(cost, money=money)

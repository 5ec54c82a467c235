"""Files of a folder as a source: those that are there, or also those that come while the job runs. A file is a split.

The enumerator lists the folder and remembers what it has found. A file is read once it is settled: two listings in a row showed it
with the same size and time. What is remembered is bounded by the files that the folder has or lately had, or by their age."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import xxhash

from holdfast.operators.functions.schema import declared_type
from holdfast.operators.sources.file_formats import FileSplit, FileSplitReader, open_filesystem, parquet_schema
from holdfast.operators.sources.splits import EnumeratorContext, ReaderContext, Source, SplitEnumerator
from holdfast.statebackends.decoding import decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InputChangedError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.state import duration_ms
from holdfast.statebackends.storage.failures import unavailable

Format = Literal["csv", "json", "parquet"]
SUFFIXES: dict[str, tuple[str, ...]] = {
    "csv": (".csv", ".csv.gz"),
    "json": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
    "parquet": (".parquet",),
}
WATCH_INTERVAL_MS_MIN = 10
FILES_REMEMBERED_MAX = 2_000_000
"""Files in one folder, at most: each takes 24 bytes of state, and one that is gone 28."""
FORGET_MS = 3_600_000
FORGET_LISTINGS_MIN = 3
"""A file is forgotten once so many listings in a row, over at least an hour, were without it: a folder that is not mounted for a
while, or an object store whose listings lag, shows files that were read a second time."""
_KEY_BYTES, _FINGERPRINT_BYTES, _COUNT_BYTES = 16, 8, 4
_ENTRY_BYTES = _KEY_BYTES + _FINGERPRINT_BYTES
_GONE_BYTES = _ENTRY_BYTES + _COUNT_BYTES

log = logging.getLogger("holdfast.sources")


class FileSource(Source[FileSplit]):
    """Source of the files of a folder, read recursively: CSV with a header, JSON lines, or Parquet.

    path: a folder, on a file system that all workers see, or a URL. format: by default from the suffix of `pattern`. schema:
    pa.Schema, {column: type} or a record type; None: of Parquet, that of the files that are there. pattern: of file names, such as
    `orders-*.csv`; by default the format's suffixes. Names that begin with a dot or an underscore are no input, but for
    a folder `_<column>=<value>`.
    watch_interval: timedelta or ms, at least 10; None: the files that are there when the job starts, and then the source ends. A
    watched file is read once it has not changed from one listing to the next: write it under another name, or elsewhere on the same
    file system, and rename it.
    max_file_age: a file that is older than the newest one by more is left out, so that it need not be remembered; None: none is. A
    time in the future counts as that of the listing.
    A column that the path below the folder names, `<column>=<value>/`, is taken from there. A file that changes while, or after, it
    is read raises InputChangedError; a record that does not fit, InvalidRecordError."""

    split_type = FileSplit
    splits_per_reader = 2
    reads_in_turn = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        schema: Any = None,
        pattern: str | None = None,
        watch_interval: Any = None,
        max_file_age: Any = None,
        name: str = "files",
    ) -> None:
        self.name = name
        self.path = _checked_path(path)
        self.format = _format_of(format, pattern)
        self.pattern = pattern
        self.watch_interval_ms = _interval(watch_interval, "watch_interval", WATCH_INTERVAL_MS_MIN)
        self.max_file_age_ms = _interval(max_file_age, "max_file_age", 1)
        self._schema = self._declared(schema)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def with_columns(self, names: Sequence[str]) -> FileSource:
        """The same source, of which only these columns are read."""
        narrow = copy(self)
        narrow._schema = pa.schema([self._schema.field(name) for name in names])
        return narrow

    def create_enumerator(self) -> FolderEnumerator:
        return FolderEnumerator(self)

    def create_split_reader(self, context: ReaderContext) -> FileSplitReader:
        return FileSplitReader(self.path, self.format, self._schema, context.uid)

    def takes(self, path: str) -> bool:
        """Whether a file, by its path below the folder, is input."""
        parts = path.split("/")
        if any(part.startswith((".", "_")) and not _names_column(part) for part in parts[:-1]) or parts[-1].startswith((".", "_")):
            return False
        if self.pattern is not None:
            return fnmatch.fnmatchcase(parts[-1], self.pattern)
        return parts[-1].endswith(SUFFIXES[self.format])

    def _declared(self, given: Any) -> pa.Schema:
        if given is not None:
            schema: pa.Schema | None = declared_type(given, self.name).schema
        elif self.format == "parquet":
            files = sorted(list_folder(self, "").files, key=_by_age)
            schema = parquet_schema(self.path, [file.path for file in files])
        else:
            raise InvalidConfigError(f"source {self.name!r}: {self.format} files need a schema=", setting="schema")
        if schema is None or not schema.names:
            raise InvalidConfigError(f"source {self.name!r}: its schema has no columns", setting="schema")
        for column in schema:
            if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
                raise InvalidConfigError(f"column {column.name} holds nanoseconds: write it as microseconds", column=column.name)
        return schema.remove_metadata()


def _checked_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise InvalidConfigError(f"path is {path!r}, must be a folder", setting="path")
    return text if "://" in text else os.path.abspath(text)


def _format_of(given: str | None, pattern: str | None) -> Format:
    if given is None:
        given = next((name for name, suffixes in SUFFIXES.items() if pattern is not None and pattern.endswith(suffixes)), None)
    if given not in get_args(Format):
        raise InvalidConfigError(f"format is {given!r}, must be one of {', '.join(get_args(Format))}", setting="format")
    found: Format = given  # type: ignore[assignment]
    return found


def _interval(given: Any, setting: str, least_ms: int) -> int | None:
    if given is None:
        return None
    number_ms = duration_ms(given, setting)
    if number_ms < least_ms:
        raise InvalidConfigError(f"{setting} must be at least {least_ms} ms, got {number_ms}", setting=setting)
    return number_ms


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file of a listing."""

    path: str
    """As the file system names it."""
    size: int
    modified_ns: int

    @property
    def key(self) -> bytes:
        return xxhash.xxh3_128_digest(os.fsencode(self.path))

    @property
    def fingerprint(self) -> bytes:
        return xxhash.xxh3_64_digest(b"%d/%d" % (self.size, self.modified_ns))


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder holds at a time."""

    files: list[FoundFile]
    """The input."""
    is_there: bool
    """The folder exists, or it is on an object store, which has no empty folders."""
    is_empty: bool
    """There is no file, input or not."""
    now_ns: int
    """Wall clock, ns since the epoch."""


def list_folder(source: FileSource, operator: str) -> Listing:
    """Raises StorageUnavailableError, and InvalidConfigError for input whose name is not UTF-8, which can't be opened."""
    try:
        filesystem, root = open_filesystem(source.path)
        infos = _infos(filesystem, root)
        top = root if filesystem.type_name == "local" else root.partition("/")[0]
        top_is_there = bool(infos) or filesystem.get_file_info(top).type == pafs.FileType.Directory
    except (OSError, pa.ArrowException) as error:
        raise unavailable(error, f"source {operator}: {source.path}", path=source.path, operator=operator) from error
    if not top_is_there and top != root:
        message = f"source {operator}: {source.path}: there is no bucket {top!r}"
        raise InvalidConfigError(message, operator=operator, path=source.path)
    prefix = root.rstrip("/") + "/"
    files, is_empty = [], True
    for info in infos:
        if info.type != pafs.FileType.File:
            continue
        is_empty = False
        path = _path_of(source, info, operator, prefix)
        if path is not None and source.takes(path.removeprefix(prefix)):
            files.append(FoundFile(path, int(info.size), int(info.mtime_ns or 0)))
    return Listing(files, top_is_there, is_empty, time.time_ns())


def _names_column(folder: str) -> bool:
    """Whether a folder is `<column>=<value>` of a column whose name begins with an underscore, which Spark reads as well."""
    return folder.startswith("_") and "=" in folder


def _infos(filesystem: pafs.FileSystem, root: str) -> list[Any]:
    """What is below a folder. On a local file system folder by folder: Arrow follows a link to a folder that it is in again and
    again, up to the system's bound for links, and with two of them for ever."""
    if filesystem.type_name != "local":
        return list(filesystem.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True)))
    found: list[Any] = []
    folders: list[str | bytes] = [root]
    while folders:
        infos = filesystem.get_file_info(pafs.FileSelector(folders.pop(), allow_not_found=True))
        found += infos
        inner = [_raw_path(info) for info in infos if info.type == pafs.FileType.Directory]
        folders += [path for path in inner if not (os.path.islink(path) and _leads_above(os.fsdecode(path), root))]
    return found


def _raw_path(info: Any) -> str | bytes:
    """Bytes where it is not UTF-8."""
    try:
        path: str = info.path
    except UnicodeDecodeError as error:
        return error.object
    return path


def _leads_above(link: str, root: str) -> bool:
    """Whether a link is to a folder that it is in, also by way of other links."""
    target = f"{os.path.realpath(link).rstrip('/')}/"
    folder = os.path.dirname(link)
    while f"{folder}/".startswith(f"{root.rstrip('/')}/"):
        if f"{os.path.realpath(folder)}/".startswith(target):
            return True
        folder = os.path.dirname(folder)
    return False


def _by_age(file: FoundFile | FileSplit) -> tuple[int, str]:
    return file.modified_ns, file.path if isinstance(file, FoundFile) else file.split_id


def _path_of(source: FileSource, info: Any, operator: str, prefix: str) -> str | None:
    """None for a name that is not UTF-8 and no input."""
    try:
        path: str = info.path
    except UnicodeDecodeError as error:
        name = error.object.decode(errors="backslashreplace")
        if source.takes(name.removeprefix(prefix)):
            message = f"source {operator}: {name}: the name of a file to read must be UTF-8"
            raise InvalidConfigError(message, operator=operator, path=name) from error
        return None
    return path


class _State(msgspec.Struct, frozen=True, array_like=True):
    """The state of the enumerator."""

    version: int
    newest_ns: int
    """Time of the newest file that was found."""
    found: bytes
    """24 bytes for each file: of its path, and of its size and time."""
    gone: bytes = b""
    """28 bytes for each file that the last listings were without: the same, and how many (uint32, big-endian)."""


@dataclass(frozen=True, slots=True)
class FileMemory:
    """What is known of a folder: changed by no one, so that a thread may compare a listing with it."""

    found: dict[bytes, bytes] = field(default_factory=dict)
    """Files that were handed on: path -> size and time, as digests."""
    gone: dict[bytes, int] = field(default_factory=dict)
    """Those of them that are not there: path -> listings in a row without it."""
    newest_ns: int = 0
    """Time of the newest file; never later than the clock was, and never less than before, since older files are forgotten."""
    unsettled: dict[bytes, bytes] = field(default_factory=dict)
    """Files of the last listing that were new or had changed; not stored."""
    encoded: bytes = b""

    @classmethod
    def decoded(cls, state: bytes, operator: str) -> FileMemory:
        """Raises CorruptStateError."""
        stored = decode_msgpack(state, _State)
        if stored.version != 1 or len(stored.found) % _ENTRY_BYTES or len(stored.gone) % _GONE_BYTES:
            reason = f"what it has found is in a format that this version does not know: {stored.version}"
            raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
        found = dict(_cut(entry, _KEY_BYTES) for entry in _entries(stored.found, _ENTRY_BYTES))
        gone = {}
        for entry in _entries(stored.gone, _GONE_BYTES):
            (key, found[key]), count = _cut(entry[:_ENTRY_BYTES], _KEY_BYTES), entry[_ENTRY_BYTES:]
            gone[key] = int.from_bytes(count)
        return cls(found, gone, stored.newest_ns, encoded=state)

    def with_state(self) -> FileMemory:
        """The same, encoded."""
        here = b"".join(key + fingerprint for key, fingerprint in self.found.items() if key not in self.gone)
        gone = b"".join(key + self.found[key] + count.to_bytes(_COUNT_BYTES) for key, count in self.gone.items())
        return replace(self, encoded=msgspec.msgpack.encode(_State(1, self.newest_ns, here, gone)))


def _entries(stored: bytes, size: int) -> Iterable[bytes]:
    return (stored[start : start + size] for start in range(0, len(stored), size))


def _cut(entry: bytes, size: int) -> tuple[bytes, bytes]:
    return entry[:size], entry[size:]


@dataclass(frozen=True, slots=True)
class Discovered:
    """One listing, compared with what was known."""

    memory: FileMemory
    splits: list[FileSplit]
    """Of files that are new, and settled."""
    too_old: int = 0
    """Files that are older than max_file_age says."""
    error: Exception | None = None
    """Why the job can't go on."""


class FolderEnumerator(SplitEnumerator[FileSplit]):
    """Lists the folder at intervals; a listing is looked through on the thread of `discover`, however many files it has."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.discovery_interval_ms = source.watch_interval_ms
        self._operator = source.name
        self._memory = FileMemory().with_state()
        self._too_old = 0

    def open(self, context: EnumeratorContext) -> None:
        self._operator = context.uid

    def discover(self) -> Discovered:
        listing, memory = list_folder(self._source, self._operator), self._memory
        if memory.found and not listing.is_there:
            path, operator = self._source.path, self._operator
            raise StorageUnavailableError(f"source {operator}: {path} was there, and is not", path=path, operator=operator)
        return self._compared(listing, memory)

    def _compared(self, listing: Listing, memory: FileMemory) -> Discovered:
        newest_ns = max([memory.newest_ns, *(min(file.modified_ns, listing.now_ns) for file in listing.files)])
        age_ms = self._source.max_file_age_ms
        oldest_ns = 0 if age_ms is None else newest_ns - age_ms * 1_000_000
        seen: set[bytes] = set()
        added: dict[bytes, FoundFile] = {}
        unsettled: dict[bytes, bytes] = {}
        too_old = 0
        for file in listing.files:
            if file.modified_ns < oldest_ns:
                too_old += 1
                continue
            key, fingerprint = file.key, file.fingerprint
            known = memory.found.get(key)
            if known == fingerprint:
                seen.add(key)
            elif known is not None and memory.gone.get(key, 0) < FORGET_LISTINGS_MIN:
                return Discovered(memory, [], error=self._changed(file.path))
            elif self.discovery_interval_ms is None or memory.unsettled.get(key) == fingerprint:
                seen.add(key)
                added[key] = file
            else:
                unsettled[key] = fingerprint
        after = self._remembered(memory, listing, seen, added)
        after = replace(after, newest_ns=newest_ns, unsettled=unsettled)
        if added or after.gone != memory.gone or newest_ns != memory.newest_ns:
            after = after.with_state()
        new = sorted((FileSplit(file.path, file.size, file.modified_ns) for file in added.values()), key=_by_age)
        return Discovered(after, new, too_old, self._too_many(after))

    def _remembered(
        self, memory: FileMemory, listing: Listing, seen: set[bytes], added: dict[bytes, FoundFile]
    ) -> FileMemory:
        """Files that were found; a listing without any file says nothing of those that are gone."""
        gone = {key: memory.gone.get(key, 0) + 1 for key in memory.found if key not in seen}
        if listing.is_empty or not (added or gone or memory.gone):
            return memory
        found = {**memory.found, **{key: file.fingerprint for key, file in added.items()}}
        for key in [key for key, count in gone.items() if count >= self._forget_listings]:
            del found[key], gone[key]
        return replace(memory, found=found, gone=gone)

    @property
    def _forget_listings(self) -> int:
        interval_ms = self.discovery_interval_ms or FORGET_MS
        return max(FORGET_LISTINGS_MIN, -(-FORGET_MS // interval_ms))

    def handle_discovered(self, found: Discovered) -> list[FileSplit]:
        if found.error is not None:
            raise found.error
        if found.too_old > self._too_old:
            # Among them are files that were read long ago: only at first it is known that none was.
            level = logging.INFO if self._memory.found else logging.WARNING
            log.log(level, "source %s: %d files are older than max_file_age, and left out", self._operator, found.too_old)
        self._memory, self._too_old = found.memory, found.too_old
        return found.splits

    def _changed(self, path: str) -> InputChangedError:
        reason = "it has changed since it was found"
        return InputChangedError(f"source {self._operator}: {path}: {reason}", operator=self._operator, path=path, reason=reason)

    def _too_many(self, memory: FileMemory) -> InvalidConfigError | None:
        if len(memory.found) <= FILES_REMEMBERED_MAX:
            return None
        message = f"source {self._operator}: {len(memory.found):,} files, more than {FILES_REMEMBERED_MAX:,}: give max_file_age="
        return InvalidConfigError(message, operator=self._operator, setting="max_file_age")

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return self._memory.encoded

    def restore_state(self, state: bytes) -> None:
        self._memory = FileMemory.decoded(state, self._operator)

"""SHELL: writes the audit log of one coordinator process, behind its requests, and reads the logs of all of them.

Its thread begins with the first request that is recorded; a storage that is slow or down holds no request up. What was recorded is
in storage a second later."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.api.access.audit import (
    FURTHER,
    WRITE_EVERY_MS,
    AuditLine,
    AuditRecorder,
    AuditReport,
    AuditVerifier,
    FileReady,
    Noted,
    RefusalWindow,
    StoredFile,
    choose_pruned,
    in_order,
    mark_pruned,
)
from holdfast.coordinator.ha.store import list_jobs
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, ObjectMissingError
from holdfast.statebackends.layout import (
    AUDIT_CHAIN_CHARACTERS,
    AUDIT_FOLDER,
    DIRECTORY_FILE,
    SERVICE_FOLDER,
    TOKENS_FOLDER,
    further_chain,
    parse_audit_path,
)
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DescribeFiles,
    FileFacts,
    Flow,
    ListFiles,
    ListFolder,
    PutIfAbsent,
    ReadFile,
    Storage,
    run_flow,
)

log = logging.getLogger("holdfast.audit")

FLUSH_S = 3.0
"""Longest that a stopping service waits for the last lines."""
CHAINS_NAMED_MAX = 100
"""Newest other chains whose ends a first line names."""
NOTED_MAX = 1_000
"""Requests that wait until the ends of other chains are known."""
NOTED_OF_ONE_MAX = NOTED_MAX // 2
"""Of one sender: it must not take the places of all."""
PRUNE_EVERY_S = 600.0
"""Time between two looks at how large the log is."""
VERIFICATIONS_MAX = 3
FILE_BYTES_MAX = 1024 * 1024
"""Of a file that is read: what is larger was written by nobody here."""


class _Pruned(NamedTuple):
    """What is to be deleted of a log that is too large."""

    gone: list[str]
    """Paths of files that are to go."""
    left: list[str]
    """Those of the others; both in order."""
    deleted: AuditVerifier
    """Has read what is to go."""
    chosen: Mapping[str, int]
    """Chain -> its first file that is kept."""


class AuditLog:
    """The log of one process. `note` may be called from any thread and never blocks on storage."""

    def __init__(self, location: str, *, prunes: bool = True, writer: str = "") -> None:
        """`location`: the state directory. `prunes`: whether this process deletes the oldest files of a log that is too large.
        `writer`: what it is and that it began, if it is no coordinator: the log's reader would take it for one."""
        self._location = location
        self._prunes = prunes
        self._writer = writer
        self._lock = threading.Lock()
        self._recorder: AuditRecorder | None = None
        self._further: AuditRecorder | None = None
        """What senders change beyond their share of a day; None: nothing yet."""
        self._noted: list[tuple[Noted, int]] = []
        """Before the ends of other chains are known, each with its time."""
        self._waiting: Counter[str] = Counter()
        """How many of them are of whom."""
        self._refusals = RefusalWindow()
        self._refusals_hidden = self._dropped = 0
        """What is only counted of them."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._is_failing = False
        self._looked_s = -PRUNE_EVERY_S
        """When the size of the log was last looked at."""
        self._asked = list[threading.Event]()
        """Who waits until all that was noted is stored."""

    def note(self, noted: Noted) -> None:
        """Record a request; in storage a second later."""
        with self._lock:
            if self._recorder is not None:
                self._record(self._recorder, noted, _wall_ms())
            else:
                self._keep(noted)
            if self._thread is None and not self._stopping.is_set():
                self._begin_thread()

    def _record(self, recorder: AuditRecorder, noted: Noted, wall_ms: int) -> None:
        """In the chain that it belongs into."""
        now_ms = _now_ms()
        if not recorder.has_share(noted, now_ms):
            if self._further is None:
                self._further = AuditRecorder(further_chain(recorder.chain), {}, now_ms=now_ms, wall_ms=wall_ms)
            recorder = self._further
        recorder.note(noted, now_ms=now_ms, wall_ms=wall_ms)

    def _keep(self, noted: Noted) -> None:
        """Refusals must not take the place of changes: anybody can cause them, and a storage may be down for long."""
        if noted.is_refused and not self._refusals.admits(noted):
            self._refusals_hidden += 1
        elif len(self._noted) >= NOTED_MAX or self._waiting[noted.sender] >= NOTED_OF_ONE_MAX:
            self._dropped += 1
        else:
            self._noted.append((noted, _wall_ms()))
            self._waiting[noted.sender] += 1

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="holdfast-audit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads: the next request tries again
            log.warning("the audit log can't be written, and waits: %s", error)
            return
        self._thread = thread

    def store(self, seconds: float) -> bool:
        """Write what waits, without waiting for more; whether it is stored by then."""
        stored = threading.Event()
        with self._lock:
            self._asked.append(stored)
        return stored.wait(seconds)

    def close(self, seconds: float = FLUSH_S) -> None:
        """Write what waits, for so long at most. Idempotent."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        storage: Storage | None = None
        while True:
            is_last = self._stopping.wait(WRITE_EVERY_MS / 1000)
            try:
                storage = storage or open_storage(self._location)
                with self._lock:
                    asked = tuple(self._asked)
                self._write(storage, is_last=is_last or bool(asked))
                with self._lock:
                    del self._asked[: len(asked)]
                for stored in asked:
                    stored.set()
                if self._prunes and not is_last:
                    self._prune(storage)
                self._is_failing = False
            except Exception as error:  # whatever it is, later lines are tried again: nothing else starts this thread anew
                if not self._is_failing:
                    log.warning(
                        "the audit log can't be written, and waits: %s", error, exc_info=not isinstance(error, HoldfastError)
                    )
                self._is_failing = True
            if is_last:
                return

    def _write(self, storage: Storage, *, is_last: bool) -> None:
        if self._recorder is None:
            self._begin(run_flow(read_heads(), storage))
        for recorder in self._recorders():
            self._name_further(recorder, is_last=is_last)
            while (ready := self._take(recorder, is_last=is_last)) is not None:
                run_flow(_create(ready), storage)
                with self._lock:
                    recorder.written()

    def _recorders(self) -> list[AuditRecorder]:
        """The process's own chain comes last: it names what is stored of the other one."""
        with self._lock:
            return [each for each in (self._further, self._recorder) if each is not None]

    def _name_further(self, recorder: AuditRecorder, *, is_last: bool) -> None:
        with self._lock:
            if recorder is self._recorder and self._further is not None:
                end = self._further.stored
                recorder.name_further(self._further.chain, end, now_ms=_now_ms(), wall_ms=_wall_ms(), force=is_last)

    def _prune(self, storage: Storage) -> None:
        """Delete the oldest files of a log that has grown too large: behind the line that says so."""
        now_s = time.monotonic()
        if now_s - self._looked_s < PRUNE_EVERY_S:
            return
        self._looked_s = now_s
        found = self._find_pruned(storage)
        if found is None:
            return
        named = _named_ends(found.left, storage)
        with self._lock:
            assert self._recorder is not None
            marks = mark_pruned(found.chosen, found.deleted, named, {parse_audit_path(path)[0] for path in found.left})
            self._recorder.prune(marks, now_ms=_now_ms(), wall_ms=_wall_ms())
        self._write(storage, is_last=True)
        for path in self._meanwhile(found.gone, storage):
            chain, number = parse_audit_path(path)
            if chain in marks and number < marks[chain].file:
                storage.execute(DeleteFile(path))
        log.info("the audit log was too large: its oldest %d files are deleted", len(found.gone))

    def _find_pruned(self, storage: Storage) -> _Pruned | None:
        """None: all files have room, or another coordinator deletes some at the moment."""
        facts: list[FileFacts] = storage.execute(DescribeFiles(AUDIT_FOLDER))
        evidence, suspected = frozenset[str](), frozenset[str]()
        while True:
            found = self._oldest(facts, evidence, storage)
            if found is None:
                return None
            others = (run_flow(_read(path), storage) or b"" for path in self._meanwhile(found.left, storage))
            changed = found.deleted.evidence(others)
            if not changed:
                return found if found.gone else None
            if not changed <= suspected:  # files that another coordinator deletes at the moment look alike
                suspected |= changed
                facts = storage.execute(DescribeFiles(AUDIT_FOLDER))
                continue
            log.warning("chains %s of the audit log were changed: nothing of them is deleted", ", ".join(sorted(changed)))
            evidence |= changed

    def _oldest(self, facts: Sequence[FileFacts], evidence: frozenset[str], storage: Storage) -> _Pruned | None:
        """What has no room, but for chains that are evidence. None: some of it is gone already."""
        known = [fact for fact in facts if parse_audit_path(fact.path)[0] not in evidence]
        own = [each.chain for each in self._recorders()]
        chosen = choose_pruned([StoredFile(each.path, each.size, each.modified_ms) for each in known], own)
        paths = in_order([each.path for each in facts])
        gone = [path for path in paths if parse_audit_path(path)[1] < chosen.get(parse_audit_path(path)[0], 0)]
        deleted = AuditVerifier()
        for path in self._meanwhile(gone, storage):
            content = run_flow(_read(path), storage)
            if content is None:
                return None
            for _ in deleted.add(path, content):
                pass
        return _Pruned(gone, in_order(list(set(paths).difference(gone))), deleted, chosen)

    def _meanwhile(self, paths: Iterable[str], storage: Storage) -> Iterator[str]:
        """The same; lines that come meanwhile are written between them."""
        written_s = time.monotonic()
        for path in paths:
            if time.monotonic() - written_s >= WRITE_EVERY_MS / 1000:
                self._write(storage, is_last=False)
                written_s = time.monotonic()
            yield path

    def _begin(self, heads: Mapping[str, str]) -> None:
        with self._lock:
            began_ms = self._noted[0][1] if self._noted else _wall_ms()
            chain = secrets.token_hex(AUDIT_CHAIN_CHARACTERS // 2)
            recorder = AuditRecorder(chain, heads, now_ms=_now_ms(), wall_ms=began_ms, writer=self._writer)
            for noted, wall_ms in self._noted:
                self._record(recorder, noted, wall_ms)
            recorder.count(refusals=self._refusals_hidden, dropped=self._dropped)
            self._noted.clear()
            self._waiting.clear()
            self._recorder = recorder

    def _take(self, recorder: AuditRecorder, *, is_last: bool) -> FileReady | None:
        with self._lock:
            return recorder.take(now_ms=_now_ms(), wall_ms=_wall_ms(), force=is_last)


def _named_ends(paths: Sequence[str], storage: Storage) -> dict[str, list[str]]:
    """Chain -> its ends that the first lines of some files name."""
    named: dict[str, list[str]] = {}
    for path in paths:
        if parse_audit_path(path)[1] == 0:
            for line in AuditVerifier().add(path, run_flow(_read(path), storage) or b""):
                for chain, head in line.heads.items() if line.kind != FURTHER else ():
                    named.setdefault(chain, []).append(head)
    return named


def _create(ready: FileReady) -> Flow[None]:
    """A name is this process's alone: where it exists, an earlier try has written it."""
    yield PutIfAbsent(ready.path, ready.content)


def read_heads() -> Flow[dict[str, str]]:
    """Chain -> hash of its last line, of the newest chains."""
    facts = yield DescribeFiles(AUDIT_FOLDER)
    newest: dict[str, int] = {}
    for fact in facts:
        chain, _ = parse_audit_path(fact.path)
        if chain:
            newest[chain] = max(newest.get(chain, 0), fact.modified_ms)
    kept = set(sorted(newest, key=lambda chain: -newest[chain])[:CHAINS_NAMED_MAX])
    verifier = AuditVerifier()
    for chain, paths in groupby(in_order([fact.path for fact in facts]), key=lambda path: parse_audit_path(path)[0]):
        if chain in kept:
            *_, last = paths
            for _ in verifier.add(last, (yield from _read(last)) or b""):
                pass
    return dict(verifier.heads)


def _read(path: str) -> Flow[bytes | None]:
    """None: it is not there any more."""
    try:
        content: bytes = yield ReadFile(path, 0, FILE_BYTES_MAX)
    except ObjectMissingError:
        return None
    return content


def verify_audit(location: str) -> AuditReport:
    """Verify every chain of a state directory; once more where something is amiss: files come and go while they are listed and
    read, and what somebody changed stays. A folder with files of a log alone, such as a copy, is verified as well.

    Raises InvalidConfigError for a place that is neither, StorageUnavailableError."""
    for _ in range(VERIFICATIONS_MAX):
        verifier = AuditVerifier()
        for _ in _lines(location, verifier):
            pass
        report = verifier.report()
        if report.is_whole:
            return report
    return report if report.files else replace(report, untold=find_untold(location))


def read_audit(location: str) -> tuple[AuditLine, ...]:
    """All lines that can be read, by time."""
    return tuple(sorted(_lines(location, AuditVerifier()), key=lambda line: line.time_ms))


def find_untold(location: str) -> tuple[str, ...]:
    """What a state directory without a log holds that a log would tell of, as `3 jobs`. Raises as `verify_audit`."""
    return run_flow(_untold(location), open_storage(location))


def _untold(location: str) -> Flow[tuple[str, ...]]:
    """Jobs and issued tokens of a state directory: it has them by requests alone. What a coordinator writes by itself says nothing.

    Raises InvalidConfigError: a mistyped name must not pass for a directory in which nothing has happened."""
    names = yield ListFolder("")
    jobs, tokens = len((yield from list_jobs())), len((yield ListFolder(TOKENS_FOLDER)))
    if not jobs and DIRECTORY_FILE not in names and f"{SERVICE_FOLDER}/" not in names:
        message = f"{location} is no state directory: it has no {DIRECTORY_FILE}, no job and no audit log"
        raise InvalidConfigError(message, setting="state_dir")
    counts = ((jobs, "jobs"), (tokens, "issued tokens"))
    return tuple(f"{count:,} {what if count > 1 else what.removesuffix('s')}" for count, what in counts if count)


PAGE_LINES_MAX = 500
PAGE_FILES_MAX = 100
"""Files that are read for one page; it ends behind them, perhaps without a line."""

_PLACE = re.compile(r"(\d{1,15})\.([0-9a-f]{1,64})\.(\d{1,9})\.(\d{1,9})")


class AuditPage(NamedTuple):
    """Some lines, newest first."""

    lines: tuple[AuditLine, ...]
    next: str
    """Position of the page with older ones; empty: there is none."""


def read_audit_page(location: str, after: str, limit: int) -> AuditPage:
    """The newest lines of all chains, or those behind the page whose `next` is `after`: the newest files first, and the lines of
    each from its end. Lines of coordinators that ran at one time may be out of order by the age of a file, a second as a rule.

    Raises InvalidConfigError for no position, StorageUnavailableError."""
    storage = open_storage(location)
    facts: list[FileFacts] = storage.execute(DescribeFiles(AUDIT_FOLDER))
    named = ((fact.modified_ms, *parse_audit_path(fact.path), fact.path) for fact in facts)
    files = sorted((file for file in named if file[1]), reverse=True)
    start, shown = _place(after)
    lines: list[AuditLine] = []
    read = 0
    for modified_ms, chain, number, path in files:
        place = modified_ms, chain, number
        if start is not None and place > start:
            continue
        skipped = shown if place == start else 0
        if read == PAGE_FILES_MAX:
            return AuditPage(tuple(lines), _next(place, skipped))
        read += 1
        verifier = AuditVerifier()
        for line in list(verifier.add(path, run_flow(_read(path), storage) or b""))[::-1][skipped:]:
            if len(lines) == limit:
                return AuditPage(tuple(lines), _next(place, skipped))
            lines.append(line)
            skipped += 1
    return AuditPage(tuple(lines), "")


def _next(place: tuple[int, str, int], shown: int) -> str:
    modified_ms, chain, number = place
    return f"{modified_ms}.{chain}.{number}.{shown}"


def _place(after: str) -> tuple[tuple[int, str, int] | None, int]:
    """File that a page begins in, and how many of its lines were shown."""
    if not after:
        return None, 0
    found = _PLACE.fullmatch(after)
    if found is None:
        raise InvalidConfigError("after is no position of the audit log: give `next` of the page before", setting="after")
    return (int(found[1]), found[2], int(found[3])), int(found[4])


def _lines(location: str, verifier: AuditVerifier) -> Iterator[AuditLine]:
    storage = open_storage(location)
    paths: list[str] = storage.execute(ListFiles(AUDIT_FOLDER))
    for path in in_order(paths):
        content = run_flow(_read(path), storage)
        if content is not None:
            yield from verifier.add(path, content)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000

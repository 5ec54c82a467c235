"""CORE and records of the audit log: who changed what, and who was refused. Pure: events and time in, files to write out.

Each coordinator process writes a chain of its own: files `_service/audit/<chain>-<n>.jsonl`, each created once, a JSON object a
line. A line has its number in the chain and SHA-256 over the line before it, so that a line that was changed, taken out or put in
breaks the chain from there on. The first line of a chain names the ends of the chains that were there, so that an end that was cut
off later is missed by its successor. What nobody can see is the loss of the newest lines, before a next chain has begun.

Refusals are bounded: anybody can cause them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.layout import audit_path, parse_audit_path

FILE_BYTES = 256 * 1024
"""A file that would be larger is written, and the next one begun."""
WRITE_EVERY_MS = 1_000
"""Oldest line that waits, at most: what a coordinator that dies may lose."""
REFUSALS_MAX = 200
"""Refusals recorded one by one in REFUSALS_EVERY_MS; further ones are counted in one line."""
REFUSALS_PER_SENDER_MAX = 20
"""Of them of one credential, or of one address without any: one sender can't use up all."""
REFUSALS_EVERY_MS = 60_000
WAITING_BYTES_MAX = 8 * 1024 * 1024
"""Lines that wait for a storage that does not answer; further ones are counted in one line."""
LINE_BYTES_MAX = 16 * 1024
HEADS_MAX = 10_000
"""Ends of other chains that a first line names, newest first."""

_TEXT_CHARACTERS_MAX = 512
NO_HASH = "0" * 64


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line, as stored."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    """0, 1, 2 ... within its chain."""
    before: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the line before, as its bytes are stored without the line's end; zeros for the first one."""
    time_ms: int
    kind: str
    """started, request, refused, dropped (lines or refusals that were only counted)."""
    request: str = ""
    job: str = ""
    subject: str = ""
    credential: str = ""
    """Name of the credential, never the credential itself."""
    role: str = ""
    peer: str = ""
    status: int = 0
    """Of the answer; 0: the caller left before it was answered."""
    count: int = 0
    heads: dict[str, str] = {}
    """Of a first line: chain -> hash of its last line."""


class Noted(msgspec.Struct, frozen=True):
    """A request to be recorded."""

    request: str
    job: str = ""
    subject: str = ""
    credential: str = ""
    role: str = ""
    peer: str = ""
    status: int = 0

    @property
    def is_refused(self) -> bool:
        return self.status in (401, 403)

    @property
    def sender(self) -> str:
        """Credential, or address without its port: of IPv6 the network of 64 bits, all of which one machine may have."""
        if self.credential:
            return f"credential {self.credential}"
        host = self.peer.rpartition(":")[0] or self.peer
        return ":".join(host.split(":")[:4]) if ":" in host else host


class FileReady(msgspec.Struct, frozen=True):
    """A file to be created."""

    path: str
    content: bytes


class RefusalWindow:
    """Which refusals are recorded one by one, and which are counted alone: a bound in all, and one for each sender."""

    def __init__(self) -> None:
        self._all = 0
        self._by_sender: Counter[str] = Counter()

    def admits(self, noted: Noted) -> bool:
        """Whether a refusal is recorded; if so, it takes a place."""
        sender = noted.sender
        if self._all >= REFUSALS_MAX or self._by_sender[sender] >= REFUSALS_PER_SENDER_MAX:
            return False
        self._all += 1
        self._by_sender[sender] += 1
        return True


class AuditRecorder:
    """The chain of one process. `take` gives the next file, which is given again until it is `written`."""

    def __init__(self, chain: str, heads: Mapping[str, str], *, now_ms: int, wall_ms: int) -> None:
        """`chain`: a name that no other process has."""
        self._chain = chain
        self._number = 0
        self._last = NO_HASH
        self._files = 0
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._since_ms = now_ms
        self._ready: FileReady | None = None
        self._refusals_hidden = self._dropped = 0
        self._refusals = RefusalWindow()
        self._window_ms = now_ms
        self._add(AuditLine(0, NO_HASH, wall_ms, "started", heads=dict(list(heads.items())[:HEADS_MAX])), now_ms)

    def note(self, noted: Noted, *, now_ms: int, wall_ms: int) -> None:
        """Record a request; refusals and what storage does not take in time are counted beyond their bounds."""
        self._roll_window(now_ms, wall_ms)
        if noted.is_refused and not self._refusals.admits(noted):
            self._refusals_hidden += 1
            return
        if self._open_bytes >= WAITING_BYTES_MAX:
            self._dropped += 1
            return
        texts = {name: getattr(noted, name)[:_TEXT_CHARACTERS_MAX] for name in ("request", "job", "subject", "credential", "peer")}
        kind = "refused" if noted.is_refused else "request"
        self._add(AuditLine(self._number, self._last, wall_ms, kind, role=noted.role, status=noted.status, **texts), now_ms)

    def count(self, *, refusals: int, dropped: int) -> None:
        """Add to what is counted and not recorded."""
        self._refusals_hidden += refusals
        self._dropped += dropped

    def _roll_window(self, now_ms: int, wall_ms: int) -> None:
        if now_ms - self._window_ms >= REFUSALS_EVERY_MS:
            self._window_ms, self._refusals = now_ms, RefusalWindow()
            self._count(self._refusals_hidden, "refusals beyond the bound", now_ms, wall_ms)
            self._refusals_hidden = 0
        if self._dropped and self._open_bytes < WAITING_BYTES_MAX:
            dropped, self._dropped = self._dropped, 0
            self._count(dropped, "requests while storage did not answer", now_ms, wall_ms)

    def _count(self, count: int, what: str, now_ms: int, wall_ms: int) -> None:
        if count:
            self._add(AuditLine(self._number, self._last, wall_ms, "dropped", subject=what, count=count), now_ms)

    def _add(self, line: AuditLine, now_ms: int) -> None:
        content = msgspec.json.encode(line)
        if not self._open:
            self._since_ms = now_ms
        self._open.append(content)
        self._open_bytes += len(content) + 1
        self._number, self._last = self._number + 1, hash_of(content)

    def take(self, *, now_ms: int, wall_ms: int, force: bool = False) -> FileReady | None:
        """The next file to create, if one is due; the same one until it is `written`. `force`: whatever waits is due."""
        self._roll_window(now_ms, wall_ms)
        if self._ready is None and self._open and (force or now_ms - self._since_ms >= WRITE_EVERY_MS or self._is_full):
            self._ready = FileReady(audit_path(self._chain, self._files), b"".join(self._cut()))
            self._files += 1
        return self._ready

    @property
    def _is_full(self) -> bool:
        return self._open_bytes >= FILE_BYTES

    def _cut(self) -> Iterator[bytes]:
        """Lines of one file, at least one."""
        size = 0
        while self._open and (not size or size + len(self._open[0]) < FILE_BYTES):
            line = self._open.pop(0)
            size += len(line) + 1
            self._open_bytes -= len(line) + 1
            yield line + b"\n"

    def written(self) -> None:
        self._ready = None


def hash_of(line: bytes) -> str:
    """SHA-256 of a line without its end."""
    return hashlib.sha256(line).hexdigest()


class AuditProblem(msgspec.Struct, frozen=True):
    """Something in a chain that no coordinator wrote, or that is missing."""

    path: str
    line: int
    """From 1; 0: the file as a whole."""
    problem: str


class AuditReport(msgspec.Struct, frozen=True):
    """What a verification found."""

    chains: int
    files: int
    lines: int
    problems: tuple[AuditProblem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems


class AuditVerifier:
    """Checks files of audit chains, given in the order of `in_order`, one at a time."""

    def __init__(self) -> None:
        self._problems: list[AuditProblem] = []
        self._heads: dict[str, str] = {}
        self._named: list[tuple[str, str, str]] = []
        self._hashes: dict[str, set[str]] = {}
        self._number: dict[str, int] = {}
        self._next_file: dict[str, int] = {}
        self._files = self._lines = 0

    def add(self, path: str, content: bytes) -> Iterator[AuditLine]:
        """Check one file; yields its lines that can be read."""
        chain, number = parse_audit_path(path)
        expected = self._next_file.get(chain, 0)
        if number != expected:
            self._problem(path, 0, f"file {expected} of chain {chain} is missing")
        self._next_file[chain] = number + 1
        self._files += 1
        if content and not content.endswith(b"\n"):
            self._problem(path, 0, "its last line is cut off")
        for index, raw in enumerate(content.splitlines(), 1):
            self._lines += 1
            try:
                line = decode_json(raw, AuditLine)
            except UNDECODABLE as error:
                self._problem(path, index, f"no line of an audit log: {error}")
                continue
            self._check(path, index, chain, line)
            self._heads[chain] = hash_of(raw)
            self._hashes.setdefault(chain, set()).add(self._heads[chain])
            yield line

    def _check(self, path: str, index: int, chain: str, line: AuditLine) -> None:
        number = self._number.get(chain, 0)
        if line.number != number:
            self._problem(path, index, f"line {line.number} of chain {chain} stands where {number} should")
        elif line.before != self._heads.get(chain, NO_HASH):
            self._problem(path, index, f"the line before it in chain {chain} was changed")
        self._number[chain] = line.number + 1
        self._named += [(path, other, head) for other, head in line.heads.items()]

    def _problem(self, path: str, line: int, text: str) -> None:
        self._problems.append(AuditProblem(path, line, text))

    def report(self) -> AuditReport:
        """The whole finding, once all files were added."""
        missing = [
            AuditProblem(path, 1, f"the end of chain {other} that it names is missing")
            for path, other, head in self._named
            if head not in self._hashes.get(other, ())
        ]
        return AuditReport(len(self._next_file), self._files, self._lines, (*self._problems, *missing))

    @property
    def heads(self) -> Mapping[str, str]:
        """Chain -> hash of its last line."""
        return self._heads


def in_order(paths: Sequence[str]) -> list[str]:
    """Paths of audit files, chain by chain, each in its order; other paths are left out."""
    found = [(parsed, path) for path in paths if (parsed := parse_audit_path(path)) != ("", -1)]
    return [path for _, path in sorted(found)]

"""CORE and records of the audit log: who changed what, and who was refused. Pure: events and time in, files to write out.

Each coordinator process writes a chain of its own: files `_service/audit/<chain>-<n>.jsonl`, each created once, a JSON object a
line. A line has its number in the chain and SHA-256 over the line before it, so that a line that was changed, taken out or put in
breaks the chain from there on. The first line of a chain names the ends of the chains that were there, so that an end that was cut
off later is missed by its successor. What nobody can see is the loss of the newest lines, before a next chain has begun.

Refusals are bounded: anybody can cause them. What one sender changes beyond its share of a day goes into a second chain of the
process, with a bound of its own: else a token that may change something would push the records of all others out. Lines of the
first chain name its end, at once when it has one, then hourly, and when the process stops. And so is the
log: the oldest files are deleted, once a line says so, with the hash that the rest goes on from. A beginning that is missing and
that no line tells of was taken out by somebody else."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from holdfast.api.access.issued import hide_tokens
from holdfast.api.access.networks import network_of
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.layout import audit_path, is_further_chain, parse_audit_path

FILE_BYTES = 256 * 1024
"""A file that would be larger is written, and the next one begun."""
WRITE_EVERY_MS = 1_000
"""Oldest line that waits, at most: what a coordinator that dies may lose."""
REFUSALS_WRITE_EVERY_MS = 10_000
"""The same, while nothing but refusals waits: a stranger who is refused all the time writes no file a second."""
REFUSALS_MAX = 50
"""Refusals recorded one by one in REFUSALS_EVERY_MS; further ones are counted."""
REFUSALS_PER_SENDER_MAX = 10
"""Of them of one credential, or of one address without any: one sender can't use up all. Who had more a window ago has one."""
SENDERS_COUNTED_MAX = 20
"""Senders whose further refusals are counted in a line of their own: those with most. The rest have one together."""
REFUSALS_EVERY_MS = 60_000
REFUSALS_BYTES_A_DAY = 2 * 1024 * 1024
REFUSALS_FILES_A_DAY = 100
"""Files with nothing but refusals. Beyond either bound refusals are counted only, and both counts and files come hourly: else a
stranger would push the record of changes out of a log that is bounded, in three days by the number of small files."""
REFUSALS_SPENT_EVERY_MS = 3_600_000
DAY_MS = 86_400_000
CHANGES_BYTES_A_DAY = 512 * 1024
CHANGES_FILES_A_DAY = 150
"""Begun by changes of one sender. Beyond either bound its changes of that day are recorded in the chain of further ones."""
FURTHER_WRITE_EVERY_MS = 60_000
"""Oldest line of that chain that waits, at most: a file a second would use its bound up in an hour and a half."""
FURTHER_NAMED_EVERY_MS = 3_600_000
"""The process's own chain names the end of further changes so often, and once it has one: files for that are bounded."""
FURTHER_CHANGES = "further changes of who made more than a share of the log"
WAITING_BYTES_MAX = 8 * 1024 * 1024
"""Lines that wait for a storage that does not answer; further ones are counted in one line."""
LINE_BYTES_MAX = 16 * 1024
KEPT_BYTES_MAX = 256 * 1024 * 1024
"""Of all files but further ones, beyond which the oldest are deleted: a hundred days of refusals, or of the changes of one sender,
at their bound."""
KEPT_FILES_MAX = 20_000
FURTHER_BYTES_MAX = 64 * 1024 * 1024
"""The same of files with further changes."""
FURTHER_FILES_MAX = 5_000
PRUNED_SHARE = 0.75
"""What is kept then, of both bounds."""
MARKS_MAX = 1_000
"""Chains of which a `pruned` line tells."""
HEADS_MAX = 10_000
"""Ends of other chains that a first line names, newest first."""

_TEXT_CHARACTERS_MAX = 512
_SENDERS_MAX = 1_000
NO_HASH = "0" * 64


class PrunedChain(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was deleted of the beginning of a chain."""

    file: Annotated[int, msgspec.Meta(ge=1)]
    """The first one that is kept, or that would be the next."""
    line: Annotated[int, msgspec.Meta(ge=1)]
    """Number of its first line."""
    head: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Hash of the last line that was deleted: what the rest goes on from."""
    named: tuple[str, ...] = ()
    """Hashes of deleted lines that other chains name as its end."""


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line, as stored."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    """0, 1, 2 ... within its chain."""
    before: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the line before, as its bytes are stored without the line's end; zeros for the first one."""
    time_ms: int
    kind: str
    """started (`subject`: what did; empty: a coordinator), request, refused, dropped (lines or refusals that were only counted),
    pruned (the oldest lines were deleted), further (how far the chain of further changes is stored)."""
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
    """Of what was dropped or pruned; of a line that names further changes: their lines until the end that it names."""
    heads: dict[str, str] = {}
    """Of a first line, and of one that names further changes: chain -> hash of its last line."""
    pruned: dict[str, PrunedChain] = {}


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
        """Also whatever is answered to nobody who is known, such as one login too many: strangers have no share of the log that
        changes have."""
        return self.status in (401, 403) or not (self.credential or self.role)

    @property
    def sender(self) -> str:
        """Credential, or `network_of` the address."""
        if self.credential:
            return f"credential {self.credential}"
        return network_of(self.peer.rpartition(":")[0] or self.peer)


FURTHER = "further"
"""Kind of a line that names the end of further changes."""
PRUNED = "lines deleted until now to make room"
REPEATED = "refusals of one sender beyond the bound"


class ChainEnd(msgspec.Struct, frozen=True):
    """How far a chain goes."""

    lines: int = 0
    head: str = NO_HASH
    """Hash of the last one."""


class FileReady(msgspec.Struct, frozen=True):
    """A file to be created."""

    path: str
    content: bytes
    end: ChainEnd
    """Of its chain once it is stored."""


class RefusalWindow:
    """Which refusals are recorded one by one, and which are counted alone: a bound in all, and one for each sender."""

    def __init__(self, before: RefusalWindow | None = None) -> None:
        self._all = 0
        self._by_sender: Counter[str] = Counter()
        self._again = frozenset(before.hidden) if before is not None else frozenset()
        self.hidden: Counter[str] = Counter()
        """Refusals that are only counted, by sender."""
        self.hidden_of_others = 0
        """Those of senders beyond what is told apart."""

    def admits(self, noted: Noted, *, is_spent: bool = False) -> bool:
        """Whether a refusal is recorded; if so, it takes a place. `is_spent`: all are counted."""
        sender = noted.sender
        each_max = 1 if sender in self._again else REFUSALS_PER_SENDER_MAX
        if not is_spent and self._all < REFUSALS_MAX and self._by_sender[sender] < each_max:
            self._all += 1
            self._by_sender[sender] += 1
            return True
        if sender in self.hidden or len(self.hidden) < _SENDERS_MAX:
            self.hidden[sender] += 1
        else:
            self.hidden_of_others += 1
        return False


class RefusalAllowance:
    """What refusals may take of the log in a day."""

    def __init__(self, now_ms: int) -> None:
        self._since_ms = now_ms
        self._bytes = self._files = 0

    def took(self, *, size: int = 0, files: int = 0) -> None:
        self._bytes += size
        self._files += files

    def is_spent(self, now_ms: int) -> bool:
        if now_ms - self._since_ms >= DAY_MS:
            self._since_ms, self._bytes, self._files = now_ms, 0, 0
        return self._bytes >= REFUSALS_BYTES_A_DAY or self._files >= REFUSALS_FILES_A_DAY


class SharesOfChanges:
    """What the changes of each sender take of the log in a day. Senders beyond _SENDERS_MAX have one share together."""

    def __init__(self, now_ms: int) -> None:
        self._since_ms = now_ms
        self._bytes: Counter[str] = Counter()
        self._files: Counter[str] = Counter()

    def took(self, noted: Noted, *, size: int, files: int) -> None:
        sender = self._known(noted.sender)
        self._bytes[sender] += size
        self._files[sender] += files

    def is_spent(self, noted: Noted, now_ms: int) -> bool:
        if now_ms - self._since_ms >= DAY_MS:
            self._since_ms = now_ms
            self._bytes.clear()
            self._files.clear()
        sender = self._known(noted.sender)
        return self._bytes[sender] >= CHANGES_BYTES_A_DAY or self._files[sender] >= CHANGES_FILES_A_DAY

    def _known(self, sender: str) -> str:
        return sender if sender in self._bytes or len(self._bytes) < _SENDERS_MAX else ""


class AuditRecorder:
    """A chain of one process. `take` gives the next file, which is given again until it is `written`."""

    def __init__(self, chain: str, heads: Mapping[str, str], *, now_ms: int, wall_ms: int, writer: str = "") -> None:
        """`chain`: a name that no other process has; one of `further_chain` takes what the process's own one does not. `writer`: as
        the chain's first line says it; empty: a coordinator."""
        self._chain = chain
        self._is_further = is_further_chain(chain)
        self._number = 0
        self._last = NO_HASH
        self._files = 0
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._since_ms = now_ms
        self._ready: FileReady | None = None
        self.stored = ChainEnd()
        """What is in storage of the chain."""
        self._further_named = ChainEnd()
        self._further_named_ms = now_ms - FURTHER_NAMED_EVERY_MS
        self._refusals_hidden = self._dropped = 0
        self._refusals = RefusalWindow()
        self._allowance = RefusalAllowance(now_ms)
        self._shares = SharesOfChanges(now_ms)
        self._window_ms = now_ms
        self._waits_long = False
        """Nothing but refusals, or further changes, waits."""
        subject, heads = FURTHER_CHANGES if self._is_further else writer, dict(list(heads.items())[:HEADS_MAX])
        self._add(AuditLine(0, NO_HASH, wall_ms, "started", subject=subject, heads=heads), now_ms)

    def has_share(self, noted: Noted, now_ms: int) -> bool:
        """Whether a request belongs here, and not to further changes: its sender has not used its share of the day up."""
        return noted.is_refused or not self._shares.is_spent(noted, now_ms)

    def note(self, noted: Noted, *, now_ms: int, wall_ms: int) -> None:
        """Record a request; refusals and what storage does not take in time are counted beyond their bounds."""
        self._roll_window(now_ms, wall_ms)
        if noted.is_refused and not self._refusals.admits(noted, is_spent=self._allowance.is_spent(now_ms)):
            return
        if self._open_bytes >= WAITING_BYTES_MAX:
            self._dropped += 1
            return
        names = ("request", "job", "subject", "credential", "peer")
        texts: dict[str, Any] = {name: hide_tokens(getattr(noted, name))[:_TEXT_CHARACTERS_MAX] for name in names}
        kind = "refused" if noted.is_refused else "request"
        begins_file = not self._open or self._waits_long
        size = self._add(AuditLine(self._number, self._last, wall_ms, kind, role=noted.role, status=noted.status, **texts), now_ms)
        if not noted.is_refused:
            self._shares.took(noted, size=size, files=int(begins_file))

    def count(self, *, refusals: int, dropped: int) -> None:
        """Add to what is counted and not recorded."""
        self._refusals_hidden += refusals
        self._dropped += dropped

    def _roll_window(self, now_ms: int, wall_ms: int) -> None:
        if now_ms - self._window_ms >= (REFUSALS_SPENT_EVERY_MS if self._allowance.is_spent(now_ms) else REFUSALS_EVERY_MS):
            window, self._refusals = self._refusals, RefusalWindow(self._refusals)
            self._window_ms = now_ms
            most = [(sender, count) for sender, count in window.hidden.most_common(SENDERS_COUNTED_MAX) if count > 1]
            for sender, count in most:
                self._count(count, REPEATED, now_ms, wall_ms, sender)
            rest = window.hidden.total() - sum(count for _, count in most) + window.hidden_of_others
            self._count(rest + self._refusals_hidden, "refusals beyond the bound", now_ms, wall_ms)
            self._refusals_hidden = 0
        if self._dropped and self._open_bytes < WAITING_BYTES_MAX:
            dropped, self._dropped = self._dropped, 0
            self._count(dropped, "requests while storage did not answer", now_ms, wall_ms)

    def _count(self, count: int, what: str, now_ms: int, wall_ms: int, sender: str = "") -> None:
        if count:
            line = AuditLine(self._number, self._last, wall_ms, "dropped", subject=what, peer=sender, count=count)
            self._add(line, now_ms)

    def prune(self, marks: Mapping[str, PrunedChain], *, now_ms: int, wall_ms: int) -> None:
        """Say what is about to be deleted: it may be once this line is written."""
        count = sum(mark.line for mark in marks.values())
        line = AuditLine(self._number, self._last, wall_ms, "pruned", subject=PRUNED, count=count, pruned=dict(marks))
        self._add(line, now_ms)

    def name_further(self, chain: str, end: ChainEnd, *, now_ms: int, wall_ms: int, force: bool = False) -> None:
        """Say how far the chain of further changes is stored, if that is due. `force`: if there is anything to say."""
        is_due = force or now_ms - self._further_named_ms >= FURTHER_NAMED_EVERY_MS
        if not is_due or end.lines == self._further_named.lines:
            return
        self._further_named, self._further_named_ms = end, now_ms
        heads = {chain: end.head}
        line = AuditLine(self._number, self._last, wall_ms, FURTHER, subject=FURTHER_CHANGES, count=end.lines, heads=heads)
        self._add(line, now_ms)

    @property
    def chain(self) -> str:
        return self._chain

    def _add(self, line: AuditLine, now_ms: int) -> int:
        """Returns its bytes."""
        content = msgspec.json.encode(line)
        is_slow = self._is_further or line.kind in ("refused", "dropped", FURTHER)
        self._allowance.took(size=len(content) + 1 if is_slow else 0)
        if not self._open:
            self._since_ms, self._waits_long = now_ms, is_slow
        elif self._waits_long and not is_slow:
            self._since_ms, self._waits_long = now_ms, False
        self._open.append(content)
        self._open_bytes += len(content) + 1
        self._number, self._last = self._number + 1, hash_of(content)
        return len(content) + 1

    def take(self, *, now_ms: int, wall_ms: int, force: bool = False) -> FileReady | None:
        """The next file to create, if one is due; the same one until it is `written`. `force`: whatever waits is due."""
        self._roll_window(now_ms, wall_ms)
        every_ms = WRITE_EVERY_MS
        if self._is_further:
            every_ms = FURTHER_WRITE_EVERY_MS
        elif self._waits_long:
            every_ms = REFUSALS_SPENT_EVERY_MS if self._allowance.is_spent(now_ms) else REFUSALS_WRITE_EVERY_MS
        if self._ready is None and self._open and (force or now_ms - self._since_ms >= every_ms or self._is_full):
            lines = list(self._cut())
            end = ChainEnd(self.stored.lines + len(lines), hash_of(lines[-1][:-1]))
            self._ready = FileReady(audit_path(self._chain, self._files), b"".join(lines), end)
            self._files += 1
            self._allowance.took(files=int(self._waits_long))
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
        assert self._ready is not None
        self.stored, self._ready = self._ready.end, None


def hash_of(line: bytes) -> str:
    """SHA-256 of a line without its end."""
    return hashlib.sha256(line).hexdigest()


class AuditProblem(msgspec.Struct, frozen=True):
    """Something in a chain that no coordinator wrote, or that is missing."""

    path: str
    line: int
    """From 1; 0: the file as a whole."""
    problem: str


class AuditVerdict(StrEnum):
    """What a verification says of a log."""

    WHOLE = "whole"
    BROKEN = "broken"
    """A line or a file was changed, taken out or put in."""
    MISSING = "missing"
    """There is no log, though the directory holds what a log tells of."""
    EMPTY = "empty"
    """There is no log, and nothing that it would tell of: nothing was recorded yet, or all of it was taken out."""


class AuditReport(msgspec.Struct, frozen=True):
    """What a verification found."""

    chains: int
    files: int
    lines: int
    problems: tuple[AuditProblem, ...]
    pruned: int = 0
    """Lines that are not there any more, as a `pruned` line says."""
    untold: tuple[str, ...] = ()
    """Where there is no log: what the directory holds that only requests bring there, each of which a log tells of."""

    @property
    def is_whole(self) -> bool:
        return self.verdict is AuditVerdict.WHOLE

    @property
    def verdict(self) -> AuditVerdict:
        if self.problems:
            return AuditVerdict.BROKEN
        if self.files:
            return AuditVerdict.WHOLE
        return AuditVerdict.MISSING if self.untold else AuditVerdict.EMPTY


class _NamedEnd(NamedTuple):
    """End of another chain that a line names."""

    path: str
    line: int
    """Where, from 1."""
    chain: str
    end: ChainEnd
    """Without its number of lines if the line does not tell it."""


class AuditVerifier:
    """Checks files of audit chains, given in the order of `in_order`, one at a time."""

    def __init__(self) -> None:
        self._problems: list[AuditProblem] = []
        self._heads: dict[str, str] = {}
        self._named: list[_NamedEnd] = []
        self._hashes: dict[str, set[str]] = {}
        self._number: dict[str, int] = {}
        self._next_file: dict[str, int] = {}
        self._begins: dict[str, tuple[str, int, AuditLine | None]] = {}
        """Chain without its first file -> its first path, the number of that file and its first line."""
        self.marks: dict[str, PrunedChain] = {}
        """Of all `pruned` lines: of a chain what was deleted last, and all ends that others name."""
        self._paths: set[str] = set()
        self._lines = 0

    def add(self, path: str, content: bytes) -> Iterator[AuditLine]:
        """Check one file; yields its lines that can be read."""
        chain, number = parse_audit_path(path)
        expected = self._next_file.get(chain, 0)
        if number != expected and expected == 0:
            self._begins[chain] = path, number, None
        elif number != expected:
            self._problem(path, 0, f"file {expected} of chain {chain} is missing")
        self._next_file[chain] = number + 1
        self._paths.add(path)
        if not content:
            self._problem(path, 0, "it is empty")
        elif not content.endswith(b"\n"):
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
        self._learn(line)
        lines = line.count if line.kind == FURTHER else 0
        self._named += [_NamedEnd(path, index, other, ChainEnd(lines, head)) for other, head in line.heads.items()]
        begin = self._begins.get(chain)
        if begin is not None and begin[2] is None:
            self._begins[chain] = *begin[:2], line
            self._number[chain] = line.number + 1
            return
        number = self._number.get(chain, 0)
        if line.number != number:
            self._problem(path, index, f"line {line.number} of chain {chain} stands where {number} should")
        elif line.before != self._heads.get(chain, NO_HASH):
            self._problem(path, index, f"the line before it in chain {chain} was changed")
        self._number[chain] = line.number + 1

    def _learn(self, line: AuditLine) -> None:
        for chain, mark in line.pruned.items():
            known = self.marks.get(chain, mark)
            newest = max(known, mark, key=lambda each: each.file)
            self.marks[chain] = msgspec.structs.replace(newest, named=tuple(sorted({*known.named, *mark.named})))

    def _unexplained(self, chain: str) -> str:
        """What is wrong with the beginning of a chain without its first file; empty: it was deleted, as a line says.

        A deletion that was cut off leaves more than it said: what is left leads up to the hash that the line names."""
        _, file, first = self._begins[chain]
        mark = self.marks.get(chain)
        if mark is None or file > mark.file or first is None:
            return f"file 0 of chain {chain} is missing"
        if file == mark.file and (first.number, first.before) == (mark.line, mark.head):
            return ""
        if file < mark.file and mark.head in self._hashes.get(chain, ()):
            return ""
        return f"the beginning of chain {chain} is not what was left when its oldest lines were deleted"

    def _problem(self, path: str, line: int, text: str) -> None:
        self._problems.append(AuditProblem(path, line, text))

    def report(self) -> AuditReport:
        """The whole finding, once all files were added."""
        begins = [AuditProblem(self._begins[chain][0], 0, why) for chain in self._begins if (why := self._unexplained(chain))]
        missing = [
            AuditProblem(path, line, f"the end of chain {other} that it names is missing")
            for path, line, other, end in self._named
            if end.head not in self._hashes.get(other, ()) and not self._was_pruned(other, end)
        ]
        pruned = sum(mark.line for mark in self.marks.values())
        problems = (*self._problems, *begins, *missing)
        return AuditReport(len(self._next_file), len(self._paths), self._lines, problems, pruned)

    @property
    def broken(self) -> frozenset[str]:
        """Chains whose lines, of those that were read, don't follow each other."""
        return frozenset(parse_audit_path(each.path)[0] for each in self._problems)

    def _was_pruned(self, chain: str, end: ChainEnd) -> bool:
        mark = self.marks.get(chain)
        return mark is not None and (0 < end.lines < mark.line or end.head in (mark.head, *mark.named))

    def evidence(self, contents: Iterable[bytes]) -> frozenset[str]:
        """Chains that somebody has changed, of those whose oldest files were added: their lines don't follow each other, or their
        beginning is gone and no line tells of it, of these files or of others, which `contents` gives. Those are only searched for
        what they tell of deletions."""
        unexplained = {chain for chain in self._begins if not self._is_told_of(chain, self.marks.get(chain))}
        others = iter(contents)
        while unexplained and (content := next(others, None)) is not None:
            told = AuditVerifier()
            told._learn_all(content)
            unexplained -= {chain for chain in unexplained if self._is_told_of(chain, told.marks.get(chain))}
        return self.broken | unexplained

    def _learn_all(self, content: bytes) -> None:
        for raw in content.splitlines():
            if b'"pruned"' in raw:
                with contextlib.suppress(*UNDECODABLE):
                    self._learn(decode_json(raw, AuditLine))

    def _is_told_of(self, chain: str, mark: PrunedChain | None) -> bool:
        """Whether a line tells that what is missing of a chain's beginning was deleted. A deletion that was cut off leaves more."""
        _, file, first = self._begins[chain]
        if mark is None or first is None or file > mark.file:
            return False
        return file < mark.file or (first.number, first.before) == (mark.line, mark.head)

    @property
    def hashes(self) -> Mapping[str, set[str]]:
        """Chain -> hashes of its lines that were read."""
        return self._hashes

    @property
    def numbers(self) -> Mapping[str, int]:
        """Chain -> number of the line behind its last one that was read."""
        return self._number

    @property
    def heads(self) -> Mapping[str, str]:
        """Chain -> hash of its last line."""
        return self._heads


def in_order(paths: Sequence[str]) -> list[str]:
    """Paths of audit files, chain by chain, each in its order; other paths are left out."""
    found = [(parsed, path) for path in paths if (parsed := parse_audit_path(path)) != ("", -1)]
    return [path for _, path in sorted(found)]


class StoredFile(msgspec.Struct, frozen=True):
    """A file of the log."""

    path: str
    size: int
    modified_ms: int


def choose_pruned(files: Sequence[StoredFile], own: Collection[str]) -> dict[str, int]:
    """Chain -> its first file that is kept, of chains whose oldest files have no room any more; empty: all have. Further changes
    have a room of their own: none of the others goes for them.

    `own`: chains of this process, whose newest file stays. The oldest go first, and of a chain none before those in front of it."""
    known = sorted((each.modified_ms, *parse_audit_path(each.path), each.size) for each in files)
    known = [each for each in known if each[1]]
    newest = {chain: number for _, chain, number, _ in sorted(known, key=lambda each: each[2]) if chain in own}
    further = [each for each in known if is_further_chain(each[1])]
    others = [each for each in known if not is_further_chain(each[1])]
    return {
        **_beyond(others, newest, bytes_max=KEPT_BYTES_MAX, files_max=KEPT_FILES_MAX),
        **_beyond(further, newest, bytes_max=FURTHER_BYTES_MAX, files_max=FURTHER_FILES_MAX),
    }


def _beyond(
    known: Sequence[tuple[int, str, int, int]], newest_own: Mapping[str, int], *, bytes_max: int, files_max: int
) -> dict[str, int]:
    """As `choose_pruned`, of files of one kind by time, chain, number and size."""
    size, count = sum(each[3] for each in known), len(known)
    if size <= bytes_max and count <= files_max:
        return {}
    pruned: dict[str, int] = {}
    for _, chain, number, file_size in known:
        if size <= bytes_max * PRUNED_SHARE and count <= files_max * PRUNED_SHARE:
            break
        if newest_own.get(chain) != number:
            pruned[chain] = max(pruned.get(chain, 0), number + 1)
            size, count = size - file_size, count - 1
    return pruned


def mark_pruned(
    chosen: Mapping[str, int], deleted: AuditVerifier, named: Mapping[str, Sequence[str]], kept: Collection[str]
) -> dict[str, PrunedChain]:
    """What a `pruned` line says of the files that were `chosen`, none of a chain that is evidence. `deleted`: has read all of them;
    `named`: chain -> its ends that lines which are kept name; `kept`: chains of which something is left. What deleted lines said
    of other deletions is said again."""
    marks = dict(deleted.marks)
    for chain, file in chosen.items():
        if chain not in deleted.heads:
            continue
        older = marks.pop(chain).named if chain in marks else ()
        ends = {head for head in named.get(chain, ()) if head in deleted.hashes[chain] or head in older}
        marks[chain] = PrunedChain(file, deleted.numbers[chain], deleted.heads[chain], tuple(sorted(ends)))
    needed = sorted(marks, key=lambda chain: chain in kept or chain in named)  # a stable sort: of the others the newest are kept
    return {chain: marks[chain] for chain in needed[-MARKS_MAX:]}

"""A target outside: its rows and the position beside them, by its own journal (I38, I39, I41), and what was staged for it (I42)."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import ClassVar
from urllib.parse import quote

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.outside import Applied, Opened
from holdfast.chaos.workloads.scenario import OutsideExpectation, Positions, Scenario
from holdfast.statebackends.errors import HoldfastError, StorageUnavailableError

_NAME = re.compile(r"-a(\d+)-s\d+-c(\d+)-[^-]+-\d+\.parquet$")
"""Attempt and first checkpoint id in the name of a staged file."""

SHOWN_MAX = 5
"""Rows named by a message."""

CUTS_KEPT_MAX = 60


class OutsideChecker(Checker):
    """Follows the journal: what took effect before an observation is judged by what was on record before it."""

    invariants: ClassVar[tuple[str, ...]] = ("I38", "I39", "I41", "I42")
    hears: ClassVar[tuple[type, ...]] = (Stored,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._outside = scenario.outside
        self._read = 0
        """Entries of the journal that were judged."""
        self._rows: Counter[Row] = Counter()
        self._attempt = 0
        """Highest attempt that has opened the target."""
        self._went_back = False
        """A user did, and rows come again: none may be missing."""
        self._positions: dict[int, Positions] = {}
        """Completed id -> positions of the source."""
        self._folder = ""
        if self._outside is not None:
            self._folder = f"{world.job_id}/sinks/{quote(self._outside.sink_id, safe='')}/staged/"
        self._begun_ms: dict[int, int] = {}
        self._added_ms: dict[str, int] = {}
        self._trouble_ms = -1
        """When a call of a worker last failed, ms."""

    def observe(self, observation: Observation) -> None:
        outside = self._outside
        if outside is None or not isinstance(observation, Stored):
            return
        self._follow(outside)
        failed = isinstance(observation.result, StorageUnavailableError) or observation.fate in ("lie", "late", "postponed")
        if failed and observation.actor.startswith("worker"):
            self._trouble_ms = observation.at_ms
        for path in observation.added:
            if path.startswith(self._folder):
                self._added_ms[path] = observation.at_ms
        for change in self.ledger.changes(observation) if observation.added else ():
            if isinstance(change, AttemptRecorded):
                self._begun_ms[change.record.attempt] = observation.at_ms
            elif isinstance(change, Decided) and change.snapshot is not None:
                self._remember(outside, change.snapshot)

    def look(self) -> None:
        if self._outside is not None:
            self._follow(self._outside)

    def _remember(self, outside: OutsideExpectation, snapshot: Snapshot) -> None:
        if not snapshot.is_recovery_point or snapshot.claim.drain or snapshot.metadata.in_flight:
            return  # what is in flight has not come to the target
        with suppress(HoldfastError, ValueError, KeyError):
            view = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
            self._positions[snapshot.checkpoint_id] = view.positions((outside.source_uid,))
            if len(self._positions) > CUTS_KEPT_MAX:
                del self._positions[next(iter(self._positions))]

    # ---------------------------------------------------------------------------------------------------------- journal

    def _follow(self, outside: OutsideExpectation) -> None:
        for entry in outside.port.journal[self._read :]:
            self._read += 1
            if isinstance(entry, Opened):
                self._opened(entry)
            elif isinstance(entry, Applied):
                self._applied(outside, entry)

    def _opened(self, entry: Opened) -> None:
        before, after = entry.before, entry.after
        if entry.owner.attempt < self._attempt:
            self.report("I39", f"attempt {entry.owner.attempt} opened the target, which attempt {self._attempt} had opened")
        self._attempt = max(self._attempt, entry.owner.attempt)
        if before is None:
            return
        if after.owner <= before.owner:
            self.report("I39", f"attempt {after.attempt} opened the target, and {before} is as good as before")
        if after.progress < before.progress:
            if not any(record.submission.allow_output_repeat for record in self.ledger.submissions.values()):
                self.report("I38", f"the position went back from {before} to {after}, and no user allowed that")
            self._went_back = True

    def _applied(self, outside: OutsideExpectation, entry: Applied) -> None:
        after, where = entry.after, f"outside, {entry.after}"
        if after.attempt < self._attempt:
            self.report("I39", f"{where}: attempt {after.attempt} commits, and attempt {self._attempt} had opened the target")
        if after.progress <= entry.before.progress:
            self.report("I38", f"{where}: follows {entry.before}")
        if after.checkpoint_id > max(self.ledger.released, self._begun_with()):
            self.report("I41", f"{where}: rows are visible, and checkpoint {self.ledger.released} is the newest that is complete")
        rows = Counter(tuple(row[index] for index in outside.compared) for row in entry.rows)
        self._rows += rows
        twice = [row for row in rows if self._rows[row] > 1]
        if twice and not self._went_back:
            self.report("I38", f"{where}: {len(twice)} rows are there twice, such as {sorted(twice)[:SHOWN_MAX]}")
        positions = self._positions.get(after.checkpoint_id)
        if positions is not None and after.row < 0:
            self._compare(outside.rows_at(positions), where)

    def _begun_with(self) -> int:
        """Highest id that a submission started from: one restored from a plain savepoint commits what the savepoint held back."""
        bases = [record.base for record in self.ledger.submissions.values()]
        return max((base.checkpoint_id for base in bases if base is not None), default=0)

    def _compare(self, expected: Counter[Row], where: str) -> None:
        missing = expected - self._rows
        if missing:
            self.report("I38", f"{where}: {missing.total()} rows are missing, such as {sorted(missing)[:SHOWN_MAX]}")
        extra = self._rows - expected
        if extra and not self._went_back:
            self.report("I38", f"{where}: {extra.total()} rows too many, such as {sorted(extra)[:SHOWN_MAX]}")

    # -------------------------------------------------------------------------------------------------------------- end

    def at_end(self) -> None:
        outside = self._outside
        newest = self.ledger.results.get(max(self.ledger.submissions, default=0))
        if outside is None:
            return
        self._follow(outside)
        if newest is None or newest.state != "FINISHED":
            return
        self._compare(outside.rows(), "outside, at the end")
        for path in self.world.state.paths(self._folder.rstrip("/")):
            self._check_staged(path)

    def _check_staged(self, path: str) -> None:
        """A staged file is left only for a reason: written late, not swept because of a failure, or named by a snapshot."""
        found = _NAME.search(path)
        last = max(self._begun_ms, default=0)
        if found is None:
            return
        attempt, first = int(found[1]), int(found[2])
        begun_ms = self._begun_ms.get(last, 0)
        if self._trouble_ms >= begun_ms:
            return
        if attempt >= last:
            self.report("I42", f"{path} was staged by the last attempt, and is left")
        elif self._added_ms.get(path, begun_ms) < begun_ms and not self._may_be_named(attempt, first, last):
            self.report("I42", f"{path} is of attempt {attempt}, and was still there when attempt {last} began, which left it")

    def _may_be_named(self, attempt: int, first: int, last: int) -> bool:
        """An attempt in between may have restored the file, and taken a snapshot before it was committed."""
        claims, aborted = self.ledger.first_claims, self.ledger.aborted
        known = (claim for number, claim in claims.items() if number >= first and number not in aborted)
        return any(attempt <= claim.attempt < last for claim in known)

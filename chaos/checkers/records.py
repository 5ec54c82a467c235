"""Each record that came to a window is in a result, in the late output, or in the count of late records: in one of them, and in no
other (I32).

Which records are late is a matter of the order of arrival. That none is lost is not, whatever was read again."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.descent import Descent
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.oracle import CommittedOutput, OutputDamagedError
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.totals import COUNTERS_PROPERTY


class RecordsChecker(Checker):
    """Follows the count of late records from snapshot to snapshot, and looks for each record at the end."""

    invariants: ClassVar[tuple[str, ...]] = ("I32",)
    hears: ClassVar[tuple[type, ...]] = (Stored,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._dropped: dict[int, int] = {}
        """Completed id -> records dropped as late in front of its cut, since the job's first submission."""

    def observe(self, observation: Observation) -> None:
        if self.scenario.accounts is None or not isinstance(observation, Stored) or not observation.added:
            return
        for change in self.ledger.changes(observation):
            if isinstance(change, Decided) and change.snapshot is not None:
                self._count(self.scenario.accounts.operator_uid, change.snapshot)

    def _count(self, uid: str, snapshot: Snapshot) -> None:
        """A submission counts from 0 on."""
        record = self.ledger.submissions.get(snapshot.claim.submission)
        base = record.base.checkpoint_id if record is not None and record.base is not None else 0
        counters = msgspec.json.decode(snapshot.metadata.properties.get(COUNTERS_PROPERTY, "{}"))
        counted = counters.get(uid, {}).get("late_dropped", 0)
        self._dropped[snapshot.checkpoint_id] = counted + self._dropped.get(base, 0)

    def at_end(self) -> None:
        accounts = self.scenario.accounts
        newest = self.ledger.results.get(max(self.ledger.submissions, default=0))
        if accounts is None or newest is None or newest.state != "FINISHED" or not self._dropped:
            return
        descent = Descent(self.ledger)
        descent.follow()
        rows: dict[str, list[Row]] = {}
        for sink in self.scenario.sinks:
            output = CommittedOutput(self.world.store(sink.path), sink.sink_id)
            try:
                files = output.refresh()
            except OutputDamagedError:
                return  # reported elsewhere
            rows[sink.sink_id] = [row for file in files if descent.holds_file(file.checkpoint_id, file.name) for row in file.rows]
        problem = accounts.problem(rows, self._dropped[max(self._dropped)])
        if problem is not None:
            self.report("I32", f"{accounts.operator_uid}: {problem}")

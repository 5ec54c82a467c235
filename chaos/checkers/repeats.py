"""I37 (docs/invariants.md): an at-least-once job loses nothing, and repeats a record only behind a restore.

Three bounds. What is committed with n, and what n's state counts, is at least what lies in front of n's cut. At the end all of the
input is there. And what is there beyond that was read again: each restore adds at most what lies behind the cut of its checkpoint,
and none does so where every subtask has one input channel. Each staged file is committed once, with the checkpoint of its own
attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import quote

from holdfast.barriers.exchange.guarantee import loose_vertices
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.descent import Descent, attempt_of
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot, join
from holdfast.chaos.checkers.observations import Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.oracle import CommittedFile, CommittedOutput, OutputDamagedError
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.workloads.scenario import Positions, RepeatExpectation, Scenario
from holdfast.statebackends.errors import HoldfastError

CUT_EVERY = 3
"""Completed checkpoints, by id, of which the state of one is looked at, and commits of a sink of which one is compared."""
SHOWN_MAX = 3
_UNREADABLE = (HoldfastError, StateDoubledError, ValueError)
"""Of damaged snapshots, which others report."""


class _Sink:
    def __init__(self, world: WorldView, expected: RepeatExpectation, path: str) -> None:
        self._world = world
        self.expected = expected
        self.path = path
        self.log = join(path, "_holdfast", quote(expected.sink_id, safe=""), "log") + "/"
        self.commits = 0
        self.restart()

    def restart(self) -> None:
        """Read everything again."""
        self.output = CommittedOutput(self._world.store(self.path), self.expected.sink_id)


class RepeatsChecker(Checker):
    """Follows the checkpoints and the sinks of a scenario with `repeats`."""

    invariants: ClassVar[tuple[str, ...]] = ("I37",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        paths = {sink.sink_id: sink.path for sink in scenario.sinks}
        self._sinks = [_Sink(world, each, paths[each.sink_id]) for each in scenario.repeats]
        self._sources = tuple(sorted({uid for each in scenario.repeats for uid in each.source_uids}))
        self._descent = Descent(ledger)
        self._positions: dict[int, Positions] = {}
        """Completed id -> positions."""

    def observe(self, observation: Observation) -> None:
        if not self._sinks:
            return
        if isinstance(observation, Lifecycle):
            if observation.change == "power_loss":
                for sink in self._sinks:
                    sink.restart()
            return
        if not isinstance(observation, Stored) or not observation.added:
            return
        self._descent.follow()
        for change in self.ledger.changes(observation):
            if isinstance(change, Decided) and change.snapshot is not None:
                self._look_at(change.snapshot)
        for path in observation.added:
            location = join(observation.root, path)
            for sink in self._sinks:
                if location.startswith(sink.log):
                    self._committed(sink)

    def _look_at(self, snapshot: Snapshot) -> None:
        number, view = snapshot.checkpoint_id, SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
        with suppress(*_UNREADABLE):
            positions = self._positions[number] = view.positions(self._sources)
            if number % CUT_EVERY:
                return
            for each in self.scenario.counted:
                held = view.keyed_state(each.operator_uid, (each.state,)).get(each.state, {})
                if missing := each.counts(positions) - Counter(held):
                    self.report("I37", f"{snapshot.kind} {number}: {each.operator_uid} lacks records: {_shown(missing)}")

    # ---------------------------------------------------------------------------------------------------------- commits

    def _committed(self, sink: _Sink) -> None:
        """One more entry is in the log of a sink: all up to its checkpoint is out."""
        files = self._refresh(sink)
        for file in files:
            claim, attempt = self.ledger.first_claims.get(file.checkpoint_id), attempt_of(file.name)
            if claim is not None and attempt is not None and claim.attempt != attempt:
                where = f"sink {sink.expected.sink_id}: {file.name} is committed with checkpoint {file.checkpoint_id}"
                self.report("I37", f"{where}, which is of attempt {claim.attempt}")
        sink.commits += 1
        if not files or sink.commits % CUT_EVERY or sink.expected.waits:
            return
        number = files[-1].checkpoint_id
        positions = self._positions.get(number)
        if positions is not None and (missing := sink.expected.rows_before(positions) - self._measure(sink)):
            self.report("I37", f"sink {sink.expected.sink_id}: committed up to checkpoint {number} lacks {_shown(missing)}")

    def _refresh(self, sink: _Sink) -> list[CommittedFile]:
        try:
            return sink.output.refresh()
        except OutputDamagedError as error:  # OutputChecker reports others of these
            if "twice" in str(error):
                self.report("I37", str(error))
            return []

    def _measure(self, sink: _Sink) -> Counter[Any]:
        files = (each for each in sink.output.files if self._descent.holds_file(each.checkpoint_id, each.name))
        return sink.expected.measure(row for file in files for row in file.rows)

    # -------------------------------------------------------------------------------------------------------------- end

    def at_end(self) -> None:
        newest = self.ledger.results.get(max(self.ledger.submissions, default=0))
        if newest is None or newest.state != "FINISHED":
            return
        for sink in self._sinks:
            self._refresh(sink)
            found, once = self._measure(sink), sink.expected.rows()
            if missing := once - found:
                self.report("I37", f"sink {sink.expected.sink_id}: the output lacks {_shown(missing)}")
            most = self._most(once, sink.expected.rows_before, is_bounded=sink.expected.is_bounded)
            if most is not None and not sink.expected.fires_again and (extra := found - most):
                restores = sorted(self._restores)
                what = f"more than the restores of {restores} can repeat" if restores else "more than once, without a restore"
                self.report("I37", f"sink {sink.expected.sink_id}: the output has {_shown(extra)} {what}")

    @property
    def _restores(self) -> set[int]:
        """Ids of the checkpoints that attempts were restored from: of one restored twice only the last restore counts, since the
        other attempt has left nothing."""
        return {each.restored.checkpoint_id for each in self.ledger.attempts.values() if each.restored is not None}

    def _most(
        self, once: Counter[Any], before: Callable[[Positions], Counter[Any]], *, is_bounded: bool
    ) -> Counter[Any] | None:
        """The most that there may be; None: nothing bounds it."""
        most = Counter(once)
        if not any(loose_vertices(each.graph) for each in self.ledger.submissions.values()):
            return most
        for number in self._restores:
            if not is_bounded or number not in self._positions:
                return None
            most.update(once - before(self._positions[number]))
        return most


def _shown(rows: Counter[Any]) -> str:
    shown = ", ".join(f"{row!r} x{count}" for row, count in sorted(rows.items(), key=repr)[:SHOWN_MAX])
    return f"{rows.total()} of {len(rows)} kinds, such as {shown}"

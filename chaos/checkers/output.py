"""The committed output against its expectation: I1 to I5, in the order of commits, and I7 at a cut (docs/invariants.md).

It reads the log of a sink and the files named there, as every reader does, and nothing else of the job. Order and steps are checked
file by file, at the commit; loss and repetition once the job has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar
from urllib.parse import quote

import msgspec

from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.descent import Descent, attempt_of
from holdfast.chaos.checkers.drains import Drains
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, JobLedger, Snapshot, join
from holdfast.chaos.checkers.observations import Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.oracle import CommittedFile, CommittedOutput, OutputDamagedError, Sequences, compare, counted
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.pipelines.judging import Problem
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import Positions, Scenario, SinkExpectation, source_uids
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.storage.port import PutIfAbsent

CUTS_KEPT_MAX = 64
"""Completed checkpoints whose positions are kept until their output is committed."""
CUT_EVERY = 8
"""Commits of one attempt of which one is compared with its cut; the first one after a restore always is."""
EMITTED_EVERY = 2
"""Checkpoints, by id, of which one is compared with the output of its operators; a checkpoint that ends the job always is."""

_UNREADABLE = (HoldfastError, StateDoubledError, ValueError)
"""Errors of a damaged snapshot, or of its positions; reported elsewhere."""


class _Sink:
    """One sink, and its output so far."""

    def __init__(self, world: WorldView, expected: SinkExpectation) -> None:
        self.expected = expected
        self.log = join(expected.path, "_holdfast", quote(expected.sink_id, safe=""), "log") + "/"
        self._world = world
        self.attempt = -1
        self.commits = 0
        self.restart()

    def restart(self) -> None:
        """Forget the output so far, and read everything again."""
        self.output = CommittedOutput(self._world.store(self.expected.path), self.expected.sink_id)
        self.sequences = Sequences(self.expected)


class OutputChecker(Checker):
    """Follows the logs of the scenario's sinks."""

    invariants: ClassVar[tuple[str, ...]] = ("I1", "I2", "I3", "I4", "I5", "I7", "I19", "I43")
    hears: ClassVar[tuple[type, ...]] = (Stored, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._sinks = [_Sink(world, sink) for sink in scenario.sinks]
        self._sources = source_uids(scenario)
        self._cuts = bool(self._sources) and any(sink.at_cut or sink.emitted or sink.after_drains for sink in scenario.sinks)
        self._descent = Descent(ledger)
        self._drains = Drains(ledger, self._sources)
        self.misjudged: SinkExpectation | None = None
        """Sink of a user's pipeline with wrong output; None: none found."""
        self._begun_ms: dict[int, int] = {}
        """Attempt -> time of its record, ms."""
        self._positions: dict[int, Positions] = {}
        """Completed id -> positions, until its output is committed."""
        self._emitted: dict[int, list[Counter[Row]]] = {}
        """Completed id -> rows emitted by each sink's operator, for sinks judged by their operator's state."""

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Lifecycle):
            if observation.change == "power_loss":
                for sink in self._sinks:  # entries that were not durable may be gone
                    sink.restart()
            return
        if not isinstance(observation, Stored) or not observation.added:
            return
        if self._descent.follow():
            for sink in self._sinks:  # a user may have gone back: the rows that count have changed
                sink.restart()
        for change in self.ledger.changes(observation):
            if isinstance(change, AttemptRecorded):
                self._begun_ms[change.record.attempt] = observation.at_ms
            elif self._cuts and isinstance(change, Decided) and change.snapshot is not None:
                self._remember(change.snapshot)
        for path in observation.added:
            location = join(observation.root, path)
            for sink in self._sinks:
                if location.startswith(sink.log):
                    self._entry(sink, observation)

    def _remember(self, snapshot: Snapshot) -> None:
        """Read the positions of a completed checkpoint while its files exist."""
        self._drains.note(snapshot)
        if not snapshot.is_recovery_point or snapshot.metadata.in_flight:  # what is in flight has not come to the sinks
            return
        number, view = snapshot.checkpoint_id, SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
        with suppress(*_UNREADABLE):
            positions = view.positions(self._sources)
            if not snapshot.claim.drain:
                self._positions[number] = positions
            if number % EMITTED_EVERY == 0 or snapshot.kind is not CheckpointKind.CHECKPOINT:
                self._emitted[number] = [self._emitted_at(number, each.expected, positions, view) for each in self._sinks]
        for known in (self._positions, self._emitted):
            if len(known) > CUTS_KEPT_MAX:
                del known[next(iter(known))]

    def _emitted_at(self, number: int, sink: SinkExpectation, positions: Positions, view: SnapshotView) -> Counter[Row]:
        emitted = sink.emitted
        if emitted is None:
            return Counter()
        held = view.keyed_state(emitted.operator_uid, emitted.states)
        return emitted.rows(positions, self._drains.before(number), held)

    # ---------------------------------------------------------------------------------------------------------- commits

    def _entry(self, sink: _Sink, fact: Stored) -> None:
        self._read(sink)
        at_cut = sink.expected.at_cut
        if not isinstance(fact.operation, PutIfAbsent) or (at_cut is None and sink.expected.emitted is None):
            return
        entry = msgspec.json.decode(fact.operation.data)
        if entry["type"] != "commit":
            return
        restored, sink.attempt = entry["attempt"] != sink.attempt, entry["attempt"]
        sink.commits += 1
        checkpoint = entry["checkpoint_id"]
        if at_cut is None:
            if checkpoint in self._emitted:
                rows = self._emitted[checkpoint][self._sinks.index(sink)]
                self._compare_cut(sink, checkpoint, rows, "whose state says")
            return
        positions = self._positions.get(checkpoint)
        if positions is not None and (restored or sink.commits % CUT_EVERY == 0):
            self._compare_cut(sink, checkpoint, at_cut(positions), "whose cut says")

    def _compare_cut(self, sink: _Sink, checkpoint: int, rows: Counter[Row], what: str) -> None:
        """Compare the output up to an id with its cut. The log is in the order of ids, so everything staged up to this id precedes
        it."""
        problem = compare(rows, counted(self._live(sink), sink.expected))
        if problem is not None:
            self.report("I7", f"sink {sink.expected.sink_id}: committed up to checkpoint {checkpoint}, {what}: {problem}")

    def _read(self, sink: _Sink) -> None:
        """Read the entries committed since the last call."""
        try:
            files = sink.output.refresh()
        except OutputDamagedError as error:
            self.report(error.invariant, str(error))
            return
        for file in files:
            if not self._descent.holds_file(file.checkpoint_id, file.name):
                continue
            problem = sink.sequences.add(file)
            if problem is not None:
                self.report(problem[0], f"sink {sink.expected.sink_id}: {problem[1]}")

    def _live(self, sink: _Sink) -> list[CommittedFile]:
        """Files on the newest submission's line; output behind a snapshot that the user went back to is written again."""
        return [file for file in sink.output.files if self._descent.holds_file(file.checkpoint_id, file.name)]

    # -------------------------------------------------------------------------------------------------------------- end

    def at_end(self) -> None:
        """All of the output is there, once, as it was committed."""
        newest = self.ledger.results.get(max(self.ledger.submissions, default=0))
        finished = newest is not None and newest.state == "FINISHED"
        for sink in self._sinks:
            self._read(sink)
            try:
                sink.output.recheck()
            except OutputDamagedError as error:
                self.report(error.invariant, str(error))
                continue
            if sink.expected.rows is not None and finished:
                self._compare(sink)
            if sink.expected.judge is not None and finished:
                self._judge(sink, sink.expected.judge)

    def _judge(self, sink: _Sink, judge: Callable[[list[Row]], Problem | None]) -> None:
        """Judge a sink of a user's pipeline. The cause of a wrong row is dated to the beginning of the attempt that wrote it."""
        files = self._live(sink)
        problem = judge([row for file in files for row in file.rows])
        if problem is None or self.misjudged is not None:
            return
        self.misjudged = sink.expected
        newest = max(self._begun_ms, default=0)
        written = newest if problem.place is None else attempt_of(_file_at(files, problem.place).name) or newest
        self.cause_ms = self._begun_ms.get(written)
        self.report(problem.invariant, problem.message)

    def _compare(self, sink: _Sink) -> None:
        assert sink.expected.rows is not None
        drained = self._drains.before()
        again = drained and sink.expected.after_drains
        expected, actual = again(drained) if again else sink.expected.rows(), counted(self._live(sink), sink.expected)
        problem = compare(expected, actual)
        if problem is None:
            return
        invariant = "I1" if (expected - actual).total() else "I2"
        self.report(invariant, f"sink {sink.expected.sink_id}: {problem}")


def _file_at(files: Sequence[CommittedFile], place: int) -> CommittedFile:
    """File of a row, by the row's index among all rows."""
    for file in files:
        if place < len(file.rows):
            return file
        place -= len(file.rows)
    raise IndexError(place)

"""A job, and one that is started from its savepoint with the sink elsewhere: the coordinator's judgement and both committers over
the same stores, in many drawn orders. The first job may run, fail over, be cancelled or finish, before or after, or be the same.

Output is exact in either place, no row is in neither, and nobody writes to a log that is not its own; sabotages show that a
judgement which is wrong is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import holdfast.coordinator.restore.sink_forks as sink_forks_module
import holdfast.operators.sinks.files.committer as committer_module
from holdfast.barriers.jobgraph import SinkMode
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.sinks.log import FORK_PROPERTY
from holdfast.coordinator.ha.records import ClaimRecord, ResultRecord, SavepointRecord, SubmissionRecord, encode_record
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.plan import SubmissionPlan, check_submission
from holdfast.coordinator.restore.sink_forks import Fate
from holdfast.operators.sinks.files.log import end_log_flow
from holdfast.operators.sinks.files.parquet import read_log
from holdfast.statebackends.errors import FencedError, HoldfastError, OutputMayRepeatError
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle, OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import submission
from tests.coordinator.ownership.test_claims import OTHER
from tests.coordinator.restore.test_sink_forks import STATE, checkpoint_of, graph_at
from tests.coordinator.test_restore import snapshot, stored
from tests.coordinator.world import JOB
from tests.coordinator.world import DictStorage as StateDirectory
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import ROOT, Crash, MiniJob, MortalStorage, Snapshot, committed

ELSEWHERE = "/elsewhere"
SAVEPOINT = "/savepoints/s"
SEEDS = range(120)
THIRD = "ef" * 16
ROWS_AFTER = 3
"""Of the fork, at the least."""


class Wrong(AssertionError):
    """An invariant is broken."""


class Scene:
    """One seed."""

    def __init__(self, seed: int, *, is_own: bool | None = None) -> None:
        self.random = random.Random(seed)
        self.is_own = self.random.random() < 0.3 if is_own is None else is_own
        self.job = MiniJob(MortalStorage({}), DictStorage(), JOB if self.is_own else OTHER)
        self.state = ""
        """How the first job ended; empty: it runs."""
        self.savepoint = Snapshot(0, 0, [])
        self.metadata: SnapshotMetadata | None = None
        self.fork: MiniJob | None = None
        self.heir: MiniJob | None = None
        """A third job, started from the savepoint where the first one wrote."""

    def run(self) -> str:
        """What the coordinator said: `accepted`, or why not."""
        self.job.start()
        self._steps(self.random.randrange(6))
        self._take_savepoint()
        self._steps(self.random.choice((0, 0, 1, 4)))
        if self.is_own or self.random.random() < 0.6:
            self._end()
        if self.state in ("CANCELED", "FAILED") and self.random.random() < 0.4:
            self.take_over(self.random.randrange(9), after=self.random.random() < 0.5)
        plan = self._ask()
        if plan.report.refusals:
            return plan.report.refusals[0].kind
        self._start_fork(plan)
        if not self.state:
            self._steps(self.random.randrange(5))
            self._end(finish=True)
        self._check()
        return "accepted"

    # ----------------------------------------------------------------------------------------------------- the first job

    def _steps(self, count: int) -> None:
        job = self.job
        for _ in range(count):
            job.emit(self.random.randrange(1, 4))
            match self.random.choice(("checkpoint", "checkpoint", "lost notice", "lost checkpoint", "failover")):
                case "checkpoint":
                    job.checkpoint()
                case "lost notice":
                    job.decide(job.snapshot())
                case "lost checkpoint":
                    job.abort(job.snapshot())
                case "failover":
                    self._restart(job)

    def _restart(self, job: MiniJob) -> None:
        try:
            job.start()
        except HoldfastError as error:
            raise Wrong(f"a job that runs can't recover: {error}") from error

    def _take_savepoint(self) -> None:
        job = self.job
        job.emit(self.random.randrange(1, 4))
        self.savepoint = job.snapshot()
        job.decide(self.savepoint, savepoint=True)
        number, content = self.savepoint.checkpoint_id, msgspec.msgpack.encode(self.savepoint.committer)
        handle = OperatorListHandle(STATE, InlineHandle(content), len(self.savepoint.committer))
        external = job.committer.external_files(number)
        operators = stored("out-committer", (OperatorSubtaskState(operator=(handle,), external=external),), 1)
        self.metadata = snapshot(
            operators,
            job_id=job.job_id,
            checkpoint_id=number,
            attempt=job.attempt,
            external=external,
            graph=msgspec.to_builtins(graph_at(ROOT)),
        )

    def _end(self, *, finish: bool = False) -> None:
        if finish or self.random.random() < 0.4:
            self._restart(self.job)
            while self.job.position < self.savepoint.position + ROWS_AFTER:
                self.job.emit(1)
            self.job.checkpoint()
            self.state = "FINISHED"
        else:
            self.state = self.random.choice(("CANCELED", "FAILED"))

    # ------------------------------------------------------------------------------------------------------- the third job

    def take_over(self, dies_at: int | None, *, after: bool = False) -> int:
        """The third job starts, and may die for good at one change of the output; how many changes there were."""
        storage = self.job.storage
        if self.heir is None:
            self.heir = MiniJob(storage, self.job.state, THIRD, restored=self.savepoint)
        storage.changes, storage.dies_at, storage.after = 0, dies_at, after
        with suppress(Crash, OutputMayRepeatError):
            self.heir.start()
        storage.dies_at = None
        return storage.changes

    # ---------------------------------------------------------------------------------------------------------- the fork

    def _directory(self) -> StateDirectory:
        """What the coordinator sees."""
        job, number = self.job, self.savepoint.checkpoint_id
        paths, found = JobPaths(job.job_id), StateDirectory()
        assert self.metadata is not None
        found.files |= {f"{ROOT}/{path}": content for path, content in job.storage.files.items()}
        found.files["_holdfast"] = b"directory"
        first = SubmissionRecord(1, 1, submission(graph_at(ROOT), job_id=job.job_id), None, 1, "n")
        found.files[paths.submission(1)] = encode_record(first)
        if job.completed.checkpoint_id:
            found.files |= checkpoint_of(job.job_id, job.completed.checkpoint_id)
        claim = ClaimRecord(number, 1, 1, self.metadata.attempt, CheckpointKind.SAVEPOINT, SAVEPOINT, "n")
        found.files[paths.claim(number)] = encode_record(claim)
        decision = SavepointRecord(number, SAVEPOINT, CheckpointKind.SAVEPOINT, 1, 1, "n")
        found.files[paths.decision(number)] = encode_record(decision)
        found.files[f"{SAVEPOINT}/_metadata"] = encode_metadata(self.metadata)
        if self.state:
            result = ResultRecord(1, self.state, 1, "n", job.checkpoint_id, job.completed.checkpoint_id)
            found.files[paths.result(1)] = encode_record(result)
        return found

    def _ask(self) -> SubmissionPlan:
        storage = self._directory()

        def flow() -> Any:
            recorded = yield from read_job(JobPaths(JOB))
            asked = submission(graph_at(ELSEWHERE), job_id=JOB, restore=SAVEPOINT, sinks=SinkMode.FORK)
            return (yield from check_submission(recorded, asked))

        plan: SubmissionPlan = run_flow(flow(), storage)
        return plan

    def _start_fork(self, plan: SubmissionPlan) -> None:
        fork = self._deploy_fork(plan)
        for _ in range(self.random.randrange(1, 3)):
            self._restart(fork)
        self._write_fork(fork)

    def _deploy_fork(self, plan: SubmissionPlan) -> MiniJob:
        told = plan.submission.graph.vertices[-1].operators[0].properties[FORK_PROPERTY]
        fork = MiniJob(self.job.storage, self.job.state, JOB, restored=self.savepoint)
        fork.attempt = self.job.attempt if self.is_own else 0
        fork.checkpoint_id = max(self.savepoint.checkpoint_id, self.job.checkpoint_id)
        fork.path, fork.stores = ELSEWHERE, {ELSEWHERE: MortalStorage({}, ELSEWHERE), ROOT: self.job.storage}
        fork.properties = {FORK_PROPERTY: told}
        self.fork = fork
        return fork

    def _write_fork(self, fork: MiniJob) -> None:
        fork.emit(ROWS_AFTER)
        fork.checkpoint()
        self._restart(fork)

    def _check(self) -> None:
        assert self.fork is not None
        old, new = committed(self.job.storage), committed(self.fork.stores[ELSEWHERE])
        begins = self.savepoint.position
        if old != list(range(len(old))):
            raise Wrong(f"the old output is not exact: {old}")
        if new != list(range(begins, begins + ROWS_AFTER)):
            raise Wrong(f"the new output is not exact: {new}")
        if len(old) < begins:
            raise Wrong(f"rows {len(old)} to {begins} are in neither output")
        heirs = {self.heir.job_id} if self.heir is not None else set()
        strangers = {entry.job_id for entry in read_log(self.job.storage, "out")} - {self.job.job_id} - heirs
        if strangers:
            raise Wrong(f"{strangers} wrote to the log of {self.job.job_id}")


def verdicts() -> dict[str, int]:
    counts: dict[str, int] = {}
    for seed in SEEDS:
        try:
            verdict = Scene(seed).run()
        except Wrong as error:
            raise Wrong(f"seed {seed}: {error}") from error
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def test_no_row_is_lost_or_repeated_by_a_fork_and_no_log_is_written_by_another_job() -> None:
    counts = verdicts()
    assert counts["accepted"] >= 40
    assert counts["CommittablesLeftError"] >= 5, "rows of nobody are refused"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("order", ["before the check", "behind the check"])
def test_rows_of_a_log_that_a_third_job_took_over_before_it_died_are_dropped_by_nobody(order: str, *, after: bool) -> None:
    """At each of its deaths: the rows are in the old output, or the fork is refused, or it does not begin until they are there."""

    def staged() -> Scene:
        scene = Scene(0, is_own=True)
        scene.job.start()
        scene._take_savepoint()
        scene.state = "CANCELED"
        return scene

    changes = staged().take_over(None)
    assert changes >= 4
    seen = set()
    for kill in range(changes):
        scene = staged()
        if order == "before the check":
            scene.take_over(kill, after=after)
        plan = scene._ask()
        if order == "behind the check":
            scene.take_over(kill, after=after)
        if plan.report.refusals:
            (refusal,) = plan.report.refusals
            assert refusal.kind == "CommittablesLeftError"
            assert f"job {THIRD}, which took that log over" in refusal.message
            scene.take_over(None)
            plan = scene._ask()
            assert plan.report.fits, "now they are committed"
            seen.add("refused")
        fork = scene._deploy_fork(plan)
        try:
            fork.start()
        except FencedError as error:
            seen.add(f"fenced by {error.fields['owner']}")
            assert committed(fork.stores[ELSEWHERE]) == []
            scene.take_over(None)
            fork.start()
        scene._write_fork(fork)
        scene._check()
    assert seen == ({"refused"} if order == "before the check" else {f"fenced by {THIRD}"})


def _always(fate: Fate) -> Callable[..., Any]:
    def fate_of(*arguments: Any, **options: Any) -> Any:
        yield from ()
        return fate

    return fate_of


def _forgets(*arguments: Any) -> Any:
    yield from ()


def _passes_over_owners(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(*arguments: Any) -> Any:
        return replace((yield from original(*arguments)), heir="")

    return look


def _lets_go_where_fenced(original: Callable[..., Any]) -> Callable[..., Any]:
    def end_log_flow(*arguments: Any) -> Any:
        with suppress(FencedError):
            yield from original(*arguments)

    return end_log_flow



@pytest.mark.parametrize(
    ("module", "name", "mutant", "seen"),
    [
        (sink_forks_module, "_fate_of", _always(Fate.ENDED), "wrote to the log|can't recover"),
        (sink_forks_module, "_fate_of", _always(Fate.LEFT), "in neither output"),
        (committer_module, "end_log_flow", _forgets, "in neither output"),
    ],
    ids=["a fork commits for another job", "a fork leaves it to a job that is over", "a job forgets what it staged where it was"],
)
def test_a_wrong_fate_is_seen(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutant: Any, seen: str) -> None:
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(Wrong, match=seen):
        verdicts()


def test_a_log_that_another_job_took_is_seen_by_the_coordinator_and_by_the_committer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either alone is enough for no row to be lost; without both it is seen."""
    mutant = _passes_over_owners(sink_forks_module._read_log)
    monkeypatch.setattr(sink_forks_module, "_read_log", mutant)
    with pytest.raises(Wrong, match="can't recover"):
        verdicts()
    monkeypatch.setattr(committer_module, "end_log_flow", _lets_go_where_fenced(end_log_flow))
    with pytest.raises(Wrong, match="in neither output"):
        verdicts()

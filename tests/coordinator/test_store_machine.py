"""The store of checkpoints as a state machine: leaders claim, complete, abort, drop and die between any two operations."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.leadership import become_leader, check_leadership
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, LeaderRecord
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import abort_checkpoint, claim_checkpoint, decide_checkpoint, drop_checkpoint, read_job
from holdfast.statebackends.errors import FencedError, HoldfastError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import Flow, WriteFile, one_by_one, run_flow
from tests.coordinator.world import DictStorage
from tests.examples import examples

PATHS = JobPaths("ab" * 16)


class StoreMachine(RuleBasedStateMachine):
    """Several leaders may be alive at once; each only knows what it wrote. Storage alone decides."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = DictStorage()
        self.epochs = 0
        self.leaders: list[tuple[int, int]] = []
        """(epoch, next id that it would claim) of every leader that may still act."""
        self.nonces: dict[int, str] = {}
        self.decided: dict[int, CheckpointFact] = {}
        self.dropped: set[int] = set()
        self.highest = 0

    def _run(self, flow: Flow[Any], stop_after: int | None) -> Any:
        """Drive a flow; None when it was killed after so many operations."""
        if stop_after is None:
            return run_flow(flow, self.storage)
        flow = one_by_one(flow)
        try:
            operation = next(flow)
            for _ in range(stop_after):
                try:
                    result = self.storage.execute(operation)
                except HoldfastError as error:
                    operation = flow.throw(error)
                else:
                    operation = flow.send(result)
        except StopIteration as stop:
            return stop.value
        flow.close()
        return None

    @rule(stop_after=st.one_of(st.none(), st.integers(0, 12)))
    def take_over(self, stop_after: int | None) -> None:
        self.epochs += 1
        nonce = f"leader-{self.epochs}"
        epoch = run_flow(become_leader(PATHS, LeaderRecord(1, nonce, "http://x", 0)), self.storage)
        self.nonces[epoch] = nonce
        job = self._run(recover_job(PATHS, Takeover(epoch, nonce, 0)), stop_after)
        if job is not None:
            assert not job.with_fact(CheckpointFact.UNDECIDED)
            self.leaders.append((epoch, job.last_checkpoint_id + 1))

    @rule(which=st.integers(0, 5), outcome=st.sampled_from(["complete", "abort", "leave"]), die=st.integers(0, 4))
    def checkpoint(self, which: int, outcome: str, die: int) -> None:
        if not self.leaders:
            return
        index = which % len(self.leaders)
        epoch, number = self.leaders[index]
        claim = ClaimRecord(number, epoch, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(number), self.nonces[epoch])
        existing = run_flow(claim_checkpoint(PATHS, claim), self.storage)
        if existing.nonce != claim.nonce or self._is_fenced(epoch):
            del self.leaders[index]  # it stops, and has sent no trigger
            return
        assert number > self.highest or number in self.decided, "an id is used again"
        self.highest = max(self.highest, number)
        self.leaders[index] = (epoch, number + 1)
        self.storage.execute(WriteFile(f"{PATHS.checkpoint(number)}/state", (b"x",)))
        if die == 0 or outcome == "leave":
            return
        if outcome == "complete":
            other = run_flow(decide_checkpoint(PATHS, number, self._snapshot(number)), self.storage)
            assert other is not None or number not in self.decided, "an id is decided twice"
        else:
            record = AbortRecord(number, FailureReason.EXPIRED, epoch, claim.nonce)
            run_flow(abort_checkpoint(PATHS, record), self.storage)

    def _is_fenced(self, epoch: int) -> bool:
        """What a leader looks at after each write: retention of its successor may have emptied the register."""
        try:
            run_flow(check_leadership(PATHS, epoch), self.storage)
        except FencedError:
            return True
        return False

    @rule(stop_after=st.one_of(st.none(), st.integers(0, 3)))
    def retain_one(self, stop_after: int | None) -> None:
        job = run_flow(read_job(PATHS), self.storage)
        for checkpoint in job.with_fact(CheckpointFact.COMPLETED)[:-1]:
            self.dropped.add(checkpoint.checkpoint_id)
            self._run(drop_checkpoint(PATHS, checkpoint.checkpoint_id), stop_after)

    @invariant()
    def decisions_are_final(self) -> None:
        job = run_flow(read_job(PATHS), self.storage)
        for number, checkpoint in job.checkpoints.items():
            fact = checkpoint.fact
            known = self.decided.get(number)
            if fact in (CheckpointFact.COMPLETED, CheckpointFact.ABORTED):
                assert known in (None, fact), f"checkpoint {number} was {known} and is {fact}"
                self.decided[number] = fact
            elif known is not None:
                assert number in self.dropped or known is CheckpointFact.ABORTED, f"checkpoint {number} lost its decision"
            if fact is CheckpointFact.COMPLETED:
                assert isinstance(checkpoint.decision, Completed)
                assert f"{PATHS.checkpoint(number)}/state" in self.storage.files, f"checkpoint {number} is not restorable"

    @invariant()
    def the_newest_is_kept(self) -> None:
        job = run_flow(read_job(PATHS), self.storage)
        completed = [number for number, fact in self.decided.items() if fact is CheckpointFact.COMPLETED]
        if completed and max(completed) not in self.dropped:
            assert job.newest_completed == max(completed)

    @staticmethod
    def _snapshot(number: int) -> bytes:
        return encode_metadata(
            SnapshotMetadata(
                job_id=PATHS.job_id,
                job_name="j",
                checkpoint_id=number,
                kind="checkpoint",
                attempt=1,
                epoch=1,
                trigger_timestamp_ms=number,
                completion_timestamp_ms=number,
            )
        )


def test_a_stale_leader_is_refused() -> None:
    storage = DictStorage()
    run_flow(become_leader(PATHS, LeaderRecord(1, "one", "http://x", 0)), storage)
    epoch = run_flow(become_leader(PATHS, LeaderRecord(1, "two", "http://x", 0)), storage)
    run_flow(recover_job(PATHS, Takeover(epoch, "two", 0)), storage)
    stale = ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(1), "one")
    assert run_flow(claim_checkpoint(PATHS, stale), storage).nonce == "two"
    assert isinstance(run_flow(decide_checkpoint(PATHS, 1, StoreMachine._snapshot(1)), storage), AbortRecord)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

"""Sabotages of the checkpoint coordinator, of fencing and of two-phase sinks: the one thing that each does otherwise."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgspec

import holdfast.coordinator.dispatcher.storage_effects as effects_module
import holdfast.coordinator.ha.store as store_module
import holdfast.coordinator.ownership.claims as claims_module
from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.launches import launch_token
from holdfast.barriers.messages import AcknowledgeCheckpoint, CheckpointKind, FailureReason, RegisterWorker
from holdfast.chaos.sabotage import find_sabotage
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.ha.leadership import become_leader
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, LeaderRecord, RestorePoint, encode_record
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.jobmaster.releases import Releases
from holdfast.coordinator.jobmaster.restart_backoff import RestartBackoff
from holdfast.coordinator.jobmaster.slots import JobTurn, SlotPool
from holdfast.coordinator.jobmaster.stopping import StopIntent, StopRetries
from holdfast.statebackends.errors import AmbiguousWriteError, AuthenticationError, FencedError
from holdfast.statebackends.handles import FileHandle, OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import DeleteFile, Flow, run_flow
from tests.coordinator import test_stopping
from tests.coordinator.bench import JOB, A, B, Bench, of, path, state
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.stepping import Process
from tests.coordinator.test_jobmaster import restarted
from tests.coordinator.world import DictStorage as StepStorage
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import MiniJob, MortalStorage
from tests.simulation.test_sabotage_mutants import assert_changes

# -------------------------------------------------------------------------------------------------------- coordinator


def test_early_notice() -> None:
    def told() -> list[int]:
        bench = Bench()
        bench.held = {actions.WriteMetadata}
        bench.trigger()
        bench.ack_all(1)
        return bench.done

    assert_changes("early_notice", told, [], [1])


def test_missing_ack() -> None:
    def completed() -> list[int]:
        bench = Bench()
        bench.trigger()
        bench.ack(A, 1)
        return bench.completed

    assert_changes("missing_ack", completed, [], [1])


def test_trusted_acks() -> None:
    def completed() -> list[int]:
        bench = Bench(tolerable_failed_checkpoints=9)
        bench.trigger()
        bench.ack(A, 1)
        bench.ack(B, 1, "/../../outside")
        return bench.completed

    assert_changes("trusted_acks", completed, [], [1])


def test_strays_delete() -> None:
    def deleted() -> list[tuple[str, ...] | None]:
        bench = Bench()
        bench.trigger()
        stray = msgspec.structs.replace(state("x")["op"].operator[0], part=FileHandle("_claim", 1, ""))
        states = {"op": OperatorSubtaskState(operator=(stray,))}
        bench.handle(events.AcksReceived((AcknowledgeCheckpoint(77, 1, "A", 0, states),), 0))
        return [action.files for action in bench.all(actions.DiscardState)]

    assert_changes("strays_delete", deleted, [], [("_claim",)])


def test_counted_acks() -> None:
    def completed() -> tuple[list[int], list[int]]:
        bench = Bench()
        bench.trigger()
        bench.ack(A, 1)
        once = bench.completed
        bench.ack(A, 1)
        return once, bench.completed

    assert_changes("counted_acks", completed, ([], []), ([], [1]))


def test_hasty_abort() -> None:
    def done_before() -> tuple[list[int], int]:
        bench = Bench()
        bench.held = {actions.WriteAborted}
        bench.trigger()
        bench.decline(B, 1)
        return bench.aborts, len(bench.all(actions.DiscardState))

    assert_changes("hasty_abort", done_before, ([], 0), ([1], 1))


def test_savepoint_commits() -> None:
    def told() -> list[int]:
        bench = Bench()
        bench.request(CheckpointKind.SAVEPOINT)
        bench.ack_all(1)
        return bench.done

    assert_changes("savepoint_commits", told, [], [1])


def test_ignored_pause() -> None:
    def triggered() -> int:
        bench = Bench(min_pause_ms=500, checkpoint_interval_ms=600)
        bench.start_scheduler()
        bench.trigger()
        bench.advance(600)
        bench.now += 450
        bench.ack_all(1)
        bench.advance(1_300)
        return len(bench.all(actions.SendTriggers))

    assert_changes("ignored_pause", triggered, 1, 2)


def test_lasting_and_tolerated_failures() -> None:
    def failed() -> list[int]:
        bench = Bench(tolerable_failed_checkpoints=1)
        for number in (1, 2, 3, 4):
            bench.trigger()
            if number == 2:
                bench.ack_all(number)
            else:
                bench.decline(A, number)
        return [action.checkpoint_id for action in bench.all(actions.FailJob)]

    assert_changes("lasting_failures", failed, [4], [3])
    assert_changes("tolerated_failures", failed, [4], [])


def test_pauses_before_restarts() -> None:
    def pauses() -> list[int | None]:
        backoff, found, failure = RestartBackoff(RestartStrategy(), 0, random.Random(1)), [], Failure("UserFunctionError: no")
        for _ in range(2):
            found += [backoff.restart_delay_ms(failure, same_failure=False, now_ms=0) for _ in range(2)]
            backoff.progressed()
        return found

    right = [1_000, 2_000, 1_000, 2_000]
    assert_changes("hasty_restarts", pauses, right, [0, 1_000, 0, 1_000])
    assert_changes("even_pauses", pauses, right, [1_000] * 4)
    assert_changes("lasting_pauses", pauses, right, [1_000, 2_000, 4_000, 8_000])


def test_pauses_of_other_strategies() -> None:
    growing = RestartStrategy(delay_ms=100, delay_max_ms=10_000, backoff_multiplier=3, jitter_factor=0.5)
    by_time = RestartStrategy(delay_ms=100, reset_backoff_threshold_ms=60_000)
    rate = RestartStrategy("failure_rate", delay_ms=10, failures_per_interval_max=1, failure_rate_interval_ms=1_000)
    failure = Failure("UserFunctionError: no")

    def failing(strategy: RestartStrategy, *at_ms: int, progress: bool = False) -> list[int | None]:
        backoff, found = RestartBackoff(strategy, 0, random.Random(3)), []
        for now_ms in at_ms:
            found.append(backoff.restart_delay_ms(failure, same_failure=False, now_ms=now_ms))
            if progress:
                backoff.progressed()
        return found

    def continued() -> list[int | None]:
        first = RestartBackoff(growing, 0, random.Random(3))
        pause = first.restart_delay_ms(failure, same_failure=False, now_ms=0)
        record = first.record(now_ms=0, wall_ms=50)
        assert record is not None
        second = RestartBackoff(growing, 1, random.Random(4))
        second.resume(record, progressed=False, now_ms=7, wall_ms=60)
        rest = second.restart_delay_ms(failure, same_failure=False, now_ms=7)
        return [pause, rest, second.restarts]

    exact = msgspec.structs.replace(growing, jitter_factor=0.0)
    assert_changes("ignored_multiplier", lambda: failing(exact, 0, 1, 2), [100, 300, 900], [100, 200, 400])
    assert_changes("unforgotten_failures", lambda: failing(rate, 0, 2_000), [10, 10], [10, None])
    assert_changes("reset_by_checkpoints", lambda: failing(by_time, 0, 1, 2, progress=True), [100, 200, 400], [100] * 3)
    pause = continued()[0]
    assert isinstance(pause, int)
    assert continued() == [pause, pause - 10, 1]
    for name in ("redrawn_pause", "forgotten_failures"):
        with find_sabotage(name).apply():
            assert continued()[1:] != [pause - 10, 1]
        assert continued() == [pause, pause - 10, 1]


class Ambiguous(DictStorage):
    """Nobody can tell what became of a write, and it did not happen."""

    def execute(self, operation: Any) -> Any:
        if type(operation).__name__ == "PutIfAbsent":
            raise AmbiguousWriteError("who knows", path=operation.path)
        return super().execute(operation)


def test_ambiguous_is_done() -> None:
    def outcome() -> str:
        try:
            return run_flow(store_module.put_once("register", b"mine"), Ambiguous()).decode()
        except AmbiguousWriteError:
            return "unknown"

    assert_changes("ambiguous_is_done", outcome, "unknown", "mine")


def test_stale_acks() -> None:
    def completed() -> tuple[list[int], list[int]]:
        bench = Bench()
        bench.trigger()
        bench.ack(A, 1)
        bench.handle(events.JobFailing("worker lost"))
        bench.restart(2)
        bench.ack(B, 1, attempt=1)
        return bench.completed, bench.done

    assert_changes("stale_acks", completed, ([], []), ([1], []))


def test_deaf_recovery() -> None:
    def led_before_it_listens() -> bool:
        storage = StepStorage()
        accepted = Process(storage).begin().submit(submission(word_count()))
        second = Process(storage, seed=1)
        second.drive(second.host.open())
        return second.host.registry.find(accepted.job_id) is not None

    assert_changes("deaf_recovery", led_before_it_listens, False, True)


def test_untried_stop() -> None:
    def tried() -> int:
        stops = StopRetries()
        stops.resume(StopIntent("s", "/savepoints", False, False, asked_ms=0, tries=1), now_ms=0, wall_ms=0)
        return len(stops.take_due(is_up=True))

    assert_changes("untried_stop", tried, 1, 0)


def test_forgotten_stop() -> None:
    def is_tried_by_the_next_leader() -> bool:
        rig = test_stopping.stopping()
        restarted(rig)
        return test_stopping.seen(rig).in_progress

    assert_changes("forgotten_stop", is_tried_by_the_next_leader, True, False)


# ---------------------------------------------------------------------------------------------------------- retention


def complete(bench: Bench, count: int) -> Bench:
    for number in range(1, count + 1):
        bench.trigger()
        bench.ack_all(number)
    return bench


def test_newest_dropped_and_oldest_restored() -> None:
    def kept() -> list[int]:
        return complete(Bench(retained_checkpoints=2), 4).completed

    def restored() -> int:
        newest = complete(Bench(retained_checkpoints=2), 4).machine.newest
        return 0 if newest is None else newest.checkpoint_id

    assert_changes("newest_dropped", kept, [3, 4], [1, 2])
    assert_changes("oldest_restored", restored, 4, 3)


def test_repeated_ack_discarded() -> None:
    def discarded() -> list[actions.DiscardState]:
        bench = Bench()
        bench.trigger()
        bench.ack(A, 1, "a")
        again = bench.ack(A, 1, "a")
        return [*of(again, actions.DiscardState), *of(bench.ack(B, 1, "b") + bench.ack(B, 1, "b"), actions.DiscardState)]

    wrong = [actions.DiscardState(1, f"{JOB}/chk-1", (path(*each),)) for each in (("a", A), ("b", B))]
    assert_changes("repeated_ack_discarded", discarded, [], wrong)


def test_claim_deleted_last() -> None:
    def order() -> list[str]:
        storage = DictStorage({f"{JOB}/chk-1/{name}": b"" for name in ("_claim", "_metadata", "state")})
        run_flow(effects_module.drop_checkpoint(JobPaths(JOB), 1), storage)  # type: ignore[attr-defined]
        assert not storage.files
        return [each.path.rpartition("/")[2] for each in storage.log if isinstance(each, DeleteFile)]

    assert_changes("claim_deleted_last", order, ["_claim"], ["state", "_metadata", "_claim"])


def test_claimed_deleted_early() -> None:
    def released() -> list[str]:
        base = RestorePoint(7, "/savepoints/s", 0, explicit=True, claim="n")
        releases = Releases.of(base, 1, ())
        return [release.folder for release in releases.advance(0, stopped=False, dropped=False, now_ms=0)]

    assert_changes("claimed_deleted_early", released, [], ["/savepoints/s"])


def test_final_dropped() -> None:
    def dropped() -> list[int]:
        bench = Bench(retain_on_finish=True)
        bench.trigger()
        bench.ack_all(1)
        bench.handle(events.ShutDown())
        return [drop.checkpoint_id for drop in of(bench.handle(events.JobTerminated("FINISHED")), actions.DropCheckpoint)]

    assert_changes("final_dropped", dropped, [], [1])


def test_needed_claim_given_back() -> None:
    def reason() -> str:
        return claims_module.refuse_to_return(RecordedJob(JOB, (), {}, {}, {}, {}), "n", 0)

    assert_changes("needed_claim_given_back", reason, "its job may be starting just now", "")


def test_needed_shared_file_deleted() -> None:
    def released() -> tuple[str, ...]:
        shared = SharedStateRegistry()
        for number in (1, 2):
            shared.register(number, [FileHandle("../shared/1-x", 1, "c")])
        return shared.release(1).names

    assert_changes("needed_shared_file_deleted", released, (), ("1-x",))


def test_shared_deleted_first() -> None:
    def order() -> list[str]:
        storage = DictStorage({f"{JOB}/chk-1/_claim": b"", f"{JOB}/shared/1-x": b""})
        run_flow(effects_module.drop_checkpoint(JobPaths(JOB), 1, ("1-x",)), storage)  # type: ignore[attr-defined]
        return [each.path.rpartition("/")[2] for each in storage.log if isinstance(each, DeleteFile)]

    assert_changes("shared_deleted_first", order, ["_claim", "1-x"], ["1-x", "_claim"])


def test_unswept_shared_files() -> None:
    def sweep() -> Flow[None]:
        yield from effects_module.sweep_shared(PATHS, 2)  # type: ignore[attr-defined]

    def left() -> list[str]:
        storage = left_behind(aborted=True)
        storage.files[f"{JOB}/shared/1-x"] = b""
        run_flow(recover_job(PATHS, Takeover(2, "b", 0)), storage)
        storage.files[f"{JOB}/shared/2-x"] = b""
        run_flow(sweep(), storage)
        return sorted(path.rpartition("/")[2] for path in storage.files if "/shared/" in path)

    assert_changes("unswept_shared_files", left, [], ["1-x", "2-x"])


# ------------------------------------------------------------------------------------------------------------ fencing

PATHS = JobPaths(JOB)


def left_behind(*, aborted: bool) -> DictStorage:
    """A job whose leader has claimed id 1, and perhaps aborted it."""
    claim = ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(1), "old", created_ms=0)
    storage = DictStorage({PATHS.claim(1): encode_record(claim)})
    run_flow(become_leader(PATHS, LeaderRecord(1, "old", "", 0)), storage)
    if aborted:
        record = AbortRecord(1, FailureReason.EXPIRED, 1, "old", "", 0)
        storage.files[PATHS.decision(1)] = encode_record(record)
    return storage


def settled(storage: DictStorage, epoch: int) -> tuple[int, list[CheckpointFact]]:
    """Highest id, and what the ids are, when a leader has settled the job."""
    job = run_flow(recover_job(PATHS, Takeover(epoch, "new", 0)), storage)
    return job.last_checkpoint_id, [job.checkpoints[number].fact for number in sorted(job.checkpoints)]


def test_trusted_registrations_and_borrowed_proof() -> None:
    def taken() -> list[tuple[int, int, str]]:
        """(slot, spawn, proof) of the registrations that are believed: the proof is that of spawn 1 in slot 0, or none."""
        setup = msgspec.structs.replace(Rig().run().master.setup, launch_key="key")
        proof = launch_token("key", job_id=setup.job_id, submission=setup.submission, slot=0, spawn=1)
        believed = []
        for slot, spawn, token in ((0, 1, proof), (0, 2, proof), (1, 1, proof), (0, 1, "")):
            names = (setup.job_id, slot, setup.submission, 1, "n", 1, "h", "tcp://h:1", setup.directory_nonce)
            message = RegisterWorker(*names, spawn=spawn, launch_token=token)
            slot_pool = SlotPool(setup, random.Random(0), JobTurn())
            with suppress(AuthenticationError):
                slot_pool.check_registration(message)
                believed.append((slot, spawn, "its own" if token else "none"))
        return believed

    right = [(0, 1, "its own")]
    assert_changes("borrowed_proof", taken, right, [*right, (0, 2, "its own"), (1, 1, "its own")])
    assert_changes("trusted_registrations", taken, right, [*right, (0, 2, "its own"), (1, 1, "its own"), (0, 1, "none")])


def test_reused_id() -> None:
    aborted = CheckpointFact.ABORTED
    assert_changes("reused_id", lambda: settled(left_behind(aborted=True), 1), (1, [aborted]), (0, []))


def test_unsettled_takeover() -> None:
    aborted, undecided = CheckpointFact.ABORTED, CheckpointFact.UNDECIDED
    assert_changes(
        "unsettled_takeover", lambda: settled(left_behind(aborted=False), 2), (2, [aborted, aborted]), (2, [undecided, undecided])
    )


def test_loser_goes_on() -> None:
    def outcome() -> tuple[bytes, str]:
        storage = left_behind(aborted=True)
        run_flow(become_leader(PATHS, LeaderRecord(2, "new", "", 0)), storage)
        existing = run_flow(store_module.put_once(PATHS.decision(1), b"completed"), storage)
        try:
            run_flow(effects_module.check_leadership(PATHS, 1), storage)  # type: ignore[attr-defined]
        except FencedError:
            return existing[:10], "fenced"
        return existing[:10], "leads"

    stood = left_behind(aborted=True).files[PATHS.decision(1)][:10]
    assert_changes("loser_goes_on", outcome, (stood, "fenced"), (b"completed", "leads"))


# -------------------------------------------------------------------------------------------------------------- sinks


def new_job() -> MiniJob:
    job = MiniJob(MortalStorage({}), DictStorage())
    job.start()
    return job


def staged(job: MiniJob) -> int:
    return sum("/staged/" in path for path in job.storage.files)


def test_exact_commit() -> None:
    def committed() -> list[int]:
        job = new_job()
        job.emit(2)
        job.decide(job.snapshot())
        job.emit(1)
        job.checkpoint()
        return job.committed()

    assert_changes("exact_commit", committed, [0, 1, 2], [2])


def test_lost_recommit() -> None:
    def committed() -> list[int]:
        job = new_job()
        job.emit(2)
        job.decide(job.snapshot())
        job.start()
        return job.committed()

    assert_changes("lost_recommit", committed, [0, 1], [])


def test_repeated_commit() -> None:
    def committed() -> list[int]:
        job = new_job()
        job.emit(2)
        job.checkpoint()
        job.start()
        return job.committed()

    assert_changes("repeated_commit", committed, [0, 1], [0, 1, 0, 1])


def test_early_commit() -> None:
    def committed() -> list[int]:
        job = new_job()
        job.emit(2)
        job.snapshot()
        job.run_pool()
        return job.committed()

    assert_changes("early_commit", committed, [], [0, 1])


def test_early_ack() -> None:
    def durable() -> int:
        job = new_job()
        job.emit(2)
        job.snapshot()
        return staged(job)

    assert_changes("early_ack", durable, 1, 0)


def test_no_sweep_and_unprotected_sweep() -> None:
    def after_abort() -> int:
        job = new_job()
        job.emit(2)
        job.abort(job.snapshot())
        job.start()
        return staged(job)

    def after_savepoint() -> int:
        job = new_job()
        job.emit(2)
        job.decide(job.snapshot(), savepoint=True)
        job.start()
        return staged(job)

    assert_changes("no_sweep", after_abort, 0, 1)
    assert_changes("unprotected_sweep", after_savepoint, 1, 0)


def test_sweep_of_the_living() -> None:
    def own() -> int:
        job = new_job()
        job.file_size_max = 1
        job.start()
        job.emit(2)
        job.run_pool()
        job.notify(0)
        return staged(job)

    assert_changes("sweep_of_the_living", own, 1, 0)

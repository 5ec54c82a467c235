"""Epochs and attempts, from their records to the workers: I15, and of I8 and I16 where an attempt begins (docs/invariants.md).

Numbers rise without gaps, since fencing compares with the next one only. A slot of an attempt belongs to one process, which
receives no attempt older than its newest and reports none that it did not receive. Only a process that the job's launcher started
as the worker of a slot gets that slot."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.messages import (
    Answerable,
    Deploy,
    Deployment,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, EpochTaken, JobLedger
from holdfast.chaos.checkers.observations import (
    Answered,
    Commanded,
    Delivered,
    FaultBegan,
    Impersonated,
    Lifecycle,
    Observation,
    Report,
    Reported,
    Stored,
    WorldView,
)
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AttemptRecord
from holdfast.statebackends.layout import METADATA_NAME
from holdfast.statebackends.storage import is_absolute_folder


def _is_broken(item: SubtaskStatus | Answerable) -> bool:
    if not isinstance(item, SubtaskStatus) or item.state is not TaskState.FAILED:
        return False
    return item.error.startswith(("ProtocolError", "InvariantError"))


class AttemptsChecker(Checker):
    """Follows each process through its attempts."""

    invariants: ClassVar[tuple[str, ...]] = ("I8", "I15", "I16")
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Impersonated, Answered, Delivered, Reported, Lifecycle, FaultBegan)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._holders: dict[tuple[int, int], str] = {}
        """(attempt, slot) -> process that holds it."""
        self._given: dict[str, list[int]] = {}
        """Process -> attempts deployed to it, ascending."""
        self._strangers: dict[str, int] = {}
        """Process that no launcher started -> slot that it asks for."""
        self._forged_frames = False
        """Forged frames have arrived at a data port."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Reported(actor=actor, item=item):
                if _is_broken(item):
                    self._broken(actor, item)
                if item.attempt not in self._given.get(actor, ()):
                    self.report("I15", f"{actor} reports {type(item).__name__} of attempt {item.attempt}, not deployed to it")
            case Stored(added=()):
                pass
            case Stored() | Lifecycle():
                for change in self.ledger.changes(observation):
                    if isinstance(change, EpochTaken) and change.epoch != change.newest + 1:
                        self.report("I15", f"epoch {change.epoch} follows {change.newest}")
                    elif isinstance(change, AttemptRecorded):
                        self._recorded(change)
            case Commanded(command=Deploy(deployment=deployment), epoch=epoch):
                self._deployed(deployment, epoch)
            case Impersonated(actor=actor, slot=slot):
                self._strangers[actor] = slot
            case Answered(answer=Registered() as registered, receiver=receiver) if receiver in self._strangers:
                slot = self._strangers[receiver]
                self.report("I15", f"epoch {registered.epoch} gives slot {slot} to {receiver}, which no launcher started for it")
            case Answered(answer=Registered(deployment=Deployment() as deployment, epoch=epoch)):
                self._deployed(deployment, epoch)
            case Delivered():
                self._delivered(observation)
            case FaultBegan(kind="forged_frames"):
                self._forged_frames = True
            case _:
                pass

    def _broken(self, actor: str, item: SubtaskStatus | Answerable) -> None:
        """A channel broke: by forged frames, which a task must refuse, or by a gap or repeat, which no link makes."""
        if self._forged_frames:
            self.report("I15", f"{actor} fails by what came to its data port")
        elif isinstance(item, SubtaskStatus):
            self.report("I15", f"{actor} fails by what can't be: {item.error}")

    # ---------------------------------------------------------------------------------------------------------- records

    def _recorded(self, change: AttemptRecorded) -> None:
        record = change.record
        if record.attempt != change.newest + 1:
            self.report("I15", f"attempt {record.attempt} follows {change.newest}")
        if record.epoch == self.ledger.newest_epoch:
            self._check_start(record)
            self._check_restarts(record)

    def _check_restarts(self, record: AttemptRecord) -> None:
        """Each failover counts once for the restart strategy, under any leader: the strategy may allow only a few.

        A process that dies before it reports repeats the old failure, which does not count again; behind a checkpoint it does."""
        before = self.ledger.attempts.get(record.attempt - 1)
        if before is None or before.submission != record.submission:
            if record.restarts > 0 and record.attempt - 1 in self.ledger.attempts:
                which = f"attempt {record.attempt}, the first of submission {record.submission},"
                self.report("I16", f"{which} counts {record.restarts} restarts")
            return
        progressed = any(each.claim.attempt == before.attempt for each in self.ledger.completed.values())
        least = before.restarts + (1 if progressed else 0)
        if not least <= record.restarts <= before.restarts + 1:
            count = f"attempt {record.attempt} counts {record.restarts} restarts"
            self.report("I16", f"{count}, the one before it {before.restarts}; epoch {before.epoch} led that, {record.epoch} this")

    def _check_start(self, record: AttemptRecord) -> None:
        """A new attempt begins at the newest completed checkpoint of its submission, else at the submission's base."""
        wanted = self.ledger.recovery_point(record.submission)
        found = record.restored.checkpoint_id if record.restored is not None else 0
        if wanted is not None and found != wanted:
            self.report("I16", f"attempt {record.attempt} begins at checkpoint {found}; the newest one is {wanted}")
        submission = self.ledger.submissions.get(record.submission)
        if submission is not None and record.restored is not None and found < submission.first_checkpoint_id:
            self._check_named(record, submission.submission.restore or "")

    def _check_named(self, record: AttemptRecord, restore: str) -> None:
        """A submission that names a snapshot by its path starts from that folder, not from another snapshot of the same id, such as
        its copy."""
        named = restore.rstrip("/").removesuffix(f"/{METADATA_NAME}")
        assert record.restored is not None
        if is_absolute_folder(named) and record.restored.folder.rstrip("/") != named:
            self.report("I16", f"attempt {record.attempt} begins at {record.restored.folder}; its submission names {named}")

    def _deployed(self, deployment: Deployment, epoch: int) -> None:
        """A deployment follows its attempt's durable record, and equals it."""
        record = self.ledger.attempts.get(deployment.attempt)
        if record is None or record.epoch != epoch:
            held = "no leader" if record is None else f"epoch {record.epoch}"
            self.report("I15", f"epoch {epoch} deploys attempt {deployment.attempt}, which {held} has on record")
            return
        restored = record.restored.checkpoint_id if record.restored is not None else 0
        if deployment.restored_checkpoint_id != restored:
            self.report(
                "I8",
                f"attempt {deployment.attempt} is deployed from checkpoint {deployment.restored_checkpoint_id}, "
                f"its record says {restored}",
            )

    # ---------------------------------------------------------------------------------------------------------- workers

    def _delivered(self, fact: Delivered) -> None:
        actor = fact.actor
        given = self._given.setdefault(actor, [])
        match fact.command:
            case Deploy(deployment=deployment):
                attempt = deployment.attempt
                if given and attempt <= given[-1]:
                    self.report("I15", f"{actor} is given attempt {attempt} after {given[-1]}")
                given.append(attempt)
                holder = self._holders.setdefault((attempt, fact.slot), actor)
                if holder != actor:
                    self.report("I15", f"slot {fact.slot} of attempt {attempt} is given to {actor}, and was to {holder}")
            case TriggerCheckpoint() | NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks() as command:
                if not given or command.attempt != given[-1]:
                    self.report(
                        "I15",
                        f"{actor} runs attempt {given[-1] if given else 'none'} and takes "
                        f"{type(command).__name__} of attempt {command.attempt}",
                    )
            case _:
                pass

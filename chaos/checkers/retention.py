"""What is left when a job has ended: I16 for its checkpoints, I24 for what it should have deleted while it ran
(docs/invariants.md).

A deletion may fail: a process dies, a call fails, and the late writes of a zombie wait for the next recovery (recovery.py). Only
what was due without trouble is a violation:
- completed checkpoints beyond the limit, and any after FINISHED where none is retained, unless a deletion failed or the last leader
  died; a job that finished and retains its checkpoints keeps the newest one in every case;
- the registers of aborted ids, once no recovery starts below them, with the same exceptions;
- files shared by completed checkpoints, once none of these is left (I23), with the same exceptions;
- the snapshot that the last submission claimed, once it has finished with a checkpoint of its own, unless a deletion failed or a
  coordinator was in trouble since that submission;
- files of an acknowledgement that the leader discarded, if it never tried to delete them, and could;
- files staged by dead attempts, if the last attempt never listed them, and could, and no savepoint may name them.
A sink's `data/` holds committed files alone, each with its link for plain readers, and no staged file of the last attempt is
left."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from holdfast.barriers.messages import AckAnswers, AckBatch, AcknowledgeCheckpoint, AckStatus, CheckpointKind, Deploy
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.descent import Descent
from holdfast.chaos.checkers.ledger import AttemptRecorded, JobLedger, ResultRecorded, join
from holdfast.chaos.checkers.observations import (
    Answered,
    Delivered,
    Forged,
    Led,
    Lifecycle,
    Observation,
    Report,
    Requested,
    Stored,
    StoreView,
    WorldView,
)
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import CLAIM_NAME, METADATA_NAME, SHARED_FOLDER, JobPaths, writer_of
from holdfast.statebackends.snapshot.parts import file_handles, snapshot_files
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, ListFolder

DISCARD_MS_MAX = 5_000
"""Time in which a leader deletes files that came too late, ms: its deletions run one after another."""

_NAME = re.compile(r"-a(\d+)-s\d+-c(\d+)-[^-]+-\d+\.parquet$")
"""Attempt and first checkpoint id in the name of a staged file."""


@dataclass(slots=True)
class _Staging:
    """The staged files of one sink, as they appear."""

    expected: SinkExpectation
    folder: str
    """Relative to the sink's root."""
    added_ms: dict[str, int] = field(default_factory=dict)
    listed_ms: int = -1
    """When a sweep last listed them, ms."""


@dataclass(frozen=True, slots=True)
class _Discarded:
    """Files of an acknowledgement that the leader refused."""

    at_ms: int
    leader: str
    paths: tuple[str, ...]
    """Paths in the state directory."""


class RetentionChecker(Checker):
    """Notes failures while the job runs, and checks the stores at the end."""

    invariants: ClassVar[tuple[str, ...]] = ("I16", "I19", "I23", "I24")
    hears: ClassVar[tuple[type, ...]] = (Stored, Requested, Answered, Delivered, Forged, Led, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._sinks = [_Staging(sink, join("_holdfast", quote(sink.sink_id, safe=""), "staged")) for sink in scenario.sinks]
        self._descent = Descent(ledger)
        self._deletion_failed = False
        self._result_ms: int | None = None
        self._submitted_ms: dict[int, int] = {}
        """Submission -> time of its record, ms."""
        self._trouble_ms: dict[str, int] = {}
        """Process -> when it last died, was paused or had a call fail, ms."""
        self._worker_trouble_ms: list[int] = []
        """The same of any worker, while the job ran."""
        self._leaders: dict[str, int] = {}
        """Process -> epoch in which it last led."""
        self._discarded: list[_Discarded] = []
        self._forged: list[AcknowledgeCheckpoint] = []
        """Forged acknowledgements: the files named there are others', and must stay."""
        self._deployed_ms: dict[int, int] = {}
        """Attempt -> when it was first deployed to a worker, ms."""
        self._late: set[str] = set()
        """Files in the state directory made by a call that had been answered as failed: they may appear after their deletion."""
        self._deleted: set[str] = set()
        """Files in the state directory that a process tried to delete, one by one."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored():
                self._stored(observation)
            case Answered(request="acks", body=AckBatch() as batch, answer=AckAnswers() as answers):
                self._answered(observation, batch, answers)
            case Delivered(command=Deploy(deployment=deployment)):
                self._deployed_ms.setdefault(deployment.attempt, observation.at_ms)
            case Forged(item=item):
                self._forged.append(item)
            case Led():
                self._leaders[observation.actor] = observation.epoch
            case Lifecycle():
                if observation.change in ("killed", "paused", "left", "power_loss"):
                    self._trouble(observation.actor, observation.at_ms)
                if observation.change == "power_loss":
                    self._discarded.clear()
            case _:
                pass

    # --------------------------------------------------------------------------------------------------------- noting

    def _trouble(self, actor: str, at_ms: int) -> None:
        self._trouble_ms[actor] = at_ms
        if actor.startswith("worker") and self._result_ms is None:
            self._worker_trouble_ms.append(at_ms)

    def _stored(self, fact: Stored) -> None:
        # the caller of an operation that succeeded may have had another answer
        if isinstance(fact.result, StorageUnavailableError) or fact.fate in ("lie", "late", "postponed"):
            self._trouble(fact.actor, fact.at_ms)
            if isinstance(fact.operation, DeleteFile | DeleteFolder):
                self._deletion_failed = True
        for change in self.ledger.changes(fact) if fact.added else ():
            if isinstance(change, ResultRecorded):
                self._result_ms = fact.at_ms
            elif isinstance(change, AttemptRecorded):
                self._result_ms = None
        if fact.added:
            for submission in self.ledger.submissions:
                self._submitted_ms.setdefault(submission, fact.at_ms)
        if fact.fate == "late":
            self._late.update(fact.added)
        if isinstance(fact.operation, DeleteFile):
            self._deleted.add(fact.operation.path)
        if fact.added or isinstance(fact.operation, ListFolder):
            for sink in self._sinks:
                if fact.root == sink.expected.path.rstrip("/"):
                    self._at_sink(sink, fact)

    def _at_sink(self, sink: _Staging, fact: Stored) -> None:
        for path in fact.added:
            folder, _, name = path.rpartition("/")
            if folder == sink.folder:
                sink.added_ms.setdefault(name, fact.at_ms)
        operation = fact.operation
        if isinstance(operation, ListFolder) and operation.prefix == sink.folder and isinstance(fact.result, list):
            sink.listed_ms = fact.at_ms

    def _answered(self, fact: Answered, batch: AckBatch, answers: AckAnswers) -> None:
        for item, answer in zip(batch.items, answers.answers, strict=True):
            if answer is AckStatus.DISCARDED and isinstance(item, AcknowledgeCheckpoint) and item not in self._forged:
                self._discard(fact, item)

    def _discard(self, fact: Answered, ack: AcknowledgeCheckpoint) -> None:
        claim = self.ledger.first_claims.get(ack.checkpoint_id)
        if claim is not None and claim.kind.is_savepoint:
            return
        folder = f"{self.world.job_id}/chk-{ack.checkpoint_id}"
        handles = [handle for state in ack.states.values() for handle in file_handles(state)]
        handles += [channel.part for channel in ack.in_flight if isinstance(channel.part, FileHandle)]
        paths = tuple(posixpath.normpath(f"{folder}/{handle.path}") for handle in handles)
        if paths:
            self._discarded.append(_Discarded(fact.at_ms, fact.actor, paths))

    # ----------------------------------------------------------------------------------------------------------- judging

    def look(self) -> None:
        """Files that came too late are deleted in time."""
        due = [each for each in self._discarded if each.at_ms + DISCARD_MS_MAX <= self.world.now_ms]
        if due:
            self._discarded = [each for each in self._discarded if each not in due]
            self._check_discarded(due)

    def _check_discarded(self, due: list[_Discarded]) -> None:
        for each in due:
            leads = self._leaders.get(each.leader) == self.ledger.newest_epoch
            if not leads or self._trouble_ms.get(each.leader, -1) >= each.at_ms:
                continue
            if any(path in self._deleted for path in each.paths):
                continue  # a deletion whose answer got lost ends there
            for path in each.paths:
                if self.world.state.size(path) is not None:
                    self.report("I24", f"{path} came with an acknowledgement that {each.leader} discarded, and is still there")

    def at_end(self) -> None:
        self._descent.follow()
        self._check_discarded(self._discarded)
        self._check_retained()
        self._check_kept()
        self._check_claimed()
        for sink in self._sinks:
            self._check_sink(sink)

    def _check_retained(self) -> None:
        """No more completed checkpoints than are retained, and none of a finished job that retains none."""
        submission = max(self.ledger.submissions, default=0)
        result = self.ledger.results.get(submission)
        if result is None or result.epoch < self.ledger.newest_epoch or self._deletion_failed or self._is_disturbed():
            return
        kept = [
            number
            for number, each in self.ledger.completed.items()
            if self.ledger.stands(number) and each.kind in (CheckpointKind.CHECKPOINT, CheckpointKind.FINAL)
        ]
        if any(self.world.state.size(JobPaths(self.world.job_id).labelled(number)) is not None for number in kept):
            return  # labels keep some, and shared files with them; one that lost its label beside its leader goes with the next
        config = self.ledger.submissions[submission].graph.config
        limit = config.retained_checkpoints + config.retained_hourly + config.retained_daily
        if result.state == "FINISHED" and not self._keeps_finished(submission):
            limit = 0
        elif self._begins_with(max(kept, default=0)):
            limit += 1  # what an attempt was restored from does not count until another one completes
        if len(kept) > limit:
            self.report("I16", f"the job is {result.state} and keeps the checkpoints {kept}, at most {limit} are to be kept")
        if not kept:
            self._check_shared(result.state)
        self._check_aborted(result.state, max(kept, default=0), leaves_all=result.state == "FINISHED" and limit == 0)

    def _begins_with(self, checkpoint_id: int) -> bool:
        """Whether the newest attempt was restored from this checkpoint of its job."""
        attempt = self.ledger.attempts.get(self.ledger.newest_attempt)
        restored = attempt.restored if attempt is not None else None
        return restored is not None and restored.checkpoint_id == checkpoint_id

    def _keeps_finished(self, submission: int) -> bool:
        return self.ledger.submissions[submission].graph.config.retain_on_finish

    def _check_kept(self) -> None:
        """A finished job that retains its checkpoints has its newest one, complete for a start from it."""
        submission = max(self.ledger.submissions, default=0)
        result = self.ledger.results.get(submission)
        if result is None or result.state != "FINISHED" or not self._keeps_finished(submission):
            return
        own = [
            number
            for number, each in self.ledger.completed.items()
            if each.is_recovery_point and number >= self.ledger.submissions[submission].first_checkpoint_id
        ]
        newest = max(own, default=0)
        if not newest or self.ledger.completed[newest].kind is not CheckpointKind.FINAL:
            return  # stopped with a savepoint, which is its user's
        if not self.ledger.stands(newest):
            self.report("I16", f"the job has finished and was to keep checkpoint {newest}, its last, which is gone")
            return
        snapshot = self.ledger.completed[newest]
        for path in sorted({snapshot.path(handle.path) for handle, _, _ in snapshot_files(snapshot.metadata)}):
            if snapshot.view.size(path) is None:
                self.report("I16", f"the job has finished and keeps checkpoint {newest}, of which {path} is gone")
                return

    def _check_aborted(self, state: str, newest: int, *, leaves_all: bool) -> None:
        """The registers of aborted ids go with the next checkpoint that completes, and with the end of a job that retains none."""
        for number in sorted(self.ledger.aborted & self.ledger.claims.keys()):
            if not leaves_all and number > newest:
                continue
            folder = f"{self.world.job_id}/chk-{number}"
            register = {f"{folder}/{CLAIM_NAME}", f"{folder}/{METADATA_NAME}"}
            own = self.ledger.claims[number] == self.ledger.first_claims.get(number)
            if own and self.ledger.abort_record(number) is not None and not register & self._late:
                self.report(
                    "I24", f"the job is {state}, and the register of checkpoint {number}, which was aborted, is still there"
                )
                return

    def _check_shared(self, state: str) -> None:
        """Without a checkpoint no file is referred to. Late writes of an aborted one wait for the next recovery."""
        for path in self.world.state.paths(f"{self.world.job_id}/{SHARED_FOLDER}"):
            if writer_of(path.rpartition("/")[2]) in self.ledger.completed:
                self.report("I23", f"the job is {state} and keeps no checkpoint, and {path} is still there")
                return

    def _check_claimed(self) -> None:
        """Snapshots that a finished job owned, and has replaced, are gone."""
        number = max(self.ledger.submissions, default=0)
        record, result = self.ledger.submissions.get(number), self.ledger.results.get(number)
        if record is None or record.base is None or result is None or result.state != "FINISHED":
            return
        if not self.ledger.took(record.base.folder):
            return
        begun_ms = self._submitted_ms[number]
        if self._deletion_failed or result.epoch < self.ledger.newest_epoch or self._was_trouble_since(begun_ms):
            return
        own = [each for each in self.ledger.completed.values() if each.checkpoint_id >= record.first_checkpoint_id]
        left = self.world.store(record.base.folder).paths()
        config = record.graph.config
        least = config.retained_checkpoints if config.retain_on_finish else 1
        if left and sum(each.is_recovery_point for each in own) >= least:
            self.report("I24", f"the job has finished and left {left[0]} of {record.base.folder}, which it had claimed")

    def _was_trouble_since(self, begun_ms: int) -> bool:
        """Whether a coordinator died, was paused or had a call fail since then."""
        return any(at_ms >= begun_ms for actor, at_ms in self._trouble_ms.items() if not actor.startswith("worker"))

    def _is_disturbed(self) -> bool:
        """Whether a coordinator died, was paused or had a call fail after the result was stored: what it began may be
        unfinished."""
        return self._result_ms is None or self._was_trouble_since(self._result_ms)

    # ------------------------------------------------------------------------------------------------------------- sinks

    def _check_sink(self, sink: _Staging) -> None:
        result: Any = self.ledger.results.get(max(self.ledger.submissions, default=0))
        if result is None or result.state != "FINISHED":
            return
        view, sink_id = self.world.store(sink.expected.path), sink.expected.sink_id
        holder = sink.folder.removesuffix("/staged")
        committed, replaced = _committed(view, f"{holder}/log")
        names = set(committed) | replaced
        planned = {path.rpartition("/")[2].removesuffix(".json") for path in view.paths(f"{holder}/merges")}
        stray = sorted({path.rpartition("/")[2] for path in view.paths(f"{holder}/data")} - names - planned)
        if stray and self._descent.is_straight:  # a commit under way when its user went back is never finished
            self.report("I24", f"sink {sink_id}: {stray[0]} is in data/ and not committed")
        # Links of output behind a snapshot that the user went back to are not made: no state holds it any more.
        unseen = (name for name in committed if name not in planned and view.size(name) is None)
        hidden = sorted(name for name in unseen if self._descent.holds_file(committed[name], name))
        if hidden:
            self.report("I19", f"sink {sink_id}: {hidden[0]} is committed and plain readers don't see it")
        for path in view.paths(sink.folder):
            self._check_staged(sink, path.rpartition("/")[2], names)

    def _check_staged(self, sink: _Staging, name: str, names: set[str]) -> None:
        """A staged file is left only for a reason."""
        found = _NAME.search(name)
        if found is None or name in names:  # a late write may bring back what was committed
            return
        attempt, first = int(found[1]), int(found[2])
        last = max(self._deployed_ms, default=0)
        where = f"sink {sink.expected.sink_id}: {name}"
        if attempt >= last:
            self.report("I24", f"{where} was staged by the last attempt and never committed")
        elif not self._is_excused(sink, name, (attempt, last), first):
            self.report("I24", f"{where} is of attempt {attempt} and was still there when attempt {last} began, which left it")

    def _is_excused(self, sink: _Staging, name: str, attempts: tuple[int, int], first: int) -> bool:
        """Whether a staged file of the first of these attempts may be left by the second: written later, listed by a sweep, not
        listable, or possibly named by a snapshot (also of an attempt in between, which may have restored it)."""
        attempt, last = attempts
        begun_ms = self._deployed_ms[last]
        if sink.added_ms.get(name, begun_ms) >= begun_ms:
            return True
        if begun_ms <= sink.listed_ms:
            return True
        claims, aborted = self.ledger.first_claims, self.ledger.aborted
        named = (number >= first and attempt <= claim.attempt < last for number, claim in claims.items() if number not in aborted)
        if any(named):
            return True
        return any(at_ms >= begun_ms for at_ms in self._worker_trouble_ms)


def _committed(view: StoreView, folder: str) -> tuple[dict[str, int], set[str]]:
    """Current files of a sink's log, and the id that each was committed with; those that others have replaced."""
    names: dict[str, int] = {}
    replaced: set[str] = set()
    sequence = 0
    while (content := view.peek(f"{folder}/{sequence:012d}.json")) is not None:
        entry = msgspec.json.decode(content)
        names.update((file["name"], entry["checkpoint_id"]) for file in entry.get("files", ()))
        if entry["type"] == "merge":
            replaced.update(file["name"] for file in entry["replaced"])
            names[entry["file"]["name"]] = entry["checkpoint_id"]
        sequence += 1
    return {name: number for name, number in names.items() if name not in replaced}, replaced

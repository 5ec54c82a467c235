"""Ownership of the snapshot that a submission starts from (I25, docs/invariants.md): what its user asked for, not what the job has
recorded.

Without CLAIM only its user writes into the folder or deletes from it, and no checkpoint of the job refers to its files."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot, folder_asked, join
from holdfast.chaos.checkers.observations import Observation, Report, Stored, Submitted, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.layout import METADATA_NAME, parse_owner_name
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.storage import is_absolute_folder

_USER = "user"


class ClaimsChecker(Checker):
    """Notes what users ask for, and watches the folders that stay theirs."""

    invariants: ClassVar[tuple[str, ...]] = ("I25",)
    hears: ClassVar[tuple[type, ...]] = (Submitted, Stored)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._started_from: set[str] = set()
        """Folders of snapshots from which submissions started."""

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Submitted):
            self.ledger.asked(observation.submission)
            folder = folder_asked(observation.submission)
            if folder is not None:
                self._started_from.add(folder)
        elif isinstance(observation, Stored) and (observation.added or observation.removed):
            self._stored(observation)

    def _stored(self, fact: Stored) -> None:
        if self._started_from and fact.actor != _USER and fact.fate != "late":
            for path in fact.removed:
                self._touched(fact, path, "deleted")
            for path in fact.added:
                if parse_owner_name(path.rpartition("/")[2]) is not None:
                    self._touched(fact, path, "wrote")
        if fact.actor == _USER:
            for path in fact.removed:
                self._disposed(fact, path)
        for change in self.ledger.changes(fact):
            if isinstance(change, Decided) and change.snapshot is not None:
                self._check_files(change.snapshot)

    def _disposed(self, fact: Stored, path: str) -> None:
        """A user may dispose of a snapshot unless the newest submission claimed it and has no checkpoint of its own since."""
        folder, _, name = join(fact.root, path).rpartition("/")
        number = max(self.ledger.submissions, default=0)
        record = self.ledger.submissions.get(number)
        if name != METADATA_NAME or record is None or record.base is None or record.base.folder != folder or not record.base.claim:
            return
        has_own = any(
            each.is_recovery_point and each.checkpoint_id >= record.first_checkpoint_id for each in self.ledger.completed.values()
        )
        if number not in self.ledger.results and not has_own:
            self.report("I25", f"{fact.actor} could delete {path}, which the job was given and has not replaced yet")

    def _touched(self, fact: Stored, path: str, did: str) -> None:
        folder = join(fact.root, path).rpartition("/")[0]
        if folder in self._started_from and folder not in self.ledger.given:
            self.report("I25", f"{fact.actor} {did} {path} of {folder}, which a job was started from and did not get")

    def _check_files(self, snapshot: Snapshot) -> None:
        own = join(snapshot.view.root, snapshot.folder if is_absolute_folder(snapshot.claim.folder) else self.world.job_id)
        for handle, _, _ in snapshot_files(snapshot.metadata):
            location = snapshot.location(handle.path)
            if not location.startswith(f"{own}/"):
                self.report("I25", f"{snapshot.kind} {snapshot.checkpoint_id} needs {location}, which is not the job's")
                return

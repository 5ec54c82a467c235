"""SHELL: labels of a job's snapshots for users: read and changed in its directory, and told to the job's leader if it is led here.

The register beside a snapshot decides (`ownership/labels.py`); the leader is told so that it keeps the snapshot without trying to
delete it, or deletes it at once when its last label is gone."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.jobmaster.events import LabelNoted
from holdfast.coordinator.ownership.labels import LabelList, LabelView, Mark, add_label, read_labels, remove_label
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import Storage, run_flow


class JobLabels:
    """The part of `interface.Coordinator` that labels. Thread-safe."""

    def __init__(
        self, calls: JobCalls, storage: Storage, clock: Clock, draw_nonce: Callable[[], str], clear: Callable[[str], None]
    ) -> None:
        """`clear`: deletes what an ended job, which no runner of this process has, keeps no longer."""
        self._calls = calls
        self._storage = storage
        self._clock = clock
        self._draw_nonce = draw_nonce
        self._clear = clear

    def list(self, job_id: str) -> LabelList:
        self._runner(job_id)
        return self._located(run_flow(read_labels(JobPaths(job_id)), self._storage))

    def add(self, job_id: str, checkpoint_id: int, label: str) -> LabelView:
        runner = self._runner(job_id)
        if runner is not None:
            runner.check_room()  # whatever is stored, the leader is told
        view = run_flow(add_label(JobPaths(job_id), checkpoint_id, label, self._mark()), self._storage)
        if runner is not None:
            runner.post(LabelNoted(checkpoint_id, label, removed=False, labelled=True))
        return self._located(LabelList((view,))).labels[0]

    def remove(self, job_id: str, label: str, checkpoint_id: int | None = None) -> tuple[LabelView, ...]:
        runner, paths = self._runner(job_id), JobPaths(job_id)
        removed = run_flow(remove_label(paths, label, self._mark(), checkpoint_id), self._storage)
        left = run_flow(read_labels(paths), self._storage)
        still = {view.checkpoint_id for view in left.labels}
        if runner is None:
            self._clear(job_id)
        else:
            for view in removed:
                number = view.checkpoint_id
                runner.post(LabelNoted(number, label, removed=True, labelled=number in still or bool(left.damage)))
        return self._located(LabelList(removed)).labels

    def _runner(self, job_id: str) -> JobMasterRunner | None:
        """None for a job that had ended before this process began. Raises NotFoundError, NotLeaderError, RecoveringError."""
        recorded = self._calls.recorded_only(job_id)
        return None if recorded is not None else self._calls.led(job_id)

    def _mark(self) -> Mark:
        return Mark(self._draw_nonce(), self._clock.wall_ms())

    def _located(self, found: LabelList) -> LabelList:
        """With absolute locations."""
        root = self._storage.root.rstrip("/")
        labels = (
            view if is_absolute_folder(view.folder) else replace(view, folder=f"{root}/{view.folder}") for view in found.labels
        )
        return replace(found, labels=tuple(labels))

"""SHELL: has checkpoints of one job explained when they end, from what the job was then, and has the explanations recorded.

`ExplanationSchedule` decides which. A turn of the job only captures the job, as it does for its readers: judging it and asking its
workers is the explainer's, and what becomes of that is nobody's failure."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.dispatcher.job_log import about
from holdfast.coordinator.dispatcher.published import PublishedJob, capture
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.explain.kept import describe_explanation, recall_explanation
from holdfast.coordinator.explain.records import Explanation
from holdfast.coordinator.explain.schedule import Expiry, ExplanationSchedule, ProbeExpiring
from holdfast.coordinator.explain.usual import Usual
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.views import AnswerView, CheckpointView

logger = logging.getLogger(__name__)

KEPT_MAX = 32
"""Explanations of one job in memory: more than checkpoints that it shows."""


@dataclass(slots=True)
class ExpiryProbe:
    """A job while one of its checkpoints was about to expire."""

    checkpoint_id: int
    attempt: int
    """Of the checkpoint: what workers say of another one is no answer."""
    left_ms: int
    """Until it expires."""
    published: PublishedJob
    asked: tuple[tuple[SubtaskKey, Future[AnswerView]], ...] = ()
    """Workers of missing acknowledgements; set by the explainer alone."""


@dataclass(frozen=True, slots=True)
class EndedCheckpoint:
    """What is to be explained."""

    checkpoint: CheckpointView
    published: PublishedJob
    """The job as it was then; with a probe, as it was at that."""
    probe: ExpiryProbe | None = None


class Explainer(Protocol):
    """Explains on threads of its own. Both calls return at once and may drop the work."""

    def probe(self, probe: ExpiryProbe) -> None:
        """Ask workers of missing acknowledgements where they are."""

    def explain(self, ended: EndedCheckpoint, explained: Callable[[Explanation], None], dropped: Callable[[], None]) -> None:
        """Calls `explained` at most once, from any thread; not for a usual checkpoint, nor when the queue is full: then it calls
        `dropped`."""


class JobExplanations:
    """Those of one job that this process leads. `kept` is for any thread, all else for the job's turns."""

    def __init__(
        self,
        explainer: Explainer,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        record: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`post`: `offer` of JobHistory. `record`: called in a turn with the facts of an explanation."""
        self._explainer = explainer
        self._clock = clock
        self._post = post
        self._record = record
        self._schedule = ExplanationSchedule()
        self._probe: ExpiryProbe | None = None
        """The newest, until its checkpoint has ended."""
        self._kept: OrderedDict[int, Explanation] = OrderedDict()
        self._is_broken = False

    def kept(self, checkpoint_id: int) -> Explanation | None:
        return self._kept.get(checkpoint_id)

    def next_deadline_ms(self) -> int | None:
        return None if self._is_broken else self._schedule.next_deadline_ms()

    def event_handled(self, master: JobMaster, finished: Mapping[int, CheckpointView]) -> None:
        """An event was handled, which ended these checkpoints."""
        if not self._is_broken:
            self._guarded(master, lambda: self._take(master, finished))

    def _take(self, master: JobMaster, finished: Mapping[int, CheckpointView]) -> None:
        config = master.settings.config
        pending = master.coordinator.first_to_expire
        expiry = Expiry(*pending) if pending is not None and pending[1] == master.lifecycle.attempt else None
        self._schedule.watch(expiry, config.checkpoint_timeout_ms)
        if not finished:
            return
        now_ms, stats = self._clock.monotonic_ms(), master.coordinator.stats
        usual = Usual(config, master.coordinator.schedule(now_ms).interval_ms, stats.recent)
        for view in finished.values():
            probe = self._probe if self._probe is not None and self._probe.checkpoint_id == view.checkpoint_id else None
            if probe is not None:
                self._probe = None
            if self._schedule.ended(view, usual, now_ms):
                published = probe.published if probe is not None else self._capture(master)
                dropped = partial(self._dropped, view.checkpoint_id, view.status)
                self._explainer.explain(EndedCheckpoint(view, published, probe), self._explained, dropped)

    def advance(self, master: JobMaster) -> bool:
        """Take the probe that is due; False if none is."""
        if self._is_broken:
            return False
        found = self._schedule.advance(self._clock.monotonic_ms())
        if found is None:
            return False
        self._guarded(master, lambda: self._probe_expiring(master, found))
        return True

    def _probe_expiring(self, master: JobMaster, wanted: ProbeExpiring) -> None:
        self._probe = ExpiryProbe(wanted.checkpoint_id, wanted.attempt, wanted.left_ms, self._capture(master))
        self._explainer.probe(self._probe)

    def _capture(self, master: JobMaster) -> PublishedJob:
        return capture(master, 0, self._clock.wall_ms(), monotonic_ms=self._clock.monotonic_ms())

    def _explained(self, explanation: Explanation) -> None:
        """From any thread."""
        facts = describe_explanation(explanation)
        kept = recall_explanation(facts)  # in memory it is as it will be read from the record
        if kept is None:
            text, job_id = "job %s: the explanation of checkpoint %d is not kept: its record can't be read back", explanation.job_id
            logger.error(text, job_id, explanation.checkpoint_id, extra=about(job_id))
            return
        self._post(lambda: self._keep(kept, facts))

    def _dropped(self, checkpoint_id: int, status: str) -> None:
        """From any thread."""
        self._post(lambda: self._schedule.dropped(checkpoint_id, status))

    def _keep(self, kept: Explanation, facts: Mapping[str, Any]) -> None:
        self._record(facts)
        self._kept[kept.checkpoint_id] = kept
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def _guarded(self, master: JobMaster, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            self._is_broken = True
            job_id, text = master.setup.job_id, "job %s: its checkpoints are explained no more when they end"
            logger.critical(text, job_id, exc_info=True, extra=about(job_id))

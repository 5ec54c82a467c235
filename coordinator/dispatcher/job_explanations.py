"""SHELL: has checkpoints of one job explained when they end, from what the job was then, and has the explanations recorded.

`Keeping` decides which. A turn of the job only captures the job, as it does for its readers: judging it and asking its workers is
the explainer's, and what becomes of that is nobody's failure."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.dispatcher.job_log import about
from holdfast.coordinator.dispatcher.published import PublishedJob, capture
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.explain.keeping import Expiry, Keeping, TakeLook
from holdfast.coordinator.explain.kept import describe_explanation, recall_explanation
from holdfast.coordinator.explain.records import Explanation
from holdfast.coordinator.explain.usual import Usual
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.views import AnswerView, CheckpointView

logger = logging.getLogger(__name__)

KEPT_MAX = 32
"""Explanations of one job in memory: more than checkpoints that it shows."""


@dataclass(slots=True)
class EarlyLook:
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
    """The job as it was then; with a look, as it was at that."""
    look: EarlyLook | None = None


class Explainer(Protocol):
    """Explains on threads of its own. Neither call blocks, or promises anything."""

    def look(self, look: EarlyLook) -> None:
        """Ask workers of missing acknowledgements where they are."""

    def explain(self, ended: EndedCheckpoint, explained: Callable[[Explanation], None]) -> None:
        """`explained` is called once, from any thread, or never: if all is as usual, or too much else is to be explained."""


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
        self._keeping = Keeping()
        self._look: EarlyLook | None = None
        """The newest, until its checkpoint has ended."""
        self._kept: OrderedDict[int, Explanation] = OrderedDict()
        self._is_broken = False

    def kept(self, checkpoint_id: int) -> Explanation | None:
        return self._kept.get(checkpoint_id)

    def next_deadline_ms(self) -> int | None:
        return None if self._is_broken else self._keeping.next_deadline_ms()

    def turned(self, master: JobMaster, finished: Mapping[int, CheckpointView]) -> None:
        """An event was handled, which ended these checkpoints."""
        if not self._is_broken:
            self._guarded(master, lambda: self._take(master, finished))

    def _take(self, master: JobMaster, finished: Mapping[int, CheckpointView]) -> None:
        config = master.settings.config
        pending = master.coordinator.first_to_expire
        expiry = Expiry(*pending) if pending is not None and pending[1] == master.lifecycle.attempt else None
        self._keeping.watch(expiry, config.checkpoint_timeout_ms)
        if not finished:
            return
        now_ms, stats = self._clock.monotonic_ms(), master.coordinator.stats
        usual = Usual(config, master.coordinator.schedule(now_ms).interval_ms, stats.recent)
        for view in finished.values():
            look = self._look if self._look is not None and self._look.checkpoint_id == view.checkpoint_id else None
            if look is not None:
                self._look = None
            if self._keeping.ended(view, usual, now_ms):
                published = look.published if look is not None else self._capture(master)
                self._explainer.explain(EndedCheckpoint(view, published, look), self._explained)

    def advance(self, master: JobMaster) -> bool:
        """Take the look that is due; False if none is."""
        if self._is_broken:
            return False
        found = self._keeping.advance(self._clock.monotonic_ms())
        if found is None:
            return False
        self._guarded(master, lambda: self._take_look(master, found))
        return True

    def _take_look(self, master: JobMaster, wanted: TakeLook) -> None:
        self._look = EarlyLook(wanted.checkpoint_id, wanted.attempt, wanted.left_ms, self._capture(master))
        self._explainer.look(self._look)

    def _capture(self, master: JobMaster) -> PublishedJob:
        return capture(master, 0, self._clock.wall_ms(), monotonic_ms=self._clock.monotonic_ms())

    def _explained(self, explanation: Explanation) -> None:
        """From any thread."""
        facts = describe_explanation(explanation)
        kept = recall_explanation(facts)  # in memory it is as it will be read from the record
        if kept is not None:
            self._post(lambda: self._keep(kept, facts))

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

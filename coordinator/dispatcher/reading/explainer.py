"""SHELL: explains checkpoints when they end, of all jobs of this process, one after the other on a thread that nothing waits for.

The same functions that explain a checkpoint to somebody who asks. What finds no room is not explained; a question to a worker has
its own time, and an answer that comes later is not waited for."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable

from msgspec.structs import replace

from holdfast.coordinator.dispatcher.job_explanations import EndedCheckpoint, ExpiryProbe
from holdfast.coordinator.dispatcher.published import Look, PublishedJob
from holdfast.coordinator.dispatcher.reading.questions import WorkerQuestions
from holdfast.coordinator.dispatcher.reading.recollection import Recollection
from holdfast.coordinator.dispatcher.reading.situations import (
    LOOK_INTERVAL_MS,
    LOOKS,
    answers_of,
    ask_for_stacks,
    view_situation,
    with_earlier_leaders,
)
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.records import Explanation, Situation

logger = logging.getLogger(__name__)

WAITING_MAX = 64
"""Probes and checkpoints of all jobs that wait to be handled; each holds a job's view."""

WAITED_MAX_S = 8.0
"""How long one waits for those in front of it: who reads a history looks for an explanation a few seconds behind its checkpoint."""


class EndedCheckpointExplainer:
    """Implements `Explainer`. Thread-safe; `watch` is the body of its thread."""

    def __init__(self, questions: WorkerQuestions, recollection: Recollection, storage_root: str) -> None:
        self._questions = questions
        self._recollection = recollection
        self._root = storage_root
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING_MAX)
        self._stopping = False

    def probe(self, probe: ExpiryProbe) -> None:
        self._put(lambda: self._ask(probe))

    def explain(self, ended: EndedCheckpoint, explained: Callable[[Explanation], None], dropped: Callable[[], None]) -> None:
        asked_s = time.monotonic()

        def act() -> None:
            found = self._explain(ended, asked_s)
            if found is not None:
                explained(found)
            else:
                dropped()

        if not self._put(act):
            dropped()

    def _put(self, act: Callable[[], None]) -> bool:
        try:
            self._waiting.put_nowait(act)
        except queue.Full:
            logger.info("%d checkpoints wait to be explained: one is not", WAITING_MAX)
            return False
        return True

    def watch(self) -> None:
        """Handle what waits, until `close`."""
        while (act := self._waiting.get()) is not None and not self._stopping:
            try:
                act()
            except Exception:
                logger.critical("a checkpoint could not be explained when it ended", exc_info=True)

    def close(self) -> None:
        """End `watch`. Idempotent."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # then it sees that it stops behind what it handles
            self._waiting.put_nowait(None)

    def _ask(self, probe: ExpiryProbe) -> None:
        situation = replace(self._situation(probe.published), checkpoint=probe.published.stats.checkpoint(probe.checkpoint_id))
        samples = max(1, min(LOOKS, probe.left_ms // (2 * LOOK_INTERVAL_MS)))  # with the attempt's end an answer is void
        probe.asked = ask_for_stacks(self._questions, situation, samples)

    def _explain(self, ended: EndedCheckpoint, asked_s: float) -> Explanation | None:
        """None where all is as usual, or it has waited too long."""
        if time.monotonic() - asked_s > WAITED_MAX_S:
            logger.info("checkpoint %d has waited too long to be explained", ended.checkpoint.checkpoint_id)
            return None
        situation = replace(self._situation(ended.published), checkpoint=ended.checkpoint)
        if ended.probe is not None:
            situation = replace(situation, looks=answers_of(ended.probe.asked, attempt=ended.probe.attempt))
        found = explain(with_earlier_leaders(situation, self._recollection))
        return None if found.is_usual else replace(found, explained_ms=situation.job.now_ms)

    def _situation(self, published: PublishedJob) -> Situation:
        return view_situation(Look(published, published.as_of_ms), self._root)

"""The merges of one attempt, beside its commits: one step at a time on the pool, in the pauses of the committer.

What a step does, and why it may, is in merging.py. A step that fails is tried again later, and fails nothing; an entry, which
competes with commits, is put by the committer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.barriers.sinks.log import MERGE_VERSION, LogEntry, MergeEntry, MergePlan, OwnerEntry, SinkPaths
from holdfast.operators.base import OperatorContext
from holdfast.operators.sinks.calls import log
from holdfast.operators.sinks.files.formats import SUFFIXES, format_of
from holdfast.operators.sinks.files.log import FileName, MergeSettings, job_tag, nonce_tag
from holdfast.operators.sinks.files.merging import (
    ENTRIES_BACK,
    MERGED,
    Appended,
    Merged,
    Prepared,
    Runs,
    SmallFile,
    end_flow,
    give_up_flow,
    plans_flow,
    prepare_flow,
    publish_flow,
    read_entries_flow,
)
from holdfast.statebackends.secrets import hide_resolved
from holdfast.statebackends.storage.port import Flow, Storage

RETRY_MS = 10_000
"""Pause behind a step that failed."""


def _words(error: BaseException) -> str:
    return hide_resolved(f"{type(error).__name__}: {error}")


class Merges:
    """Follows the log, and merges small files. Also without settings, it ends what an earlier attempt began."""

    def __init__(
        self,
        context: OperatorContext,
        settings: MergeSettings | None,
        paths: SinkPaths,
        storage: Storage,
        then: Callable[[], None],
    ) -> None:
        """`then`: called behind each step; the committer goes on, and calls `follow` when it has nothing to commit."""
        self._context = context
        self._paths = paths
        self._storage = storage
        self._then = then
        self._runs = Runs(settings) if settings is not None else None
        self._working = False
        self._retry_ms = 0
        self._read_to: int | None = None
        """Number of the next entry to read; None: the plans of earlier attempts are not known yet."""
        self._listed_at = 0
        """Number of the next entry when plans were listed."""
        self._plans: dict[str, int | None] = {}
        """Merged file of a plan whose entry is not found -> number from which on an entry of ours says that there is none."""
        self._dead: list[str] = []
        """Merged files that have no entry, and will have none."""
        self._unpublished: dict[str, MergeEntry] = {}
        self._kept: dict[str, MergeEntry] = {}
        """Merges whose replaced files are still there."""
        self._sequence = 0
        self._plan: MergePlan | None = None
        """Of the merge that is under way."""
        self._merged: Merged | None = None

    @property
    def is_busy(self) -> bool:
        """A step is under way, or an entry has to be put."""
        return self._working or self._merged is not None

    def ready(self, next_sequence: int) -> Merged | None:
        """A merge whose entry may be put at this number, since all entries in front of it are known; None: there is none yet."""
        return self._merged if self._read_to == next_sequence and not self._working else None

    def appended(self, outcome: Appended) -> None:
        assert self._plan is not None
        name, entry = self._plan.name, outcome.entry
        self._plan = self._merged = None
        if outcome.is_lost:
            self._dead.append(name)
            return
        if entry is None:
            self._plans[name] = None  # perhaps it was put, and the answer was lost
            self._retry_ms = self._context.now_ms() + RETRY_MS
            return
        self._unpublished[name] = self._kept[name] = entry
        named = self._context.counters.named
        named["merges"] = named.get("merges", 0) + 1

    def follow(self, next_sequence: int) -> None:
        """Begin the next step, if there is one. Called while nothing is put into the log, which is known, and durable, up to
        next_sequence."""
        now_ms = self._context.now_ms()
        for name, asked in self._plans.items():
            self._plans[name] = next_sequence if asked is None else asked
        if self._working or (self._merged is not None and self._read_to == next_sequence) or now_ms < self._retry_ms:
            return
        if self._read_to is None:
            self._start(plans_flow(self._paths), lambda plans: self._listed(plans, next_sequence))
        elif self._read_to < next_sequence and (self._runs is not None or self._plans):
            flow = read_entries_flow(self._paths, self._read_to, next_sequence, sizes=self._runs is not None)
            self._start(flow, lambda found: self._take(*found))
        elif self._dead:
            dead = tuple(self._dead)
            self._start(give_up_flow(self._paths, dead), lambda _: self._forget(dead))
        elif self._unpublished:
            name, entry = next(iter(self._unpublished.items()))
            self._start(publish_flow(self._paths, entry), lambda _: self._unpublished.pop(name, None))
        elif not self._end_one(now_ms) and self._runs is not None and self._merged is None:
            self._prepare(self._runs.due(now_ms), next_sequence)

    def _listed(self, plans: list[MergePlan], next_sequence: int) -> None:
        self._listed_at = next_sequence
        self._plans = dict.fromkeys((plan.name for plan in plans), None)
        back = next_sequence - ENTRIES_BACK if self._runs is not None else next_sequence
        self._read_to = max(0, min([back, *(plan.first_sequence for plan in plans)]))

    def _take(self, entries: list[LogEntry], sizes: dict[str, int | None]) -> None:
        """Take in entries of the log."""
        for entry in entries:
            mine = self._is_mine(entry)
            name = entry.file.name if isinstance(entry, MergeEntry) else ""
            # Another attempt may have put its plan behind the listing, and won: it may be gone by now, too.
            if isinstance(entry, MergeEntry) and (name in self._plans or (not mine and entry.sequence >= self._listed_at)):
                self._plans.pop(name, None)
                self._unpublished[name] = self._kept[name] = entry
            if mine:
                gone = [name for name, asked in self._plans.items() if asked is not None and asked <= entry.sequence]
                self._dead += gone
                for name in gone:
                    del self._plans[name]
            elif self._plan is not None:
                self._give_up()
            if self._runs is not None:
                self._runs.follow(entry, sizes)
        if entries:
            self._read_to = entries[-1].sequence + 1

    def _is_mine(self, entry: LogEntry) -> bool:
        nonce = entry.owner_nonce if isinstance(entry, OwnerEntry) else entry.writer_nonce
        context = self._context
        return (nonce, entry.attempt, entry.job_id) == (context.nonce, context.attempt, context.job_id)

    def _give_up(self) -> None:
        """No entry is put for the merge that is under way."""
        assert self._plan is not None
        self._dead.append(self._plan.name)
        self._plan = self._merged = None

    def _forget(self, names: tuple[str, ...]) -> None:
        self._dead = [name for name in self._dead if name not in names]

    def _end_one(self, now_ms: int) -> bool:
        over = next((name for name, entry in self._kept.items() if entry.kept_until_ms <= now_ms), None)
        if over is not None:
            self._start(end_flow(self._paths, self._kept[over]), lambda _: self._kept.pop(over, None))
        return over is not None

    def _prepare(self, due: tuple[SmallFile, ...], next_sequence: int) -> None:
        if not due:
            return
        folder, format = due[0].file.name.rpartition("/")[0], format_of(due[0].file.name)
        name = FileName(
            sink_id=self._paths.sink_id,
            job=job_tag(self._context.job_id),
            attempt=self._context.attempt,
            subtask=0,
            first_checkpoint=due[0].checkpoint_id,
            nonce=f"{MERGED}{nonce_tag(self._context.nonce)}",
            sequence=self._sequence,
            suffix=SUFFIXES[format],
            folder=folder,
        ).text
        self._sequence += 1
        self._plan = MergePlan(MERGE_VERSION, name, next_sequence)
        self._start(prepare_flow(self._paths, self._plan, due), self._prepared)

    def _prepared(self, prepared: Prepared) -> None:
        if self._runs is not None:
            self._runs.drop(prepared.refused)
        self._merged = prepared.merged
        if self._merged is None:
            self._plan = None

    def _start(self, flow: Flow[Any], ended: Callable[[Any], object]) -> None:
        self._working = True

        def done(result: Any, error: BaseException | None) -> None:
            self._working = False
            if error is None:
                ended(result)
            else:
                self._retry_ms = self._context.now_ms() + RETRY_MS
                log.warning("sink %s: a step of a merge failed, and is tried again: %s", self._paths.sink_id, _words(error))
                if self._plan is not None:
                    self._give_up()
            self._then()

        self._context.submit_flow(flow, self._storage, done)

"""SHELL: the log of a job: turns notes into lines, one a note.

Every line has its facts as `fields` of the log record (`logging`'s `extra`), which a JSON log shows one by one. Texts of users are
escaped and clipped here, not by a formatter: a coordinator embedded in a driver logs to the driver's own handlers, which write a
text as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

import msgspec

from holdfast.barriers import messages
from holdfast.barriers.jobgraph import JOB_NAME_CHARS_MAX
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.notes import (
    AttemptDeployed,
    AttemptFailed,
    AttemptInitialized,
    CheckpointFailed,
    DrillEnded,
    FirstRecords,
    LabelChanged,
    Note,
    RequestEnded,
    StateChanged,
)

MESSAGE_CHARACTERS_MAX = 4_096
"""Characters of a line's message, and of each of its facts; a traceback may have ten times as many."""

TEXT_CHARACTERS_MAX = 3_072
"""Characters of a user's text in a message: the message around it has room, and is not clipped again."""

_CLIPPED = "... (clipped)"


def printable(text: str, characters_max: int = MESSAGE_CHARACTERS_MAX) -> str:
    """The text on one line of at most `characters_max` characters (at least 16), clipped. Characters that are not printable are
    escaped as Python does it. Idempotent."""
    found = messages.printable(text[: characters_max + 1])
    return found if len(found) <= characters_max else found[: characters_max - len(_CLIPPED)] + _CLIPPED


def printable_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Facts of a line by name, with printable texts."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}


def about(job_id: str) -> dict[str, object]:
    """`extra` of a line about a job, so that a JSON log has the id as a field of its own."""
    return {"fields": {"job_id": job_id}}


logger = logging.getLogger("holdfast.coordinator.jobs")

_EXPECTED = frozenset(
    {
        FailureReason.SUBSUMED,
        FailureReason.JOB_FINISHING,
        FailureReason.COORDINATOR_SHUTDOWN,
        FailureReason.SUSPENDED,
        FailureReason.END_OF_INPUT,
    }
)
"""Reasons of a failed checkpoint that need no attention."""


class JobLog:
    """The lines of one job that this process leads."""

    def __init__(self, job_id: str, name: str) -> None:
        self._job_id = job_id
        self._name = name

    def taken(self, setup: JobSetup) -> None:
        """This process leads the job from now on."""
        newest = max((entry.checkpoint_id for entry in setup.completed), default=0)
        runs = f"attempt {setup.attempt} runs on, if its workers come back" if setup.reconcile else "it waits for workers"
        took = "a new submission begins" if setup.begins else f"taken over from epoch {setup.epoch - 1}"
        text = f"led from here with epoch {setup.epoch}, submission {setup.submission}: {took}; newest checkpoint {newest}; {runs}"
        fields = {"epoch": setup.epoch, "submission": setup.submission, "checkpoint_id": newest, "attempt": setup.attempt}
        self._write(logging.INFO, "leadership_taken", text, fields)

    def write(self, notes: Iterable[Note]) -> None:
        """Write the notes of one turn, in order."""
        for note in notes:
            level, event, text = _worded(note)
            if logger.isEnabledFor(level):
                self._write(level, event, text, msgspec.to_builtins(note))

    def _write(self, level: int, event: str, text: str, fields: Mapping[str, object]) -> None:
        worker = {"worker": f"{self._job_id}_slot-{slot}"} if isinstance(slot := fields.get("slot"), int) and slot >= 0 else {}
        extra = printable_fields({"event": event, "job_id": self._job_id, "job_name": self._name, **fields, **worker})
        told = (self._job_id, printable(self._name, JOB_NAME_CHARS_MAX), printable(text, TEXT_CHARACTERS_MAX))
        logger.log(level, "job %s (%s): %s", *told, extra={"fields": extra})


def _worded(note: Note) -> tuple[int, str, str]:
    """Level, event and text."""
    match note:
        case StateChanged():
            because = f": {note.reason}" if note.reason else ""
            level = logging.ERROR if note.state == "FAILED" else logging.INFO
            before = f", was {note.previous}" if note.previous else ""
            return level, "state_changed", f"{note.state}{before}{because}"
        case AttemptFailed():
            return logging.WARNING, "attempt_failed", _failed(note)
        case AttemptDeployed():
            kind = "savepoint" if note.savepoint else "checkpoint"
            source = f"from {kind} {note.checkpoint_id} ({note.folder})" if note.checkpoint_id else "with empty state"
            return logging.INFO, "attempt_deployed", f"attempt {note.attempt} starts {source}"
        case AttemptInitialized():
            return logging.INFO, "attempt_initialized", f"all tasks of attempt {note.attempt} run"
        case FirstRecords():
            gap = f", {note.since_failure_ms} ms after the failure" if note.since_failure_ms >= 0 else ""
            return logging.INFO, "first_records", f"attempt {note.attempt} processes records{gap}"
        case CheckpointFailed():
            level = logging.INFO if note.reason in _EXPECTED else logging.WARNING
            why = f": {note.message}" if note.message else ""
            kind = note.kind.value.replace("_", "-")
            return level, "checkpoint_failed", f"{kind} {note.checkpoint_id} failed, {note.reason.value}{why}"
        case RequestEnded():
            return _ended(note)
        case LabelChanged():
            done = "lost" if note.removed else "has"
            return logging.INFO, "label_changed", f"checkpoint {note.checkpoint_id} {done} the label {note.label}"
        case DrillEnded():
            level = logging.INFO if note.facts["state"] == "passed" else logging.WARNING
            why = note.facts["error"] or "; ".join(note.facts["problems"]) or f"{note.facts['rows']} rows were read"
            return level, "drill_ended", f"drill of {_snapshot(note.facts)} {note.facts['state']}: {why}"
        case _:
            assert_never(note)


def _snapshot(facts: Mapping[str, Any]) -> str:
    """What was drilled: `stop-savepoint 220`."""
    return f"{str(facts.get('kind', CheckpointKind.CHECKPOINT.value)).replace('_', '-')} {facts['checkpoint_id']}"


def _failed(note: AttemptFailed) -> str:
    where = f" in subtask {note.subtask} of {note.vertex}" if note.vertex else ""
    then = "no restart is left" if note.restart_in_ms is None else f"restart {note.restarts} in {note.restart_in_ms} ms"
    frames = "".join(f" | {line.strip()}" for line in note.frames.splitlines())
    return f"attempt {note.attempt} failed{where}; {then}: {note.error}{frames}"


def _ended(note: RequestEnded) -> tuple[int, str, str]:
    kind = f"{note.kind.value.replace('_', '-')} asked for as {note.trigger_id}"
    if note.reason is None:
        at = f" at {note.location}" if note.location else ""
        return logging.INFO, "request_completed", f"{kind} is complete: id {note.checkpoint_id}{at}"
    why = f": {note.message}" if note.message else ""
    after = f" after {note.tries} tries" if note.tries > 1 else ""
    return logging.WARNING, "request_failed", f"{kind} failed{after}, {note.reason.value}{why}"

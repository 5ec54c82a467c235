"""CORE: spans of records: `Checkpoint` and `JobInitialization`, with Flink's names of scope and attributes.

Each is a trace of its own, as Flink's are. What Flink tells of subtasks' initialization no record has: it is left out.
Source: Flink, docs/ops/traces.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.barriers.messages import clip
from holdfast.coordinator.history.feed import FedRecord
from holdfast.coordinator.history.records import Line, RecordKind
from holdfast.statebackends.decoding import decode_json

SCOPE = "org.apache.flink.runtime.checkpoint.CheckpointStatsTracker"
JOBS_MAX = 10_000
TEXT_BYTES_MAX = 1_024

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class Span:
    """One span that has ended."""

    name: str
    start_ms: int
    end_ms: int
    attributes: Mapping[str, Value]
    error: str = ""
    """Why it failed; empty for one that did not."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An attempt that is being initialized."""

    at_ms: int
    attempt: int
    checkpoint_id: int
    replayed: int | None


@dataclass(slots=True)
class SpanDeriver:
    """Remembers of each job the attempt that begins, and the size of its newest checkpoint."""

    _begun: dict[str, _Begun] = field(default_factory=dict)
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, record: FedRecord) -> Span | None:
        """The span that a record ends, if it ends one."""
        line = decode_json(record.line, Line)
        facts = line.facts
        about: dict[str, Value] = {"jobId": record.job_id, "jobName": record.job_name}
        match line.kind:
            case RecordKind.CHECKPOINT if "triggered_ms" in facts:
                return self._checkpoint(record.job_id, facts, about)
            case RecordKind.RESTART:
                replayed = facts.get("replayed")
                self._begun[record.job_id] = _Begun(
                    line.at_ms, int(facts["attempt"]), int(facts["checkpoint_id"]), None if replayed is None else int(replayed)
                )
                _trim(self._begun)
            case RecordKind.INITIALIZED:
                return self._initialized(record.job_id, line.at_ms, about, "")
            case RecordKind.FAILURE:
                return self._initialized(record.job_id, line.at_ms, about, clip(str(facts.get("error", "")), TEXT_BYTES_MAX))
            case _:
                pass
        return None

    def _checkpoint(self, job_id: str, facts: Mapping[str, Any], about: dict[str, Value]) -> Span:
        start_ms, end_ms = int(facts["triggered_ms"]), int(facts["triggered_ms"]) + max(0, int(facts["duration_ms"]))
        is_complete = facts["status"] == "COMPLETED"
        if is_complete:
            self._sizes.pop(job_id, None)
            self._sizes[job_id] = int(facts["id"]), int(facts["state_size"])
            _trim(self._sizes)
        attributes = {
            **about,
            "startTs": start_ms,
            "endTs": end_ms,
            "checkpointId": int(facts["id"]),
            "checkpointedSize": int(facts["checkpointed_size"]),
            "fullSize": int(facts["state_size"]),
            "checkpointStatus": "COMPLETED" if is_complete else "FAILED",
            "checkpointType": str(facts["checkpoint_kind"]),
            "isUnaligned": bool(facts["unaligned"]),
        }
        why = f"{facts.get('reason', '')}: {facts.get('message', '')}".removesuffix(": ") or "failed"
        return Span("Checkpoint", start_ms, end_ms, attributes, "" if is_complete else clip(why, TEXT_BYTES_MAX))

    def _initialized(self, job_id: str, at_ms: int, about: dict[str, Value], error: str) -> Span | None:
        begun = self._begun.pop(job_id, None)
        if begun is None:
            return None  # it runs on, or had run already
        end_ms = max(begun.at_ms, at_ms)
        attributes = {**about, "startTs": begun.at_ms, "endTs": end_ms, "attempt": begun.attempt}
        attributes["initializationStatus"] = "FAILED" if error else "COMPLETED"
        if begun.checkpoint_id > 0:
            attributes["checkpointId"] = begun.checkpoint_id
            known_id, size = self._sizes.get(job_id, (-1, 0))
            if known_id == begun.checkpoint_id:
                attributes["fullSize"] = size
        if begun.replayed is not None:
            attributes["replayedRecords"] = begun.replayed
        return Span("JobInitialization", begun.at_ms, end_ms, attributes, error)


def _trim(kept: dict[str, Any]) -> None:
    while len(kept) > JOBS_MAX:
        del kept[next(iter(kept))]

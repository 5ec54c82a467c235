"""An explanation as a job's history keeps it, and back: facts of a record, with bounds. Pure.

Records are files, which anybody may have written, and other versions have other causes: what is not of this shape is no
explanation, and a cause that is not known here has its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from holdfast.barriers.messages import clip
from holdfast.coordinator.explain.advice import command_of, is_changed
from holdfast.coordinator.explain.facts import Facts, shown
from holdfast.coordinator.explain.records import Cause, CauseKind, Explanation, Phase, PhaseView, Place, SettingChange
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import InvalidConfigError

TEXT_BYTES_MAX = 2_048
"""Of one text. With the bounds below a record has 64 KiB at most, and 3 KiB as a rule."""
CAUSES_MAX = 16
"""A longer chain loses what is in front of the first causes."""
_NAMED_BYTES_MAX = 256

_PHASES, _CAUSES = frozenset(Phase), frozenset(CauseKind)
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_BYTES_MAX)]


class _Phase(msgspec.Struct, frozen=True):
    phase: str
    longest_ms: _Number
    median_ms: _Number = -1
    is_unusual: bool = False
    place: Place | None = None


class _Cause(msgspec.Struct, frozen=True):
    kind: str
    text: _Text
    place: Place | None = None


class _Kept(msgspec.Struct, frozen=True):
    id: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    subject: _Text
    summary: _Text
    explained_ms: _Number
    causes: Annotated[tuple[_Cause, ...], msgspec.Meta(min_length=1, max_length=CAUSES_MAX)]
    phases: Annotated[tuple[_Phase, ...], msgspec.Meta(max_length=4 * len(Phase))] = ()
    setting: SettingChange | None = None
    compared: _Number = 0


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """Facts of the record of one checkpoint that is not as usual."""
    causes = explanation.causes
    if len(causes) > CAUSES_MAX:
        causes = (causes[0], *causes[1 - CAUSES_MAX :])
    return {
        "id": explanation.checkpoint_id,
        "subject": clip(explanation.subject, TEXT_BYTES_MAX),
        "summary": clip(explanation.summary, TEXT_BYTES_MAX),
        "explained_ms": explanation.explained_ms,
        "causes": [
            {"kind": each.kind.value, "text": clip(each.text, TEXT_BYTES_MAX), "place": _place(each.place)} for each in causes
        ],
        "phases": [
            {
                "phase": each.phase.value,
                "longest_ms": each.longest_ms,
                "median_ms": each.median_ms,
                "is_unusual": each.is_unusual,
                "place": _place(each.place),
            }
            for each in explanation.phases
        ],
        "setting": _setting(explanation.setting),
        "compared": explanation.compared,
    }


def _place(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    vertex, uid, host = (clip(each, _NAMED_BYTES_MAX) for each in (place.vertex, place.uid, place.host))
    return {"vertex": vertex, "uid": uid, "subtask": place.subtask, "host": host}


def _setting(setting: SettingChange | None) -> dict[str, Any] | None:
    if setting is None:
        return None
    told: dict[str, Any] = msgspec.to_builtins(setting)
    return {name: clip(value, TEXT_BYTES_MAX) if isinstance(value, str) else value for name, value in told.items()}


def recall_explanation(facts: Mapping[str, Any]) -> Explanation | None:
    """The explanation in a record, without the job; None if there is none in it."""
    try:
        told = decode_json(msgspec.json.encode(facts), _Kept)
    except UNDECODABLE:
        return None
    return Explanation(
        job_id="",
        job_name="",
        checkpoint_id=told.id,
        subject=told.subject,
        is_usual=False,
        summary=told.summary,
        phases=tuple(
            PhaseView(Phase(each.phase), each.longest_ms, each.median_ms, each.is_unusual, each.place)
            for each in told.phases
            if each.phase in _PHASES
        ),
        causes=tuple(
            Cause(CauseKind(each.kind) if each.kind in _CAUSES else CauseKind.NOT_KNOWN, each.text, each.place)
            for each in told.causes
        ),
        setting=told.setting,
        compared=told.compared,
        explained_ms=told.explained_ms,
    )


def show_kept(facts: Facts, kept: Explanation) -> Explanation:
    """A kept explanation as it is shown now: when all subtasks knew has become known since, and its setting is advice for now."""
    checkpoint = facts.situation.checkpoint
    phases = kept.phases
    if checkpoint is not None and checkpoint.notify_ms >= 0 and all(each.phase is not Phase.NOTIFY for each in phases):
        phases = (*phases, facts.phase(checkpoint, Phase.NOTIFY, checkpoint.notify_ms, None))
    job = facts.job.overview
    setting = _still(facts, kept.setting)
    return replace(kept, job_id=job.job_id, job_name=shown(job.name, 255), phases=phases, setting=setting)


def _still(facts: Facts, setting: SettingChange | None) -> SettingChange | None:
    """None if it was changed since, or would be refused now. Its command is made anew: who can write a record must not choose what
    an operator is told to run."""
    if setting is None or is_changed(facts, setting.name, setting.old):
        return None
    try:
        return replace(setting, command=command_of(facts, setting.name, setting.new))
    except InvalidConfigError:
        return None

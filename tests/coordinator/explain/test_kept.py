"""Explanations as a history keeps them: the same text again, within bounds, and nothing of what is not of their shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.kept import CAUSES_MAX, TEXT_BYTES_MAX, describe_explanation, recall_explanation
from holdfast.coordinator.explain.records import Cause, CauseKind, Explanation, Phase, Place, SettingChange
from tests.coordinator.explain.building import COMMITTER, JOB, NOW, SINK, SOURCE, WINDOW, Built


def expired() -> Built:
    it = Built(status="FAILED", reason=FailureReason.EXPIRED, failed_after_ms=120_000, age_ms=125_000)
    for vertex in (WINDOW, SINK):
        it.missing(vertex, 0, 1, 2, 3)
    it.missing(COMMITTER, 0)
    it.pressed(SOURCE)
    it.busy(WINDOW)
    return it


def explained(it: Built) -> Explanation:
    return replace(explain(it.made()), explained_ms=NOW - 1)


def through_a_file(explanation: Explanation) -> Explanation:
    facts = json.loads(msgspec.json.encode(describe_explanation(explanation)))
    found = recall_explanation(facts)
    assert found is not None
    return found


def test_what_was_explained_is_shown_again_whatever_the_job_does_now() -> None:
    then = explained(expired())
    assert then.first_cause.kind is CauseKind.BUSY_VERTEX
    now = expired()
    now.shares.clear()
    now.state = "RESTARTING"
    made = now.made()
    assert explain(made).causes != then.causes
    assert explain(replace(made, kept=through_a_file(then))) == then


def test_a_slow_one_as_well_and_when_its_subtasks_knew_is_added() -> None:
    it = Built()
    it.ack(SINK, [1], encode=2_000)
    it.notify_ms = -1
    then = explained(it)
    it.notify_ms = 35
    shown = explain(replace(it.made(), kept=through_a_file(then)))
    assert (shown.causes, shown.phases[:-1]) == (then.causes, then.phases)
    assert (shown.phases[-1].phase, shown.phases[-1].longest_ms, shown.phases[-1].median_ms) == (Phase.NOTIFY, 35, 20)


def test_the_setting_is_advice_for_now() -> None:
    then = explained(expired())
    assert then.setting is not None
    assert (then.setting.name, then.setting.new, bool(then.setting.command)) == ("unaligned_checkpoints", True, True)
    kept = through_a_file(then)
    it = expired()
    assert explain(replace(it.made(), kept=kept)).setting == then.setting
    it.state = "CANCELED"
    assert explain(replace(it.made(), kept=kept)).setting == replace(then.setting, command="")
    it.tune(unaligned_checkpoints=True)
    assert explain(replace(it.made(), kept=kept)).setting is None, "it was changed since"


TRUE_COMMAND = f"holdfast checkpoints {JOB} --set unaligned_checkpoints=true"


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (SettingChange("unaligned_checkpoints", False, True, "w", "rm -rf ~"), TRUE_COMMAND),
        (SettingChange("checkpoint_timeout_ms", 600_000, "1; rm -rf ~", "w", "rm -rf ~"), None),
        (SettingChange("checkpoint_timeout_ms", 600_000, 10**30, "w"), None),
        (SettingChange("parallelism", 4, 8, "w", "rm -rf ~"), ""),
        (SettingChange("parallelism", 3, 6, "w"), None),
        (SettingChange("rocksdb_write_buffer_bytes", 32 << 20, 64 << 20, "w", "rm -rf ~"), ""),
        (SettingChange("rocksdb_write_buffer_bytes", 8 << 20, 64 << 20, "w"), None),
        (SettingChange("rocksdb___class__", None, 1, "w"), None),
        (SettingChange("__doc__", None, 1, "w", "rm -rf ~"), None),
        (SettingChange("of_a_later_version", 1, 2, "w", "rm -rf ~"), None),
    ],
)
def test_its_command_is_not_what_the_record_says(setting: SettingChange, shown: str | None) -> None:
    """Who can write into the job's folder can't have an operator run anything else; nor is advice given that was taken."""
    it = expired()
    kept = through_a_file(replace(explained(it), setting=setting))
    found = explain(replace(it.made(), kept=kept)).setting
    assert (found.command if found is not None else None) == shown


def test_the_job_is_not_in_the_record() -> None:
    facts = describe_explanation(explained(expired()))
    assert JOB not in msgspec.json.encode({**facts, "setting": None}).decode()
    assert len(msgspec.json.encode(facts)) < 4_096


def test_a_record_has_a_bound() -> None:
    long = "x" * 10_000
    place = Place(long, long, 3, long)
    causes = tuple(Cause(CauseKind.BACKPRESSURE, f"{number} {long}", place) for number in range(100))
    then = replace(explained(expired()), summary=long, causes=causes, setting=SettingChange("a", 1, 2, long, long))
    facts = describe_explanation(then)
    assert len(msgspec.json.encode(facts)) < 64 << 10
    found = recall_explanation(facts)
    assert found is not None
    numbers = [int(each.text.split()[0]) for each in found.causes]
    assert numbers == [0, *range(101 - CAUSES_MAX, 100)], "the first cause is the last one"
    assert len(found.summary) <= TEXT_BYTES_MAX + 10


def test_causes_and_phases_of_a_later_version_are_no_hindrance() -> None:
    facts = json.loads(msgspec.json.encode(describe_explanation(explained(expired()))))
    facts["causes"][-1]["kind"] = "cosmic_rays"
    facts["phases"].append({"phase": "teleport", "longest_ms": 3})
    facts["added"] = {"a": 1}
    found = recall_explanation(facts)
    assert found is not None
    assert (found.first_cause.kind, found.first_cause.text) == (CauseKind.NOT_KNOWN, facts["causes"][-1]["text"])
    assert all(each.phase in list(Phase) for each in found.phases)


GOOD: dict[str, Any] = {
    "id": 7, "subject": "failed", "summary": "s", "explained_ms": 1, "causes": [{"kind": "expired", "text": "t"}],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"id": 0},
        {"id": "7"},
        {"causes": []},
        {"causes": [{"kind": "expired"}]},
        {"summary": None},
        {"explained_ms": 2**70},
        {"phases": [{"phase": "sync", "longest_ms": "long"}]},
        {"setting": {"name": 1}},
        {"summary": "x" * 2_049},
        {"causes": [{"kind": "expired", "text": "x" * 2_049}]},
        {"causes": [{"kind": "expired", "text": "x"}] * 17},
        {"phases": [{"phase": "sync", "longest_ms": 1}] * 1_000},
    ],
)
def test_a_record_of_another_shape_is_no_explanation(change: dict[str, Any]) -> None:
    assert recall_explanation(GOOD) is not None
    assert recall_explanation({**GOOD, **change}) is None
    assert recall_explanation({"left_out_bytes": 300_000}) is None


def test_a_subject_has_a_bound_as_every_text() -> None:
    kept = through_a_file(replace(explained(expired()), subject="s" * (TEXT_BYTES_MAX + 1)))
    assert len(kept.subject) <= TEXT_BYTES_MAX

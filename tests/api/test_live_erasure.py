"""A running job is made to forget: tries, the label by which the checkpoint stays, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.api.snapshots.live_erasure import LiveErasure, is_running
from holdfast.barriers.erasure import KEY_CHARS_MAX, STATES_MAX, Erasure
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ownership.labels import LabelList, LabelView
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import ForgetError, HoldfastError, InvalidConfigError, NotFoundError, NotLeaderError

ERASURE = Erasure("secret", (("op", "*"),))


@dataclass
class Doubled:
    """A coordinator whose checkpoints end as `outcomes` say, one after the other: an id, or a reason."""

    outcomes: list[int | str]
    state: str = "RUNNING"
    labelled: dict[str, int] = field(default_factory=dict)
    unlabelled: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    asked: int = 0
    now_s: float = 0.0

    def job(self, job_id: str) -> Any:
        if job_id != "job":
            raise NotFoundError("no such job", job=job_id)
        return type("View", (), {"overview": type("Overview", (), {"state": self.state})})

    def erase_key(self, job_id: str, erasure: Erasure) -> str:
        assert erasure == ERASURE
        self.asked += 1
        return str(self.asked)

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        outcome = self.outcomes[min(int(trigger_id), len(self.outcomes)) - 1]
        if isinstance(outcome, int):
            return TriggerView(trigger_id, CheckpointKind.CHECKPOINT, False, outcome)
        if outcome == "hangs":
            return TriggerView(trigger_id, CheckpointKind.CHECKPOINT, True)
        return TriggerView(trigger_id, CheckpointKind.CHECKPOINT, False, 7, failure=f"{outcome}: secret", failure_reason=outcome)

    def labels(self, job_id: str) -> LabelList:
        views = (LabelView(label, number, CheckpointKind.CHECKPOINT, "", 0) for label, number in self.labelled.items())
        return LabelList(tuple(views))

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> Any:
        if checkpoint_id in self.gone:
            raise NotFoundError("it is gone", checkpoint=checkpoint_id)
        self.labelled[label] = checkpoint_id

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> Any:
        self.unlabelled.append(self.labelled.pop(label))
        return ()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def erasure_of(doubled: Doubled, seconds_max: float = 10) -> LiveErasure:
    return LiveErasure(
        doubled, "job", ERASURE, seconds_max=seconds_max, now_s=lambda: doubled.now_s, sleep=doubled.sleep
    )


def test_the_checkpoint_stays_until_it_is_released() -> None:
    doubled = Doubled([5])
    erasure = erasure_of(doubled)
    assert erasure.run() == 5
    assert list(doubled.labelled.values()) == [5]
    erasure.release()
    assert (doubled.labelled, doubled.unlabelled) == ({}, [5])


def test_one_that_fails_or_is_dropped_at_once_is_tried_again() -> None:
    doubled = Doubled(["job_failure", "declined", 5, 6], gone={5})
    assert erasure_of(doubled).run() == 6
    assert doubled.asked == 4


@pytest.mark.parametrize(("outcomes", "why"), [(["declined"], "declined"), (["hangs"], "no outcome"), ([5], "dropped")])
def test_it_gives_up_in_time_and_says_why_without_quoting(outcomes: list[int | str], why: str) -> None:
    doubled = Doubled(outcomes, gone={5})
    with pytest.raises(ForgetError, match=why) as raised:
        erasure_of(doubled).run()
    assert "secret" not in str(raised.value)
    assert doubled.now_s < 11
    assert doubled.labelled == {}


def test_a_job_that_has_ended_is_for_the_other_way() -> None:
    doubled = Doubled(["job_finishing"], state="FINISHED")
    with pytest.raises(ForgetError, match="the job has ended"):
        erasure_of(doubled).run()
    assert not is_running(doubled, "job")
    assert not is_running(doubled, "unknown")
    assert is_running(Doubled([]), "job")


def test_a_label_that_a_call_left_is_removed_and_others_stay() -> None:
    doubled = Doubled([5], labelled={"forgetting0123456789abcdef": 3, "forgetting-mine": 4})
    erasure_of(doubled).run()
    assert doubled.unlabelled == [3]
    assert "forgetting-mine" in doubled.labelled


def test_errors_of_a_coordinator_that_does_not_lead_any_more_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fenced(*_: Any) -> str:
        raise NotLeaderError("another one leads", job="job")

    doubled = Doubled([5])
    monkeypatch.setattr(doubled, "erase_key", fenced)
    with pytest.raises(HoldfastError):
        erasure_of(doubled).run()


@pytest.mark.parametrize(
    ("states", "key"),
    [
        ([], "k"),
        ([("a", "b")] * (STATES_MAX + 1), "k"),
        ([("a" * 257, "b")], "k"),
        ([("a", "b")], "k" * (KEY_CHARS_MAX + 1)),
        ([("a", "b")], "\ud800"),
    ],
)
def test_what_no_event_can_carry_is_refused_without_the_key(states: list[tuple[str, str]], key: str) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        Erasure.of(states, key)
    assert "kkk" not in str(raised.value)

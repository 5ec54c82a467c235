"""The throttle of work that holds the interpreter lock, on clocks of the test's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from holdfast.statebackends.snapshot.rows import PAUSES_S_MAX, RISE_S, SHARE, SHARE_MAX, Throttle

TURNS = 50


@dataclass
class Machine:
    """One thread's clocks. Others want the interpreter for `others` times as long as each turn takes."""

    others: float
    wall: float = 10.0
    cpu: float = 3.0
    pauses: list[float] = field(default_factory=list)

    def work(self, seconds: float) -> int:
        self.cpu += seconds
        self.wall += seconds * (1 + self.others)
        return 7

    def pace(self, share: float) -> Throttle:
        return Throttle(share, rise_s=math.inf, wall_s=lambda: self.wall, cpu_s=lambda: self.cpu, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.pauses.append(seconds)
        self.wall += seconds


@pytest.mark.parametrize(
    ("others", "share", "expected"),
    [
        (0.0, 0.1, 1.0),  # nobody waits: no pauses
        (0.4, 0.1, 1 / 1.4),  # hardly anybody
        (1.0, 0.1, 0.1),
        (4.0, 0.1, 0.1),
        (9.0, 0.1, 0.1),
        (19.0, 0.1, 0.05),  # they have had more than their part
        (1.0, 0.5, 0.5),
        (3.0, 1.0, 0.25),
    ],
)
def test_others_get_their_part_of_the_interpreter(others: float, share: float, expected: float) -> None:
    machine = Machine(others)
    pace = machine.pace(share)
    for number in range(TURNS):
        assert pace.run(lambda seconds=0.002 + number % 3 / 1000: machine.work(seconds)) == 7  # type: ignore[misc]
    assert (machine.cpu - 3.0) / (machine.wall - 10.0) == pytest.approx(expected)


def test_a_pause_follows_its_turn_and_is_not_made_up_for_later() -> None:
    machine = Machine(1.0)
    pace = machine.pace(0.1)
    pace.run(lambda: machine.work(0.01))
    machine.others = 0.0
    pace.run(lambda: machine.work(0.01))
    assert machine.pauses == pytest.approx([0.08])


def test_what_passes_between_two_turns_is_no_sign_of_others() -> None:
    """Rows come from a disk."""
    machine = Machine(0.0)
    pace = machine.pace(0.1)
    for _ in range(9):
        machine.wall += 0.5
        pace.run(lambda: machine.work(0.01))
    assert machine.pauses == []


def test_short_turns_count_together() -> None:
    machine = Machine(1.0)
    pace = machine.pace(0.1)
    for _ in range(9):
        pace.run(lambda: machine.work(0.0006))
    assert machine.pauses == pytest.approx([4 * 0.0006 * 8] * 2)


def test_the_pauses_of_one_table_come_to_an_end() -> None:
    machine = Machine(1.0)
    pace = machine.pace(0.001)
    for _ in range(20):
        pace.run(lambda: machine.work(0.005))
    assert sum(machine.pauses) == pytest.approx(PAUSES_S_MAX)


@pytest.mark.parametrize("age_s", [0.0, 0.1, 5.0])
def test_the_share_rises_with_the_age_of_a_checkpoint(age_s: float) -> None:
    machine = Machine(1.0)
    throttle = Throttle(
        began_s=machine.wall - age_s, wall_s=lambda: machine.wall, cpu_s=lambda: machine.cpu, sleep=machine.sleep
    )
    shares: list[tuple[float, float]] = []
    while machine.wall < 12.0:
        began, used = machine.wall, machine.cpu
        throttle.run(lambda: machine.work(0.003))
        shares.append((began - 10.0 + age_s, (machine.cpu - used) / (machine.wall - began)))
    for age, share in shares:
        at_least, at_most = (min(SHARE_MAX, SHARE * 2 ** int(each / RISE_S)) for each in (age, age + 0.01))
        assert at_least - 1e-6 <= share <= at_most + 1e-6
    assert shares[0][1] == pytest.approx(SHARE if age_s < RISE_S else SHARE_MAX)
    assert shares[-1][1] == pytest.approx(SHARE_MAX)


def test_a_checkpoint_of_any_age_has_a_share() -> None:
    machine = Machine(1.0)
    throttle = Throttle(began_s=-1e9, wall_s=lambda: machine.wall, cpu_s=lambda: machine.cpu, sleep=machine.sleep)
    throttle.run(lambda: machine.work(0.01))
    assert machine.pauses == [0.0] or machine.pauses == []

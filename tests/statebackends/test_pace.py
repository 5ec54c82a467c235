"""The pace of work that holds the interpreter lock, on clocks of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from statebackends.pace import Pace

TURNS = 50


@dataclass
class Machine:
    """One thread's clocks. Others want the interpreter for `others` times as long as each turn takes."""

    others: float
    wall: float = 10.0
    cpu: float = 3.0
    pauses: list[float] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.wall += seconds * (1 + self.others)

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
    pace = Pace(share, wall_s=lambda: machine.wall, cpu_s=lambda: machine.cpu, sleep=machine.sleep)
    for number in range(TURNS):
        machine.work(0.002 + number % 3 / 1000)
        pace.turn()
    assert (machine.cpu - 3.0) / (machine.wall - 10.0) == pytest.approx(expected)


def test_a_pause_follows_its_turn_and_is_not_made_up_for_later() -> None:
    machine = Machine(1.0)
    pace = Pace(0.1, wall_s=lambda: machine.wall, cpu_s=lambda: machine.cpu, sleep=machine.sleep)
    machine.work(0.01)
    pace.turn()
    machine.others = 0.0
    machine.work(0.01)
    pace.turn()
    assert machine.pauses == pytest.approx([0.08])


def test_short_turns_count_together() -> None:
    machine = Machine(1.0)
    pace = Pace(0.1, wall_s=lambda: machine.wall, cpu_s=lambda: machine.cpu, sleep=machine.sleep)
    for _ in range(9):
        machine.work(0.0006)
        pace.turn()
    assert machine.pauses == pytest.approx([4 * 0.0006 * 8] * 2)

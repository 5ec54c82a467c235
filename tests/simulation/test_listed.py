"""The list of seeds can be read, and names what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.chaos.sabotage import SABOTAGES
from holdfast.chaos.workloads import WORKLOADS
from tests.simulation.listed import ListedSeed, first_seeds, listed_seeds


def test_the_list_names_workloads_and_sabotages_that_exist() -> None:
    listed = listed_seeds()
    assert {each.workload for each in listed} == set(WORKLOADS)
    assert {each.sabotage for each in listed if each.sabotage is not None} <= set(SABOTAGES)
    assert {each.sabotage for each in first_seeds(listed).values()} == {None}


def test_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text("# a list\n\ncounter 12  # once\nwindows 3 forget\n")
    assert listed_seeds(path) == [ListedSeed("counter", 12, why="once"), ListedSeed("windows", 3, "forget")]


@pytest.mark.parametrize("line", ["counter", "counter x", "counter -3", "counter 1 forget more", "counter 1\ncounter 1"])
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"seeds.txt, line [12]: "):
        listed_seeds(path)

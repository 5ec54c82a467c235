"""The seeds that every test run repeats: seeds.txt, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).with_name("seeds.txt")


@dataclass(frozen=True, slots=True)
class ListedSeed:
    """One line."""

    workload: str
    seed: int
    sabotage: str | None = None
    why: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.workload, str(self.seed), self.sabotage)))


def listed_seeds(path: Path = SEEDS) -> list[ListedSeed]:
    """All of them. Raises ValueError naming a line that is none, or that is there twice."""
    found: list[ListedSeed] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        words, _, why = line.partition("#")
        match words.split():
            case []:
                continue
            case [workload, seed] if seed.isdigit():
                listed = ListedSeed(workload, int(seed), why=why.strip())
            case [workload, seed, sabotage] if seed.isdigit():
                listed = ListedSeed(workload, int(seed), sabotage, why.strip())
            case _:
                raise ValueError(f"{path.name}, line {number}: `workload seed [sabotage]` is wanted, not {words.strip()!r}")
        if str(listed) in map(str, found):
            raise ValueError(f"{path.name}, line {number}: {listed} is listed twice")
        found.append(listed)
    return found


def first_seeds(listed: list[ListedSeed]) -> dict[str, ListedSeed]:
    """The first one of each workload."""
    return {each.workload: each for each in reversed(listed)}

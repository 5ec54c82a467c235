"""Writes the state diagrams of docs/architecture.md from the tables of transitions in the code, and the invariants of
docs/invariants.md from the checkers.

    .venv/bin/python scripts/architecture_page.py            # a test fails while a page is out of date

A table of transitions is below its enum, as TRANSITIONS: state -> states that may follow. The first state of the enum is the
initial one; a state without successors is final."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from holdfast.barriers import messages  # noqa: E402  (a script finds the packages beside it)
from holdfast.chaos.checkers import CHECKERS, INVARIANTS  # noqa: E402
from holdfast.coordinator.checkpoints import pending  # noqa: E402
from holdfast.coordinator.jobmaster import job  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
STATES = ("<!-- states: written by scripts/architecture_page.py from the tables in the code -->\n", "<!-- end of states -->")
INVARIANTS_PAGE = ROOT / "docs" / "invariants.md"
CHECKED = (
    "<!-- invariants: written by scripts/architecture_page.py from chaos/checkers/__init__.py -->\n",
    "<!-- end of invariants -->",
)
OUTSIDE = {"I30": ("chaos/cluster/world.py",)}
"""Invariant -> further modules that report it: a job that does not end reaches no checker."""
DIAGRAMS: tuple[tuple[str, str, Mapping[Any, Collection[Any]]], ...] = (
    ("A checkpoint", "`coordinator/checkpoints/pending.py`: `PendingStatus`", pending.TRANSITIONS),
    ("A task", "`barriers/messages.py`: `TaskState`", messages.TRANSITIONS),
    ("A job", "`coordinator/jobmaster/job.py`: `JobState`", job.TRANSITIONS),
)
"""Heading, source file, table."""


def diagram(transitions: Mapping[Any, Collection[Any]]) -> str:
    """A Mermaid state diagram, in the order of the enum. Raises KeyError for a table that lacks a state of its enum."""
    kind: type[Enum] = type(next(iter(transitions)))
    states = list(kind)
    lines = ["stateDiagram-v2", f"    [*] --> {states[0].name}"]
    for state in states:
        follow = transitions[state]
        lines += [f"    {state.name} --> {after.name}" for after in states if after in follow]
        if not follow:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(("```mermaid", *lines, "```", ""))


def table() -> str:
    """Number, sentence and checkers of each invariant."""
    lines = ["| number | what holds | checked by |", "|---|---|---|"]
    for number, sentence in INVARIANTS.items():
        modules = [checker.__module__.removeprefix("holdfast.") for checker in CHECKERS if number in checker.invariants]
        paths = [module.replace(".", "/") + ".py" for module in dict.fromkeys(modules)]
        lines.append(f"| {number} | {sentence} | {', '.join(f'`{path}`' for path in (*paths, *OUTSIDE.get(number, ())))} |")
    return "\n".join((*lines, ""))


def between(text: str, markers: tuple[str, str], content: str) -> str:
    """The text with other content between its markers. Raises ValueError for a text without them."""
    before, begin, rest = text.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"there is no {markers[0].strip()} with its end")
    return f"{before}{begin}\n{content}\n{end}{after}"


def page(text: str) -> str:
    """docs/architecture.md with current diagrams."""
    drawn = "\n".join(f"### {heading}\n\n{where}\n\n{diagram(transitions)}" for heading, where, transitions in DIAGRAMS)
    return between(text, STATES, drawn)


def invariants_page(text: str) -> str:
    """docs/invariants.md with the current table of invariants."""
    return between(text, CHECKED, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    INVARIANTS_PAGE.write_text(invariants_page(INVARIANTS_PAGE.read_text()))

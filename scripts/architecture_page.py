"""Writes the state diagrams of docs/architecture.md from the tables of transitions in the code.

    .venv/bin/python scripts/architecture_page.py            # a test says when this is due

Each table stands below its enum, as TRANSITIONS: state -> what may follow. The first state of the enum is where it begins; a state
that nothing follows is an end."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from holdfast.barriers import messages  # noqa: E402  (a script finds the packages beside it)
from holdfast.coordinator.checkpoints import pending  # noqa: E402
from holdfast.coordinator.jobmaster import events as jobmaster  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- states: written by scripts/architecture_page.py from the tables in the code -->\n"
END = "<!-- end of states -->"
DIAGRAMS: tuple[tuple[str, str, Mapping[Any, Collection[Any]]], ...] = (
    ("A checkpoint", "`coordinator/checkpoints/pending.py`: `PendingStatus`", pending.TRANSITIONS),
    ("A task", "`barriers/messages.py`: `TaskState`", messages.TRANSITIONS),
    ("A job", "`coordinator/jobmaster/events.py`: `JobState`", jobmaster.TRANSITIONS),
)
"""Heading, where the table stands, the table."""


def diagram(transitions: Mapping[Any, Collection[Any]]) -> str:
    """A Mermaid state diagram, in the order of the enum. Raises KeyError for a table that leaves a state of its enum out."""
    kind: type[Enum] = type(next(iter(transitions)))
    states = list(kind)
    lines = ["stateDiagram-v2", f"    [*] --> {states[0].name}"]
    for state in states:
        follow = transitions[state]
        lines += [f"    {state.name} --> {after.name}" for after in states if after in follow]
        if not follow:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(("```mermaid", *lines, "```", ""))


def page(text: str) -> str:
    """The page with its diagrams made again; what is outside the two markers stays. Raises ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has lost its markers")
    drawn = "\n".join(f"### {heading}\n\n{where}\n\n{diagram(transitions)}" for heading, where, transitions in DIAGRAMS)
    return f"{before}{BEGIN}\n{drawn}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

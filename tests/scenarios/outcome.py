"""What became of one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Passed:
    """The real cores did what the row says."""


@dataclass(frozen=True)
class Failed:
    """They did not."""

    expected: str
    got: str


@dataclass(frozen=True)
class Unparsed:
    """The row is not in the notation; counted as failed."""

    reason: str


@dataclass(frozen=True)
class Covered:
    """A requirement in prose: a named test covers it, this runner does not. Counted neither as passed nor as failed."""

    test: str
    """`tests/…/test_x.py::test_y`; if there is no such test the row has failed."""
    remark: str = ""


Outcome: TypeAlias = Passed | Failed | Unparsed | Covered

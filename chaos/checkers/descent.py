"""The ids that a job's newest submission descends from, after its user has gone back to an older snapshot.

Output committed behind that snapshot stays, and is written again: it is left out of the comparison. A submission without
`allow_output_repeat` leaves nothing out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.coordinator.ha.records import SubmissionRecord

Ranges = tuple[tuple[int, float], ...]
_ATTEMPT = re.compile(r"-a(\d+)-s\d+-c\d+-")
"""Attempt that staged a file, in the file's name."""
EVERYTHING: Ranges = ((0, math.inf),)


def attempt_of(name: str) -> int | None:
    """Attempt that staged a file, by the file's name."""
    found = _ATTEMPT.search(name)
    return None if found is None else int(found[1])


class Descent:
    """The line of descent as of the last call of `follow`."""

    def __init__(self, ledger: JobLedger) -> None:
        self._ledger = ledger
        self._submissions = 0
        self._ranges = EVERYTHING

    def follow(self) -> bool:
        """Read the submissions on record; true if the line has changed."""
        if self._submissions == len(self._ledger.submissions):
            return False
        self._submissions = len(self._ledger.submissions)
        before, self._ranges = self._ranges, descent(self._ledger.submissions)
        return self._ranges != before

    @property
    def is_straight(self) -> bool:
        """No submission has gone back."""
        return self._ranges == EVERYTHING

    def holds(self, number: int) -> bool:
        """Whether an id is on the line of the newest submission."""
        return _holds(self._ranges, number)

    def holds_file(self, number: int, name: str) -> bool:
        """Whether a file committed with this id is on the line.

        The id is not enough: a plain savepoint may belong to an attempt that failed before its next checkpoint. Its content is on
        the line of submissions restored from it, and of no line that has higher ids."""
        if self.is_straight:
            return True
        found = _ATTEMPT.search(name)
        if found is None or not self.holds(number):
            return self.holds(number)
        ledger, claims, attempt = self._ledger, self._ledger.first_claims, int(found[1])
        line = {each.checkpoint_id for each in ledger.completed.values() if each.is_recovery_point}
        begun = [each for each in ledger.submissions.values() if self.holds(each.first_checkpoint_id)]
        line |= {each.base.checkpoint_id for each in begun if each.base is not None}
        return any(number <= each and self.holds(each) and each in claims and claims[each].attempt == attempt for each in line)


def descent(submissions: Mapping[int, SubmissionRecord]) -> Ranges:
    """(first id, last id) of each piece of the newest submission's line; one piece with all ids while no submission has gone
    back."""
    lines: list[tuple[int, Ranges]] = [(0, EVERYTHING)]
    for number in sorted(submissions):
        record = submissions[number]
        first, base = record.first_checkpoint_id, record.base.checkpoint_id if record.base is not None else 0
        line = _until(lines[-1][1], first - 1)
        if record.submission.allow_output_repeat or not _holds(line, base):
            begun = [ranges for begin, ranges in lines if begin <= base]  # lines that have the base's id
            line = _until(begun[-1], base)
        lines.append((first, _joined(line, first)))
    return lines[-1][1]


def _holds(ranges: Ranges, number: int) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _until(ranges: Ranges, end: int) -> Ranges:
    return tuple((first, min(last, end)) for first, last in ranges if first <= end)


def _joined(ranges: Ranges, first: int) -> Ranges:
    """The pieces, with all ids from `first` on."""
    if ranges and ranges[-1][1] == first - 1:
        return (*ranges[:-1], (ranges[-1][0], math.inf))
    return (*ranges, (first, math.inf))

"""What a check finds, and how checks are run: each within a time, none of them able to end the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.statebackends.errors import HoldfastError

CHECK_TIMEOUT_S = 30.0
"""Seconds after which a check that hangs is left behind."""


class Verdict(StrEnum):
    OK = "ok"
    SKIPPED = "skipped"
    """Nothing was named to look at, or it was not asked for."""
    WARNING = "warning"
    """It works, and something about it will hurt."""
    FAULT = "fault"
    """It does not work."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """What to do; of a warning or a fault."""


class Check(NamedTuple):
    """One group of findings."""

    name: str
    look: Callable[[], Iterable[Finding]]
    fix: str
    """What to do if it can't be finished at all."""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, text)


def skipped(check: str, text: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, text)


def warning(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARNING, text, fix)


def fault(check: str, text: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAULT, text, fix)


def run_checks(checks: Sequence[Check], timeout_s: float = CHECK_TIMEOUT_S) -> list[Finding]:
    """The findings of all checks, in their order. One that fails or hangs is a fault of its own."""
    found: list[Finding] = []
    for check in checks:
        found += _run(check, timeout_s)
    return found


def _run(check: Check, timeout_s: float) -> list[Finding]:
    found: list[Finding] = []
    failures: list[Exception] = []

    def look() -> None:
        try:
            found.extend(check.look())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=look, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return [*found, fault(check.name, f"did not answer within {timeout_s:g} s", check.fix)]
    for error in failures:
        text = error.message if isinstance(error, HoldfastError) else str(error)
        found.append(fault(check.name, f"{type(error).__name__}: {text}", check.fix))
    return found


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: there are warnings; 2: there are faults."""
    verdicts = {finding.verdict for finding in findings}
    return 2 if Verdict.FAULT in verdicts else 1 if Verdict.WARNING in verdicts else 0

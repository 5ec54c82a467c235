"""`holdfast snapshot fsck`: parse, call, print.

Exit codes: 0 every file has an owner and is there, 1 not so, 2 trouble, or a repair that was refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.api.cli import console

if TYPE_CHECKING:
    from holdfast.coordinator.ownership.files import OwnedFile
    from holdfast.coordinator.ownership.fsck import FsckReport

EXIT_UNCLEAN = 1
EXIT_REFUSED = 2
FILES_SHOWN_MAX = 20
"""Of each kind, unless they are asked for as JSON."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration(text: str) -> int:
    """Milliseconds of `90s`, `30m`, `1h`, `2d`."""
    match = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration: use 90s, 30m, 1h, 2d")
    return int(match[1]) * _UNITS[match[2]]


def fsck(
    state_dir: Annotated[str, typer.Argument(metavar="STATE_DIR", help="The state directory; a path or a URL.")],
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job: its id or its name.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete what nothing owns and is older than the safety age.")] = False,
    safety_age: Annotated[str, typer.Option("--safety-age", help="Younger files are left alone: 90s, 30m, 1h.")] = "1h",
    checksums: Annotated[bool, typer.Option("--checksums", help="Read every file that retained checkpoints need.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Whose every file of a state directory is, what nothing owns, and what it adds up to; exit code 1 if something is wrong."""
    from holdfast.api.snapshots.maintenance import fsck as check

    report = check(state_dir, job=job, repair=repair, safety_age_ms=parse_duration(safety_age), checksums=checksums)
    if as_json:
        console.show_json(describe(report))
    else:
        _show(report)
    if report.refused:
        raise typer.Exit(EXIT_REFUSED)
    if not report.is_clean:
        raise typer.Exit(EXIT_UNCLEAN)


def describe(report: FsckReport) -> dict[str, Any]:
    """JSON-ready."""
    return {**asdict(report), "problems": [asdict(problem) for problem in report.problems], "clean": report.is_clean}


def _show(report: FsckReport) -> None:
    columns = ("JOB", "OWNER", "FILES", "SMALL FILES", "SIZE")
    rows = [
        (cost.job_id or "-", cost.kind.value, cost.files, cost.small_files, console.size_text(cost.size)) for cost in report.costs
    ]
    console.show_table(columns, rows, empty="no files")
    for job_id, damage in report.damaged_jobs.items():
        console.show_line(f"job {job_id}: {damage}")
    for problem in report.problems:
        console.show_line(str(problem))
    for each in report.unchecked[:FILES_SHOWN_MAX]:
        console.show_line(f"not checked: {each}")
    if len(report.unchecked) > FILES_SHOWN_MAX:
        console.show_line(f"not checked: {len(report.unchecked) - FILES_SHOWN_MAX} more; --json lists all")
    _show_files("orphan", report.orphans)
    _show_files("too young to be an orphan", report.young)
    _show_files("unknown", report.unknown)
    _show_files("deleted", report.deleted)
    for job_id, reason in report.refused.items():
        console.show_line(f"job {job_id} was left alone: {reason}")
    counted = Counter(
        orphans=len(report.orphans), young=len(report.young), unknown=len(report.unknown), problems=len(report.problems)
    )
    freed = f", {len(report.deleted)} deleted ({console.size_text(sum(file.size for file in report.deleted))})"
    wrong = ", ".join(f"{count} {name}" for name, count in counted.items())
    console.show_line(f"{'clean' if report.is_clean else 'not clean'}: {wrong}{freed if report.deleted else ''}")


def _show_files(what: str, files: Sequence[OwnedFile]) -> None:
    for file in files[:FILES_SHOWN_MAX]:
        console.show_line(f"{what}: {file.path} ({console.size_text(file.size)}): {file.owner}")
    if len(files) > FILES_SHOWN_MAX:
        console.show_line(f"{what}: {len(files) - FILES_SHOWN_MAX} more; --json lists all")

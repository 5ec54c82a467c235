"""`holdfast snapshot inspect | verify | diff | export | copy | edit | bootstrap | dispose | fsck`: parse, call, print.

Exit codes are those of `diff`: 0 sound or the same (of `fsck`: every file has an owner and is there), 1 damaged or different,
2 trouble, which includes a repair that was refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from holdfast.api.cli import console
from holdfast.api.cli.history import describe_damage, describe_gap
from holdfast.api.cli.interrupts import interruptible, settle
from holdfast.api.cli.progress import Tool
from holdfast.coordinator.figures import size_text
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError
from holdfast.statebackends.layout import METADATA_NAME

if TYPE_CHECKING:
    from holdfast.api.snapshots.maintenance import DirectoryReport
    from holdfast.api.snapshots.savepoint import Savepoint
    from holdfast.api.snapshots.snapshot import Snapshot
    from holdfast.coordinator.history.store import HistoryFaults
    from holdfast.coordinator.ownership.files import OwnedFile


EXIT_UNCLEAN = 1
EXIT_REFUSED = 2
FILES_SHOWN_MAX = 20
"""Files shown of each kind; JSON has all."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration(text: str, option: str) -> int:
    """Milliseconds of `90s`, `30m`, `1h`, `2d`. `option`: what it was given with."""
    match = re.fullmatch(r"([0-9]{1,15})(ms|s|m|h|d)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration: use 90s, 30m, 1h, 2d", param_hint=option)
    return int(match[1]) * _UNITS[match[2]]


def fsck(
    state_dir: Annotated[str, typer.Argument(metavar="STATE_DIR", help="The state directory; a path or a URL.")],
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job: its id or its name.")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete what nothing owns and is older than the safety age.")] = False,
    safety_age: Annotated[str, typer.Option("--safety-age", help="Younger files are left alone: 90s, 30m, 1h.")] = "1h",
    checksums: Annotated[bool, typer.Option("--checksums", help="Read every file that retained checkpoints need.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Find the owner of every file of a state directory, files without owner, and sizes; exit code 1 if something is wrong."""
    from holdfast.api.snapshots.maintenance import fsck as check

    age_ms = parse_duration(safety_age, "--safety-age")
    report = check(state_dir, job=job, repair=repair, safety_age_ms=age_ms, checksums=checksums)
    if as_json:
        console.show_json(describe(report))
    else:
        _show(report)
    if report.refused:
        raise typer.Exit(EXIT_REFUSED)
    if not report.is_clean:
        raise typer.Exit(EXIT_UNCLEAN)


def describe(report: DirectoryReport) -> dict[str, Any]:
    """The report as JSON-ready data."""
    histories = msgspec.to_builtins(report.histories)
    problems = [asdict(problem) for problem in report.problems]
    return {**asdict(report), "problems": problems, "histories": histories, "clean": report.is_clean}


def _show(report: DirectoryReport) -> None:
    columns = ("JOB", "OWNER", "FILES", "SMALL FILES", "SIZE")
    rows = [
        (cost.job_id or "-", cost.kind.value, cost.files, cost.small_files, size_text(cost.size)) for cost in report.costs
    ]
    console.show_table(columns, rows, empty="no files")
    for job_id, damage in report.damaged_jobs.items():
        console.show_line(f"job {job_id}: {damage}")
    for problem in report.problems:
        console.show_line(str(problem))
    for job_id, faults in report.histories.items():
        _show_history(job_id, faults)
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
    damaged = sum(len(faults.damage) for faults in report.histories.values())
    if damaged:
        counted["damaged places of histories"] = damaged
    freed = f", {len(report.deleted)} deleted ({size_text(sum(file.size for file in report.deleted))})"
    wrong = ", ".join(f"{count} {name}" for name, count in counted.items())
    console.show_line(f"{'clean' if report.is_clean else 'not clean'}: {wrong}{freed if report.deleted else ''}")


def _show_history(job_id: str, faults: HistoryFaults) -> None:
    lines = [f"history: can't be read: {describe_damage(msgspec.to_builtins(each))}" for each in faults.damage[:FILES_SHOWN_MAX]]
    lines += [f"history of job {job_id}: {describe_gap(msgspec.to_builtins(each))}" for each in faults.gaps[:FILES_SHOWN_MAX]]
    for line in lines:
        console.show_line(line)
    more = len(faults.damage) + len(faults.gaps) + faults.left_out - len(lines)
    if more:
        console.show_line(f"history of job {job_id}: {more:,} more")


def _show_files(what: str, files: Sequence[OwnedFile]) -> None:
    for file in files[:FILES_SHOWN_MAX]:
        console.show_line(f"{what}: {file.path} ({size_text(file.size)}): {file.owner}")
    if len(files) > FILES_SHOWN_MAX:
        console.show_line(f"{what}: {len(files) - FILES_SHOWN_MAX} more; --json lists all")


EXIT_DIFFERENT = 1


class _Group(TyperGroup):
    """Maps every error of a tool to exit code 2, since 1 is a result."""

    def invoke(self, ctx: Any) -> Any:
        with console.trouble(), interruptible():
            return super().invoke(ctx)


snapshots = typer.Typer(
    cls=_Group,
    help="Inspect, verify, compare, export, copy and edit snapshots; find the owners of files. No coordinator is needed.",
    no_args_is_help=True,
)

_FOLDER = f"Folder of a checkpoint or savepoint, or its {METADATA_NAME} file; a path or a URL."
Path = Annotated[str, typer.Argument(metavar="PATH", help=_FOLDER)]
State = Annotated[tuple[str, str] | None, typer.Option("--state", metavar="UID NAME", help="Only this state of this operator.")]
Operator = Annotated[str | None, typer.Option("--operator", metavar="UID", help="Only the states of this operator.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


def inspect(
    path: Path,
    state: Annotated[
        tuple[str, str] | None, typer.Option("--state", metavar="UID NAME", help="Show the rows of one state of one operator.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows to show.")] = 20,
    verify: Annotated[bool, typer.Option("--verify", help="Check length and checksum of every file.")] = False,
    as_json: Json = False,
) -> None:
    """Show a snapshot: its operators, states and sizes, or the rows of one state."""
    from holdfast.api.cli import render as rendering
    from holdfast.api.snapshots import inspection  # imports pyarrow: a third of a second that other commands save
    from holdfast.api.snapshots.snapshot import Snapshot

    with console.trouble(), interruptible():
        snapshot = Snapshot(path)
        if verify:
            inspection.verify(snapshot)
        if state is not None:
            rendering.show_rows(snapshot, *state, limit=limit, as_json=as_json)
        else:
            rendering.show_summary(snapshot, verified=verify, as_json=as_json)


snapshots.command(cls=Tool)(inspect)
snapshots.command(cls=Tool)(fsck)


@snapshots.command(cls=Tool)
def verify(path: Path, as_json: Json = False) -> None:
    """Check length and checksum of every file: one line for each problem; exit code 1 if there are any."""
    from holdfast.api.cli import render as rendering
    from holdfast.api.snapshots.snapshot import Snapshot

    try:
        snapshot = Snapshot(path)
    except UnsupportedVersionError:
        raise  # of a newer version: whether it is damaged is unknown
    except CorruptStateError as error:
        rendering.show_damaged_metadata(path, error, as_json=as_json)
        raise typer.Exit(EXIT_DIFFERENT) from error
    report = snapshot.verify()
    rendering.show_verified(snapshot, report, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(EXIT_DIFFERENT)


@snapshots.command(cls=Tool)
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=_FOLDER)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=_FOLDER)],
    operator: Operator = None,
    state: State = None,
    keys: Annotated[int, typer.Option("--keys", min=0, help="Differing keys to show of each state.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what changed: keys added, removed and changed per state. Exit code 0 same, 1 different, 2 trouble."""
    from holdfast.api.cli import render as rendering
    from holdfast.api.snapshots.snapshot import Snapshot

    uid, name = _chosen(operator, state)
    left, right = Snapshot(before), Snapshot(after)
    found = left.diff(right, uid=uid, state=name, keys_max=keys)
    rendering.show_diff(left, right, found, as_json=as_json)
    if not found.is_same:
        raise typer.Exit(EXIT_DIFFERENT)


@snapshots.command(cls=Tool)
def export(
    path: Path,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New folder; a path or a URL.")],
    operator: Operator = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Write one Parquet dataset per state, for DuckDB, pandas, Polars, Spark."""
    from holdfast.api.cli import render as rendering
    from holdfast.api.snapshots.snapshot import Snapshot

    uid, name = _chosen(operator, state)
    report = Snapshot(path).export(folder, uid=uid, state=name)
    settle()
    rendering.show_exported(report, as_json=as_json)


@snapshots.command(cls=Tool)
def copy(
    path: Path,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    as_json: Json = False,
) -> None:
    """Write an independent savepoint with the same content elsewhere, checking every file; print its location."""
    from holdfast.api.snapshots.snapshot import Snapshot

    copied = Snapshot(path).copy(target)
    settle()
    _show_written(copied, as_json=as_json)


@snapshots.command(cls=Tool)
def edit(
    path: Path,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    uid: Annotated[str | None, typer.Option("--uid", metavar="UID", help="The operator whose state is replaced.")] = None,
    state: Annotated[str | None, typer.Option("--state", metavar="NAME", help="Its state.")] = None,
    function: Annotated[
        str | None,
        typer.Option("--function", metavar="NAME", help="FILE.py:function or module:function, from a batch of rows to others."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="FILE", help="Parquet file with all rows of the new state.")
    ] = None,
    remove_operator: Annotated[list[str], typer.Option(metavar="UID", help="Leave out an operator.")] = [],  # noqa: B006
    remove_state: Annotated[list[str], typer.Option(metavar="UID/NAME", help="Leave out a state.")] = [],  # noqa: B006
    rename_state: Annotated[list[str], typer.Option(metavar="UID/NAME=NEW", help="Give a state another name.")] = [],  # noqa: B006
    rename_operator: Annotated[
        list[str], typer.Option(metavar="UID=NEW", help="Give an operator another uid, after all other changes.")
    ] = [],  # noqa: B006
    max_parallelism: Annotated[int | None, typer.Option(min=1, help="Key groups of all operators that are kept.")] = None,
    as_json: Json = False,
) -> None:
    """Write a savepoint in which a function or a file replaces one state; or with some operators and states removed or renamed, or
    another number of key groups. Print its location."""
    from holdfast.api.snapshots.frames import parquet_rows
    from holdfast.api.snapshots.savepoint import Savepoint
    from holdfast.api.snapshots.snapshot import Snapshot
    from holdfast.operators.datastream.pipelines import load_function

    arranging = remove_operator, remove_state, rename_state, rename_operator, max_parallelism
    if any(arranging) == any((uid, state, function, rows)):
        raise typer.BadParameter("give either a state and what its rows become, or what to remove, rename or change")
    if any(arranging):
        edited = _arranged(Savepoint.from_snapshot(path), *arranging).write(target)
    else:
        if uid is None or state is None or (function is None) == (rows is None):
            raise typer.BadParameter("give --uid, --state, and either --function or --rows")
        change = load_function(function, "function", takes="a RecordBatch")[0] if function is not None else parquet_rows(rows or "")
        edited = Snapshot(path).edit(target, {(uid, state): change})
    settle()
    _show_written(edited, as_json=as_json)


def _arranged(
    savepoint: Savepoint,
    operators_out: list[str],
    states_out: list[str],
    states_renamed: list[str],
    operators_renamed: list[str],
    max_parallelism: int | None,
) -> Savepoint:
    """Change operators by their uids in the snapshot; they are renamed last."""
    for uid in operators_out:
        savepoint = savepoint.without_operator(uid)
    for given in states_out:
        savepoint = savepoint.without_state(*_halves(given, "/"))
    for given in states_renamed:
        state, to = _halves(given, "=")
        savepoint = savepoint.with_state_renamed(*_halves(state, "/"), to)
    if max_parallelism is not None:
        savepoint = savepoint.with_max_parallelism(max_parallelism)
    for given in operators_renamed:
        savepoint = savepoint.with_operator_renamed(*_halves(given, "="))
    return savepoint


def _halves(given: str, sign: str) -> tuple[str, str]:
    if given.count(sign) != 1:
        raise typer.BadParameter(f"{given!r} needs one {sign!r}; names that hold it can be given from Python alone (hf.Savepoint)")
    before, _, after = given.partition(sign)
    return before, after


def _show_written(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        console.show_json({"location": snapshot.location, "size": snapshot.metadata.size})
    else:
        console.show_line(snapshot.location)


@snapshots.command(cls=Tool)
def bootstrap(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    function: Annotated[
        str,
        typer.Option(
            "--function", metavar="NAME", help="FILE.py:function or module:function, from an hf.Savepoint to a fuller one."
        ),
    ],
    max_parallelism: Annotated[
        int | None, typer.Option("--max-parallelism", min=1, help="Max parallelism of the job that will start from it.")
    ] = None,
    parallelism: Annotated[int, typer.Option("--parallelism", min=1, help="Files of each state.")] = 1,
    base: Annotated[
        str | None, typer.Option("--from", metavar="PATH", help="Checkpoint or savepoint to add to; else it begins empty.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a savepoint of rows that your function provides, for a job to start with history; print its location."""
    from holdfast.api.snapshots.savepoint import Savepoint, filled_by
    from holdfast.operators.datastream.pipelines import load_function

    apply, _ = load_function(function, "function", takes="the Savepoint")
    if base is not None:
        given = Savepoint.from_snapshot(base, max_parallelism=max_parallelism, parallelism=parallelism)
    elif max_parallelism is None:
        raise typer.BadParameter("give --max-parallelism, or --from a snapshot that has one")
    else:
        given = Savepoint.create(max_parallelism=max_parallelism, parallelism=parallelism)
    written = filled_by(apply, function, given).write(target)
    settle()
    _show_written(written, as_json=as_json)


@snapshots.command(cls=Tool)
def dispose(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a savepoint; a path or a URL.")], as_json: Json = False
) -> None:
    """Delete a savepoint; one that a job has claimed is refused."""
    from holdfast.api.snapshots.maintenance import dispose_of

    folder = dispose_of(path)
    if as_json:
        console.show_json({"disposed": folder})
    else:
        console.show_line(f"disposed of {folder}")


def _chosen(operator: str | None, state: tuple[str, str] | None) -> tuple[str | None, str | None]:
    if operator is not None and state is not None:
        raise typer.BadParameter("give --operator or --state, not both")
    return state if state is not None else (operator, None)

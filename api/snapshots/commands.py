"""`holdfast snapshot inspect | verify | diff | export | copy | edit | bootstrap | dispose | fsck`: parse, call, print.

Exit codes are those of `diff`: 0 sound or the same, 1 damaged or different, 2 trouble."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from api import console
from api.interrupts import interruptible, settle
from api.snapshots.fsck_command import fsck
from statebackends.errors import CorruptStateError, UnsupportedVersionError

EXIT_DIFFERENT = 1


class _Group(TyperGroup):
    """Every error of a tool is trouble: 1 has a meaning of its own."""

    def invoke(self, ctx: Any) -> Any:
        with console.trouble(), interruptible():
            return super().invoke(ctx)


snapshots = typer.Typer(
    cls=_Group,
    help="Look at, check, compare, export, copy and edit snapshots; whose files are whose. No coordinator is needed.",
    no_args_is_help=True,
)

_FOLDER = "Folder of a checkpoint or savepoint, or its _metadata file; a path or a URL."
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
    from api import inspection  # pyarrow: a third of a second that other commands need not wait for
    from api.snapshots.snapshot import Snapshot

    with console.trouble(), interruptible():
        snapshot = Snapshot(path)
        if verify:
            inspection.verify(snapshot)
        if state is not None:
            inspection.show_rows(snapshot, *state, limit=limit, as_json=as_json)
        else:
            inspection.show_summary(snapshot, verified=verify, as_json=as_json)


snapshots.command()(inspect)
snapshots.command()(fsck)


@snapshots.command()
def verify(path: Path, as_json: Json = False) -> None:
    """Check length and checksum of every file: one line a problem; exit code 1 if there are any."""
    from api.snapshots import rendering
    from api.snapshots.snapshot import Snapshot

    try:
        snapshot = Snapshot(path)
    except UnsupportedVersionError:
        raise  # of a newer version: nobody knows whether it is damaged
    except CorruptStateError as error:
        rendering.show_damaged_metadata(path, error, as_json=as_json)
        raise typer.Exit(EXIT_DIFFERENT) from error
    report = snapshot.verify()
    rendering.show_verified(snapshot, report, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(EXIT_DIFFERENT)


@snapshots.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=_FOLDER)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=_FOLDER)],
    operator: Operator = None,
    state: State = None,
    keys: Annotated[int, typer.Option("--keys", min=0, help="Differing keys to show of each state.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what changed: keys added, removed and changed per state. Exit code 0 same, 1 different, 2 trouble."""
    from api.snapshots import rendering
    from api.snapshots.snapshot import Snapshot

    uid, name = _chosen(operator, state)
    left, right = Snapshot(before), Snapshot(after)
    found = left.diff(right, uid=uid, state=name, keys_max=keys)
    rendering.show_diff(left, right, found, as_json=as_json)
    if not found.is_same:
        raise typer.Exit(EXIT_DIFFERENT)


@snapshots.command()
def export(
    path: Path,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New folder; a path or a URL.")],
    operator: Operator = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Write one Parquet dataset per state, for DuckDB, pandas, Polars, Spark."""
    from api.snapshots import rendering
    from api.snapshots.snapshot import Snapshot

    uid, name = _chosen(operator, state)
    report = Snapshot(path).export(folder, uid=uid, state=name)
    settle()
    rendering.show_exported(report, as_json=as_json)


@snapshots.command()
def copy(
    path: Path,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    as_json: Json = False,
) -> None:
    """Write a savepoint of its own with the same content elsewhere, every file checked; print where it is."""
    from api.snapshots.snapshot import Snapshot

    copied = Snapshot(path).copy(target)
    settle()
    if as_json:
        console.show_json({"location": copied.location, "size": copied.metadata.size})
    else:
        console.show_line(copied.location)


@snapshots.command()
def edit(
    path: Path,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    uid: Annotated[str, typer.Option("--uid", metavar="UID", help="The operator.")],
    state: Annotated[str, typer.Option("--state", metavar="NAME", help="Its state.")],
    function: Annotated[
        str | None,
        typer.Option("--function", metavar="NAME", help="FILE.py:function or module:function, from a batch of rows to others."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="FILE", help="Parquet file of all rows that the state is to have.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a savepoint in which a function or a file of yours has made one state anew; print where it is."""
    from api.snapshots.frames import parquet_rows
    from api.snapshots.snapshot import Snapshot
    from operators.pipelines import load_function

    if (function is None) == (rows is None):
        raise typer.BadParameter("give either --function or --rows")
    change = load_function(function, "function")[0] if function is not None else parquet_rows(rows or "")
    edited = Snapshot(path).edit(target, {(uid, state): change})
    settle()
    if as_json:
        console.show_json({"location": edited.location, "size": edited.metadata.size})
    else:
        console.show_line(edited.location)


@snapshots.command()
def bootstrap(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder; a path or a URL.")],
    function: Annotated[
        str,
        typer.Option(
            "--function", metavar="NAME", help="FILE.py:function or module:function, from an hf.Savepoint to a fuller one."
        ),
    ],
    max_parallelism: Annotated[int, typer.Option("--max-parallelism", min=1, help="That of the job that is to start from it.")],
    parallelism: Annotated[int, typer.Option("--parallelism", min=1, help="Files of each state.")] = 1,
    as_json: Json = False,
) -> None:
    """Write a savepoint of rows that a function of yours gives it, for a job to start with history; print where it is."""
    from api.snapshots.savepoints import Savepoint, filled_by
    from operators.pipelines import load_function

    apply, _ = load_function(function, "function")
    empty = Savepoint.create(max_parallelism=max_parallelism, parallelism=parallelism)
    written = filled_by(apply, function, empty).write(target)
    settle()
    if as_json:
        console.show_json({"location": written.location, "size": written.metadata.size})
    else:
        console.show_line(written.location)


@snapshots.command()
def dispose(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a savepoint; a path or a URL.")], as_json: Json = False
) -> None:
    """Delete a savepoint; one that a job has claimed is refused."""
    from api.snapshots.disposing import dispose_of

    folder = dispose_of(path)
    if as_json:
        console.show_json({"disposed": folder})
    else:
        console.show_line(f"disposed of {folder}")


def _chosen(operator: str | None, state: tuple[str, str] | None) -> tuple[str | None, str | None]:
    if operator is not None and state is not None:
        raise typer.BadParameter("give --operator or --state, not both")
    return state if state is not None else (operator, None)

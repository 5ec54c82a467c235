"""`holdfast bench nexmark`: checks the queries against DuckDB, or measures their speed."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from holdfast.api.cli import console
from holdfast.statebackends.errors import InvalidConfigError


def nexmark(
    *,
    queries: Annotated[
        str, typer.Option("--queries", metavar="q0,q5", help="Which, with commas; all if left out.", show_default=False)
    ] = "",
    events: Annotated[
        int | None,
        typer.Option("--events", min=1, help="Of all kinds; 200,000 if left out, for --speed 20,000,000.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the events that --check compares.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Compare each with DuckDB, restarted midway at another parallelism. The default.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Events a second of one worker process on Spark, beside Flink's published figures.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Nexmark's queries: exit code 1 if one of them differs from DuckDB."""
    if check and speed:
        raise InvalidConfigError("give --check or --speed, one of them", setting="check")
    names = [name.strip() for name in queries.split(",") if name.strip()]
    if speed:
        _show_speed(names, events, as_json=as_json)
    elif not _show_checks(names, events, seed, as_json=as_json):
        raise typer.Exit(console.EXIT_FAILED)


def _show_checks(names: list[str], events: int | None, seed: int, *, as_json: bool) -> bool:
    """Whether every query gives what DuckDB gives."""
    from holdfast.api.nexmark.check import EVENTS, Checker
    from holdfast.api.nexmark.queries import named_queries

    chosen = named_queries(names)
    checker = Checker(events or EVENTS, seed=seed)
    checks = [checker.check(query) for query in chosen]
    if as_json:
        shown = [(each.query.name, each.rows, msgspec.to_builtins(each.difference), each.seconds) for each in checks]
        console.show_json([dict(zip(("query", "rows", "difference", "seconds"), row, strict=True)) for row in shown])
    else:
        cells = [
            (each.query.name, each.query.meaning, each.rows, "no" if each.difference else "yes", f"{each.seconds:.1f}")
            for each in checks
        ]
        console.show_table(("query", "", "rows", "ok", "s"), cells, empty="no query")
        for each in checks:
            if each.difference:
                console.show_line(f"{each.query.name}: missing {each.difference.missing}, too many {each.difference.extra}")
    return not any(each.difference for each in checks)


def _show_speed(names: list[str], events: int | None, *, as_json: bool) -> None:
    from holdfast.api.nexmark.queries import named_queries
    from holdfast.api.nexmark.speed import EVENTS, FLINK, measure, spark

    chosen = named_queries(names)
    with spark():
        runs = [measure(query, events or EVENTS) for query in chosen]
    if as_json:
        rows = [(each.query.name, each.events, each.seconds, each.checkpoints, FLINK.get(each.query.name)) for each in runs]
        columns = ("query", "events", "seconds", "checkpoints", "flink_k_events_s")
        console.show_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    cells = [
        (query.name, query.meaning, f"{each.thousands:,.0f}", FLINK.get(query.name), each.checkpoints, f"{each.seconds:.1f}")
        for query, each in zip(chosen, runs, strict=True)
    ]
    console.show_table(("query", "", "k events/s", "Flink, a core", "checkpoints", "s"), cells, empty="no query")

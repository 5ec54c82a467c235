"""The command line of the simulator: `holdfast chaos sim | replay | list`.

Commands parse, call and print. What they print is in report.py, which names exist in catalogue.py."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.api.cli import console
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    from holdfast.chaos.campaign.campaign import Campaign, Finding, Settings
    from holdfast.chaos.campaign.summary import CoverageReport

SEEDS = 200
"""Seeds of a campaign for which no number was given."""
STOP_AFTER = 5
SEED_TIMEOUT_MIN_S = 0.001
SEED_TIMEOUT_MAX_S = 86_400.0
INTERRUPTED = 130
UNJUDGED = 3
"""Nothing broke, and the output of some sink was compared with nothing: it depends on order or time, and the user said nothing."""
ENTRY: str | None = None
"""What runs a seed; None: the simulator, whose modules `holdfast --help` does not load."""
ALL = "all"

app = typer.Typer(
    help="Run jobs under seeded failures in one process, and check that exactly-once holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", metavar="NAME", help="A workload, or FILE.py:function; again for more. All if left out."),
]
Faults = Annotated[
    str | None,
    typer.Option("--faults", metavar="A,B|@PLAN", help="Kinds or families of faults, or a plan in a file. All if left out."),
]
SabotageName = Annotated[str | None, typer.Option("--sabotage", metavar="NAME", help="Break one rule of the product on purpose.")]
Backend = Annotated[str | None, typer.Option("--backend", help="State backend; drawn from the seed if left out.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command()
def sim(
    *,
    seeds: Annotated[int | None, typer.Option("--seeds", help=f"Number of runs; {SEEDS} if left out.", show_default=False)] = None,
    start: Annotated[int, typer.Option("--start", help="First seed.")] = 0,
    workload: Workloads = None,
    faults: Faults = None,
    sabotage: Annotated[
        str | None, typer.Option("--sabotage", metavar="NAME", help="Break one rule of the product on purpose; all: each in turn.")
    ] = None,
    backend: Backend = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes; one for each CPU if left out.", show_default=False)] = None,
    stop_after: Annotated[
        int | None,
        typer.Option(
            "--stop-after", help=f"Stop after that many failed runs, 0: never; {STOP_AFTER} if left out.", show_default=False
        ),
    ] = None,
    seed_timeout: Annotated[float, typer.Option("--seed-timeout", help="Seconds of real time for one run.")] = 60.0,
    check_determinism: Annotated[bool, typer.Option("--check-determinism", help="Run every seed twice and compare.")] = False,
    coverage: Annotated[
        bool | None,
        typer.Option(
            "--coverage/--no-coverage", help="Measure the product's branches on some of the seeds; if left out, when all held."
        ),
    ] = None,
    minimise: Annotated[bool, typer.Option("--minimise/--no-minimise", help="Find the faults that a failure takes.")] = True,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page into this file, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run many seeds; exit code 1 if any of them breaks an invariant, 3 if output of your own pipeline could not be judged."""
    from holdfast.chaos.campaign.campaign import Settings
    from holdfast.chaos.campaign.runner import RUN_SEED, cpu_count

    _check_bounds(seeds, start, jobs, stop_after, seed_timeout)
    _check_writable("--html", html)
    settings = Settings(
        jobs=jobs or cpu_count(),
        limit_s=seed_timeout,
        stop_after=stop_after if stop_after is not None else (STOP_AFTER if sabotage is None else 1),
        check_determinism=check_determinism,
        minimise=minimise,
        entry=ENTRY or RUN_SEED,
    )
    names = tuple(workload or ())
    if sabotage == ALL:
        _prove(settings, seeds, start, names, faults, backend, as_json=as_json, html=html)
    campaign = make_campaign(seeds, start, names, faults, sabotage, backend)
    found, measured = _run(campaign, settings, coverage=coverage, quiet=as_json)
    _show(found, measured, as_json=as_json, html=html)
    if found.summary.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(console.EXIT_FAILED if found.summary.violations else UNJUDGED if found.summary.unjudged else 0)


def _check_bounds(seeds: int | None, start: int, jobs: int | None, stop_after: int | None, seed_timeout: float) -> None:
    _at_least("--seeds", seeds, 1)
    _at_least("--start", start, 0)
    _at_least("--jobs", jobs, 1)
    _at_least("--stop-after", stop_after, 0)
    if not SEED_TIMEOUT_MIN_S <= seed_timeout <= SEED_TIMEOUT_MAX_S:  # also refuses NaN
        raise InvalidConfigError(
            f"--seed-timeout must be {SEED_TIMEOUT_MIN_S:g} to {SEED_TIMEOUT_MAX_S:g} seconds, got {seed_timeout:g}"
        )


def make_campaign(
    seeds: int | None, start: int, workloads: tuple[str, ...], faults: str | None, sabotage: str | None, backend: str | None
) -> Campaign:
    """From what was typed. Raises InvalidConfigError naming the choices."""
    from holdfast.chaos.campaign import catalogue
    from holdfast.chaos.campaign.campaign import Campaign

    chosen = catalogue.choose_sabotage(sabotage)
    kinds, plan = catalogue.choose_faults(faults, chosen)
    return Campaign(
        seeds=seeds or (SEEDS if chosen is None else chosen.seeds_max),
        workloads=catalogue.choose_workloads(workloads, chosen),
        start=start,
        kinds=kinds,
        plan=plan,
        sabotage=sabotage,
        backend=catalogue.choose_backend(backend) or (None if chosen is None else chosen.backend),
        options=() if faults is None else ("--faults", faults),
    )


def _run(campaign: Campaign, settings: Settings, *, coverage: bool | None, quiet: bool) -> tuple[Finding, CoverageReport | None]:
    """`coverage` None: only if everything held, for a failure should not wait for it."""
    from holdfast.chaos import report
    from holdfast.chaos.campaign import catalogue
    from holdfast.chaos.campaign import coverage as branches
    from holdfast.chaos.campaign.campaign import run_campaign

    with report.ProgressBar(campaign.seeds, quiet=quiet) as bar:
        found = run_campaign(campaign, settings, bar, sometimes=tuple(catalogue.sometimes()))
        wanted = campaign.sabotage is None and not found.summary.violations if coverage is None else coverage
        if not wanted or found.summary.interrupted:
            return found, None
        bar.looks_at(campaign.start, "coverage")
        ran = range(campaign.start, campaign.start + found.summary.seeds)
        requests = [campaign.request(seed) for seed in branches.sample(ran, found.summary.kinds)]
        try:
            return found, branches.measure(requests, limit_s=settings.limit_s, entry=settings.entry)
        except KeyboardInterrupt:  # the report on what ran is worth more than these figures
            return found, None


def _show(found: Finding, measured: CoverageReport | None, *, as_json: bool, html: Path | None) -> None:
    from holdfast.chaos import page, report
    from holdfast.chaos.campaign import catalogue

    if as_json:
        coverage = None if measured is None else report.plain(measured)
        console.show_json({**report.plain(found), "coverage": coverage})
    else:
        report.show_finding(found, measured, catalogue.invariants())
    _write_page(html, lambda: page.render_finding(found, measured, catalogue.invariants(), **_origin()))


def _write_page(path: Path | None, render: Callable[[], str]) -> None:
    """After the report is shown: a disk that is full by now takes the page alone. Raises InvalidConfigError."""
    if path is None:
        return
    try:
        path.write_text(render(), "utf-8", "backslashreplace")
    except OSError as error:
        raise InvalidConfigError(f"--html {path} can't be written: {error.strerror}") from error


def _origin() -> dict[str, str]:
    """When a page was made, by which command and version."""
    from holdfast.api.version import VERSION

    made = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"command": f"holdfast {shlex.join(sys.argv[1:])}", "made": made, "version": VERSION}


def _prove(
    settings: Settings,
    seeds: int | None,
    start: int,
    workloads: tuple[str, ...],
    faults: str | None,
    backend: str | None,
    *,
    as_json: bool,
    html: Path | None,
) -> None:
    """Every sabotage in turn; exit code 1 if one is not caught."""
    from dataclasses import replace

    from holdfast.chaos import page, report
    from holdfast.chaos.campaign.campaign import Unwatched, run_campaign
    from holdfast.chaos.campaign.proof import Trial, try_all
    from holdfast.chaos.sabotage import SABOTAGES

    trials = [
        Trial(name, make_campaign(seeds, start, workloads, faults, name, backend), found.invariants)
        for name, found in SABOTAGES.items()
    ]
    brief = replace(settings, minimise=False, events=0, stop_after=1, check_determinism=False)
    with brief.runner(brief.jobs) as runner, report.ProgressBar(len(trials), quiet=as_json) as bar:
        verdicts = try_all(trials, lambda campaign: run_campaign(campaign, brief, Unwatched(), runner=runner), bar.tried)
    if as_json:
        console.show_json(report.plain(verdicts))
    else:
        report.show_verdicts(verdicts)
    _write_page(html, lambda: page.render_verdicts(verdicts, **_origin()))
    raise typer.Exit(0 if all(verdict.caught_after for verdict in verdicts) else console.EXIT_FAILED)


@app.command()
def replay(
    *,
    seed: Annotated[int, typer.Argument(metavar="SEED", help="The seed.")],
    workload: Annotated[
        list[str] | None, typer.Option("--workload", metavar="NAME", help="Its workload; needed if the campaign named any.")
    ] = None,
    faults: Faults = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Faults in a file; the same as --faults @FILE.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="N,M", help="These faults of the plan alone, counted from 0; or none.")
    ] = None,
    sabotage: SabotageName = None,
    backend: Backend = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write every event into this file.")] = None,
    save_plan: Annotated[Path | None, typer.Option("--save-plan", metavar="FILE", help="Write the faults into this file.")] = None,
    events: Annotated[int, typer.Option("--events", help="Last events to print.")] = 0,
    as_json: Json = False,
) -> None:
    """Run one seed again, event for event; exit code 1 if it breaks an invariant."""
    from holdfast.chaos import report
    from holdfast.chaos.campaign.campaign import replay_seed

    _at_least("SEED", seed, 0)
    _at_least("--events", events, 0)
    if plan is not None and faults is not None:
        raise InvalidConfigError("give --plan or --faults, not both")
    if sabotage == ALL:
        raise InvalidConfigError("--sabotage all is for sim: a replay takes one, as `holdfast chaos list sabotages` names them")
    for option, path in (("--trace", trace), ("--save-plan", save_plan)):
        _check_writable(option, path)
    campaign = make_campaign(1, seed, tuple(workload or ()), f"@{plan}" if plan is not None else faults, sabotage, backend)
    done = replay_seed(campaign.request(seed), only)
    lines = done.trace.lines()
    if trace is not None:
        trace.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    if save_plan is not None:
        from holdfast.chaos.faults.faults import encode_plan

        save_plan.write_bytes(encode_plan(done.result.plan))
    shown = [line.partition("\n")[0] for line in lines[len(lines) - min(events, len(lines)) :]]
    if as_json:
        console.show_json({"result": report.plain(done.result), "events": shown})
    else:
        for line in shown:
            console.show_line(line)
        report.show_run(done.result, done.trace.digest(), len(lines))
    raise typer.Exit(console.EXIT_FAILED if done.result.violations else 0)


@app.command(name="list")
def list_names(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="workloads, faults, sabotages, invariants, or sometimes.")],
    as_json: Json = False,
) -> None:
    """Print names that can be chosen, one a line, with what each means."""
    from holdfast.chaos.campaign import catalogue

    found = catalogue.entries(what)
    if as_json:
        console.show_json([{"name": name, "meaning": meaning} for name, meaning in found])
    else:
        width = max((len(name) for name, _ in found), default=0)
        for name, meaning in found:
            console.show_line(f"{name:<{width}}  {meaning}")


def _check_writable(option: str, path: Path | None) -> None:
    """Before the run, whose result would be lost. Raises InvalidConfigError."""
    if path is None:
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidConfigError(f"{option} {path} can't be written: {error.strerror}") from error


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise InvalidConfigError(f"{name} must be at least {least:g}, got {value:g}")

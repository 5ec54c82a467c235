"""The command line: `holdfast serve | jobs | status | explain | checkpoints | savepoint | stop | cancel | inspect | ...`.

Commands parse, call and print: console.py formats the output, settings.py finds the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, assert_never

import msgspec
import typer
from typer.core import TyperGroup

from holdfast.api.access.audit import AuditReport, AuditVerdict
from holdfast.api.access.issued import LIFE_MS_MAX, LIFE_RULE
from holdfast.api.cli import console, diagnosis
from holdfast.api.cli import snapshots as commands
from holdfast.api.cli.connections import ANYWHERE, TERMINAL_STATES, Connection, Offline, resolve_job
from holdfast.api.cli.history import show_failures, show_history
from holdfast.api.cli.interrupts import EXIT_INTERRUPTED, interruptible
from holdfast.api.cli.options import grouped
from holdfast.api.cli.progress import Tool
from holdfast.api.cli.serving import ServiceOptions
from holdfast.api.cli.snapshot_life import follow_drill, show_cost, show_drill, show_drills, show_labels, with_money
from holdfast.api.client import RestClient
from holdfast.api.errors import ConnectionLostError
from holdfast.api.settings import check_named, named_state_directory
from holdfast.api.version import VERSION
from holdfast.barriers.jobgraph import ClaimMode, SinkMode, Submission
from holdfast.barriers.tunable import SettingValue, parse_setting
from holdfast.coordinator.figures import duration_text, size_text
from holdfast.coordinator.ha.records import derive_job_id, is_job_id
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError

_CANCEL_POLL_S = 0.05


class _Group(TyperGroup):
    """Prints typed errors as one line with an exit code, never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (HoldfastError, TimeoutError) as error:
            console.show_error(error)
            raise typer.Exit(console.exit_code(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    cls=_Group,
    help="Checkpointing and exactly-once fault tolerance for stateful streaming jobs in Python on Spark.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Job = Annotated[str, typer.Argument(metavar="JOB", help="Job id, a unique beginning of one, or the job's name.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Target = Annotated[
    str | None, typer.Option("--target", help="Directory of the savepoint; the job's savepoint directory if left out.")
]
Format = Annotated[
    Literal["canonical", "native"],
    typer.Option("--format", help="canonical: every state backend reads it, and other tools. native: the backend's own files."),
]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds to wait for the outcome; no limit by default.")]


def _version(*, shown: bool) -> None:
    if shown:
        console.show_line(f"holdfast {VERSION}")
        raise typer.Exit


@app.callback()
def holdfast(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=lambda value: _version(shown=value), is_eager=True)
    ] = False,
) -> None:
    pass


# ------------------------------------------------------------------------------------------------------------ commands


@app.command()
@grouped
def serve(options: ServiceOptions, as_json: Json = False) -> None:
    """Run the coordinator on a state directory until interrupted."""
    from holdfast.api.server.main import (
        serve as run,  # the service's libraries take a while to import; other commands need none of them
    )

    run(options.settings(os.environ), announce=console.show_line, as_json=as_json)


@app.command()
@grouped
def doctor(
    connection: Connection = ANYWHERE,
    certificate: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate of the coordinator, PEM.")] = None,
    key: Annotated[Path | None, typer.Option("--tls-key", help="Its key.")] = None,
    authority: Annotated[Path | None, typer.Option("--tls-ca", help="Authority that it is trusted by; itself if left out.")] = None,
    spark_conf: Annotated[
        Path | None,
        typer.Option("--spark-conf", help="A spark-defaults.conf, also for --spark; the one that Spark reads if left out."),
    ] = None,
    spark: Annotated[bool, typer.Option("--spark", help="Start Spark, and ask its executors what they reach.")] = False,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with this host, a state directory, a coordinator and the way to it: each fault with its fix. Exit code
    0 if all is well, 1 with warnings, 2 with faults."""
    from holdfast.api.cli.examination import show_examination  # imports libraries that no other command needs

    code = show_examination(
        os.environ,
        **asdict(connection),
        tls=(certificate, key, authority),
        spark_conf=spark_conf,
        asks_spark=spark,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
@grouped
def jobs(
    connection: Connection = ANYWHERE,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """List jobs, newest first, with the rows that they have read, written, dropped as late, and skipped because a function failed
    on them, and how backpressured their worst subtask is: ok, low or high; without a coordinator, the jobs recorded in the state
    directory."""
    client = connection.reader(offline=offline)
    found, totals = [*client.jobs(), *client.unreadable()], client.totals()
    if as_json:
        console.show_json([{**job, "totals": totals.get(job["jid"])} for job in found])
        return
    rows = [
        (
            job["jid"],
            job["name"],
            job["state"],
            f"{job['tasks']['running']}/{job['tasks']['total']}" if "failure" not in job else "-",  # no coordinator was asked
            console.time_text(job["start-time"]),
            duration_text(job["duration"]),
            *(_count(totals, job["jid"], name) for name in ("records_in", "records_out", "late_dropped", "rows_skipped")),
            totals.get(job["jid"], {}).get("backpressure") or "-",
        )
        for job in found
    ]
    columns = ("JOB", "NAME", "STATE", "RUNNING", "STARTED", "DURATION", "IN", "OUT", "LATE", "SKIPPED", "PRESSURE")
    console.show_table(columns, rows, empty="no jobs")
    for job in found:
        numbers = totals.get(job["jid"], {})
        if job["state"] == "RESTARTING" and numbers.get("restarts_at", -1) >= 0:
            due = console.time_text(numbers["restarts_at"])
            console.show_line(f"{job['jid']}: restart {numbers['restarts']} at {due}; {numbers['restart_strategy']}")
        if job.get("failure"):
            console.show_line(f"{job['jid']}: {job['state']} after {job['restarts']} restarts: {job['failure']}")
    if any(job["state"] == "UNKNOWN" for job in found):
        console.show_note("UNKNOWN: no end recorded: it runs elsewhere, or goes on from its last checkpoint when started again")


def _count(totals: dict[str, dict[str, Any]], job_id: str, name: str) -> str:
    count = totals.get(job_id, {}).get(name)
    return "-" if count is None else f"{count:,}"


@app.command()
@grouped
def history(
    job: Job,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Show at most this many, the newest.")] = 50,
    kinds: Annotated[
        str,
        typer.Option(
            "--kinds",
            help="Only these, with commas: leader, state, failure, restart, initialized, first_record, checkpoint, explanation, "
            "request, label, drill.",
        ),
    ] = "",
    after: Annotated[
        str, typer.Option("--after", metavar="EPOCH-NUMBER", help="Show those behind this one, the oldest first to go on from.")
    ] = "",
    before: Annotated[
        str, typer.Option("--before", metavar="EPOCH-NUMBER", help="Show the newest of those in front of this one.")
    ] = "",
    connection: Connection = ANYWHERE,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Show what happened to a job: its leaders, states, failures, restarts, checkpoints and users' requests, oldest first. Also of
    jobs that have ended, and without a coordinator from the state directory."""
    client = connection.reader(offline=offline)
    wanted = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    found = client.history(resolve_job(client, job), after=after, kinds=wanted, limit=limit, newest=not after, before=before)
    if as_json:
        console.show_json(found)
    else:
        show_history(found)


@app.command()
@grouped
def failures(
    job: Job,
    limit: Annotated[int, typer.Option("--limit", min=1, max=300, help="Show at most this many, the newest.")] = 20,
    before: Annotated[str, typer.Option("--before", metavar="EPOCH-NUMBER", help="Show those in front of this one.")] = "",
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Show the failures of a job, newest first: what the job was restored from behind each, how many records it read again, and how
    long it was until records were processed again."""
    client = connection.client()
    found = client.failures(resolve_job(client, job), before=before, limit=limit)
    if as_json:
        console.show_json(found)
    else:
        show_failures(found)


@app.command()
@grouped
def checkpoints(
    job: Job,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Show at most this many, newest first.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of the running job, until its next submission, such as checkpoint_interval_ms=60000; none: no "
            "value, of the interval no periodic checkpoints. Repeatable. Shows the settings that hold.",
        ),
    ] = None,
    connection: Connection = ANYWHERE,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Show a job's checkpoints and savepoints, newest first; where no coordinator answers, those recorded in the state directory.
    DISCARDED: completed, and deleted to make room for newer ones.

    With --set: change how the job takes them, while it runs."""
    if changes:
        if offline:
            raise InvalidConfigError("--set changes a running job: it needs a coordinator, not --offline", setting="offline")
        _change_settings(connection.client(), job, changes, as_json=as_json)
        return
    client = connection.reader(offline=offline)
    found = client.checkpoints(resolve_job(client, job))
    found["history"] = found["history"][:limit]
    if as_json:
        console.show_json(found)
        return
    rows = [
        (
            each["id"],
            each["checkpoint_type"],
            "DISCARDED" if each.get("discarded") else each["status"],
            console.time_text(each["trigger_timestamp"]),
            duration_text(each["end_to_end_duration"]),
            f"{each['num_acknowledged_subtasks']}/{each['num_subtasks']}" if each["num_subtasks"] else "-",
            size_text(each["checkpointed_size"]),
            size_text(each["state_size"]),
            "" if each.get("discarded") else each.get("external_path") or each.get("failure_message") or "",
        )
        for each in found["history"]
    ]
    columns = ("ID", "TYPE", "STATUS", "TRIGGERED", "DURATION", "ACKS", "WRITTEN", "STATE", "WHERE OR WHY")
    console.show_table(columns, rows, empty="no checkpoints")
    console.show_line(_counted(found["counts"]))


def _counted(counts: dict[str, int]) -> str:
    """Only a coordinator that leads the job counts failures and restores; records are deleted with their checkpoints."""
    names = ("completed", "failed", "in_progress", "restored")
    told = [f"{counts[name]} {name.replace('_', ' ')}" for name in names if counts["restored"] >= 0 or counts[name] > 0]
    if counts["restored"] >= 0:
        return ", ".join(told)
    return f"on record: {', '.join(told) or 'none'}; older ones, failures behind which one completed, and restores are not"


@app.command()
@grouped
def status(job: Job, connection: Connection = ANYWHERE, as_json: Json = False) -> None:
    """Whether a job is safe, why it is slow, and where it will resume: exit code 0 if all is ok, 1 at risk, 2 bad, and 3 if nobody
    answers for the job."""
    with console.trouble(console.EXIT_NO_VERDICT), _naming_records(job):
        client = connection.client()
        job_id = resolve_job(client, job)
        code = diagnosis.show_health(diagnosis.ask_health(lambda: client.health(job_id)), as_json=as_json)
    raise typer.Exit(code)


@app.command()
@grouped
def explain(
    job: Job,
    number: Annotated[
        int | None,
        typer.Argument(metavar="[ID]", min=0, help="Id of a checkpoint; the one that is late, missing or newest if left out."),
    ] = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Why a checkpoint was slow, failed, is pending, or is missing: its phases beside the usual, the chain of causes, and one
    setting to change."""
    with _naming_records(job):
        client = connection.client()
        diagnosis.show_explanation(client.explain(resolve_job(client, job), number), as_json=as_json)


@contextmanager
def _naming_records(job: str) -> Iterator[None]:
    """Where no coordinator answers, say what can be read without one."""
    try:
        yield
    except ConnectionLostError as error:
        hint = f"`holdfast checkpoints {job} --offline --state-dir DIR` shows what is on record"
        raise ConnectionLostError(f"{error.message}. {hint}", **error.fields) from error


@app.command()
@grouped
def label(
    job: Job,
    number: Annotated[int | None, typer.Argument(metavar="[ID]", min=1, help="Id of a checkpoint or savepoint.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The label: letters, digits, '.', '_', '-'.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the label.")] = False,
    connection: Connection = ANYWHERE,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Give a checkpoint or savepoint a label: it is not deleted until the label is removed, and restore="label:NAME" starts from
    it. With JOB alone: list the job's labels.

    With --offline the state directory itself is changed, beside a coordinator or without one; that one's next recovery of the job
    deletes what is kept no longer."""
    if (number is None) != (name is None) or (remove and name is None):
        raise InvalidConfigError("a label needs both: `holdfast label JOB ID NAME`; JOB alone lists labels", setting="label")
    if number is None or name is None:
        reader = connection.reader(offline=offline)
        show_labels(reader.labels(resolve_job(reader, job)), as_json=as_json)
        return
    client = connection.labeller(offline=offline)
    job_id = resolve_job(client, job)
    if remove:
        shown = client.remove_label(job_id, name, number)[0]
    else:
        shown = client.add_label(job_id, number, name)
    if as_json:
        console.show_json(shown)
    else:
        done = "removed from " if remove else ""
        console.show_line(f"{shown['label']}: {done}{shown['kind']} {shown['checkpoint_id']} {shown['location']}")


@app.command()
@grouped
def drill(
    job: Job,
    number: Annotated[
        int | None, typer.Argument(metavar="[ID]", min=1, help="Id of a checkpoint or savepoint; the newest if left out.")
    ] = None,
    shows: Annotated[bool, typer.Option("--list", help="Show the drills that there were, newest first; begin none.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the outcome.")] = True,
    timeout: Timeout = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Read every row of the newest checkpoint, or of another snapshot of the job, as a restore would, in a process of the
    coordinator's own: exit code 0 if all is there, 1 if not, 3 if nothing could be found out."""
    if shows and number is not None:
        raise InvalidConfigError("--list shows the drills of all snapshots of the job: leave the id out", setting="list")
    with console.trouble(console.EXIT_NO_VERDICT):
        client = connection.client()
        job_id = resolve_job(client, job)
        if shows:
            show_drills(client.drills(job_id), as_json=as_json)
            return
        begun = client.drill(job_id, number)
        found = follow_drill(client, job_id, begun, timeout) if wait else begun
        code = show_drill(found, as_json=as_json)
    raise typer.Exit(code)


@app.command()
@grouped
def cost(
    job: Job,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", help="Price file, TOML or JSON: adds money. [env: HOLDFAST_PRICES]", show_default=False),
    ] = None,
    connection: Connection = ANYWHERE,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """What the checkpoints of a job take: bytes of its own and shared, files, small files, requests an hour, and with a price file
    money."""
    client = connection.reader(offline=offline)
    found = client.cost(resolve_job(client, job))
    named = prices or os.environ.get("HOLDFAST_PRICES")
    if named:
        found = with_money(found, Path(named))
    show_cost(found, as_json=as_json)


@app.command()
@grouped
def checkpoint(
    job: Job,
    unaligned: Annotated[
        bool | None,
        typer.Option(
            "--unaligned/--aligned",
            help="Whether its barriers overtake what is queued, which it stores then; as the job's settings say if left out.",
        ),
    ] = None,
    aligned_timeout: Annotated[
        int | None,
        typer.Option("--aligned-timeout", min=0, metavar="MS", help="They overtake from this age on; 0: at once."),
    ] = None,
    timeout: Timeout = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Take a checkpoint now and print its id, in the job's own mode or in one for it alone."""
    if unaligned is False and aligned_timeout is not None:
        text = "--aligned-timeout says from when on barriers overtake, and with --aligned none does: leave one of them out"
        raise InvalidConfigError(text, setting="aligned_timeout")
    client = connection.client()
    job_id = resolve_job(client, job)
    with _naming_flags():
        number = client.trigger_checkpoint(job_id, unaligned=unaligned, aligned_timeout_ms=aligned_timeout, timeout_s=timeout)
    if as_json:
        console.show_json({"job": job_id, "checkpoint": number})
    else:
        console.show_line(str(number))


@contextmanager
def _naming_flags() -> Iterator[None]:
    """A refusal of a checkpoint's mode names fields of the request: its user gave flags."""
    try:
        yield
    except InvalidConfigError as error:
        if error.setting != "alignedCheckpointTimeout":
            raise
        said = error.message.replace("alignedCheckpointTimeout", "--aligned-timeout").replace("say unaligned,", "give --unaligned,")
        raise InvalidConfigError(said, **error.fields) from error


def _change_settings(client: RestClient, job: str, changes: list[str], *, as_json: bool) -> None:
    settings: dict[str, SettingValue] = {}
    for name, value in map(parse_setting, changes):
        if settings.setdefault(name, value) != value:
            raise InvalidConfigError(f"--set gives {name} two values", setting=name)
    found = client.change_settings(resolve_job(client, job), settings)
    if as_json:
        console.show_json(found)
        return
    rows = [(name, "none" if value is None else str(value).lower()) for name, value in found["settings"].items()]
    console.show_table(("SETTING", "VALUE"), rows, empty="no settings")
    if found["processing_backlog"]:
        console.show_line("a source processes a backlog: checkpoint_interval_during_backlog_ms is the interval, unless it is none")


@app.command()
@grouped
def savepoint(
    job: Job,
    target: Target = None,
    format_type: Format = "canonical",
    timeout: Timeout = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Take a savepoint and print its location."""
    directory = _absolute(target)
    client = connection.client()
    job_id = resolve_job(client, job)
    location = client.savepoint(job_id, directory, format_type=format_type.upper(), timeout_s=timeout)
    _show_location(job_id, location, as_json=as_json)


@app.command()
@grouped
def stop(
    job: Job,
    drain: Annotated[
        bool, typer.Option("--drain", help="Fire all timers and windows first: for a job that will not go on afterwards.")
    ] = False,
    target: Target = None,
    format_type: Format = "canonical",
    timeout: Timeout = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Stop a job with a savepoint and print its location."""
    directory = _absolute(target)
    client = connection.client()
    job_id = resolve_job(client, job)
    location = client.stop(job_id, directory, drain=drain, format_type=format_type.upper(), timeout_s=timeout)
    _show_location(job_id, location, as_json=as_json)


def _absolute(target: str | None) -> str | None:
    """Resolve a relative directory against the caller's working directory, not the coordinator's. Raises InvalidConfigError."""
    if target is not None and not target.strip():
        raise InvalidConfigError("the target directory is empty: leave --target out, or name one", setting="target")
    return target if target is None or "://" in target else str(Path(os.path.expanduser(target)).absolute())


def _show_location(job_id: str, location: str, *, as_json: bool) -> None:
    if as_json:
        console.show_json({"job": job_id, "location": location})
    else:
        console.show_line(location)


@app.command()
@grouped
def cancel(
    job: Job,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the job has ended.")] = True,
    timeout: Timeout = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Cancel a job; its state since the last checkpoint is lost."""
    client = connection.client()
    job_id = resolve_job(client, job)
    client.cancel(job_id)
    deadline = None if timeout is None else time.monotonic() + timeout
    state = client.job_state(job_id)
    while wait and state not in TERMINAL_STATES:
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"job {job_id} is still {state} after {timeout} s")
        time.sleep(_CANCEL_POLL_S)
        state = client.job_state(job_id)
    if as_json:
        console.show_json({"job": job_id, "state": state})
    else:
        console.show_line(state)


app.command(cls=Tool)(commands.inspect)
app.add_typer(commands.snapshots, name="snapshot")


@app.command(cls=Tool)
def preflight(
    snapshot: Annotated[
        str,
        typer.Argument(metavar="SNAPSHOT", help="Folder of a snapshot, a path or a URL; with --state-dir also `latest` or an id."),
    ],
    pipeline: Annotated[str, typer.Argument(metavar="JOB", help="FILE.py:function or module:function that builds the job.")],
    *,
    state_dir: Annotated[
        str | None,
        typer.Option("--state-dir", help="State directory of the job, with its newer checkpoints and files outside a snapshot."),
    ] = None,
    job_id: Annotated[str | None, typer.Option("--job-id", help="Id of the job; by default derived from its name.")] = None,
    parallelism: Annotated[int | None, typer.Option("--parallelism", min=1, help="Instead of the function's own.")] = None,
    allow_non_restored_state: Annotated[
        bool, typer.Option("--allow-non-restored-state", help="State without an operator is dropped, not refused.")
    ] = False,
    allow_output_repeat: Annotated[
        bool, typer.Option("--allow-output-repeat", help="Output that was committed already may be written again.")
    ] = False,
    without_channel_state: Annotated[
        int | None,
        typer.Option("--without-channel-state", min=1, metavar="ID", help="In-flight records of the snapshot of this id are lost."),
    ] = None,
    claim: Annotated[bool, typer.Option("--claim", help="As with claim_mode=CLAIM: the job would own the snapshot.")] = False,
    sinks: Annotated[
        SinkMode, typer.Option("--sinks", help="fork: a sink that writes elsewhere begins a new log; abandon: despite lost rows.")
    ] = SinkMode.KEEP,
    as_json: Json = False,
) -> None:
    """Check a snapshot against a job before it is started: exit code 0 if it fits, 1 if not, 2 if that is unknown."""
    from holdfast.api.cli.render import show_report
    from holdfast.api.snapshots.preflight import named_snapshot, preflight_offline
    from holdfast.operators.datastream.pipelines import build_environment, load_function
    from holdfast.statebackends.state_processor.contents import absolute_location

    with console.trouble(), interruptible():
        function, _ = load_function(pipeline, "job")
        environment = build_environment(function, pipeline, "job", parallelism=parallelism)
        submission = Submission(
            environment.build().graph,
            job_id=job_id,
            restore=named_snapshot(snapshot),
            claim_mode=ClaimMode.CLAIM if claim else ClaimMode.NO_CLAIM,
            sinks=sinks,
            allow_non_restored_state=allow_non_restored_state,
            allow_output_repeat=allow_output_repeat,
            without_channel_state=without_channel_state,
        )
        directory = check_named(state_dir) if state_dir is not None else environment.state_dir
        report = preflight_offline(submission, None if directory is None else absolute_location(directory))
    show_report(report, as_json=as_json)
    if not report.fits:
        raise typer.Exit(console.EXIT_FAILED)


tokens = typer.Typer(help="Tokens for callers: issue, list, revoke.", no_args_is_help=True)
app.add_typer(tokens, name="token")


@tokens.command()
@grouped
def create(
    role: Annotated[
        str,
        typer.Option("--role", help="viewer: sees all but rows. operator: also submits, stops, changes jobs. admin: everything."),
    ],
    job: Annotated[
        str | None, typer.Option("--job", help="Id or name of the only job that it is for; all if left out.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What logs and lists call it.", show_default=False)] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", help="Time until it ends: 30m, 12h, 30d; until it is revoked if left out.", show_default=False),
    ] = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Issue a token and print it, this once: only a hash of it is stored."""
    life_ms = None if expires is None else commands.parse_duration(expires, "--expires")
    if life_ms is not None and not 0 < life_ms <= LIFE_MS_MAX:
        raise InvalidConfigError(f"--expires {expires}: {LIFE_RULE}", setting="expires")
    found = connection.client().issue_token(role, job=job, name=name, expires_in_ms=life_ms)
    if as_json:
        console.show_json(found)
        return
    console.show_line(found["token"])
    ends = "until it is revoked" if found["expires"] < 0 else f"until {console.time_text(found['expires'])}"
    whose = "all jobs" if job is None else job if job == found["job"] else f"{job} ({found['job']})"
    console.show_note(f"{found['id']}: {found['role']} of {whose} {ends}")
    if not found["job_exists"]:
        revoking = f"if that is mistyped, `holdfast token revoke {found['id']}`"
        console.show_note(f"there is no job {job!r} yet: the token is for one that is submitted by this id or name; {revoking}")


@tokens.command("list")
@grouped
def list_tokens(connection: Connection = ANYWHERE, as_json: Json = False) -> None:
    """List the tokens that are not revoked, oldest first; their texts are not known any more."""
    found = connection.client().tokens()
    if as_json:
        console.show_json(found)
        return
    now_ms = time.time_ns() // 1_000_000
    rows = [
        (
            each["id"],
            each["name"],
            each["role"],
            each["job"] or "all",
            console.time_text(each["created"]),
            "never" if each["expires"] < 0 else console.time_text(each["expires"]),
            "expired" if 0 <= each["expires"] <= now_ms else "good",
        )
        for each in found
    ]
    console.show_table(("ID", "NAME", "ROLE", "JOB", "CREATED", "EXPIRES", "STATE"), rows, empty="no issued tokens")


@tokens.command()
@grouped
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `holdfast token list` shows it.")],
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Revoke a token: it ends here at once, at other coordinators of the state directory within 5 s."""
    connection.client().revoke_token(token_id)
    if as_json:
        console.show_json({"id": token_id, "revoked": True})
    else:
        console.show_line(f"{token_id} is revoked")


@app.command()
@grouped
def forget(
    job: Job,
    state: Annotated[
        tuple[str, str],
        typer.Option("--state", metavar="UID NAME", help="Operator and state; * for all keyed states and timers of the operator."),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="Of a stopped job: where the savepoint without the key goes, a path or URL.")
    ] = "",
    key: Annotated[
        str | None, typer.Option("--key", metavar="K", help="The key. Other users of this machine can see it; see --key-file.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="File that holds the key.")] = None,
    empty_key: Annotated[bool, typer.Option("--empty-key", help="The key is the empty text.")] = False,
    snapshot: Annotated[
        list[str], typer.Option("--snapshot", metavar="PATH", help="A further savepoint of the job; again for more.")
    ] = [],  # noqa: B006
    local: Annotated[
        list[str], typer.Option("--local", metavar="DIR", help="A local directory of workers on this host; again for more.")
    ] = [],  # noqa: B006
    keep_history: Annotated[
        bool, typer.Option("--keep-history", help="Keep the job's history, which may quote the key: the certificate is incomplete.")
    ] = False,
    certificate: Annotated[Path | None, typer.Option("--certificate", metavar="FILE", help="Write the certificate there.")] = None,
    connection: Connection = ANYWHERE,
    as_json: Json = False,
) -> None:
    """Forget a key of a job. With --url its coordinator does it: a running job loses the key at the barrier of a checkpoint. With
    --state-dir, of a stopped job: write a savepoint without it. Then delete every other snapshot of the job that may hold it, its
    history and the outcomes of its drills.

    Prints where to restore from, and what is not covered. The same command goes on after a crash. Exit code 1: some was kept."""
    from holdfast.api.cli.forgetting import run_forget, run_forget_at

    if connection.url is not None:
        if snapshot or local:
            raise InvalidConfigError("--snapshot and --local are for a stopped job, by --state-dir", setting="url")
        client = connection.client()
        how = {"keep_history": keep_history, "as_json": as_json}
        if not run_forget_at(client, resolve_job(client, job), state, (key, key_file, empty_key), to, certificate, **how):
            raise typer.Exit(console.EXIT_FAILED)
        return
    directory = named_state_directory(os.environ, url=None, state_dir=connection.state_dir)
    if directory is None:
        message = "a key is forgotten in a state directory: give --state-dir, or --url for a running job"
        raise InvalidConfigError(message, setting="state_dir")
    if not to:
        raise InvalidConfigError("a stopped job needs a directory for the savepoint without the key: give --to", setting="to")
    job_id = job if is_job_id(job) else derive_job_id(job)
    others = (snapshot, local)
    keeping = {"keep_history": keep_history, "as_json": as_json}
    if not run_forget(directory, job_id, state, (key, key_file, empty_key), to, others, certificate, **keeping):
        raise typer.Exit(console.EXIT_FAILED)


audit = typer.Typer(help="The log of who changed what, and who was refused: show, verify.", no_args_is_help=True)
app.add_typer(audit, name="audit")

AuditedDirectory = Annotated[
    str, typer.Argument(metavar="STATE_DIR", help="The state directory; a path or a URL.", envvar="HOLDFAST_STATE_DIR")
]


@audit.command()
def show(
    state_dir: AuditedDirectory,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many lines, the newest.")] = 100,
    as_json: Json = False,
) -> None:
    """Show the newest lines of the audit log, read from the state directory itself."""
    from holdfast.api.access.audit_log import find_untold, read_audit
    from holdfast.statebackends.state_processor.contents import absolute_location

    location = absolute_location(state_dir)
    found = read_audit(location)[-limit:]
    if not found:
        find_untold(location)  # refuses what is no state directory: of a mistyped name nothing is known
    if as_json:
        console.show_json([msgspec.to_builtins(line) for line in found])
        return
    rows = [
        (
            console.time_text(line.time_ms),
            line.kind,
            line.request or (f"{line.count:,} {line.subject}" if line.count else line.subject or "a coordinator began"),
            line.job,
            line.subject if line.request else "",
            line.credential,
            line.role,
            line.peer,
            line.status or "",
        )
        for line in found
    ]
    columns = ("TIME", "KIND", "REQUEST", "JOB", "SUBJECT", "BY", "ROLE", "FROM", "STATUS")
    console.show_table(columns, rows, empty="no audit log")


@audit.command()
def verify(state_dir: AuditedDirectory, as_json: Json = False) -> None:
    """Check that no line of the audit log was changed, taken out or put in. Exit code 1: one was, or the log is gone from a
    directory with jobs or tokens; 2: it can't be read, or this is no state directory; 3: nothing is recorded there."""
    from holdfast.api.access.audit_log import verify_audit
    from holdfast.statebackends.state_processor.contents import absolute_location

    with console.trouble():
        report = verify_audit(absolute_location(state_dir))
    if as_json:
        console.show_json({"verdict": report.verdict.value, **msgspec.to_builtins(report)})
    else:
        for problem in report.problems:
            console.show_line(f"{problem.path}:{problem.line}: {problem.problem}")
        console.show_line(_verdict_line(report))
        if report.pruned:
            console.show_line(f"{report.pruned:,} older lines were deleted to make room, as `pruned` lines say")
    if report.verdict is AuditVerdict.EMPTY:
        raise typer.Exit(console.EXIT_NO_VERDICT)
    if not report.is_whole:
        raise typer.Exit(console.EXIT_FAILED)


def _verdict_line(report: AuditReport) -> str:
    counted = f"{report.lines:,} lines in {report.files:,} files of {report.chains:,} chains"
    match report.verdict:
        case AuditVerdict.WHOLE:
            return f"whole: {counted}"
        case AuditVerdict.BROKEN:
            return f"{len(report.problems)} problems: {counted}"
        case AuditVerdict.MISSING:
            return f"missing: there is no audit log, but {' and '.join(report.untold)}, which it would tell of"
        case AuditVerdict.EMPTY:
            return "empty: there is no audit log, no job and no issued token: nothing was recorded yet, or all of it is gone"
        case _:
            assert_never(report.verdict)


class _Benchmarks(TyperGroup):
    """Arguments that name no command are for the suites."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["suites", *args])


benchmarks = typer.Typer(cls=_Benchmarks, help="Benchmarks; without a command, those of a source checkout.", no_args_is_help=False)
app.add_typer(benchmarks, name="bench")


@benchmarks.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def suites(context: typer.Context) -> None:
    """Run the benchmarks of a source checkout; arguments go to `python -m benchmarks.run`."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "run.py").is_file():
        raise InvalidConfigError("the benchmarks are not installed: run `holdfast bench` or `make bench` in a source checkout")
    raise typer.Exit(subprocess.run([sys.executable, "-m", "benchmarks.run", *context.args], cwd=root, check=False).returncode)

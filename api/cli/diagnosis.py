"""Output of `holdfast status` and `holdfast explain`: the records of REST as lines."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from holdfast.api.cli import console
from holdfast.coordinator.explain.records import Explanation, HealthView, PhaseView, SafeView, SettingChange, SourceCut, Verdict
from holdfast.coordinator.figures import duration_text

SOURCES_PRINTED_MAX = 5
POSITIONS_PRINTED_MAX = 4
POSITIONS_WAIT_S = 2.5
"""How long the positions of sources are waited for: they are read from the snapshot because somebody asks, of a job every two
seconds at most."""


def ask_health(ask: Callable[[], HealthView]) -> HealthView:
    """Health, with positions of sources in the checkpoint that is the newest now, if they come soon."""
    deadline_s = time.monotonic() + POSITIONS_WAIT_S
    view = ask()
    wanted = view.resume.checkpoint_id
    while view.resume.positions_of < min(wanted, view.resume.checkpoint_id) and time.monotonic() < deadline_s:
        time.sleep(0.1)
        view = ask()
    return view


def show_health(view: HealthView, *, as_json: bool) -> int:
    """Print three lines with verdicts; returns the exit code of the worst: 0 ok, 1 at risk, 2 bad."""
    if as_json:
        console.show_json(msgspec.to_builtins(view))
        return view.verdict.rank
    for name, verdict, text in (
        ("SAFE", view.safe.verdict, _safe(view)),
        ("SLOW", view.slow.verdict, _slow(view)),
        ("RESUME", view.resume.verdict, _resume(view)),
    ):
        console.show_line(f"{name:<7} {_word(verdict):<8} {text}")
    return view.verdict.rank


def _word(verdict: Verdict) -> str:
    return verdict.value.replace("_", " ")


def _safe(view: HealthView) -> str:
    safe, text = view.safe, view.safe.why
    if safe.replay_ms >= 0:
        records = f", at least {safe.replay_records:,} records" if safe.replay_records >= 0 else ""
        text += f"; a failure replays {duration_text(safe.replay_ms)}{records}"
    if safe.checkpoint_id >= 0:
        verified, drilled = (_told(safe, time_ms, view.as_of_ms) for time_ms in (safe.verified_ms, safe.drilled_ms))
        text += f"; verified {verified}, drilled {drilled}"
    return text


def _told(safe: SafeView, time_ms: int, now_ms: int) -> str:
    return _ago(time_ms, now_ms) if time_ms >= 0 or safe.are_drills_known else "not known yet"


def _ago(time_ms: int, now_ms: int) -> str:
    return "never" if time_ms < 0 else f"{duration_text(max(0, now_ms - time_ms))} ago"


def _slow(view: HealthView) -> str:
    lag_ms = view.slow.watermark_lag_ms
    return view.slow.why + (f"; watermark lag {duration_text(lag_ms)}" if lag_ms >= 0 else "")


def _resume(view: HealthView) -> str:
    resume, text = view.resume, view.resume.why
    if resume.location:
        text += f"; {resume.location}"
    if resume.sources:
        shown = ", ".join(map(_source, resume.sources[:SOURCES_PRINTED_MAX]))
        more = len(resume.sources) - SOURCES_PRINTED_MAX
        text += f"; sources: {shown}" + (f" and {more} more" if more > 0 else "")
        if 0 <= resume.positions_of < resume.checkpoint_id and any(each.positions for each in resume.sources):
            text += f" (positions of checkpoint {resume.positions_of}; those of {resume.checkpoint_id} are being read)"
    return text


def _source(source: SourceCut) -> str:
    """Where its state says that it goes on; without that, how much it had read."""
    if not source.positions:
        return f"{source.uid} at record {source.records:,}" if source.records >= 0 else f"{source.uid} at its beginning"
    more = source.splits - len(source.positions[:POSITIONS_PRINTED_MAX])
    shown = ", ".join(source.positions[:POSITIONS_PRINTED_MAX]) + (f" and {more:,} more" if more > 0 else "")
    return f"{source.uid} ({shown})"


def show_explanation(view: Explanation, *, as_json: bool) -> None:
    """Print how it went, its phases beside what is usual, the chain of causes, and the one setting to change."""
    if as_json:
        console.show_json(msgspec.to_builtins(view))
        return
    console.show_line(f"{view.job_name}: {view.summary}")
    if view.explained_ms >= 0:
        console.show_line(f"seen    {console.time_text(view.explained_ms)}; it was explained when it ended")
    if view.phases:
        console.show_table(("PHASE", "LONGEST", "USUALLY", "NOTE", "WHERE"), map(_phase, view.phases), empty="")
    for number, cause in enumerate(view.causes):
        console.show_line(f"{'because ' if number else 'why     '}{cause.text}")
    if view.is_usual:
        return
    console.show_line(f"change  {_change(view.setting) if view.setting is not None else 'not known'}")
    if view.setting is not None and view.setting.command:
        console.show_line(f"        {view.setting.command}")


def _phase(view: PhaseView) -> tuple[str, ...]:
    return (
        view.phase.value.replace("_", " "),
        duration_text(view.longest_ms),
        duration_text(view.median_ms),
        "above" if view.is_unusual else "usual" if view.median_ms >= 0 else "",
        str(view.place) if view.place is not None else "",
    )


def _change(setting: SettingChange) -> str:
    when = "" if setting.command else " (with the next submission)"
    return f"{setting.name} {_value(setting.old)} -> {_value(setting.new)}{when}: {setting.why}"


def _value(value: object) -> str:
    return "none" if value is None else str(value).lower()

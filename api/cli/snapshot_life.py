"""Output of `holdfast label`, `drill` and `cost`: the answers of REST as lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.api.cli import console
from holdfast.api.settings import read_prices
from holdfast.coordinator.figures import duration_text, size_text
from holdfast.statebackends.errors import NotFoundError


def show_labels(found: Mapping[str, Any], *, as_json: bool) -> None:
    """`found`: the answer of GET /v1/jobs/:jobid/labels."""
    if as_json:
        console.show_json(found)
        return
    rows = [
        (each["label"], each["checkpoint_id"], each["kind"], console.time_text(each["created_ms"]), each["location"])
        for each in found["labels"]
    ]
    console.show_table(("LABEL", "ID", "KIND", "SINCE", "WHERE"), rows, empty="no labels")
    for damage in found["damage"]:
        console.show_note(f"can't be read, and is left out: {damage}")


# ------------------------------------------------------------------------------------------------------------------ drills

_POLL_S = 0.2


class Driller(Protocol):
    """What is asked for drills."""

    def drills(self, job_id: str) -> list[dict[str, Any]]: ...


def follow_drill(client: Driller, job_id: str, begun: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """Wait for the outcome of a drill. Raises TimeoutError; the drill goes on then."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    found = begun
    while found["state"] == "running":
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"drill {begun['drill_id']} goes on: no outcome within {timeout_s} s; `--list` shows it")
        time.sleep(_POLL_S)
        known = [each for each in client.drills(job_id) if each["drill_id"] == begun["drill_id"]]
        if not known:
            text = f"the coordinator knows no drill {begun['drill_id']} any more: it may have been replaced"
            raise NotFoundError(text, job=job_id)
        found = known[0]
    return found


def show_drill(found: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the outcome; returns the exit code: 0 passed (or runs), 1 problems, 3 nothing is known."""
    if as_json:
        console.show_json(found)
    else:
        console.show_line(_told(found))
        for problem in found["problems"]:
            console.show_line(problem)
        more = found["problem_count"] - len(found["problems"])
        if more > 0:
            console.show_line(f"and {more} more problems")
    return {"failed": console.EXIT_FAILED, "error": console.EXIT_NO_VERDICT}.get(found["state"], 0)


def _told(found: Mapping[str, Any]) -> str:
    name = f"{found['kind'].replace('_', '-')} {found['checkpoint_id']}"
    match found["state"]:
        case "running":
            return f"{name}: drill {found['drill_id']} has begun"
        case "error":
            return f"{name}: nothing was found out: {found['error']}"
        case _:
            size, took = size_text(found["size"]), duration_text(found["duration_ms"])
            counts = f"{found['rows']:,} rows of {found['states']} states, {size}, in {took}" if found["rows"] >= 0 else "not read"
            return f"{name} {found['state']}: {counts}; {found['problem_count']} problems"


def show_drills(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        console.show_json({"drills": list(found)})
        return
    rows = [
        (
            console.time_text(each["started_ms"]),
            each["checkpoint_id"],
            each["state"],
            each["by"],
            each["rows"] if each["rows"] >= 0 else "-",
            size_text(each["size"]),
            duration_text(each["duration_ms"]),
            each["error"] or "; ".join(each["problems"]),
        )
        for each in found
    ]
    console.show_table(("BEGAN", "ID", "STATE", "BY", "ROWS", "SIZE", "TOOK", "WHY"), rows, empty="no drills")


# -------------------------------------------------------------------------------------------------------------------- cost


def with_money(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The answer of GET /v1/jobs/:jobid/cost, with money by a price file. Raises InvalidConfigError."""
    from holdfast.coordinator.ownership.cost import Cost, priced  # of no use to other commands

    cost = priced(msgspec.convert(found, Cost), read_prices(path))
    result: dict[str, Any] = msgspec.to_builtins(cost)
    return result


def show_cost(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.show_json(found)
        return
    rows = [
        (
            each["checkpoint_id"],
            each["kind"],
            size_text(each["exclusive_size"]),
            size_text(each["shared_size"]),
            each["files"] if each["files"] >= 0 else "-",
            each["small_files"] if each["small_files"] >= 0 else "-",
            ", ".join(each["labels"]),
        )
        for each in found["checkpoints"]
    ]
    console.show_table(("ID", "KIND", "OWN", "SHARED", "FILES", "SMALL", "LABELS"), rows, empty="no checkpoints")
    parts = ("exclusive", "shared", "savepoint", "other")
    sizes = ", ".join(f"{name} {size_text(found[f'{name}_size'])}" for name in parts)
    counts = f"{found['files']:,} files, {found['small_files']:,} small"
    console.show_line(f"{size_text(found['total_size'])} in {counts}: {sizes}")
    requests, money = found["requests"], found["money"]
    if requests is not None:
        kinds = ", ".join(f"{requests[f'{kind}_per_hour']:,.0f} {kind}" for kind in ("puts", "gets", "lists", "deletes"))
        console.show_line(f"about {kinds} an hour, of {requests['checkpoints_per_hour']:,.0f} checkpoints")
    else:
        console.show_line("no requests for further checkpoints: the job has ended, has no interval, or has completed none yet")
    if money is not None:
        console.show_line(
            f"{money['total_per_month']:,.2f} {money['currency']} a month: storage {money['storage_per_month']:,.2f}, "
            f"requests {money['requests_per_month']:,.2f} (prices: {money['prices']})"
        )
    for reason in found["unread"]:
        console.show_note(f"not counted: {reason}")

"""Writes the golden savepoint of sessions over columns, once: `python -m tests.golden.session_savepoint`. It is kept for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast as hf

FOLDER = Path(__file__).parent / "sessions" / "v1-session-savepoint"


def pipeline(job: hf.testing.Job) -> tuple[Any, Any, Any]:
    """(input, rows, late rows). Never change what is here."""
    clicks = job.input("clicks", {"user": str, "page": str, "price": float | None})
    windowed = clicks.stream.key_by("user").window(hf.Session(10)).allowed_lateness(25).side_output_late("late")
    sessions = windowed.aggregate(
        n=hf.count(), pages=hf.count_distinct("page"), last=hf.last("page"), paid=hf.sum("price"), spread=hf.stddev("price")
    ).uid("sessions")
    return clicks, job.output(sessions), job.output(sessions.side_output("late"))


def click(user: str, page: str, price: float | None = None) -> dict[str, Any]:
    return {"user": user, "page": page, "price": price}


def make(folder: Path = FOLDER) -> None:
    """ann's session goes on over several panes, bob's has fired and may be changed, eve's is not there any more."""
    with hf.testing.Job(parallelism=2, max_parallelism=16) as job:
        clicks, rows, _ = pipeline(job)
        job.start()
        clicks.add([click("eve", "home", 1.0), click("ann", "home", 0.5)], at=[0, 3])
        for at in range(8, 60, 5):
            clicks.add(click("ann", f"page {at % 3}", at / 2), at=at)
        clicks.add([click("bob", "home"), click("bob", "home", 2.0)], at=[25, 31])
        clicks.watermark(49)
        assert {row["user"] for row in rows.rows()} == {"eve", "bob"}
        job.checkpoint()
        job.savepoint(folder)


if __name__ == "__main__":
    make()

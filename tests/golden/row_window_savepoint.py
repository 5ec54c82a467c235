"""Writes the golden savepoint of windows of row functions, once: `python -m tests.golden.row_window_savepoint`. It stays for ever.

Sessions that have grown and merged, with lateness, with triggers that have state and timers; sliding windows with an evictor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast as hf

FOLDER = Path(__file__).parent / "sessions" / "v1-row-window-savepoint"
CLICK = {"user": str, "at": int}


class Seen(hf.ProcessWindowFunction):
    """User, window, and the times of the clicks."""

    returns = {"user": str, "start": int, "end": int, "ats": list[int]}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"user": key, "start": ctx.window.start, "end": ctx.window.end, "ats": [row["at"] for row in elements]})


class Times:
    """An AggregateFunction: how many, and their sum."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: Any, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + value["at"]

    def get_result(self, accumulator: tuple[int, int]) -> dict[str, int]:
        return {"n": accumulator[0], "total": accumulator[1]}

    def merge(self, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]


def _later(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return max(one, other, key=lambda row: row["at"])


def pipeline(job: hf.testing.Job) -> tuple[Any, dict[str, Any]]:
    """(input, outputs by uid). Never change what is here."""
    clicks = job.input("clicks", CLICK)
    keyed = clicks.stream.key_by("user")
    late = keyed.window(hf.Session(10)).allowed_lateness(25).side_output_late("late").process(Seen()).uid("late")
    continuous = keyed.window(hf.Session(10)).trigger(hf.ContinuousEventTimeTrigger(20)).process(Seen()).uid("continuous")
    counting = hf.PurgingTrigger(hf.CountTrigger(4))
    counted = keyed.window(hf.Session(10)).trigger(counting).aggregate(Times(), accumulator_type=tuple[int, int]).uid("counted")
    sliding = keyed.window(hf.Sliding(40, slide=20)).evictor(hf.CountEvictor(2)).process(Seen()).uid("sliding")
    made = {
        "plain": keyed.window(hf.Session(10)).reduce(_later).uid("plain"),
        "late": late, "continuous": continuous, "counted": counted, "sliding": sliding,
    }  # fmt: skip
    return clicks, {uid: job.output(stream) for uid, stream in made.items()} | {"aside": job.output(late.side_output("late"))}


def feed(clicks: Any, *given: tuple[str, int]) -> None:
    """Each by itself, as (user, time)."""
    for user, at in given:
        clicks.add({"user": user, "at": at}, at=at)


def make(folder: Path = FOLDER) -> None:
    """ann's session goes on, merged of two; bob's has fired and may be changed; eve's is not there any more; joe has two."""
    with hf.testing.Job(parallelism=2, max_parallelism=16) as job:
        clicks, outputs = pipeline(job)
        job.start()
        feed(clicks, ("eve", 0), ("ann", 3), ("bob", 25), ("bob", 31))
        clicks.watermark(15)
        feed(clicks, ("joe", 70), ("joe", 95), ("ann", 52), ("ann", 36), ("ann", 44), ("joe", 72))
        clicks.watermark(48)
        assert [row["ats"] for row, _ in outputs["late"].take()] == [[0], [3], [25, 31]]
        job.checkpoint()
        job.savepoint(folder)


if __name__ == "__main__":
    make()

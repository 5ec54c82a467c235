"""A key that leaves a running job at a barrier: the whole path from the trigger to the files, in one process."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.barriers.erasure import Erasure
from holdfast.barriers.messages import CheckpointKind
from tests.api.test_forgetting import files_with

KEY = "forget-me-2f1b"
EVENTS = {"key": str, "n": int}


class Count(hf.ProcessFunction):
    """Rows of a key, its texts and a timer for each."""

    count = hf.ValueStateDescriptor("count", int)
    seen = hf.MapStateDescriptor("seen", int, str)
    states = (count, seen)
    returns = EVENTS

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        count = ctx.state(self.count)
        count.update(count.value(0) + 1)
        ctx.state(self.seen).put(value["n"], f"{ctx.key} {value['n']}")
        ctx.timers.register_processing_time_timer(1_000_000 + value["n"])
        out({"key": ctx.key, "n": count.value()})

    def on_timer(self, timestamp_ms: int, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        out({"key": ctx.key, "n": -1})


def job_of(backend: Any, **settings: Any) -> tuple[hf.testing.Job, Any, Any]:
    job = hf.testing.Job(parallelism=2, state_backend=backend, retained_checkpoints=3, **settings)
    feed = job.input("in", EVENTS)
    return job, feed, job.output(feed.stream.key_by("key").process(Count()).uid("count"))


def give(feed: Any, *keys: str) -> None:
    feed.add([{"key": key, "n": number} for number, key in enumerate(keys)])


def erase(job: hf.testing.Job, states: tuple[tuple[str, str], ...] = (("count", "*"),), key: str = KEY) -> int:
    view = job._request("erasure", CheckpointKind.CHECKPOINT, erasure=Erasure(key, states))
    assert view.checkpoint_id is not None
    return view.checkpoint_id


def state_files(job: hf.testing.Job, key: str = KEY) -> list[str]:
    """Files of the job that hold the key, tables decoded, and small parts, which are texts within records."""
    root = Path(job._folder.path) / "state"
    texts = [base64.b64encode(b"x" * shift + key.encode())[4:-4] for shift in range(3)]
    records = [str(path) for path in root.rglob("_*") if path.is_file() and any(text in path.read_bytes() for text in texts)]
    return sorted({*records, *files_with(root, key)})


def counts(out: Any) -> list[tuple[str, int]]:
    return sorted((row["key"], row["n"]) for row in out.rows())


BACKENDS = ["memory", "filesystem", "rocksdb"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_behind_the_checkpoint_no_file_of_the_job_decodes_to_the_key(backend: Any) -> None:
    job, feed, out = job_of(backend)
    with job:
        job.start()
        for _ in range(3):
            give(feed, "a", KEY, "b", *map(str, range(50)))
            job.checkpoint()
        assert state_files(job)
        number = erase(job)
        assert state_files(job) == []
        for _ in range(2):
            give(feed, "a", "b")
            job.checkpoint()
        assert state_files(job) == [], "increments build on nothing older"
        job.fail()
        give(feed, "a", KEY)
        found = [(row["key"], row["n"]) for row in out.rows()]
        assert found[-2:] == [("a", 6), (KEY, 1)] or found[-2:] == [(KEY, 1), ("a", 6)]
        assert number == 4
        job.checkpoint()
        assert state_files(job), "a record that comes behind the cut makes state anew"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_right_behind_it_restores_the_state_without_the_key(backend: Any) -> None:
    job, feed, out = job_of(backend)
    with job:
        job.start()
        give(feed, "a", KEY)
        job.checkpoint()
        erase(job)
        job.fail()
        give(feed, "a", KEY)
        assert sorted((row["key"], row["n"]) for row in out.rows()[-2:]) == [("a", 2), (KEY, 1)]
        job.checkpoint()  # on one in tables
        give(feed, "a")
        job.checkpoint()
        job.restart(parallelism=3)
        give(feed, "a", KEY)
        assert sorted((row["key"], row["n"]) for row in out.rows()[-2:]) == [("a", 4), (KEY, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_timers_of_the_key_do_not_fire_any_more(backend: Any) -> None:
    job, feed, out = job_of(backend)
    with job:
        job.start()
        give(feed, "a", KEY)
        erase(job)
        job.advance(to_ms=2_000_000)
        assert [row["key"] for row in out.rows() if row["n"] == -1] == ["a"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_state_alone_goes(backend: Any) -> None:
    job, feed, out = job_of(backend)
    with job:
        job.start()
        give(feed, "a", KEY)
        erase(job, (("count", "count"),))
        give(feed, KEY)
        assert counts(out)[-2:] == [(KEY, 1), (KEY, 1)]
        job.advance(to_ms=2_000_000)
        assert {row["key"] for row in out.rows() if row["n"] == -1} == {"a", KEY}
        snapshot = job.savepoint()
        assert {row["key"] for row in hf.Snapshot(snapshot).rows("count", "seen")} == {"a", KEY}


def test_files_after_a_rescale_have_rows_of_no_other_key_group() -> None:
    """RocksDB restores whole tables, and hides the rows of key groups that are another subtask's now."""
    job, feed, _ = job_of("rocksdb")
    with job:
        job.start()
        give(feed, *(f"user-{number}" for number in range(40)), KEY)
        job.checkpoint()
        job.restart(parallelism=3)
        give(feed, "user-1")
        job.checkpoint()
        erase(job)
        give(feed, "user-2")
        job.checkpoint()
        assert state_files(job) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_of_no_type_and_an_unknown_operator_change_nothing(backend: Any) -> None:
    job, feed, out = job_of(backend)
    with job:
        job.start()
        give(feed, "a", KEY)
        erase(job, (("in", "*"), ("nobody", "x"), ("count", "no such")))
        give(feed, KEY)
        assert counts(out)[-1] == (KEY, 2)


def test_columnar_windows_lose_the_key_and_go_on() -> None:
    for backend in ("filesystem", "rocksdb"):
        with hf.testing.Job(parallelism=2, state_backend=backend) as job:
            feed = job.input("in", EVENTS)
            windowed = feed.stream.key_by("key").window(hf.Sliding(seconds=4, slide=1_000)).aggregate(n=hf.count())
            out = job.output(windowed.uid("windows"))
            job.start()
            for second in range(6):
                feed.add([{"key": key, "n": 1} for key in ("a", KEY)], at=second * 1_000 + 1)
            feed.watermark(4_500)
            job.checkpoint()
            before = [row["key"] for row in out.rows()]
            erase(job, (("windows", "*"),))
            assert sorted(before) == ["a"] * 4 + [KEY] * 4
            assert state_files(job) == []
            feed.end()
            assert [row["key"] for row in out.rows()] == ["a"] * 5

"""examples/orders.py: that its referee can fail, and the whole of it on worker processes."""

from __future__ import annotations

import copy
import datetime as dt
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECORDS = 4 * 1_500


@pytest.fixture(scope="module")
def modules() -> tuple[Any, Any]:
    """Referee and feeder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("orders_check"), importlib.import_module("orders_feed")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def exact(modules: tuple[Any, Any]) -> tuple[Any, Any]:
    """A topic, and what a job without a fault makes of it; the sums are Python's."""
    check, feed = modules
    topic, orders = check.Topic(), feed.Orders(seed=5)
    for partition in range(feed.PARTITIONS):
        newest = feed.BEGIN
        for offset in range(RECORDS // feed.PARTITIONS):
            newest = topic.add((partition, offset), orders.next(partition), newest)
    late = [order for order in topic.orders if order["id"] in topic.behind]
    sums: dict[tuple[str, dt.datetime], tuple[int, int]] = {}
    for order in topic.orders:
        if order["id"] not in topic.behind:
            key = (order["shop"], order["ordered_at"].replace(second=0, microsecond=0))
            count, cents = sums.get(key, (0, 0))
            sums[key] = (count + 1, cents + order["cents"])
    windows = Counter((shop, at, at + dt.timedelta(minutes=1), *found) for (shop, at), found in sums.items())
    rows = Counter((order["id"], order["shop"], order["cents"], order["ordered_at"]) for order in late)
    return topic, check.Outputs(windows, windows.copy(), rows, Counter(topic.unreadable))


def doubled(rows: Counter[Any]) -> None:
    rows[next(iter(rows))] += 1


def lost(rows: Counter[Any]) -> None:
    del rows[next(iter(rows))]


def off_by_a_cent(rows: Counter[Any]) -> None:
    row = next(iter(rows))
    rows[(*row[:-1], row[-1] + 1)] = rows.pop(row)


def test_the_referee_accepts_what_is_exact(modules: tuple[Any, Any], exact: tuple[Any, Any]) -> None:
    topic, outputs = exact
    assert modules[0].problems(topic, outputs) == []
    assert topic.records == RECORDS == len(topic.orders) + len(topic.unreadable)


@pytest.mark.parametrize(
    ("output", "harm", "found"),
    [
        ("postgres", doubled, "PostgreSQL, spending: 0 rows are missing, 1 are too many"),
        ("postgres", lost, "PostgreSQL, spending: 1 rows are missing, 0 are too many"),
        ("delta", doubled, "Delta, spending: 0 rows are missing, 1 are too many"),
        ("delta", off_by_a_cent, "Delta, spending: 1 rows are missing, 1 are too many"),
        ("dead_letters", lost, "PostgreSQL, dead letters: 1 rows are missing, 0 are too many"),
        ("dead_letters", doubled, "PostgreSQL, dead letters: 0 rows are missing, 1 are too many"),
        ("late", doubled, "PostgreSQL, late orders: 1 are doubled or not late"),
        ("late", lost, "PostgreSQL, spending: 1 rows are missing"),  # the order is then in no window either
    ],
)
def test_the_referee_finds(
    modules: tuple[Any, Any], exact: tuple[Any, Any], output: str, harm: Callable[[Counter[Any]], None], found: str
) -> None:
    topic, outputs = exact
    harmed = copy.deepcopy(outputs)
    harm(getattr(harmed, output))
    assert any(line.startswith(found) for line in modules[0].problems(topic, harmed))


@pytest.mark.endurance
@pytest.mark.parametrize("seed", [1, 2])
def test_orders_are_exact_through_kills_in_commits(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(EXAMPLES / "orders.py"), "--without-spark", f"--seed={seed}", f"--keep={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert lines[-1] == "ORDERS OK kills=7 exact=true", done.stdout + done.stderr
    assert sum("who commits to" in line for line in lines) == 4

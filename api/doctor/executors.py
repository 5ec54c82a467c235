"""The coordinator and the state directory as executors see them: a Spark job of a few short tasks, only when it is asked for."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.api.doctor.findings import Finding, fault, ok, skipped
from holdfast.api.doctor.host import judge_settings
from holdfast.api.doctor.storage import skew
from holdfast.statebackends.state_processor.contents import absolute_location

if TYPE_CHECKING:
    from pyspark import SparkContext

TASKS_MAX = 32
TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0


def probe(url: str | None, directory: str | None) -> dict[str, Any]:
    """What one executor sees; runs there, with Python's own modules alone."""
    import os
    import urllib.parse

    seen: dict[str, Any] = {"host": socket.gethostname(), "python": platform.python_version(), "time_s": time.time()}
    if url is not None:
        parts = urllib.parse.urlsplit(url)
        try:
            address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
            seen["reaches"] = True
        except OSError as error:
            seen["reaches"], seen["why"] = False, str(error)
    if directory is not None:
        seen["has_directory"] = os.path.isdir(directory)
    return seen


def judge(seen: Iterable[dict[str, Any]], url: str | None, directory: str | None, *, now_s: float) -> Iterator[Finding]:
    """What is wrong with what executors saw."""
    by_host = {str(each["host"]): each for each in seen}
    hosts = f"{len(by_host)} {'host' if len(by_host) == 1 else 'hosts'} ({', '.join(sorted(by_host)[:5])})"
    lost = {host: each for host, each in by_host.items() if each.get("reaches") is False}
    if lost:
        host, each = min(lost.items())
        fix = "open the port to the executors' network, or give `serve` the --advertised-host that they can reach"
        yield fault("executors", f"{len(lost)} of {hosts} can't reach {url}; {host}: {each.get('why', '')}", fix)
    elif url is not None:
        yield ok("executors", f"{hosts} reach {url}")
    without = sorted(host for host, each in by_host.items() if each.get("has_directory") is False)
    if without:
        fix = "mount the same file system at the same path on each host"
        yield fault("shared directory", f"{without[0]} has no {directory}", fix)
    elif directory is not None and by_host:
        yield ok("shared directory", f"{hosts} have {directory}")
    mine = platform.python_version_tuple()[:2]
    others = {tuple(str(each["python"]).split(".")[:2]) for each in by_host.values()} - {mine}
    if others:
        text = f"executors have Python {', '.join('.'.join(each) for each in sorted(others))}, this driver {'.'.join(mine)}"
        yield fault("executors' Python", text, "use one minor version on both: PYSPARK_PYTHON")
    worst_s = max((abs(float(each["time_s"]) - now_s) for each in by_host.values()), default=0.0)
    yield skew("executors' clocks", int(max(0.0, worst_s - TIMEOUT_S) * 1000), "the clock of an executor")


def ask_spark(url: str | None, directory: str | None) -> Iterator[Finding]:
    """Start Spark, or use the session that there is, and ask its executors. A session that was started here is stopped again."""
    from pyspark.sql import SparkSession  # imports for a second what nobody else needs

    running = SparkSession.getActiveSession()
    session = running or SparkSession.builder.appName("holdfast doctor").getOrCreate()
    try:
        yield from _ask(session.sparkContext, url, directory)
    finally:
        if running is None:
            session.stop()


def _ask(context: SparkContext, url: str | None, directory: str | None) -> Iterator[Finding]:
    from pyspark import cloudpickle

    configuration = context.getConf()
    yield from judge_settings(dict(configuration.getAll()), f"Spark at {context.master}")
    tasks = max(1, min(TASKS_MAX, context.defaultParallelism))
    place = absolute_location(directory) if directory is not None else None  # an executor has a working directory of its own
    local = place if place is not None and "://" not in place else None
    if local is None and place is not None:
        yield skipped("shared directory", "executors' access to a bucket is not tried: docs/storage.md has their credentials")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors may have no holdfast yet
    began_s = time.time()
    seen = context.parallelize(range(tasks), tasks).map(lambda _: probe(url, local)).collect()
    yield from judge(seen, url, local, now_s=began_s)

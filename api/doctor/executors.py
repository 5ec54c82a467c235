"""The coordinator and the state directory as executors see them: a Spark job of a few short tasks, only when it is asked for."""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.api.doctor.findings import Finding, fault, ok, skipped
from holdfast.api.doctor.host import judge_settings
from holdfast.api.doctor.storage import folders_of_trials, remove_trials, skew
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import doctor_folder
from holdfast.statebackends.state_processor.contents import absolute_location
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import PutIfAbsent

if TYPE_CHECKING:
    from pyspark import SparkContext

TASKS_MAX = 32
TIMEOUT_S = 180.0
"""A resource manager may take minutes until there are executors."""
CONNECT_TIMEOUT_S = 5.0
LOOKS = 5
"""At a file that was just made: a network file system may show it a moment later."""
LOOKS_EVERY_S = 0.5
NONCE_BYTES_MAX = 128


class SharedFile(NamedTuple):
    """A file that this host made in a state directory, for executors to read."""

    directory: str
    path: str
    """Within it."""
    nonce: str


def probe(url: str | None, shared: SharedFile | None) -> dict[str, Any]:
    """What one executor sees; runs there, with Python's own modules alone. `url`: one, or those of several members with commas
    between; those that it does not reach are `lost`, each with why."""
    import urllib.parse

    seen: dict[str, Any] = {"host": socket.gethostname(), "python": platform.python_version(), "time_s": time.time()}
    lost: dict[str, str] = {}
    for each in url.split(",") if url is not None else ():
        parts = urllib.parse.urlsplit(each)
        try:
            address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            lost[each] = str(error)
    seen["lost"] = lost
    if shared is not None:
        seen["directory"], seen["why_not"] = _look(shared)
    return seen


def _look(shared: SharedFile) -> tuple[str, str]:
    """Whether the directory there is the one from here, and can be written to: `same`, or what is wrong and the system's words."""
    import os
    import uuid

    if not os.path.isdir(shared.directory):
        return "missing", ""
    path = os.path.join(shared.directory, shared.path)
    for look in range(LOOKS):
        if look:
            time.sleep(LOOKS_EVERY_S)
        try:
            with open(path, "rb") as file:
                found = file.read(NONCE_BYTES_MAX)
        except FileNotFoundError:
            continue
        except OSError as error:
            return "unreadable", str(error)
        if found != shared.nonce.encode():
            continue
        try:
            with open(os.path.join(os.path.dirname(path), f"executor-{uuid.uuid4().hex}"), "xb"):
                return "same", ""
        except OSError as error:
            return "unwritable", str(error)
    return "another", ""


def judge(
    seen: Iterable[dict[str, Any]], url: str | None, directory: str | None, *, between_s: tuple[float, float]
) -> Iterator[Finding]:
    """What is wrong with what executors saw. `between_s`: times of this host's clock between which they looked."""
    seen = list(seen)
    by_host = {str(each["host"]): each for each in seen}
    hosts = f"{len(by_host)} {'host' if len(by_host) == 1 else 'hosts'} ({', '.join(sorted(by_host)[:5])})"
    if url is not None:
        yield from _judge_way(seen, url, hosts)
    if directory is not None and seen:
        yield _judge_directory(seen, directory, hosts)
    mine = platform.python_version_tuple()[:2]
    others = {tuple(str(each["python"]).split(".")[:2]) for each in by_host.values()} - {mine}
    if others:
        text = f"executors have Python {', '.join('.'.join(each) for each in sorted(others))}, this driver {'.'.join(mine)}"
        yield fault("executors' Python", text, "use one minor version on both: PYSPARK_PYTHON")
    began_s, ended_s = between_s
    times_s = [float(each["time_s"]) for each in by_host.values()]
    off_s = max((max(0.0, began_s - each, each - ended_s) for each in times_s), default=0.0)
    yield skew("executors' clocks", int(off_s * 1000), "the clock of an executor")


def _judge_way(seen: Sequence[dict[str, Any]], url: str, hosts: str) -> Iterator[Finding]:
    """A finding for each member that some host does not reach. Workers need the way to all: any may lead next."""
    is_reached = True
    for each in url.split(","):
        lost = {str(one["host"]): str(one["lost"][each]) for one in seen if each in one["lost"]}
        if lost:
            is_reached = False
            host, why = min(lost.items())
            fix = "open the port to the executors' network, or give `serve` the --advertised-host that they can reach"
            yield fault("executors", f"{len(lost)} of {hosts} can't reach {each}; {host}: {why}", fix)
    if is_reached:
        yield ok("executors", f"{hosts} reach {url.replace(',', ', ')}")


_MOUNT = "mount the same file system at the same path on each host"
_RIGHTS = "run executors as the coordinator's user, or give both a group (docs/storage.md, who may read it); mount it for writing"
_TROUBLE = {
    "missing": ("has no", _MOUNT),
    "another": ("has another directory at", _MOUNT),
    "unreadable": ("can't read", _RIGHTS),
    "unwritable": ("can't write to", _RIGHTS),
}


def _judge_directory(seen: Sequence[dict[str, Any]], directory: str, hosts: str) -> Finding:
    """One executor that does not share it is enough: it would write where nobody looks."""
    answers = ((str(each["host"]), str(each["directory"]), str(each["why_not"])) for each in seen)
    wrong = sorted(each for each in answers if each[1] != "same")
    if not wrong:
        return ok("shared directory", f"{hosts} read and write {directory}")
    host, what, why = wrong[0]
    words, fix = _TROUBLE[what]
    others = len({each[0] for each in wrong}) - 1
    more = f"; so it is with {others} more" if others else ""
    return fault("shared directory", f"{host} {words} {directory}{': ' if why else ''}{why}{more}", fix)


@contextlib.contextmanager
def shared_file(directory: str) -> Iterator[SharedFile]:
    """A file in a state directory, deleted at the end of the block with what executors write beside it. Raises
    StorageUnavailableError."""
    storage, folder = open_storage(directory), doctor_folder(secrets.token_hex(8))
    made = folders_of_trials(storage)
    shared = SharedFile(directory, f"{folder}/shared", secrets.token_hex(16))
    try:
        storage.execute(PutIfAbsent(shared.path, shared.nonce.encode()))
        yield shared
    finally:
        with contextlib.suppress(HoldfastError):  # nothing rests on it, and the checks of the storage tell why
            remove_trials(storage, folder, made)


def ask_spark(url: str | None, directory: str | None, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Start Spark, or use the session that there is, and ask its executors. A session that is started here has `settings`, too,
    and is stopped again."""
    from pyspark.sql import SparkSession  # imports for a second what nobody else needs

    running = SparkSession.getActiveSession()
    session = running or SparkSession.builder.config(map=dict(settings)).appName("holdfast doctor").getOrCreate()
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
    with contextlib.ExitStack() as opened:
        shared: SharedFile | None = None
        try:
            shared = opened.enter_context(shared_file(local)) if local is not None else None
        except HoldfastError as error:
            text = f"{type(error).__name__}: {error.message}; executors are not asked about it"
            yield fault("shared directory", text, "see what is said about the storage")
        asked = context.parallelize(range(tasks), tasks)
        asked.map(lambda _: None).count()  # starts executors, which takes far longer than clocks may differ
        began_s = time.time()
        seen = asked.map(lambda _: probe(url, shared)).collect()
        yield from judge(seen, url, local if shared is not None else None, between_s=(began_s, time.time()))

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.examples import FACTOR, examples

# How long an example takes says how busy the machine is, not whether the code is right; two processes and Spark share it.
# `make test` tries the same examples at each run, so that a commit passes or it does not; `make chaos` looks for new ones.
settings.register_profile("holdfast", deadline=None, derandomize=FACTOR == 1, max_examples=examples(100) if FACTOR == 1 else 100)
settings.load_profile("holdfast")

_SPARK = "tests/spark"
_LONG = (
    _SPARK,
    "tests/integration",
    "tests/operators/connectors",
    "tests/simulation",
    "tests/servers",
    "tests/statebackends",
    "tests/api",
    "tests/coordinator",
)
"""Folders with long files, the longest first, and those that mostly wait between those that mostly work. Begun last, one kept a
process busy for minutes that the others had nothing to do."""


GC_THRESHOLD = 10_000
"""Objects that are made between two collections of the youngest; Python's 700 costs a fortieth of all time."""


MEMORY_FOLDER = "/dev/shm"
MEMORY_BYTES_MIN = 2 << 30
"""Free space below which the disk is used; a run of all tests holds about a fifth of it at its end."""


def _folder(nodeid: str) -> str:
    return "/".join(nodeid.split("/", 2)[:2])


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and so does all that is started from there."""
    if _write_to_memory(config):
        os.environ["TMPDIR"], tempfile.tempdir = MEMORY_FOLDER, None
    gc.disable()  # what is collected stays: the collector would look at all of it again and again
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _write_to_memory(config: pytest.Config) -> bool:
    """Whether files of the tests, and of what they start, lie in memory: syncing, renaming and deleting them on a disk is a third
    of what tests of storage cost. Processes are killed here, machines are not; what a loss of power leaves the simulator's disk
    says. `make chaos`, and who sets TMPDIR, has the same tests on that disk."""
    if FACTOR != 1 or "endurance" in config.option.markexpr.replace("not endurance", "") or config.option.basetemp is not None:
        return False
    if "TMPDIR" in os.environ or not os.access(MEMORY_FOLDER, os.W_OK):
        return False
    return shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_BYTES_MIN


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """Of several processes each first imports its share: what one has compiled, and rewritten the assertions of, the others load.
    In a new checkout each would compile all, at the same time: half of what collecting costs."""
    folder = Path(__file__).parent
    if collector.path != folder or collector.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    files = sorted(folder.rglob("test_*.py"))
    for file in files[int(worker) :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says so
            importlib.import_module(".".join(file.relative_to(collector.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(nodeid: str) -> int:
        return next((number for number, folder in enumerate(_LONG) if nodeid.startswith(f"{folder}/")), len(_LONG))

    items.sort(key=lambda item: rank(item.nodeid))
    if FACTOR > 1:  # so many times as many examples take so many times as long
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FACTOR * float(item.config.getini("timeout"))))


@pytest.fixture(scope="session", autouse=True)
def _servers_stop_soon() -> Iterator[None]:
    """uvicorn looks every tenth of a second whether it is to stop, and again whether its connections are closed: hundreds of tests
    stop a server of this process."""
    with pytest.MonkeyPatch.context() as patch:
        if "uvicorn.server" in sys.modules:
            hurried = types.ModuleType("asyncio")
            vars(hurried).update(vars(asyncio), sleep=lambda delay_s: asyncio.sleep(delay_s / 10))
            patch.setattr(sys.modules["uvicorn.server"], "asyncio", hurried)
        yield


def pytest_collection_finish() -> None:
    """The collector need not look at thousands of tests again each time that it looks at everything."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What a run that passed has left in memory goes; pytest keeps what three runs have left."""
    if os.environ.get("TMPDIR") == MEMORY_FOLDER and "PYTEST_XDIST_WORKER" not in os.environ and exitstatus == 0:
        shutil.rmtree(session.config._tmp_path_factory.getbasetemp(), ignore_errors=True)  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else what the interpreter can't free at its end is told as leaks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to processes whole; those on Spark all to one: a second Spark session takes half a minute to start."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneSparkSession(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _SPARK if _folder(nodeid) == _SPARK else super()._split_scope(nodeid)

    return OneSparkSession(config, log)

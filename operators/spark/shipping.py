"""SHELL: gives executors our packages: the driver's own code as a zip (packaging.py), once for each Spark application."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from holdfast.operators.spark.packaging import write_package
from holdfast.operators.spark.preloads import ask_for
from holdfast.operators.worker.working_folders import PACKAGE_FOLDER, FolderSweep, OwnedFolder

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger("holdfast.spark")

DAEMON_SETTING = "spark.python.daemon.module"


def ship_package(context: SparkContext, locations: Iterable[str] = ()) -> None:
    """Give the executors our packages, once per SparkContext: the driver's own code, whatever is installed there.

    `locations`: of storage that tasks will use; what it needs is loaded before workers are forked."""
    ask_for(context.environment, locations)
    path = package_path()
    if path.name in context._python_includes:
        return
    before = list(sys.path)
    context.addPyFile(str(path))
    # Spark puts the zip on the driver's path, too, where it would shadow modules that are not imported yet.
    sys.path[:] = [entry for entry in sys.path if entry in before]
    if preload_workers(context, path):
        log.debug("Spark's Python daemon imports Holdfast once, for all workers")


def package_path() -> Path:
    """The zip, in this process's folder."""
    folder = _package_folder(os.getpid())
    if not folder.is_dir():  # removed by a cleaner of temporary folders
        _package_folder.cache_clear()
        folder = _package_folder(os.getpid())
    return write_package(folder)


@functools.cache
def _package_folder(process: int) -> Path:
    """Folder in which this process keeps what it ships: Spark's executors fetch it from there as long as the process lives. Deletes
    the folders of drivers that were killed."""
    root = tempfile.gettempdir()
    folder = OwnedFolder(root, f"holdfast-package-{uuid4().hex[:16]}")
    atexit.register(_delete_package, folder, process)
    sweep = FolderSweep(root, PACKAGE_FOLDER)
    while sweep.step():
        pass
    return Path(folder.path)


def _delete_package(folder: OwnedFolder, process: int) -> None:
    if os.getpid() == process:  # not in a child that it forked
        folder.delete()


def preload_workers(context: SparkContext, package: Path) -> bool:
    """On local[N], where the daemon finds the zip, let it import our packages before it forks workers.

    Elsewhere the user may set spark.python.daemon.module, if Holdfast is installed on the nodes; an existing setting is kept."""
    live = context._jsc.sc().conf()
    if not context.master.startswith("local") or context.master.startswith("local-cluster") or live.contains(DAEMON_SETTING):
        return False
    context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package), context.environment.get("PYTHONPATH"))))
    live.set(DAEMON_SETTING, "holdfast.operators.spark.daemon")
    return True

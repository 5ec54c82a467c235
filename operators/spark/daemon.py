"""SHELL: Spark's Python daemon with our imports done once, so that a forked worker starts warm.

`python -m holdfast.operators.spark.daemon` in place of `pyspark.daemon`. It imports and nothing more: contexts, threads and native
handles are made inside the task, after the fork. Of what Arrow loads on first use it has only what starts no thread: a conversion
to pandas would start the pool of Arrow, which no fork survives. What only some jobs use, a worker loads on first use, and the
daemon beforehand where the driver says so (preloads.py): else each worker would pay for it, and each dead one's successor again."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable

from holdfast.operators.spark.preloads import PRELOAD, S3

PRELOADED = (
    "holdfast.operators.spark.slots",
    "holdfast.operators.worker.deploy",
    "holdfast.statebackends.rocksdb.backend",
    "pyarrow.parquet",
    "pyspark.worker",
)


def preload() -> None:
    """Import what a worker needs; what can't be imported here is left to the worker, which reports it properly."""
    gc.disable()  # imports leave nothing to collect, and a tenth of their time is looking
    for module in PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    asked = os.environ.get(PRELOAD, "").split(",")
    for load in (_load_arrow, *(_LOADS[name] for name in asked if name in _LOADS)):
        with contextlib.suppress(Exception):
            load()
    gc.enable()
    gc.collect()
    gc.freeze()  # keeps the imported modules' pages shared after a fork


def _load_arrow() -> None:
    importlib.import_module("holdfast.operators.worker.main").warm_imports()


def _load_s3() -> None:
    importlib.import_module("holdfast.statebackends.storage.s3")
    importlib.import_module("holdfast.statebackends.storage.s3_connection").load()


_LOADS: dict[str, Callable[[], None]] = {S3: _load_s3}
"""What a driver may ask for. Other names, of a newer driver, are left to the worker."""


def main() -> None:
    preload()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()

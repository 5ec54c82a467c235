"""SHELL: Spark's Python daemon with our imports done once, so that a forked worker starts warm.

`python -m holdfast.operators.spark.daemon` in place of `pyspark.daemon`. It imports and nothing more: contexts, threads and native
handles are made inside the task, after the fork. Of what Arrow loads on first use it has only what starts no thread: a conversion
to pandas would start the pool of Arrow, which no fork survives."""

from __future__ import annotations

import contextlib
import gc
import importlib

PRELOADED = ("holdfast.operators.spark.slots", "holdfast.operators.worker.deploy", "pyarrow.parquet", "pyspark.worker")


def preload() -> None:
    """Import what a worker needs; what can't be imported here is left to the worker, which reports it properly."""
    for module in PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    with contextlib.suppress(Exception):
        importlib.import_module("holdfast.operators.worker.main").warm_imports()
    gc.collect()
    gc.freeze()  # keeps the imported modules' pages shared after a fork


def main() -> None:
    preload()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()

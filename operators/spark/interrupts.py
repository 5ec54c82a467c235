"""SHELL: protects workers from Ctrl-C, which reaches them in two ways.

PySpark's handler of SIGINT cancels every Spark job of the driver. It calls `cancelAllJobs` of its SparkContext, whichever thread
runs it, so this method is replaced, on the one context. No signal handler is touched: a program may have its own, and only the main
thread may install one.

When an interrupt ends a py4j call of any thread, py4j closes the connections of all threads, which then send their commands again.
A worker's command must not be sent twice: its Spark job is submitted once, and then waited for."""

from __future__ import annotations

import _thread
import functools
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

log = logging.getLogger("holdfast.spark")

WORKER_TAG = "holdfast-worker"
"""Tag on every Spark job that is a worker, by which cancellation of the other jobs spares it."""

CANCEL_WAIT_S = 5.0
"""Seconds that an interrupt waits for the cancellation of other Spark jobs; it is raised then, with or without success."""

CONNECTION_LOSSES_MAX = 100
"""Most connections lost in a row, each within CONNECTION_STANDS_S; then Spark is taken to have stopped."""

CONNECTION_STANDS_S = 5.0
"""Connection losses caused by an interrupt come in shorter intervals than this; one that lasted as long starts the count again."""

RECONNECT_S = 0.05
"""Pause between two tries."""

LISTENERS_WAIT_MS = 2_000
"""Time for Spark's status tracker to learn of jobs that were just started."""


def spare_workers(context: SparkContext) -> None:
    """Make `cancelAllJobs` of this context, and so Ctrl-C, spare the Spark jobs of workers. Idempotent."""
    context.cancelAllJobs = functools.partial(_cancel_other_jobs, context)


def mark_worker(context: SparkContext) -> None:
    """Tag the Spark jobs of this thread as workers."""
    context.addJobTag(WORKER_TAG)


def _cancel_other_jobs(context: SparkContext) -> None:
    """Cancel from a separate thread: a signal handler may run inside a call of the main thread, whose connection to Spark waits for
    that call's answer. The thread is unknown to `threading`, since the main thread may hold any of that module's locks."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            cancel_other_jobs(context)
        except Exception:
            log.warning("Spark's jobs can't be cancelled", exc_info=True)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    if not done.acquire(timeout=CANCEL_WAIT_S):
        log.warning("Spark has not cancelled its jobs within %.0f s", CANCEL_WAIT_S)


def cancel_other_jobs(context: SparkContext) -> None:
    """Cancel the Spark jobs that are no workers, as far as Spark's status tracker knows them. Raises Py4JError."""
    from py4j.protocol import Py4JError

    scala = context._jsc.sc()
    try:
        scala.listenerBus().waitUntilEmpty(LISTENERS_WAIT_MS)
    except Py4JError:  # listeners are busy: jobs that are known already are cancelled
        log.debug("Spark's listeners have not heard of all of its jobs", exc_info=True)
    tracker = scala.statusTracker()
    active = set(tracker.getActiveJobIds())  # read first: a job in this set already has its tags
    for job in sorted(active - set(tracker.getJobIdsForTag(WORKER_TAG))):
        scala.cancelJob(job, "all Spark jobs but Holdfast's workers were cancelled, as by Ctrl-C")


def collect(rdd: RDD[Any]) -> list[Any]:
    """`rdd.collect()` in one Spark job, however often the connection to Spark is lost while it runs. Raises Py4JError.

    After an interrupt Spark closes new connections, too, for a moment, and seems to have stopped; the call is repeated."""
    from py4j.protocol import Py4JError, Py4JJavaError

    running = rdd._jrdd.collectAsync()
    losses = 0
    while True:
        asked = time.monotonic()
        try:
            return [row for batch in running.get() for row in pickle.loads(batch)]  # written by Python workers: lists of rows
        except Py4JJavaError:  # the job failed
            raise
        except Py4JError:
            losses = 1 if time.monotonic() - asked >= CONNECTION_STANDS_S else losses + 1
            if losses > CONNECTION_LOSSES_MAX:
                raise
            log.debug("the connection to Spark was lost, and is made again", exc_info=True)
            time.sleep(RECONNECT_S)

"""SHELL: keeps workers out of reach of Ctrl-C, which reaches them in two ways.

PySpark's handler of SIGINT cancels every Spark job of the driver. It calls `cancelAllJobs` of its SparkContext, whichever thread
runs it, so that is what is replaced, on the one context; no signal handler is touched: a program may have its own, and only the
main thread may install one.

And py4j, when an interrupt ends a call of any thread, closes the connections of all threads, which then send their commands once
more. A worker's command must not be sent twice: its Spark job is submitted, and then waited for."""

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
"""On every Spark job that is a worker: what cancels all the others knows them by it."""

CANCEL_WAIT_S = 5.0
"""Seconds that an interrupt waits until the other Spark jobs are told; it is raised then, whatever became of that."""

CONNECTION_LOSSES_MAX = 100
"""In a row, none of which stood for CONNECTION_STANDS_S; behind so many Spark has gone."""

CONNECTION_STANDS_S = 5.0
"""Behind an interrupt connections are refused for less; from a Spark that has gone no answer takes so long."""

RECONNECT_S = 0.05
"""Between two tries."""

LISTENERS_WAIT_MS = 2_000
"""Until Spark's status tracker has heard of the jobs that were just started."""


def spare_workers(context: SparkContext) -> None:
    """From now on `cancelAllJobs` of this context, and so Ctrl-C, cancels all Spark jobs but those of workers. Idempotent."""
    context.cancelAllJobs = functools.partial(_cancel_other_jobs, context)


def mark_worker(context: SparkContext) -> None:
    """The Spark jobs of this thread are workers."""
    context.addJobTag(WORKER_TAG)


def _cancel_other_jobs(context: SparkContext) -> None:
    """From a thread of its own: a signal handler may run inside a call of the main thread, whose connection to Spark waits for that
    call's answer. One that `threading` knows nothing of, since the main thread may hold any of its locks."""
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
    """Cancel the Spark jobs that are no workers, as far as Spark's status tracker has heard of them. Raises Py4JError."""
    from py4j.protocol import Py4JError

    scala = context._jsc.sc()
    try:
        scala.listenerBus().waitUntilEmpty(LISTENERS_WAIT_MS)
    except Py4JError:  # listeners are busy: what is known already is cancelled
        log.debug("Spark's listeners have not heard of all of its jobs", exc_info=True)
    tracker = scala.statusTracker()
    active = set(tracker.getActiveJobIds())  # first: whatever is in here already has its tags
    for job in sorted(active - set(tracker.getJobIdsForTag(WORKER_TAG))):
        scala.cancelJob(job, "all Spark jobs but Holdfast's workers were cancelled, as by Ctrl-C")


def collect(rdd: RDD[Any]) -> list[Any]:
    """As `rdd.collect()`, in one Spark job, however often the connection to Spark is lost while it runs. Raises Py4JError.

    For a moment behind an interrupt Spark closes new connections, too: then it seems to have gone, and is asked again."""
    from py4j.protocol import Py4JError, Py4JJavaError

    running = rdd._jrdd.collectAsync()
    losses = 0
    while True:
        asked = time.monotonic()
        try:
            return [row for batch in running.get() for row in pickle.loads(batch)]  # as Python workers write them: lists of rows
        except Py4JJavaError:  # the job failed
            raise
        except Py4JError:
            losses = 1 if time.monotonic() - asked >= CONNECTION_STANDS_S else losses + 1
            if losses > CONNECTION_LOSSES_MAX:
                raise
            log.debug("the connection to Spark was lost, and is made again", exc_info=True)
            time.sleep(RECONNECT_S)

"""Ctrl-C in a driver: the workers of its jobs run on, its own Spark jobs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = str(Path(__file__).resolve().parents[2])

START = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from pathlib import Path
from pyspark import InheritableThread
from pyspark.sql import SparkSession
import holdfast as hf
spark = (SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").config("spark.driver.memory", "600m")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
folder = Path({folder!r})

def say(name, text=""):
    (folder / (name + ".new")).write_text(str(text))
    (folder / (name + ".new")).rename(folder / name)

def wait_for(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "condition not met"
        time.sleep(0.01)

def numbers(first, count):
    for number in range(first, first + count):
        yield {{"k": number % 7, "id": number}}

def environment():
    env = hf.Environment("interrupted", parallelism=2, checkpoint_interval_ms=200, state_dir=str(folder / "state"),
                         restart=hf.RestartStrategy("none"))
    source = hf.GeneratorSource(numbers, rows=1_000_000, rows_per_second=2_000)
    env.from_source(source).uid("numbers").key_by("k").reduce(lambda a, b: b).uid("last").sink_to(hf.Blackhole()).uid("out")
    return env

def pids(job):
    return sorted(worker["pid"] for worker in job.client.workers(job.job_id)["workers"] if worker["registered"])

def runs(pid):
    try:
        return Path("/proc/" + str(pid) + "/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False

def completed(job):
    return job.client.checkpoints(job.job_id)["counts"]["completed"]
"""

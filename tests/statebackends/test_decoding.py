"""Decoders are made one at a time: msgspec shows other threads what it has half built."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.statebackends import decoding


class Inner(msgspec.Struct):
    number: int


class Outer(msgspec.Struct):
    inner: Inner


@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_decoders_are_made_one_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(msgspec, name)
    make, entered, others = module.Decoder, threading.Barrier(2), []

    class Slow:
        """What it makes is not whole before somebody else had every chance to look."""

        def __init__(self, kind: Any) -> None:
            others.append(decoding._making.locked())
            self.decode = make(kind).decode

    monkeypatch.setattr(module, "Decoder", Slow)
    decode = getattr(decoding, f"decode_{name}")
    content = module.encode(Outer(Inner(7)))

    def run(kind: Any) -> Any:
        entered.wait(10)
        return decode(content, kind)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, (Outer, dict[str, Inner])))
    assert found == [Outer(Inner(7)), {"inner": Inner(7)}]
    assert others
    assert all(others)


@pytest.mark.slow
def test_threads_that_begin_together_survive_their_first_records() -> None:
    """As jobs that are recovered in parallel: one process in four used to end with a segmentation fault."""
    script = """
import sys, threading
sys.setswitchinterval(1e-6)
from holdfast.barriers import codec
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import Registered, RegisterWorker
from holdfast.coordinator.ha.records import SubmissionRecord, decode_record
from holdfast.statebackends.errors import HoldfastError
together = threading.Barrier(8)
def run(kind):
    together.wait()
    for _ in range(50):
        try:
            decode_record(kind, b'{"version":1}', "x") if kind is SubmissionRecord else codec.decode(b'{"version":1}', kind)
        except HoldfastError:
            pass
threads = [threading.Thread(target=run, args=(kind,)) for kind in (SubmissionRecord, Registered, Submission, RegisterWorker) * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", script], cwd=Path(hf.__file__).parent.parent, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]

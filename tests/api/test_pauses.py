"""The cyclic collector of a process that serves looks at what came since its start, and not at all its modules."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, sys
import holdfast.api.server.main
from holdfast.api.server import pauses

class Cycle:
    def __init__(self):
        self.itself = self

before = len(gc.get_objects())
ordered = []
gc.callbacks.append(lambda phase, facts: ordered.append(phase))
pauses.HeapSettler().begin()
at_start = len(gc.get_objects())
left, frozen = [], []
for _ in range(pauses.FREEZES_MAX + 2):
    kept = [[each] for each in range(20_000)]
    left.append(kept)
    gc.collect(0)
    gc.collect()
    frozen.append(gc.get_freeze_count())
found = len([Cycle() for _ in range(1_000)]) and gc.collect()
print(json.dumps({"before": before, "at_start": at_start, "frozen": frozen, "found": found, "callbacks": len(gc.callbacks)}))
"""


def test_what_was_there_at_the_start_is_looked_at_no_more_and_later_garbage_is() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(told.stdout)
    assert found["before"] > 100_000
    assert found["at_start"] < found["before"] / 20
    steps = [after - before for before, after in zip(found["frozen"], found["frozen"][1:], strict=False)]
    assert [step > 10_000 for step in steps] == [True, True, False, False], found
    assert found["found"] >= 1_000
    assert found["callbacks"] == 1, "only the program's own is left"

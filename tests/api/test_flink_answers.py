"""Flink's dialect, held against what a real Flink answers: each key of its answers is in ours, with its type."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.api.fakes import JOB, SOURCE, FakeCoordinator, Served, make_pressure
from tests.golden.flink_answers import differences, golden

NAMES = {
    **dict.fromkeys(("job", "finished", "failed"), JOB),
    "vertex": SOURCE,
    "worker": f"{JOB}_slot-0",
    "checkpoint": "1",
    "attempt": "1",
}
GOLDEN = golden()

UNKNOWN_HERE = re.compile(
    r"\.memoryConfiguration\.\w+: null, not integer"
    r"|\.changelog_storage: null, not string"
)
"""What Holdfast does not have, and Flink's classes take null for."""


def completed(body: Any) -> Any:
    """Without checkpoints and parts of them that are not complete: they have fewer fields, in Flink as here, and all are complete
    in the golden answers."""
    if isinstance(body, dict):
        for name, kept in (("history", ("className", "completed")), ("subtasks", ("status", "completed"))):
            if isinstance(entries := body.get(name), list) and "checkpointed_size" in str(body):
                body[name] = [each for each in entries if each[kept[0]] == kept[1]]
    return body


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("request_", sorted(GOLDEN))
def test_an_answer_has_flinks_keys_and_types(served: Served, coordinator: FakeCoordinator, prefix: str, request_: str) -> None:
    ended = re.search(r"\{(finished|failed)\}", request_)
    coordinator.state = ended[1].upper() if ended else "RUNNING"
    coordinator.pressure = make_pressure()
    path = re.sub(r"\{(\w+)\}", lambda match: NAMES[match[1]], request_)
    body = served.json("GET", f"{prefix}/{path}", status=GOLDEN[request_]["status"])
    found = list(differences(completed(body), GOLDEN[request_]["body"]))
    assert [each for each in found if not UNKNOWN_HERE.search(each)] == []

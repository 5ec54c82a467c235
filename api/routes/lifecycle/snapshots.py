"""Content, rows, difference and verification of snapshots that the service can see.

Rows are for operators. Each kind of work that reads files is bounded, in bytes and in how much of it there is at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Query

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, Service, ShownDirectories, body_of, describe_model
from holdfast.api.snapshots.served import PATH_CHARACTERS_MAX
from holdfast.coordinator.drills.records import Verification
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from holdfast.api.snapshots.snapshot import Snapshot

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"], responses=ERRORS)

VERIFICATIONS_MAX = 2
"""Verifications at a time: each reads every byte of a snapshot."""
PROBLEMS_MAX = 1_000
"""Problems in one answer, and unchecked files, at most; the answer has the full counts."""

PROBLEM_CHARACTERS_MAX = 1_000
"""Of the problem that the job's health names."""

PAGES_MAX = 2
"""Pages of rows at a time."""
DIFFERENCES_MAX = 1
"""Comparisons at a time: each reads all rows of two snapshots."""
DIFFERENCE_BYTES_MAX = 512 * 1024 * 1024
"""Of both snapshots, or of the compared states in them; larger ones are for the command line."""
DIFFERENCE_KEYS_MAX = 100
"""Differing keys that are listed of each state."""
ROWS_DEFAULT, ROWS_MAX = 50, 500
NAME_CHARACTERS_MAX = 1_024

_verifying = threading.BoundedSemaphore(VERIFICATIONS_MAX)
_paging = threading.BoundedSemaphore(PAGES_MAX)
_comparing = threading.BoundedSemaphore(DIFFERENCES_MAX)

Location = Annotated[str, Query(min_length=1, max_length=PATH_CHARACTERS_MAX, description="As of `GET /v1/snapshots`")]
Uid = Annotated[str, Query(max_length=NAME_CHARACTERS_MAX, description="Uid of the operator")]
State = Annotated[str, Query(max_length=NAME_CHARACTERS_MAX, description="Name of the state")]


@contextlib.contextmanager
def _one_of(allowed: threading.BoundedSemaphore, text: str, path: str) -> Iterator[None]:
    """Raises StorageUnavailableError while others take all of the places."""
    if not allowed.acquire(blocking=False):
        raise StorageUnavailableError(f"{text}: try again later", path=path)
    try:
        yield
    finally:
        allowed.release()


@router.get("")
def inspect(
    directories: ShownDirectories, path: Annotated[str, Query(min_length=1, max_length=PATH_CHARACTERS_MAX)]
) -> dict[str, Any]:
    """Operators, states and sizes. `path`: a folder or its `_metadata`; a relative one is below the state directory."""
    from holdfast.api.snapshots import inspection

    return inspection.summarise(directories.open(path))


@router.post("/verify", openapi_extra=describe_model(schemas.VerifySnapshot))
def verify(
    service: Service,
    directories: ShownDirectories,
    body: Annotated[schemas.VerifySnapshot, Depends(body_of(schemas.VerifySnapshot))],
) -> dict[str, Any]:
    """Check length and checksum of every file of a snapshot; answers when all are read. 503 while two others are verified. Of a
    snapshot of a job `GET /v1/jobs/:jobid/health` tells the outcome from then on."""
    from holdfast.api.snapshots.inspection import describe_verified

    began_ms = time.time_ns() // 1_000_000
    snapshot = directories.open(body.path)
    with _one_of(_verifying, f"{VERIFICATIONS_MAX} snapshots are being verified", body.path):
        report = snapshot.verify()
    document = describe_verified(snapshot, report)
    first = str(report.problems[0])[:PROBLEM_CHARACTERS_MAX] if report.problems else ""
    found = Verification(snapshot.metadata.checkpoint_id, began_ms, len(report.problems), first)
    with contextlib.suppress(HoldfastError):  # it is of no job here, or storage fails: it was verified all the same
        service.note_verified(snapshot.metadata.job_id, snapshot.location, found)
    return {
        **document,
        "problems": document["problems"][:PROBLEMS_MAX],
        "problem_count": len(report.problems),
        "unchecked": document["unchecked"][:PROBLEMS_MAX],
        "unchecked_count": len(report.unchecked),
    }


@router.get("/rows")
def rows(
    directories: ShownDirectories,
    path: Location,
    uid: Uid,
    state: State,
    after: Annotated[str, Query(max_length=32, description="`next` of the page before")] = "",
    limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_DEFAULT,
) -> dict[str, Any]:
    """One page of the rows of a state. Values are JSON texts, cut at 1,000 characters; `clipped` of them were. 503 while two other
    pages are read."""
    with _one_of(_paging, f"{PAGES_MAX} pages of rows are being read", path):
        snapshot = directories.open(path)
        page = snapshot.row_page(uid, state, after=after, limit=limit)
    return {
        "location": snapshot.location,
        "uid": uid,
        "state": state,
        "columns": page.columns,
        "rows": page.rows,
        "clipped": page.clipped,
        "next": page.next,
    }


@router.get("/diff")
def diff(
    directories: ShownDirectories,
    path: Location,
    other: Location,
    uid: Annotated[str | None, Query(max_length=NAME_CHARACTERS_MAX, description="Of one operator alone")] = None,
    state: Annotated[str | None, Query(max_length=NAME_CHARACTERS_MAX, description="One state alone")] = None,
    keys: Annotated[int, Query(ge=0, le=DIFFERENCE_KEYS_MAX, description="Differing keys to list of each state")] = 10,
) -> dict[str, Any]:
    """What is added, removed and changed from one snapshot to another, as `holdfast snapshot diff --json`; keys and values are JSON
    texts, cut at 1,000 characters. 503 while another comparison runs."""
    from holdfast.api.snapshots import inspection
    from holdfast.api.snapshots.row_pages import cell_text, clip_text

    with _one_of(_comparing, "two snapshots are being compared", path):
        before, after = directories.open(path), directories.open(other)
        _check_size(before, after, uid, state)
        found = before.diff(after, uid=uid, state=state, keys_max=keys)
    return inspection.describe_diff(before, after, found, shown=lambda value: clip_text(cell_text(value)))


def _check_size(before: Snapshot, after: Snapshot, uid: str | None, state: str | None) -> None:
    """Raise InvalidConfigError for a comparison that would read too much. Native files are read whole for each of their states."""
    size = 0
    for operator in (each for side in (before, after) for each in side.operators.values() if uid in (None, each.uid)):
        sizes = [each.size for name, each in operator.states.items() if state in (None, name)]
        size += sum(operator.size if each < 0 else each for each in sizes)
    if size > DIFFERENCE_BYTES_MAX:
        raise InvalidConfigError(
            f"a comparison of {size} bytes takes long, and the service compares {DIFFERENCE_BYTES_MAX} at most: "
            "name an operator and a state, or use `holdfast snapshot diff`",
            setting="state",
        )

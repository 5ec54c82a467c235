"""Content and verification of snapshots that the service can see."""

from __future__ import annotations

import threading
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from holdfast.api.flink import schemas
from holdfast.api.routes.common import ERRORS, Directories, body_of, describe_model
from holdfast.api.snapshots.served import PATH_CHARACTERS_MAX
from holdfast.statebackends.errors import StorageUnavailableError

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"], responses=ERRORS)

VERIFICATIONS_MAX = 2
"""Verifications at a time: each reads every byte of a snapshot."""
PROBLEMS_MAX = 1_000
"""Problems in one answer, and unchecked files, at most; the answer has the full counts."""

_verifying = threading.BoundedSemaphore(VERIFICATIONS_MAX)


@router.get("")
def inspect(directories: Directories, path: Annotated[str, Query(min_length=1, max_length=PATH_CHARACTERS_MAX)]) -> dict[str, Any]:
    """Operators, states and sizes. `path`: a folder or its `_metadata`; a relative one is below the state directory."""
    from holdfast.api.snapshots import inspection

    return inspection.summarise(directories.open(path))


@router.post("/verify", openapi_extra=describe_model(schemas.VerifySnapshot))
def verify(
    directories: Directories, body: Annotated[schemas.VerifySnapshot, Depends(body_of(schemas.VerifySnapshot))]
) -> dict[str, Any]:
    """Check length and checksum of every file of a snapshot; answers when all are read. 503 while two others are verified."""
    from holdfast.api.snapshots.inspection import describe_verified

    snapshot = directories.open(body.path)
    if not _verifying.acquire(blocking=False):
        raise StorageUnavailableError(f"{VERIFICATIONS_MAX} snapshots are being verified: try again later", path=body.path)
    try:
        report = snapshot.verify()
    finally:
        _verifying.release()
    document = describe_verified(snapshot, report)
    return {
        **document,
        "problems": document["problems"][:PROBLEMS_MAX],
        "problem_count": len(report.problems),
        "unchecked": document["unchecked"][:PROBLEMS_MAX],
        "unchecked_count": len(report.unchecked),
    }

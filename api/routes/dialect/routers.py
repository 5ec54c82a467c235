"""Flink's monitoring dialect as one router. Included with and without `/v1`, and below `/flink` for Flink's own UI."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.api.routes.dialect import applications, execution, job_manager, jobs, refused, task_managers, vertices

router = APIRouter()
# In this order: /jobs/metrics must come before /jobs/{jobid}, which would take it for an id.
for _part in (execution, vertices, applications, task_managers, job_manager, refused, jobs):
    router.include_router(_part.router)

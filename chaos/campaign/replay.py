"""One run again: the same request, or with a part of its faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.chaos.campaign.catalogue import choose_part
from holdfast.chaos.campaign.seedprocess import quieten_logs

if TYPE_CHECKING:
    from holdfast.chaos.cluster.world import Run, RunRequest


def replay_seed(request: RunRequest, only: str | None) -> Run:
    """Run it in this process. `only`: these faults of its plan alone, which takes a run to find out if it is drawn.

    Raises InvalidConfigError for faults that are not in it, and whatever the run itself raises."""
    from holdfast.chaos.campaign.user_runs import run_seed

    quieten_logs()
    if only is None:
        return run_seed(request)
    plan = request.plan if request.plan is not None else run_seed(request).result.plan
    return run_seed(replace(request, plan=choose_part(only, plan)))

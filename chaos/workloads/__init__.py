"""The jobs that the simulator runs, by family: each draws a job and its expected output from a seed."""

from __future__ import annotations

from importlib.util import find_spec

from holdfast.chaos.workloads import (
    aggregate,
    async_io,
    at_least_once,
    backlog,
    broadcast,
    column_sessions,
    connected,
    count_windows,
    counter,
    ends,
    expiring,
    fanout,
    forgetting,
    hooked,
    idle,
    joins,
    keys,
    labels,
    late,
    late_windows,
    latecomers,
    long,
    members,
    merging,
    nexmark,
    outside,
    pressure,
    random_graphs,
    restarts,
    rules,
    sessions,
    side_outputs,
    sliding,
    splits,
    states,
    timers,
    topn,
    versions,
    window_joins,
    window_top,
    windows,
)
from holdfast.chaos.workloads.scenario import Workload
from holdfast.statebackends.errors import InvalidConfigError

WORKLOADS: dict[str, Workload] = {
    module.WORKLOAD.name: module.WORKLOAD
    for module in (
        *(counter, windows, late, timers, broadcast, fanout, ends, aggregate, expiring, states, keys, random_graphs),
        *(connected, side_outputs, restarts, idle, rules, async_io, sliding, versions, late_windows, topn, window_top),
        *(joins, latecomers, sessions, column_sessions, window_joins, count_windows, outside, splits),
        *(merging, at_least_once, backlog, pressure, hooked, labels),
        *((nexmark,) if find_spec("duckdb") else ()),  # its queries have SQL expressions, and so has its oracle
    )
}
"""Workloads that run when none is named."""

ON_DEMAND: dict[str, Workload] = {module.WORKLOAD.name: module.WORKLOAD for module in (long, members, forgetting)}
"""Workloads that run only when they are named: since one run takes as long as a hundred of the others, or so that older seeds keep
their workloads."""


def find_workload(name: str) -> Workload:
    """The workload of a name, or a user's own pipeline as `FILE.py:function` or `module:function`.

    Raises InvalidConfigError naming the choices, or the problem in the user's pipeline."""
    known = {**WORKLOADS, **ON_DEMAND}
    if name in known:
        return known[name]
    if ":" in name:
        from holdfast.chaos.workloads.loading import load_workload

        return load_workload(name)
    raise InvalidConfigError(
        f"there is no workload {name!r}; choose from {', '.join(known)}, or name your own as FILE.py:function",
        setting="workload",
    )

"""Graphs whose steps are slower than their sources, in some subtasks more than in others: every queue in front of them is full.

The description and its evaluator are those of `random`; only what each row takes differs. Most of these jobs have unaligned
checkpoints, at once or from an age on, and a rescaled one may have another mode than before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.graphs import (
    BatchNode,
    CoNumberNode,
    DistinctNode,
    FilterNode,
    FlatMapNode,
    Graph,
    MapNode,
    Node,
    NumberNode,
    SourceNode,
    SplitNode,
    Step,
    StepNode,
    UnionNode,
    WindowNode,
)
from holdfast.chaos.workloads.random_graphs import build_graph, scenario_of
from holdfast.chaos.workloads.scenario import RowCost, Scenario, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan

EXCHANGES = ("rebalance", "rebalance", "shuffle", "global", "forward", "rescale", "broadcast", "custom")
COSTS = (RowCost(2_000, 2_000), RowCost(1_000, 1_000), RowCost(4_000, 500), RowCost(6_000, 0), RowCost(300, 300))
COSTS_OF_MANY = (RowCost(200, 200), RowCost(300, 50), RowCost(50, 50))
ROWS_MAX = 260


def make(rng: random.Random) -> Scenario:
    """One or two sources, up to three slow steps, and state by key behind them."""
    graph = _draw_graph(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng, interval_ms=(40, 200))
    settings.update(max_concurrent_checkpoints=1, tolerable_failed_checkpoints=10, min_pause_ms=rng.choice((0, 0, 20)))
    if sum(feed.rows for feed in graph.feeds) > 2 * ROWS_MAX:  # allocations have something to move for
        settings.update(buffer_debloat=True, channel_credit_bytes=4 << 20, channel_credit_batches=16)
        settings.update(channel_credit_bytes_start=65_536)
    elif rng.random() < 0.5:  # all that the sources have is in flight at once
        settings.update(buffer_debloat=False, channel_credit_bytes=4 << 20, channel_credit_batches=16)
    modes = [_draw_mode(rng) for _ in range(PARALLELISM_MAX + 1)]
    scenario = scenario_of(graph, partial(_plan, graph, parallelism, rng.random() < 0.5, settings, modes))
    slow = rng.sample(scenario.operators, rng.randint(1, len(scenario.operators)))
    costs = COSTS if scenario.records <= 2 * ROWS_MAX else COSTS_OF_MANY
    return replace(scenario, row_costs={uid: rng.choice(costs) for uid in sorted(slow)})


def _draw_mode(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.15:
        return {}
    return {
        "unaligned_checkpoints": True,
        "aligned_checkpoint_timeout_ms": rng.choice((0, 0, 0, 5, 40, 150)),
        "inflight_bytes_max": rng.choice((1_000, 3_000)) if rng.random() < 0.25 else 1 << 28,
    }


def _plan(
    graph: Graph, drawn: int, chaining: bool, settings: dict[str, Any], modes: Sequence[dict[str, Any]], parallelism: int | None
) -> JobPlan:
    return build_graph(graph, drawn, chaining, {**settings, **modes[parallelism or drawn]}, parallelism)


def _draw_graph(rng: random.Random) -> Graph:
    nodes: list[Node] = []
    ends: list[int] = []
    is_long = rng.random() < 0.15  # more rows than the least allocation of a channel
    for number in range(rng.choice((1, 1, 2))):
        rows = rng.randint(2_000, 4_000) if is_long else rng.randint(100, ROWS_MAX)
        feed = Feed(f"feed-{number}", rows, rng.choice((2, 5, 20)), number * 100_000, 10_000, rng.randint(1, 5))
        pace = (rows / rng.uniform(0.05, 0.6), rng.choice((200, 1_000) if is_long else (5, 20, 60)))
        nodes.append(SourceNode(feed, pace, rng.choice((None, None, 1, 2))))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            nodes.append(_draw_step(rng, nodes, len(nodes) - 1))
        ends.append(len(nodes) - 1)
    keyed: Step = rng.choice((NumberNode(), NumberNode(), WindowNode(rng.choice((20, 100))), DistinctNode(30)))
    shape = rng.random()
    if len(ends) == 2 and shape < 0.5:
        nodes.append(StepNode(CoNumberNode(), (ends[0], ends[1]), parallelism=rng.choice((None, 2))))
    elif len(ends) == 2:
        nodes.append(StepNode(UnionNode(), (ends[0], ends[1])))
        nodes.append(StepNode(keyed, (len(nodes) - 1,), parallelism=rng.choice((None, None, 3))))
    elif shape < 0.2:
        nodes.append(StepNode(SplitNode(2), (ends[0],)))
    else:
        nodes.append(StepNode(keyed, (ends[0],), parallelism=rng.choice((None, None, 3))))
    if rng.random() < 0.5:
        nodes.append(StepNode(MapNode(3, 1, 4), (len(nodes) - 1,), rng.choice(("rebalance", "shuffle")), chaining="head"))
    return Graph(tuple(nodes), (len(nodes) - 1,))


def _draw_step(rng: random.Random, nodes: Sequence[Node], source: int) -> StepNode:
    """Behind a broadcast the rows are as many times as many as it has subtasks; so there is one at most."""
    exchange = rng.choice(EXCHANGES)
    before = nodes[source]
    if exchange == "broadcast" and isinstance(before, StepNode):
        exchange = "rebalance"
    if exchange == "broadcast":
        return StepNode(BatchNode(rng.randint(1, 99)), (source,), exchange, 2, "head")
    parallelism = rng.choice((None, None, 1, 3))
    if exchange == "forward":
        parallelism = before.parallelism
    step = rng.choice((MapNode(rng.randint(1, 9), 1, 16), BatchNode(7), FilterNode(3, 2), FlatMapNode(1)))
    return StepNode(step, (source,), exchange, parallelism, rng.choice(("head", "never")))


WORKLOAD = Workload("pressure", "runs steps slower than their sources, some subtasks more than others, with all queues full", make)

"""Every family of workloads, without a simulated world: the committed output is what plain Python says, and so is every cut."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.chaos.workloads import WORKLOADS, find_workload
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.graphs import (
    AsideNode,
    CoNumberNode,
    Graph,
    SourceNode,
    SplitNode,
    StepNode,
    _Drawing,
    draw_additions,
    draw_graph,
    evaluate,
    feed_events,
)
from holdfast.chaos.workloads.late import LOST_BATCHES_MAX, LateFeed
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.chaos.workloads.settings import BACKENDS
from holdfast.operators.base import JobPlan
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import crossed, examples
from tests.simulation.workload_runs import Run

FAMILIES = tuple(WORKLOADS)
CRASHED = [
    pytest.param(family, seed, marks=() if seed == 1 and place % 2 else pytest.mark.endurance)
    for seed in (1, 2, 3)
    for place, family in enumerate(FAMILIES)
]
"""With `make test` every other family crashes, and the others are rescaled; with `make chaos` each does both."""
RESCALED = [pytest.param(family, marks=pytest.mark.endurance if place % 2 else ()) for place, family in enumerate(FAMILIES)]
PLAN_BYTES_MAX = 16_000


def scenario_of(family: str, seed: int) -> Scenario:
    """Nobody restarts a job here that fails by itself."""
    scenario = WORKLOADS[family].make(random.Random(seed))
    for source in scenario.splits:
        source.broker.heal()
    return scenario


def on_backend(scenario: Scenario, backend: str) -> Scenario:
    """The same job on another state backend, with all of its state in files."""

    def plan(parallelism: int | None) -> JobPlan:
        made = scenario.plan(parallelism)
        config = msgspec.structs.replace(made.graph.config, state_backend=backend, inline_threshold=0)
        return replace(made, graph=msgspec.structs.replace(made.graph, config=config))

    return replace(scenario, plan=plan)


@pytest.mark.endurance
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_cuts_are_as_expected_without_failures(family: str, tmp_path: Path) -> None:
    run = Run(scenario_of(family, 4), 4, tmp_path)
    run.start()
    run.go_on(10**6)
    run.finish()
    assert run.problems() == []


@pytest.mark.parametrize(("family", "seed"), CRASHED)
def test_output_and_cuts_are_as_expected_over_crashes(family: str, seed: int, tmp_path: Path) -> None:
    run = Run(scenario_of(family, seed), seed, tmp_path)
    run.start()
    for _ in range(3):
        if run.go_on(run.random.randrange(3)):
            run.crash_in_the_middle()
    run.go_on(10**6)
    run.finish()
    assert run.problems() == []


@pytest.mark.parametrize("family", RESCALED)
def test_output_and_cuts_are_as_expected_over_rescales(family: str, tmp_path: Path) -> None:
    scenario = scenario_of(family, 7)
    assert scenario.may_rescale
    run = Run(scenario, 7, tmp_path)
    run.start()
    for parallelism in (4, 1, 3):
        if run.go_on(1):
            run.crash_in_the_middle(parallelism)
    run.go_on(10**6)
    run.finish()
    assert run.problems() == []


@pytest.mark.parametrize(
    ("family", "backend"), crossed(["counter", "timers", "windows", "late", "states", "random"], BACKENDS)
)
def test_cuts_are_read_from_every_backend(family: str, backend: str, tmp_path: Path) -> None:
    run = Run(on_backend(scenario_of(family, 2), backend), 5, tmp_path)
    run.start()
    if run.go_on(2):
        run.crash()
    run.go_on(10**6)
    run.finish()
    assert run.plan.graph.config.state_backend == backend
    assert len(run.completed) > 2
    assert run.problems() == []


def test_a_wrong_cut_is_found(tmp_path: Path) -> None:
    scenario = scenario_of("counter", 1)
    run = Run(scenario, 1, tmp_path)
    run.start()
    run.go_on(1)
    run.crash()
    completed, metadata = run.completed[0]
    run.completed = [(completed, metadata), (completed, metadata)]
    cut = scenario.cuts[0]
    run.scenario = Scenario(
        scenario.plan,
        scenario.records,
        sinks=(),
        operators=(),
        cuts=(type(cut)(cut.source_uids, cut.operator_uid, lambda positions: {"counted": {0: {"count": 0, "total": 0}}}),),
    )
    assert len(run.problems()) == 2


# ------------------------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("family", FAMILIES)
def test_every_seed_draws_a_job_that_can_be_built_small_and_rescaled(family: str) -> None:
    for seed in range(examples(5)):
        scenario = scenario_of(family, seed)
        plans = [scenario.plan(None), scenario.plan(1), scenario.plan(4)]
        assert max(len(pickle_plan(plan)) for plan in plans) < PLAN_BYTES_MAX or family == "nexmark"  # q13 brings its table along
        config = plans[0].graph.config
        assert config.checkpoint_interval_ms is not None
        assert 1 <= plans[0].graph.slots_required <= 4
        assert set(scenario.operators) <= set(plans[0].operators)
        assert {uid for cut in scenario.cuts for uid in cut.source_uids} <= set(plans[0].sources)


def test_the_counter_is_as_large_as_the_measured_run() -> None:
    for seed in range(20):
        scenario = scenario_of("counter", seed)
        graph = scenario.plan(None).graph
        assert 900 <= scenario.records <= 1_100
        assert graph.slots_required <= 2
        assert graph.config.checkpoint_interval_ms in range(100, 151)


_DIGESTS = """
import hashlib, random
from holdfast.chaos.workloads import WORKLOADS
from holdfast.operators.worker.main import pickle_plan
for family in WORKLOADS.values():
    for seed in range(2):
        scenario = family.make(random.Random(seed))
        rows = [sorted(sink.rows().items(), key=repr) if sink.rows else [] for sink in scenario.sinks]
        text = repr((scenario.plan(None).graph, scenario.records, scenario.operators, rows))
        print(hashlib.sha256(text.encode() + pickle_plan(scenario.plan(None))).hexdigest())
"""


def test_a_seed_draws_the_same_in_processes_with_other_hashes() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _DIGESTS], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 2 * len(FAMILIES)


def test_random_graphs_have_every_kind_of_step_and_no_loose_end() -> None:
    steps: set[type] = set()
    exchanges: set[str] = set()
    for seed in range(100):
        graph = draw_graph(random.Random(seed))
        used = {index for node in graph.nodes if isinstance(node, StepNode) for index in node.inputs} | set(graph.sinks)
        assert used == set(range(len(graph.nodes)))
        assert 1 <= len(graph.sinks) <= 6
        steps |= {type(node.step) for node in graph.nodes if isinstance(node, StepNode)}
        exchanges |= {node.exchange for node in graph.nodes if isinstance(node, StepNode)}
    assert len(steps) == 12
    assert exchanges == {"", "rebalance", "broadcast", "forward", "rescale", "shuffle", "global", "custom"}
    assert isinstance(graph, Graph)
    assert isinstance(graph.nodes[0], SourceNode)


def test_later_kinds_of_steps_are_drawn_by_the_graph_and_leave_a_seed_what_it_drew() -> None:
    rng = random.Random(7)
    drawn = _Drawing(rng).draw()
    left = rng.random()
    rng = random.Random(7)
    graph = draw_graph(rng)
    assert (rng.random(), graph) == (left, draw_additions(drawn))
    plain = [replace(node, exchange="") if isinstance(node, StepNode) else node for node in graph.nodes[: len(drawn.nodes)]]
    assert plain == [replace(node, exchange="") if isinstance(node, StepNode) else node for node in drawn.nodes]
    assert graph.sinks[: len(drawn.sinks)] == drawn.sinks


def test_the_cut_of_an_operator_of_two_inputs_counts_each_stream_by_itself() -> None:
    feeds = [Feed(f"feed-{number}", rows, 2, number * 1_000, 10_000, 3) for number, rows in enumerate((20, 12))]
    sources = [SourceNode(feed, (1_000.0, 5), None) for feed in feeds]
    steps = (StepNode(CoNumberNode(), (0, 1)), StepNode(SplitNode(2), (0,)), StepNode(AsideNode(2), (3, 0)))
    graph = Graph((*sources, *steps), (2, 3, 4))
    all_events = {feed.uid: feed_events(feed, range(feed.rows)) for feed in feeds}
    first, second, numbered, even, odd = evaluate(graph, all_events)
    assert Counter(event[1] for event in numbered) == Counter(event[1] for event in first + second)
    assert {event[2] % 2 for event in numbered if event[0] == 1} == {0, 1}
    assert (sorted(even + odd), len(numbered)) == (sorted(first), 32)


def test_random_graphs_are_judged_at_their_cuts_wherever_nothing_waits() -> None:
    scenarios = [scenario_of("random", seed) for seed in range(50)]
    judged = [sink.at_cut is not None for scenario in scenarios for sink in scenario.sinks]
    assert any(judged)
    assert not all(judged)
    assert sum(len(scenario.cuts) - 1 for scenario in scenarios) > 20
    assert {scenario.may_drain for scenario in scenarios} == {True, False}


# -------------------------------------------------------------------------------------------------------------------- feeds


@pytest.mark.parametrize(
    "feed",
    [
        Feed("a", 50, 7),
        Feed("b", 50, 1, first=-9),
        Feed("c", 50, 3, 1_000_000, 10_000, 3, 60),
        LateFeed("d", 50, 3, 0, 10_000, 3, 60, size_ms=20, batch_rows=2),
    ],
    ids=lambda feed: feed.uid,
)
def test_columns_of_a_feed_are_its_records(feed: Feed) -> None:
    batch = feed.make_batch(np.arange(3, feed.rows, 2, dtype=np.int64))
    rows = [
        {"i": feed.first + index, "key": feed.key(index), "value": feed.value(index), "at": feed.at(index)}
        for index in range(3, feed.rows, 2)
    ]
    assert batch.to_pylist() == [{name: row[name] for name in feed.schema.names} for row in rows]


def test_no_record_of_a_feed_is_later_than_its_disorder_allows() -> None:
    feed = Feed("a", 2_000, 5, 0, 10_000, 2, 60)
    latest = -1
    for index in range(feed.rows):
        assert feed.at(index) > latest - feed.disorder_ms - 1
        latest = max(latest, feed.at(index))


def test_each_record_of_a_late_feed_is_late_or_in_time_wherever_batches_end() -> None:
    for seed in range(20):
        (feed,) = (scenario_of("late", seed).cuts[0].expected.args[0],)  # type: ignore[attr-defined]
        assert isinstance(feed, LateFeed)
        times = [feed.at(index) for index in range(feed.rows)]
        watermarks = [max(times[:index], default=-(2**62)) - feed.disorder_ms - 1 for index in range(feed.rows)]
        last_ms = [feed.window(index)[1] + feed.size_ms - 1 for index in range(feed.rows)]
        for index in range(feed.rows):
            if feed.is_late(index):
                assert last_ms[index] <= watermarks[index - LOST_BATCHES_MAX * feed.batch_rows]
            else:
                assert last_ms[index] > watermarks[index]
        assert sum(map(feed.is_late, range(feed.rows))) > 5
        assert any(times[index] <= watermarks[index] < last_ms[index] for index in range(feed.rows))


@pytest.mark.parametrize(
    ("stripes", "problem"),
    [
        ([], "stripes"),
        ([(3, 0, 0), (3, 1, 1)], "stripes"),
        ([(2, 0, 0), (2, 1, 1), (2, 1, 3)], "stripes"),
        ([(2, 0, 0), (3, 1, 1)], "stripes"),
        ([(2, 0, 1), (2, 1, 1)], "record 1 is not of the stripe 0"),
    ],
)
def test_positions_that_lost_or_repeat_a_stripe_are_refused(stripes: list[tuple[int, int, int]], problem: str) -> None:
    import msgspec

    entries = [msgspec.msgpack.encode((1, *stripe, "")) for stripe in stripes]
    with pytest.raises(ValueError, match=problem):
        list(read_before(entries, 10))


# ------------------------------------------------------------------------------------------------------------------ choices


def test_an_unknown_workload_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidConfigError, match=r"no workload 'conter'; choose from counter, windows, .*FILE\.py:function"):
        find_workload("conter")

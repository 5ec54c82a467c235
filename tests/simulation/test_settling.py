"""I7 where records are in flight further up than the last edge to a state: a copy of the checkpoint settles, and is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import holdfast.chaos.cluster.world as world_module
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.checkers.ledger import Snapshot
from holdfast.chaos.checkers.settled import Choice, Unsettled, must_settle
from holdfast.chaos.cluster.results import RunResult
from holdfast.chaos.cluster.settling import settle
from holdfast.chaos.cluster.world import RunRequest, Simulation
from holdfast.chaos.sabotage import find_sabotage
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.graphs import Graph, MapNode, NumberNode, SourceNode, Step, StepNode, WindowNode
from holdfast.chaos.workloads.random_graphs import build_graph, scenario_of
from holdfast.chaos.workloads.scenario import CutExpectation, RowCost, Scenario
from holdfast.statebackends.handles import ChannelPiece, ChannelState, InlineHandle
from holdfast.statebackends.storage.port import DeleteFile
from tests.simulation.checker_world import DictView

SEEDS = (0, 2, 3)
SETTINGS: dict[str, Any] = {
    "checkpoint_interval_ms": 60,
    "max_parallelism": 8,
    "buffer_debloat": False,
    "channel_credit_bytes": 4 << 20,
    "unaligned_checkpoints": True,
}


def slow(step: Step) -> Scenario:
    """A source that is quick, a step that is slow behind a shuffle, and state by key behind both."""
    feed = Feed("feed-0", 200, 5, 0, 10_000, 2)
    steps = (StepNode(MapNode(3, 1, 4), (0,), "shuffle", chaining="head"), StepNode(step, (1,)))
    graph = Graph((SourceNode(feed, (1_000.0, 20), None), *steps), (2,))
    scenario = scenario_of(graph, partial(build_graph, graph, 2, False, SETTINGS))
    return replace(scenario, row_costs={"step-1": RowCost(5_000, 2_000)})


NUMBERS = partial(slow, NumberNode())
WINDOWS = partial(slow, WindowNode(100))


def results(make: Callable[[], Scenario]) -> list[RunResult]:
    """Runs without any fault: nothing is restored in them."""
    return [Simulation(RunRequest(seed, "own", plan=()), make(), (), 2_000).run().result for seed in SEEDS]


def blind(cluster: Any, unsettled: Any) -> None:
    """Nothing settles."""


@pytest.mark.parametrize("make", [NUMBERS, WINDOWS], ids=["numbers", "windows"])
def test_a_copy_settles_to_the_state_of_its_cut_and_the_run_stays_as_it_is(
    make: Callable[[], Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = results(make)
    assert [result.violations for result in settled] == [()] * len(SEEDS)
    assert all(result.sometimes["settled_in_flight"] == 1 for result in settled)
    monkeypatch.setattr(world_module, "settle", blind)
    assert [(each.trace_digest, each.steps, each.virtual_ms) for each in results(make)] == [
        (each.trace_digest, each.steps, each.virtual_ms) for each in settled
    ]


@pytest.mark.parametrize("name", ["output_not_stored", "queue_not_stored"])
def test_what_is_not_stored_above_an_operator_shows_there_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with find_sabotage(name).apply():
        (first, *_) = [each.violations[0] for each in results(NUMBERS) if each.violations]
        monkeypatch.setattr(world_module, "settle", blind)
        assert [result.violations for result in results(NUMBERS)] == [()] * len(SEEDS)
    assert first.invariant == "I7"
    assert ", settled: operator step-2: state 'seq': " in first.message


def chosen_of(seed: int) -> tuple[Any, Unsettled]:
    """Cluster and choice of a run."""
    found: list[tuple[Any, Unsettled]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "settle", lambda cluster, unsettled: found.append((cluster, unsettled)))
        Simulation(RunRequest(seed, "own", plan=()), NUMBERS(), (), 2_000).run()
    return found[0]


def test_a_copy_that_does_not_settle_is_told() -> None:
    cluster, unsettled = chosen_of(0)
    assert unsettled.stores.storage("/state").execute(DeleteFile(f"{unsettled.snapshot.folder}/_metadata"))
    invariant, message = settle(cluster, unsettled) or ("", "")
    assert invariant == "I7"
    assert message.startswith(f"checkpoint {unsettled.snapshot.checkpoint_id}, settled: it does not settle: ")


def test_the_copy_is_a_submission_of_its_own_whose_barriers_stay_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of the run's name would repeat the run's submission: its barriers overtake what was to settle."""
    compared: list[Snapshot] = []
    problem = Unsettled.problem

    def noted(unsettled: Unsettled, settled: Snapshot) -> Any:
        compared.append(settled)
        return problem(unsettled, settled)

    monkeypatch.setattr(Unsettled, "problem", noted)
    cluster, unsettled = chosen_of(0)
    assert settle(cluster, unsettled) is None
    (settled,) = compared
    assert settled.claim.submission > unsettled.snapshot.claim.submission
    assert not msgspec.convert(settled.metadata.graph, JobGraph).config.unaligned_checkpoints
    assert settled.metadata.in_flight == ()


def test_a_checkpoint_that_holds_rows_in_flight_itself_has_not_settled() -> None:
    _, unsettled = chosen_of(0)
    rows = sum(each.rows for each in unsettled.snapshot.metadata.in_flight)
    number = unsettled.snapshot.checkpoint_id
    text = f"checkpoint {number}, settled: it does not settle: {rows} rows are in flight in checkpoint {number}, too"
    assert unsettled.problem(unsettled.snapshot) == ("I7", text)


@pytest.mark.parametrize("seed", [303, 364])
def test_what_was_in_time_at_the_cut_is_so_behind_it(seed: int) -> None:
    result = run_seed(RunRequest(seed, "pressure")).result
    assert result.violations == ()
    assert result.sometimes["settled_in_flight"] == 1


def test_sources_that_give_more_are_told() -> None:
    cluster, unsettled = chosen_of(0)
    ((cut, positions),) = unsettled.cuts
    entry = positions["feed-0"][0]
    version, count, stripe, index = msgspec.msgpack.decode(entry)[:4]
    other = [msgspec.msgpack.encode([version, count, stripe, index + count, ""]), *positions["feed-0"][1:]]
    moved = replace(unsettled, cuts=((cut, {"feed-0": other}),))
    invariant, message = settle(cluster, moved) or ("", "")
    assert invariant == "I8"
    assert "other positions" in message


# ------------------------------------------------------------------------------------------------------------ what settles


def vertex(uid: str, *more: str) -> JobVertex:
    return JobVertex(uid, uid, 1, 8, tuple(OperatorDescription(each, each, each, "process") for each in (uid, *more)))


GRAPH = JobGraph(
    "job",
    (vertex("source"), vertex("map"), vertex("count", "behind"), vertex("aside")),
    tuple(
        JobEdge(number, source, source, target, 0, Partitioning.REBALANCE, overtakable=True)
        for number, (source, target) in enumerate((("source", "map"), ("map", "count"), ("source", "aside")))
    ),
    JobConfig(),
)


def in_flight(target: str, rows: int) -> Any:
    """Metadata with so many rows in flight to a vertex."""
    piece = ChannelPiece(0, 0, 1, rows)
    state = ChannelState("source", None, target, 0, 0, "rebalance", "input", 0, rows, InlineHandle(b"x"), (piece,))
    return SimpleNamespace(in_flight=(state,), graph=msgspec.to_builtins(GRAPH))


def counts(*given: Any) -> dict[str, dict[Any, Any]]:
    """Of no records."""
    return {"counts": {}}


def cut(uid: str = "count", *, reads: bool = True, drains: bool = False) -> CutExpectation:
    return CutExpectation(("source",), uid, counts, after_drains=counts if drains else None, beside=counts if reads else None)


@pytest.mark.parametrize(
    ("target", "rows", "expectation", "drained", "must"),
    [
        ("map", 1, cut(), (), True),
        ("map", 0, cut(), (), False),
        ("count", 1, cut(), (), False),
        ("count", 1, cut(reads=False), (), True),
        ("count", 1, cut(), ({},), False),
        ("count", 1, cut(drains=True), (), False),
        ("count", 1, cut(drains=True), ({},), True),
        ("count", 1, cut("behind"), (), True),
        ("aside", 1, cut(reads=False), (), False),
        ("aside", 1, cut(), ({},), False),
    ],
)
def test_which_cuts_must_settle(target: str, rows: int, expectation: CutExpectation, drained: Any, must: bool) -> None:
    assert must_settle(in_flight(target, rows), GRAPH, expectation, drained) is must


class Chosen:
    """A run's choice, given one checkpoint after the other."""

    def __init__(self, expectation: CutExpectation, **scenario: Any) -> None:
        self.now_ms = 0
        self.forks = 0
        ledger: Any = SimpleNamespace(completed={})
        self.ledger = ledger
        drains: Any = SimpleNamespace(before=lambda number: ())
        given: Any = SimpleNamespace(cuts=(expectation,), **{"outside": None, "splits": (), **scenario})
        world: Any = self
        self.choice = Choice(world, given, ledger, drains)

    def fork_stores(self) -> int:
        self.forks += 1
        return self.forks

    def take(self, number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, rows: int = 1) -> int | None:
        """Id of the choice behind it."""
        self.now_ms += 7
        metadata = in_flight("map", rows)
        metadata.operators = ()
        snapshot: Any = SimpleNamespace(
            checkpoint_id=number, kind=kind, metadata=metadata, view=DictView({}, "/state"), folder=f"chk-{number}"
        )
        self.ledger.completed[number] = snapshot
        self.choice.consider(snapshot)
        return None if self.choice.chosen is None else self.choice.chosen.snapshot.checkpoint_id


def test_each_checkpoint_of_a_run_may_be_the_one_and_few_stores_are_copied() -> None:
    run = Chosen(cut())
    chosen = [run.take(number) for number in range(1, 101)]
    assert chosen[0] == 1
    assert 1 < len(set(chosen)) == run.forks < 20
    again = Chosen(cut())
    assert [again.take(number) for number in range(1, 101)] == chosen


def test_what_does_not_settle_is_not_chosen() -> None:
    assert Chosen(cut()).take(1, rows=0) is None
    assert Chosen(cut()).take(1, CheckpointKind.SAVEPOINT) is None
    assert Chosen(cut(), outside="a target").take(1) is None
    assert Chosen(cut(), splits=("a source",)).take(1) is None
    assert Chosen(CutExpectation(("source",), "count", lambda positions: {})).take(1) is None
    late = Chosen(cut())
    late.ledger.completed[2] = None
    assert late.take(1) is None

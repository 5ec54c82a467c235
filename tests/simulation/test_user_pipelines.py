"""Pipelines of users under failures: right ones are never blamed, wrong ones are, by operator, key, rows and what they remember."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.chaos.campaign import user_runs as userruns
from holdfast.chaos.campaign.campaign import Campaign, Settings, Unwatched, run_campaign
from holdfast.chaos.campaign.determinism import DETERMINISM, run_twice
from holdfast.chaos.campaign.runner import Task
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.results import RunResult
from holdfast.chaos.cluster.world import Run, RunRequest
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.workloads import find_workload
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import examples
from tests.simulation.user_pipelines import HELPER, PIPELINES

KILLED = (Fault("kill_worker", "worker-0", 900),)
"""Behind the first checkpoints, in the middle of the input."""
RESTARTED = (Fault("user_error", "count", 900),)
"""No process dies."""


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "helper_of_pipelines.py").write_text(HELPER)
    path = folder / "user_pipelines.py"
    path.write_text(PIPELINES)
    return path


@pytest.fixture(scope="module", autouse=True)
def references_stay() -> Iterator[None]:
    """References of all pipelines here: several tests run the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(userruns, "KNOWN_MAX", 64)
        yield


def run(pipelines: Path, function: str, seed: int = 1, plan: tuple[Fault, ...] | None = None) -> RunResult:
    return run_seed(RunRequest(seed=seed, workload=f"{pipelines}:{function}", plan=plan)).result


# ------------------------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("function", ["declared", pytest.param("mapped", marks=pytest.mark.endurance), "windowed"])
def test_output_that_is_a_function_of_the_input_is_compared_row_by_row(pipelines: Path, function: str) -> None:
    for seed in range(examples(1)):
        result = run(pipelines, function, seed)
        assert (result.violations, result.dependences) == ((), ()), seed


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        pytest.param("totals_said", "totals", marks=pytest.mark.endurance),
        ("running_said", "running"),
        pytest.param("deduplicated_said", "first", marks=pytest.mark.endurance),
        ("wall_clock_said", "stamp"),
    ],
)
def test_what_depends_on_order_or_time_is_judged_by_what_its_user_says(pipelines: Path, function: str, operator: str) -> None:
    for seed in range(examples(1)):
        result = run(pipelines, function, seed)
        assert result.violations == (), seed
        (found,) = result.dependences
        assert (found.sink, found.operator, found.judged) == ("out", operator, True)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        pytest.param("totals", "totals", marks=pytest.mark.endurance),
        pytest.param("running", "running", marks=pytest.mark.endurance),
        pytest.param("deduplicated", "first", marks=pytest.mark.endurance),
        ("wall_clock", "stamp"),
    ],
)
def test_of_which_nothing_is_said_that_is_told_and_not_judged(pipelines: Path, function: str, operator: str) -> None:
    result = run(pipelines, function, 1, KILLED)
    assert (result.violations, result.restarts > 0) == ((), True)
    (found,) = result.dependences
    assert (found.operator, found.judged) == (operator, False)
    told = str(found)
    assert "depends on the order of arrival, or on time" in told
    assert f"operator {operator!r} gave other rows" in told
    assert found.difference.expected.startswith("{'key': ")
    assert found.difference.found.startswith("{'key': ")
    if operator != "stamp":  # whose rows have no key
        assert found.difference.key == "key=0"


@pytest.mark.parametrize(("function", "judged"), [("sums", False), ("sums_said", True)])
def test_how_many_rows_a_running_aggregate_gives_is_no_violation(pipelines: Path, function: str, judged: bool) -> None:
    for seed in (0, 1, 2):
        result = run(pipelines, function, seed)
        assert [(found.operator, found.judged) for found in result.dependences] == [("sums", judged)], seed
        assert result.violations == (), seed


def test_where_batches_end_is_no_violation_even_if_no_order_without_faults_shows_it(pipelines: Path) -> None:
    results = [run(pipelines, "pairs", seed) for seed in (5, 6, 9)]
    assert all(result.violations == () for result in results)
    found = [each for result in results for each in result.dependences if each.batches]
    assert found
    assert "operator 'sums' gives a row for each batch that reaches it" in str(found[0])


RESCALED = (Fault("rescale", at_ms=600, amount=4),)


@pytest.mark.endurance
def test_a_difference_that_only_another_parallelism_shows_is_no_violation(pipelines: Path) -> None:
    assert run(pipelines, "parted", 1, KILLED).dependences == ()
    result = run(pipelines, "parted", 1, RESCALED)
    assert result.violations == ()
    (found,) = result.dependences
    assert (found.operator, found.judged, found.seed, found.parallelism) == ("totals", False, 1, 4)
    assert "(at parallelism 4)" in str(found)
    said = run(pipelines, "parted_said", 1, RESCALED)
    assert (said.violations, said.dependences) == ((), ())


# ------------------------------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize(
    ("function", "place", "plan"),
    [
        pytest.param("in_class", "InClass.counts", KILLED, marks=pytest.mark.endurance),
        ("in_class_later", "InClassLater.counts", KILLED),
        pytest.param("in_class_of_function", "Local.counts", KILLED, marks=pytest.mark.endurance),
        pytest.param("first_in_class", "FirstInClass.firsts", KILLED, marks=pytest.mark.endurance),
        pytest.param("first_in_class_later", "FirstInClassLater.firsts", KILLED, marks=pytest.mark.endurance),
        ("first_in_import", "helper_of_pipelines.FIRSTS", KILLED),
        pytest.param("in_global", "TOTALS", KILLED, marks=pytest.mark.endurance),
        pytest.param("in_helper", "helper_of_pipelines.COUNTS", KILLED, marks=pytest.mark.endurance),
        pytest.param("in_import", "helper_of_pipelines.COUNTS", KILLED, marks=pytest.mark.endurance),
        pytest.param("in_instance", "self.counts", KILLED, marks=pytest.mark.endurance),
        pytest.param("in_closure", "counts", KILLED, marks=pytest.mark.endurance),
        ("in_global", "TOTALS", RESTARTED),
        pytest.param("in_import", "helper_of_pipelines.COUNTS", RESTARTED, marks=pytest.mark.endurance),
    ],
)
def test_state_that_is_not_declared_is_found_and_named(pipelines: Path, function: str, place: str, plan: tuple[Fault, ...]) -> None:
    result = run(pipelines, function, 2, plan)
    (violation,) = result.violations
    assert violation.invariant == "I1"
    assert violation.message.startswith("sink 'out', operator 'count': key=")
    assert "instead of {'key': " in violation.message
    assert f"hint: `{place}` of operator 'count' changed while it ran and is no declared state" in violation.message
    assert violation.cause_ms is not None
    assert 900 <= violation.cause_ms < violation.at_ms


def test_state_that_is_not_declared_is_found_where_only_the_last_rows_are_compared(pipelines: Path) -> None:
    result = run(pipelines, "mixed_in_class", 1, KILLED)
    (violation,) = result.violations
    assert violation.invariant == "expect"
    assert violation.message.startswith("sink 'out', operator 'totals', last row of each key: key=")
    assert "`MixedInClass.totals`" in violation.message


def test_drawn_faults_find_it_too(pipelines: Path) -> None:
    found = [run(pipelines, "in_class_later", seed).violations for seed in range(1, 1 + examples(2))]
    assert any(found)
    assert not all(found)  # where no process died behind the first records, nothing was lost


def test_a_declared_constant_and_a_cache_that_does_not_change_are_no_hint(pipelines: Path) -> None:
    sabotaged = run_seed(RunRequest(seed=1, workload=f"{pipelines}:declared", plan=KILLED, sabotage="replayed_record")).result
    assert sabotaged.violations
    assert "hint" not in sabotaged.violations[0].message


def test_a_broken_rule_of_the_product_shows_in_the_last_rows_of_each_key(pipelines: Path) -> None:
    request = RunRequest(seed=1, workload=f"{pipelines}:totals_said", plan=KILLED, sabotage="replayed_record")
    (violation,) = run_seed(request).result.violations
    assert violation.invariant == "expect"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("never_true", "without any fault: sink 'out', operator 'count': invariant few does not hold: it returned False"),
        ("raises", "without any fault: sink 'out', operator 'count': invariant mistaken raised KeyError: 'nothing'"),
    ],
)
def test_what_does_not_hold_without_any_fault_is_said_so(pipelines: Path, function: str, message: str) -> None:
    result = run(pipelines, function)
    (violation,) = result.violations
    assert (violation.invariant, violation.message, result.plan) == ("expect", message, ())


@pytest.mark.parametrize(
    ("function", "operator"), [pytest.param("by_chance", "draw", marks=pytest.mark.endurance), ("wall_clock", "stamp")]
)
def test_chance_and_the_wall_clock_are_found_by_running_twice(pipelines: Path, function: str, operator: str) -> None:
    (outcome,) = run_twice([Task(RunRequest(seed=0, workload=f"{pipelines}:{function}", plan=()))], jobs=1)
    violation = outcome.result.violations[0]
    assert violation.invariant == DETERMINISM
    assert f"operator {operator!r} gave other rows" in violation.message


def test_a_column_that_is_ignored_may_hold_the_time_of_day(pipelines: Path) -> None:
    (outcome,) = run_twice([Task(RunRequest(seed=0, workload=f"{pipelines}:wall_clock_said", plan=KILLED))], jobs=1)
    assert outcome.result.violations == ()


# ----------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_sink", r"expect\(\): there is no sink 'elsewhere' with committed output; sinks are out"),
        ("no_such_column", r"expect\(\): sink 'out' has no column 'kee'; it has key, n"),
        ("says_nothing", r"expect\(\) says nothing: give last_value_per_key="),
    ],
)
def test_an_expectation_of_nothing_is_refused(pipelines: Path, function: str, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        find_workload(f"{pipelines}:{function}")


def test_an_expectation_outside_of_a_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "outside_pipeline.py"
    path.write_text("import holdfast as hf\nhf.chaos.expect(last_value_per_key='key')\ndef build(env):\n    pass\n")
    with pytest.raises(InvalidConfigError, match=r"expect\(\) outside of a pipeline's function"):
        find_workload(f"{path}:build")


# --------------------------------------------------------------------------------------------------------------- repeating


def test_a_seed_gives_the_same_run_whatever_ran_before(pipelines: Path) -> None:
    request = RunRequest(seed=3, workload=f"{pipelines}:in_class_later")

    def run_afresh() -> Run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(userruns, "_known", {})
            return run_seed(request)

    first = run_afresh()
    run(pipelines, "totals", 5)
    run(pipelines, "in_class_later", 1)
    again = run_seed(request)
    afresh = run_afresh()
    assert first.result == again.result == afresh.result
    assert first.trace.lines() == again.trace.lines() == afresh.trace.lines()


@pytest.mark.endurance
def test_a_campaign_shows_the_events_around_the_cause(pipelines: Path) -> None:
    campaign = Campaign(seeds=1, start=1, workloads=(f"{pipelines}:in_class",), plan=(*KILLED, Fault("checkpoint", at_ms=700)))
    found = run_campaign(campaign, Settings(jobs=1, stop_after=1), Unwatched())
    (failure,) = found.failures
    assert (failure.around_cause, [fault.kind for fault in failure.faults.values()]) == (True, ["kill_worker"])
    told = "\n".join(failure.events)
    assert "worker-0.1       killed" in told
    assert "a2 from " in told
    assert "VIOLATION I1" in failure.events[-1]
    assert "DeleteFolder" not in told  # the job's ordinary end
    assert "hint: `InClass.counts`" in failure.message


def test_what_is_not_judged_is_in_the_summary(pipelines: Path) -> None:
    campaign = Campaign(seeds=1, workloads=(f"{pipelines}:totals",), plan=())
    summary = run_campaign(campaign, Settings(jobs=1), Unwatched()).summary
    assert (summary.violations, summary.unjudged) == (0, True)
    assert [each.sink for each in summary.dependences[f"{pipelines}:totals"]] == ["out"]
    assert msgspec.json.decode(msgspec.json.encode(summary))["dependences"]

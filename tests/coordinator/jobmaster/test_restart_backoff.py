"""Restart strategies: pauses, counts and what a new leader continues, as tables, and against a model that remembers everything."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.barriers.jobgraph import RESTART_MS_MAX, JobConfig, RestartStrategy
from holdfast.barriers.messages import TaskState
from holdfast.coordinator.ha.leadership import become_leader
from holdfast.coordinator.ha.records import AttemptRecord, BackoffRecord, LeaderRecord, decode_record
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.jobmaster.restart_backoff import RestartBackoff
from holdfast.coordinator.restore.plan import derive_setup
from holdfast.operators.spark.messages import restart_hint
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB

LOST, USER = "WorkerLost: slot 0", "UserFunctionError: no"
GROWING = RestartStrategy(delay_ms=100, delay_max_ms=2_000, backoff_multiplier=3, immediate_first=False)
THRESHOLD = msgspec.structs.replace(GROWING, reset_backoff_threshold_ms=1_000)
JITTER = msgspec.structs.replace(GROWING, jitter_factor=0.5)
RATE = RestartStrategy(
    "failure_rate", delay_ms=50, immediate_first=False, failures_per_interval_max=2, failure_rate_interval_ms=1_000
)


def backoff(strategy: RestartStrategy, restarts: int = 0, seed: int = 1) -> RestartBackoff:
    return RestartBackoff(strategy, restarts, random.Random(seed))


def pauses(strategy: RestartStrategy, story: str) -> list[int | None]:
    """What follows each failure of a story: `user@ms`, `lost@ms`, `checkpoint@ms`."""
    found, taken = backoff(strategy), []
    for event in story.split():
        what, _, at_ms = event.partition("@")
        if what == "checkpoint":
            found.progressed()
        else:
            error = USER if what == "user" else LOST
            taken.append(found.restart_delay_ms(Failure(error), same_failure=False, now_ms=int(at_ms)))
    return taken


@pytest.mark.parametrize(
    ("strategy", "story", "expected"),
    [
        (GROWING, "user@0 user@1 lost@2 user@3 user@4", [100, 300, 900, 2_000, 2_000]),
        (GROWING, "user@0 user@1 checkpoint@2 user@3 user@4", [100, 300, 100, 300]),
        (msgspec.structs.replace(GROWING, backoff_multiplier=1), "user@0 user@1 user@2", [100, 100, 100]),
        (msgspec.structs.replace(GROWING, backoff_multiplier=1.5), "user@0 user@1 user@2 user@3", [100, 150, 225, 337]),
        # of the second failure: 100 ms of pause and 999 ms without failure behind it, one too few
        (THRESHOLD, "user@0 user@1099 user@1100", [100, 300, 900]),
        (THRESHOLD, "user@0 user@1100 user@1101", [100, 100, 300]),
        (THRESHOLD, "user@0 checkpoint@1 user@2", [100, 300]),
        (msgspec.structs.replace(THRESHOLD, immediate_first=True), "lost@0 lost@1 lost@1101 lost@1102", [0, 100, 0, 100]),
        (msgspec.structs.replace(GROWING, attempts_before_reset_max=2), "user@0 user@1 user@2", [100, 300, None]),
        (
            msgspec.structs.replace(GROWING, attempts_before_reset_max=2),
            "user@0 user@1 checkpoint@2 user@3 user@4 user@5",
            [100, 300, 100, 300, None],
        ),
        (msgspec.structs.replace(THRESHOLD, attempts_before_reset_max=1), "user@0 user@1100 user@1101", [100, 100, None]),
        (msgspec.structs.replace(GROWING, attempts_before_reset_max=0), "user@0", [None]),
        (msgspec.structs.replace(GROWING, attempts_max=1), "user@0 checkpoint@1 user@2", [100, None]),
        (RATE, "user@0 user@1 user@2", [50, 50, None]),
        (RATE, "user@0 checkpoint@1 user@2 checkpoint@3 user@4", [50, 50, None]),
        (RATE, "user@0 user@500 user@1000", [50, 50, None]),
        (RATE, "user@0 user@500 user@1001 user@1500", [50, 50, 50, None]),
        (RATE, "user@0 user@500 user@1001 user@1501 user@2002", [50, 50, 50, 50, 50]),
        (msgspec.structs.replace(RATE, immediate_first=True), "lost@0 lost@1 lost@2", [0, 50, None]),
        (msgspec.structs.replace(RATE, attempts_max=1), "user@0 user@5000", [50, None]),
    ],
)
def test_pauses(strategy: RestartStrategy, story: str, expected: list[int | None]) -> None:
    assert pauses(strategy, story) == expected


def test_flinks_names_stand_for_the_strategies_with_their_defaults() -> None:
    assert RestartStrategy.of("failure-rate") == RestartStrategy("failure_rate")
    assert pauses(RestartStrategy("failure_rate"), "user@0 user@60000") == [1_000, None]
    assert pauses(RestartStrategy("failure_rate"), "user@0 user@60001") == [1_000, 1_000]


def test_jitter_is_drawn_once_for_each_failure_within_its_bounds() -> None:
    found = [backoff(JITTER, seed=seed).restart_delay_ms(Failure(USER), same_failure=False, now_ms=0) for seed in range(200)]
    drawn = [pause for pause in found if pause is not None]
    assert (len(drawn), min(drawn), max(drawn)) == (200, 50, 150)
    assert found[7] == backoff(JITTER, seed=7).restart_delay_ms(Failure(USER), same_failure=False, now_ms=0)


def test_jitter_never_makes_a_pause_longer_than_the_longest() -> None:
    strategy = msgspec.structs.replace(JITTER, delay_ms=2_000, jitter_factor=1)
    found = [backoff(strategy, seed=seed).restart_delay_ms(Failure(USER), same_failure=False, now_ms=0) for seed in range(100)]
    assert max(pause for pause in found if pause is not None) == 2_000
    assert min(pause for pause in found if pause is not None) < 500


def test_without_jitter_nothing_is_drawn() -> None:
    rng = random.Random(1)
    before = rng.getstate()
    found = RestartBackoff(RestartStrategy(), 0, rng)
    assert found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=0) == 1_000
    assert rng.getstate() == before


# --------------------------------------------------------------------------------------------------------- new leaders


def resumed(strategy: RestartStrategy, record: BackoffRecord, *, progressed: bool = False, wall_ms: int) -> RestartBackoff:
    """Under another leader, whose monotonic clock stands at 7."""
    found = backoff(strategy, seed=2)
    found.resume(record, progressed=progressed, now_ms=7, wall_ms=wall_ms)
    return found


def failed_once(strategy: RestartStrategy) -> tuple[int, BackoffRecord]:
    """The pause, and what is on record of it; the failure came at 5,000 by the wall clock."""
    found = backoff(strategy)
    pause = found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=0)
    record = found.record(now_ms=3, wall_ms=5_003)
    assert pause is not None
    assert record is not None
    return pause, record


def test_a_new_leader_continues_the_pause_as_it_was_drawn() -> None:
    pause, record = failed_once(JITTER)
    found = resumed(JITTER, record, wall_ms=5_020)
    assert found.restart_delay_ms(Failure(LOST), same_failure=False, now_ms=17) == pause - 30
    assert found.restarts == 0, "it is the failure that its predecessor counted"
    assert found.record(now_ms=17, wall_ms=5_030) == record
    assert found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=2_000) is not None
    assert found.restarts == 1


def test_a_pause_that_ended_while_the_leader_waited_for_workers_is_over() -> None:
    pause, record = failed_once(JITTER)
    found = resumed(JITTER, record, wall_ms=5_020)
    assert found.restart_delay_ms(Failure(LOST), same_failure=False, now_ms=7 + pause) == 0
    assert found.restarts == 0


def test_a_failure_behind_the_pause_is_another_one() -> None:
    pause, record = failed_once(GROWING_LASTING)
    found = resumed(GROWING_LASTING, record, wall_ms=5_000 + pause)
    assert found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=8) == 300


GROWING_LASTING = msgspec.structs.replace(GROWING, attempts_before_reset_max=5)


def test_tasks_that_all_run_have_been_deployed_whatever_the_clocks_say() -> None:
    _, record = failed_once(GROWING_LASTING)
    found = resumed(GROWING_LASTING, record, wall_ms=5_000)
    found.recovered()
    assert found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=8) == 300


@pytest.mark.parametrize(("strategy", "expected"), [(GROWING_LASTING, 100), (THRESHOLD, 300)])
def test_a_checkpoint_since_the_record_counts_for_a_new_leader(strategy: RestartStrategy, expected: int) -> None:
    _, record = failed_once(strategy)
    found = resumed(strategy, record, progressed=True, wall_ms=6_000)
    assert found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=8) == expected


def test_time_without_failure_goes_on_under_a_new_leader() -> None:
    _, record = failed_once(THRESHOLD)
    assert resumed(THRESHOLD, record, wall_ms=6_098).restart_delay_ms(Failure(USER), same_failure=False, now_ms=8) == 300
    assert resumed(THRESHOLD, record, wall_ms=6_099).restart_delay_ms(Failure(USER), same_failure=False, now_ms=8) == 100


def test_failures_under_a_former_leader_count_for_the_rate() -> None:
    found = backoff(RATE)
    for now_ms in (0, 400):
        found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=now_ms)
    record = found.record(now_ms=400, wall_ms=5_400)
    assert record is not None
    assert record.failures_ms == (5_000, 5_400)
    late = resumed(RATE, record, wall_ms=5_600)
    assert late.restart_delay_ms(Failure(USER), same_failure=False, now_ms=7) is None
    later = resumed(RATE, record, wall_ms=6_001)
    assert later.restart_delay_ms(Failure(USER), same_failure=False, now_ms=7) == 50


def test_a_clock_that_is_behind_makes_no_pause_longer_and_one_ahead_ends_it() -> None:
    pause, record = failed_once(JITTER)
    behind = resumed(JITTER, record, wall_ms=0)
    assert behind.restart_delay_ms(Failure(LOST), same_failure=False, now_ms=7) == pause
    ahead = resumed(JITTER, record, wall_ms=10**9)
    assert ahead.restart_delay_ms(Failure(LOST), same_failure=False, now_ms=7) not in (None, 0)
    assert ahead.restarts == 1


@pytest.mark.parametrize("strategy", [RestartStrategy(), RestartStrategy("fixed_delay"), GROWING])
def test_of_strategies_that_end_with_their_leader_nothing_is_on_record(strategy: RestartStrategy) -> None:
    found = backoff(strategy)
    found.restart_delay_ms(Failure(USER), same_failure=False, now_ms=0)
    assert found.record(now_ms=0, wall_ms=0) is None


def test_records_written_before_open() -> None:
    attempt = b'{"attempt":3,"epoch":1,"submission":1,"graph_hash":"0","slots":1,"restored":null,"restarts":2,"nonce":"n"}'
    assert decode_record(AttemptRecord, attempt, "attempts/3.json").backoff is None
    stored = b'{"kind":"exponential_delay","attempts_max":3,"delay_ms":10,"immediate_first":false,"delay_max_ms":35}'
    strategy = msgspec.json.decode(stored, type=RestartStrategy)
    strategy.check()
    assert pauses(strategy, "user@0 user@1 user@2 checkpoint@3 user@4") == [10, 20, 35, None]


def test_the_end_of_the_pause_is_on_record_with_the_attempt_and_outlasts_its_leader() -> None:
    strategy = RestartStrategy(delay_ms=1_000, delay_max_ms=10_000, jitter_factor=0.5)
    rig = Rig(restart=strategy).run()
    rig.report(0, 1, TaskState.FAILED, USER)
    rig.report(1, 1, TaskState.CANCELED)
    pause = rig.master.lifecycle.restarts_at_ms - 1_000
    assert 500 <= pause <= 1_500
    assert rig.state == "RESTARTING"
    take_over(rig, after_ms=200)
    assert (rig.state, rig.restarts) == ("RECONCILING", 1)
    register_without_tasks(rig)
    assert (rig.state, rig.restarts) == ("RESTARTING", 1)
    assert rig.master.lifecycle.restarts_at_ms == 1_000 + pause
    rig.pass_time(pause - 201)
    assert rig.state == "RESTARTING"
    rig.pass_time(1)
    assert rig.state == "RUNNING"
    assert rig.master.lifecycle.attempt == 3
    assert rig.master.lifecycle.restarts_at_ms == -1


def test_a_rate_is_exceeded_over_two_leaders() -> None:
    rig = Rig(restart=RestartStrategy("failure_rate", delay_ms=100, failures_per_interval_max=1)).run()
    rig.report(0, 1, TaskState.FAILED, USER)
    rig.report(1, 1, TaskState.CANCELED)
    take_over(rig, after_ms=100)
    register_without_tasks(rig)
    assert (rig.state, rig.restarts) == ("FAILING", 1)
    assert f"{JOB}/results/1.json" in rig.storage.files


def test_the_default_begins_with_the_first_pause_under_a_new_leader() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.FAILED, USER)
    rig.report(1, 1, TaskState.CANCELED)
    take_over(rig, after_ms=200)
    register_without_tasks(rig)
    assert rig.restarts == 2
    assert rig.master.lifecycle.restarts_at_ms in (-1, 1_200), "a lost worker restarts at once"


def take_over(rig: Rig, *, after_ms: int) -> None:
    """Another leader recovers the job from its directory; its monotonic clock begins at 0."""
    paths, wall_ms = JobPaths(JOB), rig.wall_ms + after_ms
    epoch = run_flow(become_leader(paths, LeaderRecord(0, "leader-2")), rig.storage)
    recovered = run_flow(recover_job(paths, Takeover(epoch, "leader-2", 0)), rig.storage)
    submission = recovered.newest_submission
    assert submission is not None
    rig.open(derive_setup(recovered, submission, epoch=epoch, directory_nonce="directory"), wall_ms=wall_ms)


def register_without_tasks(rig: Rig) -> None:
    for slot in range(2):
        rig.register(slot)


# ----------------------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backoff_multiplier", 0.99),
        ("backoff_multiplier", -2.0),
        ("backoff_multiplier", math.inf),
        ("backoff_multiplier", math.nan),
        ("jitter_factor", -0.01),
        ("jitter_factor", 1.01),
        ("jitter_factor", math.nan),
        ("reset_backoff_threshold_ms", 0),
        ("attempts_before_reset_max", -1),
        ("failures_per_interval_max", 0),
        ("failures_per_interval_max", 1_001),
        ("failure_rate_interval_ms", 0),
        ("delay_max_ms", 999),
        ("delay_ms", -1),
        ("delay_ms", RESTART_MS_MAX + 1),
        ("delay_ms", 10**400),
        ("delay_max_ms", 10**400),
        ("reset_backoff_threshold_ms", 10**400),
        ("failure_rate_interval_ms", 10**400),
        ("attempts_max", 2**31),
        ("attempts_before_reset_max", 2**31),
        ("delay_ms", 1.5),
        ("delay_ms", math.inf),
        ("delay_ms", True),
        ("attempts_max", None),
        ("backoff_multiplier", "2"),
        ("jitter_factor", None),
        ("immediate_first", 1),
    ],
)
def test_values_out_of_bounds_name_their_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match=f"restart: {field} ") as caught:
        JobConfig(restart=RestartStrategy(**{field: value})).check()  # type: ignore[arg-type]
    assert caught.value.setting == f"restart.{field}"


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("strategy", "words", "hint"),
    [
        (
            RestartStrategy(),
            "exponential_delay: pause 1 s, times 2 up to 60 s; first one again after a completed checkpoint",
            "again after 1 s, then twice as long each time, up to 60 s.",
        ),
        (
            RestartStrategy(
                backoff_multiplier=1.5, jitter_factor=0.1, reset_backoff_threshold_ms=5_000, attempts_before_reset_max=9
            ),
            "exponential_delay: pause 1 s, times 1.5 up to 60 s, jitter 0.1; first one again after 5 s without a failure; at "
            "most 9 restarts before that",
            "again after 1 s, then 1.5 times as long each time, up to 60 s.",
        ),
        (
            RestartStrategy("fixed_delay", attempts_max=3, delay_ms=500),
            "fixed_delay: pause 0.5 s; at most 3 restarts in all",
            "again every 0.5 s.",
        ),
        (
            RestartStrategy("failure_rate", failures_per_interval_max=3),
            "failure_rate: pause 1 s; a failure after 3 within 60 s ends the job",
            "again every 1 s, until a failure comes after 3 within 60 s.",
        ),
        (RestartStrategy("none"), "none: the first failure ends the job", ""),
    ],
)
def test_words_for_users(strategy: RestartStrategy, words: str, hint: str) -> None:
    assert strategy.describe() == words
    assert hint in restart_hint(USER, strategy)


@pytest.mark.parametrize(("kind", "way"), [("InvalidRecordError", "side_output(hf.DEAD_LETTERS)"), ("InvalidRowError", "filter()")])
def test_rows_that_can_not_be_read_or_written_have_a_hint_of_their_own(kind: str, way: str) -> None:
    hint = restart_hint(f"{kind}: split 'a', record at 1", RestartStrategy())
    assert hint.startswith("The job comes to this row again after 1 s")
    assert way in hint
    assert "on_error" not in hint


# ---------------------------------------------------------------------------------------------------------------- model


@dataclass
class Restarted:
    """One failure that was followed by a restart, by the wall clock."""

    at_ms: int
    pause_ms: int
    is_pause: bool


class Strategies(RuleBasedStateMachine):
    """Failures, checkpoints, time and new leaders in any order. The model keeps every restart, and counts from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_ms = self.offset_ms = 0
        self.restarts: list[Restarted] = []
        self.progress_ms: list[int] = []
        self.since_reset: list[Restarted] = []
        self.stored: BackoffRecord | None = None
        self.has_progressed = self.is_unfinished = self.is_over = False

    @initialize(
        kind=st.sampled_from(["fixed_delay", "exponential_delay", "exponential_delay", "failure_rate"]),
        delay_ms=st.integers(0, 300),
        longer_ms=st.integers(0, 3_000),
        multiplier=st.sampled_from([1, 1.5, 2, 10]),
        threshold_ms=st.none() | st.integers(1, 2_000),
        jitter=st.sampled_from([0, 0.1, 1]),
        before_reset=st.sampled_from([2**31 - 1, 2, 4]),
        failures=st.integers(1, 4),
        interval_ms=st.integers(1, 2_000),
        immediate=st.booleans(),
        seed=st.integers(0, 5),
    )
    def begin(
        self,
        kind: str,
        delay_ms: int,
        longer_ms: int,
        multiplier: float,
        threshold_ms: int | None,
        jitter: float,
        before_reset: int,
        failures: int,
        interval_ms: int,
        immediate: bool,
        seed: int,
    ) -> None:
        self.strategy = RestartStrategy(
            kind,
            12,
            delay_ms,
            immediate,
            delay_ms + longer_ms,
            multiplier,
            threshold_ms,
            jitter,
            before_reset,
            failures,
            interval_ms,
        )
        self.strategy.check()
        self.rng = random.Random(seed)
        self.backoff = RestartBackoff(self.strategy, 0, self.rng)

    @property
    def now_ms(self) -> int:
        return self.wall_ms + self.offset_ms

    @property
    def resets_by_time(self) -> bool:
        return self.strategy.kind == "exponential_delay" and self.strategy.reset_backoff_threshold_ms is not None

    @rule(by_ms=st.integers(0, 1_500))
    def pass_time(self, by_ms: int) -> None:
        self.wall_ms += by_ms

    @precondition(lambda self: self.restarts)
    @rule(at_threshold=st.booleans(), nth=st.integers(0, 11), beside_ms=st.integers(-1, 1))
    def pass_time_to_a_bound(self, at_threshold: bool, nth: int, beside_ms: int) -> None:
        """The moment at which a failure ceases to count, or the backoff is reset, or one beside it; if it is not over."""
        last, some = self.restarts[-1], self.restarts[nth % len(self.restarts)]
        bound_ms = some.at_ms + self.strategy.failure_rate_interval_ms
        if at_threshold:
            bound_ms = last.at_ms + last.pause_ms + (self.strategy.reset_backoff_threshold_ms or 0)
        self.wall_ms = max(self.wall_ms, bound_ms + beside_ms)

    @precondition(lambda self: not self.is_over and not self.is_unfinished)
    @rule()
    def complete_checkpoint(self) -> None:
        self.backoff.recovered()
        self.backoff.progressed()
        self.has_progressed = True
        if not self.resets_by_time:
            self.since_reset.clear()

    @precondition(lambda self: not self.is_over)
    @rule(is_users=st.booleans())
    def fail(self, is_users: bool) -> None:
        found = self.backoff.restart_delay_ms(Failure(USER if is_users else LOST), same_failure=False, now_ms=self.now_ms)
        if self.is_unfinished:
            last = self.restarts[-1]
            assert found == max(0, last.at_ms + last.pause_ms - self.wall_ms)
            self.is_unfinished = False
        else:
            self._judge(found, is_users=is_users)
        assert self.backoff.restarts == len(self.restarts)
        self.stored, self.has_progressed = self.backoff.record(now_ms=self.now_ms, wall_ms=self.wall_ms), False

    def _judge(self, found: int | None, *, is_users: bool) -> None:
        strategy = self.strategy
        if self.resets_by_time and self.restarts:
            quiet_ms = self.wall_ms - self.restarts[-1].at_ms - self.restarts[-1].pause_ms
            if quiet_ms >= (strategy.reset_backoff_threshold_ms or 0):
                self.since_reset.clear()
        recent = sum(self.wall_ms - each.at_ms <= strategy.failure_rate_interval_ms for each in self.restarts)
        allowed = len(self.restarts) < 12
        if strategy.kind == "failure_rate":
            allowed = allowed and recent < strategy.failures_per_interval_max
        elif strategy.kind == "exponential_delay":
            allowed = allowed and len(self.since_reset) < strategy.attempts_before_reset_max
        assert (found is not None) == allowed
        if found is None:
            self.is_over = True
            return
        at_once = not self.since_reset and strategy.immediate_first and not is_users
        if at_once:
            assert found == 0
        else:
            base_ms = strategy.delay_ms
            if strategy.kind == "exponential_delay":
                exact = strategy.delay_ms * strategy.backoff_multiplier ** sum(each.is_pause for each in self.since_reset)
                base_ms = int(min(strategy.delay_max_ms, exact))
                span_ms = int(base_ms * strategy.jitter_factor)
                assert base_ms - span_ms <= found <= min(base_ms + span_ms, strategy.delay_max_ms)
            else:
                assert found == base_ms
        restart = Restarted(self.wall_ms, found, not at_once)
        self.restarts.append(restart)
        self.since_reset.append(restart)

    @precondition(lambda self: not self.is_over)
    @rule(offset_ms=st.integers(-(10**6), 10**6))
    def change_leader(self, offset_ms: int) -> None:
        """The new one knows the job's records, and has another monotonic clock."""
        self.offset_ms = offset_ms
        self.backoff = RestartBackoff(self.strategy, len(self.restarts), self.rng)
        if self.stored is None:
            self.since_reset.clear()
            return
        self.backoff.resume(self.stored, progressed=self.has_progressed, now_ms=self.now_ms, wall_ms=self.wall_ms)
        last = self.restarts[-1]
        self.is_unfinished = self.wall_ms < last.at_ms + last.pause_ms and not self.has_progressed


Strategies.TestCase.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
TestStrategies = Strategies.TestCase

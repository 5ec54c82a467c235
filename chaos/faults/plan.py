"""From a seed to a plan of faults: kinds, times, durations, probabilities. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable

from holdfast.barriers.jobgraph import JobConfig
from holdfast.chaos.faults.combinations import draw_combination
from holdfast.chaos.faults.faults import KINDS, MESSAGES, STORE_OPERATIONS, Fault, FaultKind, encode_plan
from holdfast.chaos.workloads.scenario import Scenario

FAULTS_MAX = 6
"""Most faults of a drawn plan in a short job; a longer one gets more, in proportion."""
SHORT_MS = 2_000
"""Duration of a short job, ms."""
FAULTS_LIMIT = 60
"""Most faults of any drawn plan."""

COORDINATOR_POINTS = (
    "coordinator.PutIfAbsent.claim",
    "coordinator.PutIfAbsent.claim.done",
    "coordinator.PutIfAbsent.metadata",
    "coordinator.PutIfAbsent.metadata.done",
    "coordinator.PutIfAbsent.attempts",
    "coordinator.PutIfAbsent.attempts.done",
    "coordinator.PutIfAbsent.submissions.done",
    "coordinator.PutIfAbsent.results",
    "coordinator.PutIfAbsent.results.done",
    "coordinator.recovering.",
    "coordinator.recovering.PutIfAbsent.metadata.done",
    "coordinator.DeleteFile",
    "coordinator.DeleteFolder",
    "coordinator.send.trigger",
    "coordinator.send.complete",
    "coordinator.send.deploy",
    "coordinator.send.finish",
    "coordinator.send.abort",
    "coordinator.receive.acks",
    "coordinator.answer.acks",
    "coordinator.receive.register",
    "coordinator.receive.states",
    "coordinator.answer.submit",
    "coordinator.receive.wish",
)
WORKER_POINTS = (
    "worker.receive.deploy",
    "worker.receive.trigger",
    "worker.receive.complete",
    "worker.receive.finish",
    "worker.receive.abort",
    "worker.receive.cancel",
    "worker.restore.",
    "worker.process.",
    "worker.snapshot.",
    "worker.close.",
    "worker.WriteFile.",
    "worker.WriteFile.staged.done",
    "worker.LinkFile.",
    "worker.PutIfAbsent.log",
    "worker.PutIfAbsent.log.done",
    "worker.DeleteFile.",
    "worker.ListFolder.",
)
"""Points at which processes are killed: between any two steps of the protocols."""

_DRAWN_OPERATIONS = tuple(name for name in STORE_OPERATIONS if name != "SyncFile")
"""`all` hits the other one, too: as a name of its own it would give every seed another plan."""

RETUNE = "retune"
"""Drawn beside the other faults."""
RETUNED_SHARE = 0.2
"""Share of the plans with changes of settings."""
RETUNE_POINTS = ("coordinator.PutIfAbsent.config", "coordinator.PutIfAbsent.config.done", "coordinator.answer.wish")

_FREQUENT = frozenset(
    {"kill_worker", "kill_coordinator", "kill_driver", "old_leader_wakes", "pause_worker", "user_error", "power_loss"}
)


_WHOLE = frozenset(
    {
        "pause_worker",
        "pause_coordinator",
        "second_coordinator",
        "old_leader_wakes",
        "disk_full",
        "local_disk_full",
        "partition",
        "partition_members",
    }
)
"""Kinds that last, and hit everything meanwhile."""


def draw_plan(
    rng: random.Random,
    kinds: tuple[str, ...],
    scenario: Scenario,
    slots: int,
    *,
    faults: int | None = None,
    horizon_ms: int = SHORT_MS,
    config: JobConfig | None = None,
) -> tuple[Fault, ...]:
    """A plan for one run of a job with so many worker slots. `faults`: how many; None: 1..FAULTS_MAX, more in a long job, and now
    and then a combination that fits its `config`. Faults begin before `horizon_ms`, about the end of the job without them."""
    usable = [kind for kind in kinds if kind != RETUNE and _fits(kind, scenario, slots)]
    if not usable:
        return draw_retunes(rng, faults or rng.randint(1, FAULTS_MAX), horizon_ms) if RETUNE in kinds else ()
    weights = [3 if kind in _FREQUENT else 1 for kind in usable]
    count = faults if faults is not None else min(FAULTS_LIMIT, rng.randint(1, FAULTS_MAX) * max(1, horizon_ms // SHORT_MS))
    plan = tuple(_draw(rng, KINDS[rng.choices(usable, weights)[0]], scenario, slots, horizon_ms) for _ in range(count))
    if faults is not None or config is None:
        return plan
    plan += draw_combination(rng, tuple(usable), config, scenario.operators, horizon_ms)
    own = random.Random(encode_plan(plan))  # so that older seeds keep their other faults
    return plan + draw_retunes(own, own.randint(1, 3), horizon_ms) if RETUNE in kinds and own.random() < RETUNED_SHARE else plan


def draw_retunes(rng: random.Random, count: int, horizon_ms: int) -> tuple[Fault, ...]:
    """Changes of settings at random moments, half of them with the death or the sleep of a coordinator around their record."""
    faults = [Fault(RETUNE, at_ms=rng.randrange(20, horizon_ms)) for _ in range(count)]
    if rng.random() < 0.5:
        kind = rng.choice(("kill_coordinator", "old_leader_wakes", "pause_coordinator"))
        lasts = KINDS[kind].lasts
        point = rng.choice(RETUNE_POINTS)
        faults.append(Fault(kind, on=point, duration_ms=800 if lasts else 0, amount=0 if lasts else rng.choice((1, 50, 300))))
    return tuple(faults)


def _fits(kind: str, scenario: Scenario, slots: int) -> bool:
    if kind == "partition_members":
        return scenario.members > 1
    if kind == "rescale":
        return scenario.may_rescale
    if kind == "drain":
        return scenario.may_drain
    if kind == "rewind":
        return scenario.may_rewind
    if kind in ("cut_link", "slow_link"):
        return slots > 1
    return bool(scenario.operators) or kind not in ("slow_operator", "blocked_operator", "user_error")


def _draw(rng: random.Random, kind: FaultKind, scenario: Scenario, slots: int, horizon_ms: int) -> Fault:
    moment: dict[str, object] = {"at_ms": rng.randrange(20, horizon_ms)}
    points = _points(kind.name)
    if points and rng.random() < 0.7:
        moment = {"on": rng.choice(points), "nth": _nth(rng)}
    duration_ms = rng.choice((50, 200, 800, 2_500)) if kind.lasts else 0
    return Fault(
        kind.name,
        target=_target(rng, kind.name, scenario, slots),
        duration_ms=duration_ms,
        probability=rng.choice((1.0, 0.5, 0.2, 0.05)) if kind.lasts and _is_window(kind.name) else 1.0,
        amount=_amount(rng, kind.name),
        **moment,  # type: ignore[arg-type]
    )


def _is_window(kind: str) -> bool:
    return kind not in _WHOLE


def _nth(rng: random.Random) -> int:
    return min(30, 1 + int(rng.expovariate(0.25)))


def _points(kind: str) -> tuple[str, ...]:
    match kind:
        case "kill_coordinator" | "pause_coordinator" | "second_coordinator" | "old_leader_wakes":
            return COORDINATOR_POINTS
        case "kill_worker" | "pause_worker" | "hang_worker" | "damage_copies" | "local_disk_full":
            return WORKER_POINTS
        case "forged_frames" | "forged_registration":
            return WORKER_POINTS
        case "kill_driver" | "kill_all" | "power_loss":
            return (*COORDINATOR_POINTS, *WORKER_POINTS)
        case "user_error":
            return ("worker.snapshot.", "worker.restore.", "worker.close.", "worker.process.", "coordinator.PutIfAbsent.metadata")
        case _:
            return ()


def _target(rng: random.Random, kind: str, scenario: Scenario, slots: int) -> str:
    choose: Callable[[], str] | None = {
        "kill_worker": lambda: _worker(rng, slots),
        "pause_worker": lambda: _worker(rng, slots),
        "hang_worker": lambda: _worker(rng, slots),
        "damage_copies": lambda: _worker(rng, slots),
        "local_disk_full": lambda: _worker(rng, slots),
        "forged_frames": lambda: _worker(rng, slots),
        "partition": lambda: _worker(rng, slots),
        "forged_ack": lambda: _worker(rng, slots),
        "forged_registration": lambda: _worker(rng, slots),
        "break_stream": lambda: _worker(rng, slots),
        "kill_recovering": lambda: rng.choice(("worker", "coordinator")),
        "clock_jump": lambda: rng.choice(("coordinator", "driver", _worker(rng, slots))),
        "cut_link": lambda: _link(rng, slots),
        "slow_link": lambda: rng.choice(("all", _link(rng, slots))),
        "disk_full": lambda: rng.choice(("all", "coordinator:", "worker:")),
        "slow_operator": lambda: rng.choice(scenario.operators),
        "blocked_operator": lambda: rng.choice(scenario.operators),
        "user_error": lambda: rng.choice(scenario.operators),
    }.get(kind)
    if choose is not None:
        return choose()
    if kind in ("drop", "delay", "duplicate", "reorder"):
        answers = tuple(f"answer:{name}" for name in ("register", "acks", "states", "heartbeat"))
        return rng.choice((*MESSAGES, *answers, "all"))
    if kind.startswith("store_"):
        who = rng.choice(("", "coordinator:", "worker:"))
        return who + rng.choice(
            ("all", "PutIfAbsent", "PutIfAbsent/_metadata", "PutIfAbsent/_claim", "PutIfAbsent/log", *_DRAWN_OPERATIONS)
        )
    return ""


def _worker(rng: random.Random, slots: int) -> str:
    return rng.choice(("workers", f"worker-{rng.randrange(slots)}"))


def _link(rng: random.Random, slots: int) -> str:
    one, other = rng.sample(range(slots), 2)
    return f"{one}-{other}"


def _amount(rng: random.Random, kind: str) -> int:
    match kind:
        case "kill_coordinator" | "kill_driver" | "kill_all" | "power_loss":
            return rng.choice((1, 50, 300, 1_500))
        case "delay" | "reorder" | "slow_link" | "store_slow" | "store_late" | "slow_operator" | "blocked_operator":
            return rng.choice((2, 10, 60, 400, 2_500))
        case "break_stream":
            return rng.choice((0, 5, 100, 1_500))
        case "clock_jump":
            return rng.choice((3_600_000, -3_600_000, 1_000, -1_000))
        case "pause_worker" | "hang_worker":
            return rng.choice((0, 1))
        case "rescale":
            return rng.randint(1, 4)
        case _:
            return 0

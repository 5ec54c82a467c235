"""The broadcast pattern as users write it: records by key wait for their rule, which every subtask gets and keeps a copy of.

A rule never changes, and each record comes out once, multiplied by its rule: at once, or when the rule comes and finds it with
`apply_to_keyed_state`. So the output depends neither on which came first nor on the parallelism. What a subtask has released is
counted in union state."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from holdfast.chaos.workloads.broadcast import Ruled
from holdfast.chaos.workloads.feeds import SCHEMA, Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.broadcast import BroadcastContext, KeyedBroadcastProcessFunction, ReadOnlyBroadcastContext
from holdfast.operators.functions.process import Collector, ProcessContext
from holdfast.statebackends.state import MapStateDescriptor, OperatorListStateDescriptor, Redistribution

PATH = "/out/rules"

RULES = MapStateDescriptor("rules", int, int)


class ApplyRules(KeyedBroadcastProcessFunction):
    """Multiplies a record's value by the rule that `key` modulo the number of rules names."""

    waiting = MapStateDescriptor("waiting", int, int)
    """`i` -> value."""
    released = OperatorListStateDescriptor("released", Redistribution.UNION, tuple[int, int])
    """(subtask, records that it has released)."""
    states = (waiting, released)
    returns = SCHEMA

    def __init__(self, rules: int) -> None:
        """`rules`: how many there will be; their `i` is -rules .. -1."""
        self._count = rules
        self._released = 0

    def open(self, ctx: ProcessContext) -> None:
        released = ctx.operator_list_state(self.released)
        own = [entry for entry in released.get() if entry[0] == ctx.subtask]
        self._released = sum(count for _, count in own)
        released.update(own)

    def process_element(self, row: dict[str, int], ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        rule = ctx.broadcast_state(RULES).get(row["key"] % self._count)
        if rule is None:
            ctx.state(self.waiting).put(row["i"], row["value"])
        else:
            out({**row, "value": row["value"] * rule})

    def process_broadcast_element(self, row: dict[str, int], ctx: BroadcastContext, out: Collector) -> None:
        ctx.broadcast_state(RULES).put(row["i"] + self._count, row["value"])
        ctx.apply_to_keyed_state(self.waiting, partial(self._release, row["i"] + self._count, row["value"], out))
        ctx.operator_list_state(self.released).update([(ctx.subtask, self._released)])

    def _release(self, rule: int, value: int, out: Collector, key: int, waiting: Any) -> None:
        if key % self._count != rule:
            return
        for i, factor in waiting.items():
            self._released += 1
            out({"i": i, "key": key, "value": factor * value})
        waiting.clear()


def make(rng: random.Random) -> Scenario:
    """A feed of records, and a slower one of rules, of one or two subtasks."""
    ruled = Ruled.draw(rng, 600)
    records, control = ruled.records, ruled.control
    return Scenario(
        plan=partial(build_ruled, ruled),
        records=records.rows + control.rows,
        sinks=(SinkExpectation(PATH, "ruled", ruled.rows),),
        operators=("apply",),
        cuts=(CutExpectation((records.uid, control.uid), "apply", partial(_states, records, control)),),
    )


def build_ruled(ruled: Ruled, parallelism: int | None) -> JobPlan:
    """The job at a parallelism; None: its own."""

    def apply(records: Stream, rules: Stream) -> Stream:
        connected = records.key_by("key").connect(rules.broadcast(RULES))
        return connected.process(ApplyRules(ruled.control.rows)).uid("apply")

    return ruled.build("rules", PATH, parallelism, apply)


def _states(records: Feed, control: Feed, positions: Positions) -> CutStates:
    """What waits at a cut: the records in front of it whose rule is not, whatever came first."""
    ruled = set(read_before(positions[control.uid], control.rows))
    waiting = {
        (records.key(index), index): records.value(index)
        for index in read_before(positions[records.uid], records.rows)
        if records.key(index) % control.rows not in ruled
    }
    return {"waiting": waiting}


WORKLOAD = Workload("rules", "broadcasts rules to keyed records that wait for them: broadcast, keyed and union state", make)

"""Operator state of all three kinds: rules, records that wait for them, and a count of each subtask.

The rules are broadcast state: every subtask has the same table, since a cut has the same rules before it on every channel. Waiting
records are list state, which belongs to no key and may go to any subtask. Counts are union state: each subtask stores its own, and
after a restore takes over all counts of the groups that it owns. A rule never changes, and a count becomes that many rows at the
end, so that the output depends neither on how the streams meet nor on which subtask counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from holdfast.barriers.elements import Batch
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import SCHEMA, Feed, no_states
from holdfast.chaos.workloads.scenario import CutExpectation, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan, Operator
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.schema import RowType
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution, StateDescriptor

PATH = "/out/ruled"

_RULES = OperatorListStateDescriptor("rules", Redistribution.BROADCAST)
_WAITING = OperatorListStateDescriptor("waiting")
_COUNTED = OperatorListStateDescriptor("counted", Redistribution.UNION)

GROUPS = 5
"""Records are counted in groups of `i` modulo this."""

Record = dict[str, int]


class ApplyRules(Operator):
    """Multiplies a record's value by its rule's. A record with a negative `i` is a rule; `key` names the rule of the others.

    At the end it emits, for each record that it counted in group g, the row (-1 - g, g, 0)."""

    def __init__(self, rules: int) -> None:
        """`rules`: their number; their `i` is -rules .. -1."""
        self._count = rules
        self._rules: dict[int, int] = {}
        self._waiting: dict[int, list[Record]] = {}
        self._counted: Counter[int] = Counter()
        """Group -> records counted for it, of the groups that this subtask owns."""

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (_RULES, _WAITING, _COUNTED)

    def initialize_state(self) -> None:
        for entry in self.context.operator_state.list_state(_RULES.name).entries:
            rule, value = msgspec.msgpack.decode(entry)
            self._rules[rule] = value
        for entry in self.context.operator_state.list_state(_WAITING.name).entries:
            record = msgspec.msgpack.decode(entry)
            self._waiting.setdefault(record["key"] % self._count, []).append(record)
        for entry in self.context.operator_state.list_state(_COUNTED.name).entries:
            group, count = msgspec.msgpack.decode(entry)
            if group % self.context.parallelism == self.context.subtask:
                self._counted[group] += count

    def process_batch(self, batch: Batch, input_index: int) -> None:
        ready: list[Record] = []
        for row in batch.rows():
            if row["i"] < 0:
                rule = row["i"] + self._count
                self._rules[rule] = row["value"]
                ready += self._waiting.pop(rule, ())
                continue
            self._counted[row["i"] % GROUPS] += 1
            if row["key"] % self._count in self._rules:
                ready.append(row)
            else:
                self._waiting.setdefault(row["key"] % self._count, []).append(row)
        self._emit([{**row, "value": row["value"] * self._rules[row["key"] % self._count]} for row in ready])

    def finish(self) -> Iterator[None]:
        """Emitted counts are dropped: a job that continues after a drain emits only later counts."""
        for group in sorted(self._counted):
            self._emit([{"i": -1 - group, "key": group, "value": 0}] * self._counted.pop(group))
            yield

    def _emit(self, rows: list[Record]) -> None:
        if rows:
            self.output.collect(Batch(rows=rows, schema=SCHEMA, producer=self.context.uid))

    def snapshot_state(self, checkpoint_id: int) -> None:
        rules = [msgspec.msgpack.encode(rule) for rule in sorted(self._rules.items())]
        self.context.operator_state.list_state(_RULES.name).update(rules)
        waiting = [msgspec.msgpack.encode(record) for rule in sorted(self._waiting) for record in self._waiting[rule]]
        self.context.operator_state.list_state(_WAITING.name).update(waiting)
        counted = [msgspec.msgpack.encode(count) for count in sorted(self._counted.items())]
        self.context.operator_state.list_state(_COUNTED.name).update(counted)


def apply_rules(records: Stream, rules: Stream, count: int) -> Stream:
    """The records, each multiplied by its rule: `rules` go to every subtask. The runtime has such operators, the DSL does not."""
    met = records.rebalance().union(rules.broadcast())
    return met._add("apply_rules", ApplyRules(count), RowType(SCHEMA))


class Ruled(NamedTuple):
    """A feed of records, and a slower one of their rules, of one or two subtasks."""

    records: Feed
    control: Feed
    paces: tuple[tuple[float, int], tuple[float, int]]
    parallelisms: tuple[int, int]
    settings: dict[str, Any]

    @staticmethod
    def draw(rng: random.Random, rows_max: int) -> Ruled:
        rules = rng.randint(1, 12)
        records = Feed("records", rng.randint(150, rows_max), rng.choice((3, 20)), first=0)
        control = Feed("control", rules, 1, first=-rules)
        paces = (draw_pace(rng, records.rows), (rules / rng.uniform(0.2, 1.2), rng.choice((1, 2))))
        parallelisms = (rng.randint(1, PARALLELISM_MAX), rng.randint(1, 2))
        return Ruled(records, control, paces, parallelisms, draw_settings(rng))

    def build(self, name: str, path: str, parallelism: int | None, apply: Callable[[Stream, Stream], Stream]) -> JobPlan:
        """`apply`: from records and rules to the rows of the sink."""
        environment = Environment(name, parallelism=parallelism or self.parallelisms[0], **self.settings)
        records = environment.from_source(self.records.source(*self.paces[0])).uid(self.records.uid)
        rules = environment.from_source(self.control.source(*self.paces[1])).uid(self.control.uid)
        apply(records, rules.set_parallelism(self.parallelisms[1])).sink_to(ParquetSink(path), uid="ruled")
        return environment.build()

    def rows(self) -> Counter[Row]:
        """Each record, multiplied by its rule."""
        records, control = self.records, self.control
        return Counter(
            (index, records.key(index), records.value(index) * control.value(records.key(index) % control.rows))
            for index in range(records.rows)
        )


def make(rng: random.Random) -> Scenario:
    """A feed of records, and a slower one of rules."""
    ruled = Ruled.draw(rng, 700)
    records, control = ruled.records, ruled.control
    return Scenario(
        plan=partial(_plan, ruled),
        records=records.rows + control.rows,
        sinks=(SinkExpectation(PATH, "ruled", partial(_rows, ruled)),),
        operators=("rules",),
        cuts=(CutExpectation((records.uid, control.uid), "rules", partial(no_states, (records, control))),),
    )


def _plan(ruled: Ruled, parallelism: int | None) -> JobPlan:
    def apply(records: Stream, rules: Stream) -> Stream:
        return apply_rules(records, rules, ruled.control.rows).uid("rules")

    return ruled.build("broadcast", PATH, parallelism, apply)


def _rows(ruled: Ruled) -> Counter[Row]:
    rows = ruled.rows()
    rows.update((-1 - index % GROUPS, index % GROUPS, 0) for index in range(ruled.records.rows))
    return rows


WORKLOAD = Workload("broadcast", "broadcasts rules to records that wait and are counted: list, union and broadcast state", make)

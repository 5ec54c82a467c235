"""Operator state: rules that are broadcast to every subtask, and records that wait there until their rule has come.

A rule never changes, so that the output does not depend on how the two streams meet. What waits is split state: it belongs
to no key and is dealt out anew when the job is rescaled. The rules are a table that every subtask has, stored often enough
that each subtask of a later parallelism finds a copy."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from barriers.elements import Batch
from chaos.scenario import CutExpectation, Row, Scenario, SinkExpectation, Workload
from chaos.workloads.feeds import SCHEMA, Feed, no_states
from chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from operators.base import JobPlan, Operator
from operators.environment import Environment
from operators.schema import RowType
from operators.sinks.parquet import ParquetSink
from operators.stream import Stream
from statebackends.errors import CorruptStateError
from statebackends.state import OperatorListStateDescriptor, StateDescriptor

PATH = "/out/ruled"

_RULES = OperatorListStateDescriptor("rules")
_WAITING = OperatorListStateDescriptor("waiting")

Record = dict[str, int]


class ApplyRules(Operator):
    """Multiplies a record's value by its rule's. A record with a negative `i` is a rule; `key` names the rule of the others."""

    def __init__(self, rules: int) -> None:
        """`rules`: how many there will be; their `i` is -rules .. -1."""
        self._count = rules
        self._rules: dict[int, int] = {}
        self._waiting: dict[int, list[Record]] = {}

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (_RULES, _WAITING)

    def initialize_state(self) -> None:
        tables = self.context.operator_state.list_state(_RULES.name).entries
        if any(table != tables[0] for table in tables):
            # At a cut each subtask had the same rules, for barriers come on every channel.
            raise CorruptStateError(f"operator {self.context.uid!r}: copies of the rules differ", operator=self.context.uid)
        if tables:
            self._rules = dict(msgspec.msgpack.decode(tables[0]))
        for entry in self.context.operator_state.list_state(_WAITING.name).entries:
            record = msgspec.msgpack.decode(entry)
            self._waiting.setdefault(record["key"] % self._count, []).append(record)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        ready: list[Record] = []
        for row in batch.rows():
            if row["i"] < 0:
                rule = row["i"] + self._count
                self._rules[rule] = row["value"]
                ready += self._waiting.pop(rule, ())
            elif row["key"] % self._count in self._rules:
                ready.append(row)
            else:
                self._waiting.setdefault(row["key"] % self._count, []).append(row)
        if ready:
            rows = [{**row, "value": row["value"] * self._rules[row["key"] % self._count]} for row in ready]
            self.output.collect(Batch(rows=rows, schema=SCHEMA, producer=self.context.uid))

    def snapshot_state(self, checkpoint_id: int) -> None:
        copies = -(-self.context.max_parallelism // self.context.parallelism)
        table = msgspec.msgpack.encode(sorted(self._rules.items()))
        self.context.operator_state.list_state(_RULES.name).update([table] * copies)
        waiting = [msgspec.msgpack.encode(record) for rule in sorted(self._waiting) for record in self._waiting[rule]]
        self.context.operator_state.list_state(_WAITING.name).update(waiting)


def apply_rules(records: Stream, rules: Stream, count: int) -> Stream:
    """The records, each multiplied by its rule: `rules` go to every subtask. The DSL has no such operator, the runtime does."""
    met = records.rebalance().union(rules.broadcast())
    return met._add("apply_rules", ApplyRules(count), RowType(SCHEMA))


def make(rng: random.Random) -> Scenario:
    """A feed of records, and a slower one of rules."""
    rules = rng.randint(1, 12)
    records = Feed("records", rng.randint(150, 700), rng.choice((3, 20)), first=0)
    control = Feed("control", rules, 1, first=-rules)
    paces = (draw_pace(rng, records.rows), (rules / rng.uniform(0.2, 1.2), rng.choice((1, 2))))
    parallelisms = (rng.randint(1, PARALLELISM_MAX), rng.randint(1, 2))
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, records, control, paces, parallelisms, settings),
        records=records.rows + rules,
        sinks=(SinkExpectation(PATH, "ruled", partial(_rows, records, control)),),
        operators=("rules",),
        cuts=(CutExpectation((records.uid, control.uid), "rules", partial(no_states, (records, control))),),
    )


def _plan(
    records: Feed,
    control: Feed,
    paces: tuple[tuple[float, int], tuple[float, int]],
    parallelisms: tuple[int, int],
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("broadcast", parallelism=parallelism or parallelisms[0], **settings)
    main = environment.from_source(records.source(*paces[0])).uid(records.uid)
    rules = environment.from_source(control.source(*paces[1])).uid(control.uid).set_parallelism(parallelisms[1])
    apply_rules(main, rules, control.rows).uid("rules").sink_to(ParquetSink(PATH), uid="ruled")
    return environment.build()


def _rows(records: Feed, control: Feed) -> Counter[Row]:
    return Counter(
        (index, records.key(index), records.value(index) * control.value(records.key(index) % control.rows))
        for index in range(records.rows)
    )


WORKLOAD = Workload("broadcast", "broadcasts rules to records that wait for them in operator state", make)

"""The broadcast pattern and asynchronous calls against the table X, step by step, through restores."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.functions.broadcast import KeyedBroadcastProcessOperator
from holdfast.operators.functions.schema import declared_type
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.keygroups import subtask_of_key_group
from holdfast.statebackends.serialization.keys import KeyType
from tests.operators.functions.test_async_map import Calls, operator
from tests.operators.harness import OperatorHarness
from tests.scenarios.broadcast_async import ASYNC, BROADCAST, Case

RULES = hf.MapStateDescriptor("rules", str, int)
NUMBERS = declared_type({"key": str, "n": int}, "numbers")
RULE = declared_type({"what": str}, "rule")
SHOWN = declared_type({"shown": str}, "op")


class Sums(hf.KeyedBroadcastProcessFunction):
    """The sum of each key, with the rule that holds."""

    total = hf.ValueStateDescriptor("total", int)
    states = (total,)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        rules, total = ctx.broadcast_state(RULES), ctx.state(self.total)
        if value["n"] == 0:
            rules.put("x", 1)
        total.update(total.value(0) + value["n"])
        out({"shown": f"{ctx.key}{total.value()}:{rules.get('x', 0)}"})

    def process_broadcast_element(self, value: Any, ctx: Any, out: Any) -> None:
        rules = ctx.broadcast_state(RULES)
        match value["what"]:
            case "!":
                ctx.apply_to_keyed_state(self.total, lambda key, total: self._begin_again(key, total, out))
            case "=":
                out({"shown": f"#{len(list(rules.items()))}"})
            case "-":
                rules.remove("x")
            case number:
                rules.put("x", int(number))

    def _begin_again(self, key: str, total: Any, out: Any) -> None:
        out({"shown": f"{key}{total.value()}!"})
        total.clear()


class Fleet:
    """The subtasks of the keyed side: each gets all that is broadcast."""

    def __init__(self) -> None:
        self.operator = KeyedBroadcastProcessOperator(
            Sums(), key_selector("key", None, NUMBERS, "op"), (NUMBERS, RULE), (RULES,), SHOWN
        )
        self.subtasks = [OperatorHarness(self.operator, key_type="utf8", subtask=n, parallelism=2).open() for n in (0, 1)]
        self.found: list[str] = []

    def take(self, token: str) -> None:
        if token == "cut":
            self._restart()
        elif token[0].isalpha():
            groups = KeyType.of(str).column([pa.array([token[0]])], max_parallelism=128).key_groups
            owner = self.subtasks[subtask_of_key_group(int(groups[0]), 128, len(self.subtasks))]
            owner.process([{"key": token[0], "n": int(token[1:])}], None, NUMBERS.schema)
        else:
            for subtask in self.subtasks:
                subtask.process([{"what": token.removeprefix("+")}], None, RULE.schema, 1)

    def _restart(self) -> None:
        snapshots = [subtask.snapshot() for subtask in self.subtasks]
        assert len({tuple(snapshot.lists["rules"]) for snapshot in snapshots}) == 1, "copies differ at a barrier"
        self.found = self.taken()
        self.close()
        count = len(snapshots) + 1
        settings: dict[str, Any] = {"key_type": "utf8", "parallelism": count}
        self.subtasks = [
            OperatorHarness.restored(self.operator, snapshots, subtask=number, **settings).open() for number in range(count)
        ]

    def taken(self) -> list[str]:
        """What came out since the last call."""
        found, self.found = self.found, []
        for subtask in self.subtasks:
            found += [row["shown"] for row in subtask.output.rows()]
            subtask.output.clear()
        return sorted(found)

    def close(self) -> None:
        for subtask in self.subtasks:
            subtask.close()


class Asking:
    """A subtask that calls."""

    def __init__(self, case: Case) -> None:
        self.operator = operator(lambda row: row, **case.settings)
        self.calls = Calls(self.operator).open()
        self.calls.context.skipped_rows_max = None
        self.seen: list[Any] = []
        """Calls that were told, which therefore stay alive: their ids are theirs."""
        self.found: tuple[list[str], list[str]] = ([], [])

    def take(self, token: str) -> None:
        kind, number = (token[0], token[1:]) if not token.isdigit() else ("", token)
        match kind:
            case "":
                self.calls.put(int(number))
            case "!":
                self.calls.answer(int(number))
            case "x":
                self.calls.answer(int(number), error=OSError("down"))
            case "w":
                self.calls.watermark(int(number))
                self.calls.turn()
            case "p":
                self.calls.turn(after_ms=int(number) - self.calls.clock.now_ms)
            case _:
                snapshot, now_ms = self.calls.snapshot(), self.calls.clock.now_ms
                self.calls.close()
                self.calls = Calls.restored(self.operator, [snapshot], now_ms=now_ms).open()
        self._look()

    def _look(self) -> None:
        for call, _ in self.calls.pool.calls:
            if not any(call is each for each in self.seen):
                self.seen.append(call)
                self.found[0].append(f"?{call.argument['n']}")
        self.found[1].extend(map(str, self.calls.out()))

    def taken(self) -> list[str]:
        found, self.found = self.found, ([], [])
        return found[0] + found[1]

    def close(self) -> None:
        self.calls.close()


def take(run: Fleet | Asking, tokens: list[str]) -> None:
    for token in tokens:
        run.take(token)


def check(case: Case, run: Fleet | Asking, *, is_sorted: bool) -> None:
    inputs, outputs = ([step.split() for step in text.split("|")] for text in (case.input, case.output))
    for number, (tokens, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        if case.raises and number == len(inputs) - 1:
            with pytest.raises(case.raises):
                take(run, tokens)
        else:
            take(run, tokens)
        assert run.taken() == (sorted(wanted) if is_sorted else wanted), f"step {number}"
    run.close()


@pytest.mark.parametrize("case", BROADCAST, ids=lambda case: case.id)
def test_a_scenario_of_broadcast_state(case: Case) -> None:
    check(case, Fleet(), is_sorted=True)


@pytest.mark.parametrize("case", ASYNC, ids=lambda case: case.id)
def test_a_scenario_of_asynchronous_calls(case: Case) -> None:
    check(case, Asking(case), is_sorted=False)

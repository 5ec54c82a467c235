"""What sinks show, and what a cut says of state and output: one rule broken a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.output import OutputChecker, _Sink
from holdfast.chaos.workloads.scenario import CutExpectation, Emitted, Positions, SinkExpectation
from holdfast.statebackends.handles import (
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot.tables import encode_keyed_table, keyed_table_schema
from tests.simulation.checker_world import OUT, POSITIONS, Story, ledger

ROWS = ((1, 1), (2, 1), (1, 2))


@pytest.fixture
def story() -> Story:
    """Two rows are committed with checkpoint 1, and one is staged."""
    story = Story(sinks=ledger(*ROWS))
    story.begin()
    story.stage(story.staged_name(1), (1, 1), (2, 1))
    story.complete(1)
    story.commit(1, story.staged_name(1))
    story.stage(story.staged_name(2), (1, 2))
    return story


# --------------------------------------------------------------------------------------------------------------- effects


def test_a_commit_comes_before_its_checkpoint(story: Story) -> None:
    story.claim(2)
    story.commit(2, story.staged_name(2))
    assert story.broken[0] == "I18"


def test_a_commit_follows_a_plain_savepoint(story: Story) -> None:
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.commit(2, story.staged_name(2))
    assert story.broken[0] == "I21"


def test_a_newer_checkpoint_covers_a_commit(story: Story) -> None:
    story.claim(2)
    story.abort(2)
    story.complete(3)
    story.commit(2, story.staged_name(2))
    assert story.violations == []


def test_commits_are_not_in_the_order_of_ids(story: Story) -> None:
    story.complete(2)
    story.complete(3)
    story.stage(story.staged_name(3), (2, 2))
    story.commit(3, story.staged_name(2))
    story.commit(2, story.staged_name(3))
    assert story.broken[0] == "I19"


def test_a_file_is_committed_twice(story: Story) -> None:
    story.complete(2)
    story.commit(2, story.staged_name(1), publish=False)
    assert story.broken[0] == "I19"


def test_a_file_is_committed_that_is_not_there(story: Story) -> None:
    story.complete(2)
    story.log("commit", checkpoint_id=2, attempt=1, files=[{"name": "part-none.parquet", "rows": 1}])
    assert story.broken[0] == "I19"


def test_a_log_has_a_gap(story: Story) -> None:
    story.entries += 1
    story.log("owner", attempt=1)
    assert story.broken == ["I19"]


def test_a_committed_file_is_deleted(story: Story) -> None:
    story.delete(f"_holdfast/ledger/data/{story.staged_name(1)}", OUT)
    assert story.broken == ["I19"]


def test_an_entry_of_a_log_is_deleted(story: Story) -> None:
    story.delete("_holdfast/ledger/log/000000000000.json", OUT)
    assert story.broken == ["I19"]


def test_a_file_is_shown_to_plain_readers_before_it_is_committed(story: Story) -> None:
    story.write(story.staged_name(2), b"rows", OUT)
    assert story.broken == ["I18"]


def test_what_the_running_attempt_has_staged_is_deleted(story: Story) -> None:
    story.delete(f"_holdfast/ledger/staged/{story.staged_name(2)}", OUT)
    assert story.broken == ["I20"]


def test_an_attempt_begins_behind_what_is_visible(story: Story) -> None:
    story.record_attempt(0)
    assert "I22" in story.broken


def test_entries_that_a_power_loss_took_are_written_again(story: Story) -> None:
    story.complete(2)
    del story.files[f"{OUT}/_holdfast/ledger/log/000000000000.json"]
    story.entries = 0
    story.lose_power()
    name = story.staged_name(1)
    story.commit(1, name, publish=False)
    assert story.violations == []


# ---------------------------------------------------------------------------------------------------------------- output


def finish(story: Story) -> None:
    """With a last checkpoint that commits what is staged."""
    story.complete(2, CheckpointKind.FINAL)
    story.commit(2, story.staged_name(2))
    story.drop(1)
    story.finish(2)
    story.end()


def test_all_rows_once_in_order(story: Story) -> None:
    finish(story)
    assert story.violations == []


def test_a_row_is_missing() -> None:
    story = Story(sinks=ledger(*ROWS, (9, 1)))
    story.begin()
    story.stage(story.staged_name(2), *ROWS)
    story.complete(1)
    finish(story)
    assert story.broken == ["I1"]


def test_a_row_is_too_many() -> None:
    story = Story(sinks=(SinkExpectation(OUT, "ledger", lambda: Counter(ROWS)),))
    story.begin()
    story.stage(story.staged_name(2), *ROWS, (1, 2))
    story.complete(1)
    finish(story)
    assert set(story.broken) == {"I2"}


def test_a_row_is_out_of_order() -> None:
    story = Story(sinks=ledger(*ROWS))
    story.begin()
    story.stage(story.staged_name(1), (1, 2), (1, 1))
    story.complete(1)
    story.commit(1, story.staged_name(1))
    assert story.broken == ["I5"]


def test_a_step_is_left_out(story: Story) -> None:
    story.stage(story.staged_name(2, 1), (2, 3))
    story.complete(2)
    story.commit(2, story.staged_name(2, 1))
    assert story.broken == ["I5"]


def test_a_committed_file_has_changed(story: Story) -> None:
    path = f"{OUT}/_holdfast/ledger/data/{story.staged_name(1)}"
    story.files[path] = story.files[f"{OUT}/_holdfast/ledger/staged/{story.staged_name(2)}"]
    finish(story)
    assert story.broken == ["I19"]


# ------------------------------------------------------------------------------------------------------------------ cuts

COUNTS = StateMeta("counts", "value", "int", "int64")


def keyed(counts: Mapping[int, int], group: int = 0) -> OperatorSubtaskState:
    """Keyed state of the count: key -> value, all in one key group."""
    key_type = KeyType.parse("int64")
    schema = keyed_table_schema(key_type, COUNTS, pa.int64())
    columns: list[Any] = [[group] * len(counts), list(counts), [b""] * len(counts), list(counts.values())]
    table = pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)
    part = InlineHandle(encode_keyed_table(table, "arrow").to_pybytes())
    return OperatorSubtaskState(keyed=(KeyedStateHandle(KeyGroupRange(0, 4), "arrow", (COUNTS,), (part,)),))


def position(count: int) -> OperatorSubtaskState:
    """The source has given so many records."""
    part = InlineHandle(msgspec.msgpack.encode([b"%d" % count]))
    return OperatorSubtaskState(operator=(OperatorListHandle(POSITIONS, part, 1),))


def records_before(positions: Positions) -> int:
    (entry,) = positions["source"]
    if int(entry) < 0:
        raise ValueError("a position below 0")
    return int(entry)


def expected_states(positions: Positions) -> Mapping[str, Mapping[Any, Any]]:
    return {"counts": dict.fromkeys(range(records_before(positions)), 1)}


def cut_story() -> Story:
    sink = SinkExpectation(
        OUT, "ledger", None, at_cut=lambda positions: Counter((key, 1) for key in range(records_before(positions)))
    )
    story = Story(sinks=(sink,), cuts=(CutExpectation(("source",), "count", expected_states),))
    story.begin()
    return story


def complete(story: Story, number: int, records: int, counts: Mapping[int, int], **claim: Any) -> None:
    """A checkpoint with these positions and this state; its acknowledgements are of no matter here."""
    story.claim(number, **claim)
    story.decide(number, story.snapshot(number, {"source": [position(records)], "count": [keyed(counts)]}))
    story.violations = [each for each in story.violations if "acknowledged" not in each[1] and "without" not in each[1]]


def test_state_is_what_belongs_in_front_of_the_cut() -> None:
    story = cut_story()
    complete(story, 1, 2, {0: 1, 1: 1})
    complete(story, 2, 3, {0: 1, 1: 1, 2: 1})
    assert story.violations == []


@pytest.mark.parametrize("counts", [{0: 1}, {0: 1, 1: 2}, {0: 1, 1: 1, 2: 1}])
def test_state_lacks_or_repeats_a_record(counts: dict[int, int]) -> None:
    story = cut_story()
    complete(story, 1, 2, counts)
    assert story.broken == ["I7"]


def test_positions_make_no_sense() -> None:
    story = cut_story()
    complete(story, 1, -1, {})
    assert story.broken == ["I8"]


def test_what_a_drain_lets_go_is_not_judged() -> None:
    story = cut_story()
    complete(story, 1, 2, {}, drain=True)
    assert story.violations == []


def test_output_up_to_a_cut_lacks_a_row() -> None:
    story = cut_story()
    complete(story, 1, 2, {0: 1, 1: 1})
    story.stage(story.staged_name(1), (0, 1))
    story.commit(1, story.staged_name(1))
    assert story.broken == ["I7"]


def test_output_up_to_a_cut_is_judged_although_what_another_operator_holds_makes_no_sense() -> None:
    def raises(*_: Any) -> Counter[Any]:
        raise ValueError("a window without an end")

    story = cut_story()
    output = next(each for each in story.checkers if isinstance(each, OutputChecker))
    output._sinks.append(_Sink(story, SinkExpectation("/other", "other", None, emitted=Emitted("count", ("counts",), raises))))
    complete(story, 2, 2, {0: 1, 1: 1})  # one of the ids at which that is looked at
    story.stage(story.staged_name(2), (0, 1))
    story.commit(2, story.staged_name(2))
    assert story.broken == ["I7"]


def test_output_up_to_a_cut_is_all_there() -> None:
    story = cut_story()
    complete(story, 1, 2, {0: 1, 1: 1})
    story.stage(story.staged_name(1), (0, 1), (1, 1))
    story.commit(1, story.staged_name(1))
    assert story.violations == []

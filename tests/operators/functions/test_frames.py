"""What is shown of the user's code: its frames, its innermost line, what it was raised from; nothing of ours, never too much."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import pytest

from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.functions.rows import FilterOperator, FlatMapOperator, MapOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.task.user_failures import (
    FRAMES_MAX,
    error_line,
    frames_text,
    place_of_error,
    stack_trace,
    with_source_lines,
)
from holdfast.statebackends.errors import (
    HoldfastError,
    InvariantError,
    StorageUnavailableError,
    UndeclaredStateError,
    UserFunctionError,
)
from tests.operators.functions.test_process import ROWS, harness, rows
from tests.operators.harness import OperatorHarness

ANY = RowType(None)
SOURCE = '''\
import json

def price(row):
    return row["price"]

def parse(row):
    amount = price(row)
    return {"amount": amount}

def decode(row):
    return json.loads(row)

def twice(row):
    try:
        return price(row)
    except KeyError as error:
        raise ValueError("no price") from error

def deep(row):
    return deep(row)

def rows(row):
    yield row
    yield price(row)

def silent(row):
    row.get("x")
'''


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, Any]:
    """What a user's program `mine.py` defines."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(SOURCE, str(path), "exec"), names)
    return names


def failure(operator: Any, *records: Any) -> HoldfastError:
    with OperatorHarness(operator) as one, pytest.raises(HoldfastError) as caught:
        one.process(list(records))
    return caught.value


@pytest.mark.parametrize("kind", [MapOperator, FilterOperator])
def test_the_users_frames_stand_under_the_message_and_none_of_ours(kind: Any, mine: dict[str, Any], tmp_path: Path) -> None:
    error = failure(kind(mine["parse"], ANY, ANY), {"price": 1}, {"x": 1})
    assert error.message == "operator 'op', subtask 0: parse (mine.py:4) raised KeyError: 'price'; record {'x': 1}"
    assert stack_trace(error).splitlines() == [
        f"UserFunctionError: {error.message}",
        f'  File "{tmp_path}/mine.py", line 7, in parse',
        "    amount = price(row)",
        f'  File "{tmp_path}/mine.py", line 4, in price',
        '    return row["price"]',
    ]


def test_the_place_is_the_users_line_and_not_a_librarys(mine: dict[str, Any]) -> None:
    error = failure(MapOperator(mine["decode"], ANY, ANY), "{")
    assert "decode (mine.py:11) raised JSONDecodeError: " in error.message
    assert json.decoder.__file__ in stack_trace(error), "whose frames are shown"


def test_what_an_exception_was_raised_from_is_shown(mine: dict[str, Any]) -> None:
    told = stack_trace(failure(MapOperator(mine["twice"], ANY, ANY), {}))
    assert "raised ValueError: no price" in told
    assert "caused by KeyError: 'price'" in told
    assert told.index("line 17, in twice") < told.index("caused by") < told.index("line 4, in price")


def test_a_recursion_is_cut(mine: dict[str, Any]) -> None:
    told = stack_trace(failure(MapOperator(mine["deep"], ANY, ANY), {}))
    assert told.count("in deep") == FRAMES_MAX
    assert "more frames ..." in told
    assert len(told) < 6_000


def test_a_function_of_c_has_no_frames() -> None:
    error = failure(MapOperator(int, ANY, ANY), "x")
    assert error.message == (
        "operator 'op', subtask 0: int raised ValueError: invalid literal for int() with base 10: 'x'; record 'x'"
    )
    assert stack_trace(error) == f"UserFunctionError: {error.message}"


def test_a_long_text_of_several_lines_is_told_in_one_and_at_length_below() -> None:
    def fail(row: Any) -> Any:
        raise ValueError("first\nsecond\n" + "x" * 5_000)

    error = failure(MapOperator(fail, ANY, ANY), 1)
    assert "raised ValueError: first ...; record 1" in error.message
    assert "\n" not in error.message
    assert "\n  | second\n" in stack_trace(error)
    assert len(stack_trace(error)) < 8 * 1024


HOSTILE = 'bad note \x1b[2J\x07\r\n  File "/etc/passwd", line 1, in x\n\tsecond\u2028  File "/etc/passwd", line 2, in y'


class Record:
    def __repr__(self) -> str:
        return HOSTILE


def refuse(row: Any) -> Any:
    try:
        raise LookupError(HOSTILE)
    except LookupError as error:
        raise ValueError(HOSTILE) from error


def test_a_rows_text_steers_no_terminal_and_looks_like_no_frame() -> None:
    error = failure(MapOperator(refuse, ANY, ANY), Record())
    for told in (stack_trace(error), error_line(error)):
        assert told.replace("\n", "").replace("\t", "").isprintable()
        assert "bad note \\x1b[2J\\x07" in told
        frames = [line for line in told.splitlines() if line.lstrip().startswith("File ")]
        assert all("test_frames.py" in line for line in frames), told
    assert "caused by LookupError: bad note" in stack_trace(error)
    assert stack_trace(error).startswith(error_line(error)), "the driver finds the frames behind it"
    assert stack_trace(error).count("line 1, in x") == 3, "nothing is left out: record, text and cause"


def test_an_exception_without_a_text_hides_nothing() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(row: Any) -> Any:
        raise Rude

    assert "raised Rude: <its text raises RuntimeError>; record 1" in failure(MapOperator(fail, ANY, ANY), 1).message
    assert error_line(Rude()) == "Rude: <its text raises RuntimeError>", "of a source or a sink, which no function is around"


def test_an_error_of_ours_keeps_its_kind_and_gains_the_users_line() -> None:
    class Asks(ProcessFunction):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            ctx.state("gone")

    with harness(Asks()) as one, pytest.raises(UndeclaredStateError) as caught:
        one.process(rows("a"), schema=ROWS.schema)
    assert "state 'gone' is not among the declared states" in caught.value.message
    assert "process_element (test_frames.py:" in caught.value.message
    assert caught.value.message.endswith("key 'a', record {'k': 'a', 'v': 0}")
    assert 'ctx.state("gone")' in stack_trace(caught.value)


@pytest.mark.parametrize("kind", [InvariantError, StorageUnavailableError])
def test_what_goes_wrong_in_us_is_told_whole(kind: type[HoldfastError]) -> None:
    def fail(row: Any) -> Any:
        raise kind("ours")

    error = failure(MapOperator(fail, ANY, ANY), 1)
    assert (type(error), error.message) == (kind, "ours")
    assert "process_batch" in stack_trace(error)


def test_a_function_that_returned_nothing_is_called_so(mine: dict[str, Any]) -> None:
    declared = RowType(ROWS.schema)
    error = failure(MapOperator(mine["silent"], ANY, declared), {"x": 1})
    assert error.message == (
        "operator 'op', subtask 0: silent (mine.py:26) returned None, not a row: does it lack a `return`?; record {'x': 1}"
    )
    error = failure(FlatMapOperator(mine["silent"], ANY, ANY), {"x": 1})
    assert "silent (mine.py:26) returned None, not the rows that it makes of one" in error.message
    error = failure(MapOperator(mine["price"], ANY, ANY), None)
    assert error.message.endswith("record None (the function in front of it returned None)")
    error = failure(FlatMapOperator(mine["rows"], ANY, ANY), {"x": 1})
    assert isinstance(error, UserFunctionError)
    assert "raised KeyError: 'price'" in error.message, "a generator has no return"


def test_the_driver_adds_the_lines_that_a_worker_could_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "<cell>", (9, None, ["a\n", "  b = row['x']\n"], "<cell>"))
    told = '  File "<cell>", line 2, in parse\n  File "/lib.py", line 1, in f\n    known'
    assert with_source_lines(told) == (
        '  File "<cell>", line 2, in parse\n    b = row[\'x\']\n  File "/lib.py", line 1, in f\n    known'
    )
    assert with_source_lines("caused by KeyError: 'x'") == "caused by KeyError: 'x'"


def test_without_a_traceback_the_function_itself_is_the_place(mine: dict[str, Any]) -> None:
    assert place_of_error(ValueError("x"), mine["parse"]) == "mine.py:6"
    assert frames_text(ValueError("x")) == ""


def test_no_file_is_opened_that_a_row_names(tmp_path: Path) -> None:
    """A text of an exception may look like a frame."""
    secret = tmp_path / "secret.txt"
    secret.write_text("what nobody should see\n")
    forged = f'ValueError: bad note\n  File "{secret}", line 1, in x'
    assert with_source_lines(forged) == forged

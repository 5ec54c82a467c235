"""What functions print: passed on as it was, and its end kept, whatever is printed and however it ends."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers import codec
from holdfast.barriers.messages import LOG_CHARACTERS_MAX, WorkerAnswer
from holdfast.operators.worker.kept_output import OUTPUT_CHARACTERS_MAX, SECRET_CHARACTERS_MAX, KeptOutput, keeping_output
from holdfast.statebackends.secrets import Secret

show = print  # what functions call


@contextlib.contextmanager
def printing() -> Iterator[tuple[io.StringIO, KeptOutput]]:
    """A standard output, and what is kept of it until the end of the block."""
    target = io.StringIO()
    with contextlib.redirect_stdout(target), keeping_output(("the-token-of-this-worker",)) as kept:
        yield target, kept


def test_what_is_printed_is_passed_on_and_its_end_is_kept() -> None:
    target = io.StringIO()
    with contextlib.redirect_stdout(target):
        with keeping_output(()) as kept:
            show("one", 2)
            assert sys.stdout.write("three\n") == 6
            sys.stdout.writelines(["four\n", "five\n"])
            assert (sys.stdout.encoding, sys.stdout.isatty()) == (target.encoding, False)
        assert sys.stdout is target
        show("behind the end")
    assert kept.read().text == "one 2\nthree\nfour\nfive\n"
    assert target.getvalue() == "one 2\nthree\nfour\nfive\nbehind the end\n"
    assert (kept.read().left_out, kept.read().changed_ms > 0) == (0, True)


def test_nothing_printed_is_an_empty_text() -> None:
    found = KeptOutput().read()
    assert (found.text, found.changed_ms, found.left_out) == ("", -1, 0)


def test_what_the_output_raises_its_user_gets_and_keeping_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with printing() as (target, kept):
        with pytest.raises(TypeError):
            sys.stdout.write(5)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.operators.worker.kept_output.time", None)
            show("kept although the clock fails")
        target.close()
        with pytest.raises(ValueError, match="closed"):
            show("nobody reads this")
        with pytest.raises(AttributeError):
            _ = sys.stdout.nothing_of_the_kind  # type: ignore[union-attr]
    assert "although the clock fails" in kept.read().text


def test_a_process_without_an_output_keeps_none() -> None:
    with contextlib.redirect_stdout(None), keeping_output(()) as kept:
        show("to nobody")
        assert sys.stdout is None
    assert kept.read().text == ""


def test_an_output_that_somebody_put_in_its_place_stays() -> None:
    target, theirs = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(target):
        with keeping_output(()) as kept:
            ours = sys.stdout
            sys.stdout = theirs
        assert sys.stdout is theirs
        show("late", file=ours)
    assert (target.getvalue(), kept.read().text) == ("late\n", "")


def test_the_end_stays_from_the_beginning_of_a_line_and_lines_that_go_are_counted() -> None:
    kept = KeptOutput()
    for number in range(3_000):
        kept.add(f"line {number} {'x' * 50}")
        kept.add("\n")
    found = kept.read()
    lines = found.text.splitlines()
    assert lines == [f"line {number} {'x' * 50}" for number in range(3_000 - len(lines), 3_000)]
    assert OUTPUT_CHARACTERS_MAX - 100 < len(found.text) <= OUTPUT_CHARACTERS_MAX
    assert len(lines) + found.left_out == 3_000


@pytest.mark.parametrize("size", [OUTPUT_CHARACTERS_MAX, 10 * OUTPUT_CHARACTERS_MAX])
def test_a_text_of_any_size_is_bounded(size: int) -> None:
    kept = KeptOutput()
    kept.add("\x1b" * size)
    found = kept.read()
    assert 0 < len(found.text) <= LOG_CHARACTERS_MAX
    answer = WorkerAnswer(1, 0, "s", 1, "q", "stdout", log=found)
    assert codec.decode(codec.encode(answer), WorkerAnswer) == answer


def test_no_terminal_obeys_it_and_any_text_can_be_sent() -> None:
    kept = KeptOutput()
    kept.add("10 %\r20 %\r\ndone\t\x1b[2J\udc80\n")
    found = kept.read()
    assert found.text == "10 %\n20 %\ndone\t\\x1b[2J\\udc80\n"
    codec.encode(found)


def test_secrets_are_not_shown_nor_what_is_left_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT_OUTPUT_PASSWORD", "correct-horse-battery")
    kept = KeptOutput(("the-token-of-this-worker", ""))
    kept.add("the-token-of-")
    kept.add("this-worker\nconnects with correct-horse-battery\n")
    Secret("KEPT_OUTPUT_PASSWORD").resolve()
    assert kept.read().text == "***\nconnects with ***\n"
    for cut in (1, 8, 20):  # the oldest that is kept begins within the secret
        kept = KeptOutput()
        kept.add("correct-horse-battery")
        kept.add("." * (OUTPUT_CHARACTERS_MAX + SECRET_CHARACTERS_MAX - cut))
        assert set(kept.read().text) == {"."}


@given(st.lists(st.sampled_from(["", "\n", "a", "bc\n", "x" * 30_000, "y\n" * 30_000]), max_size=12))
def test_it_is_always_the_end_of_what_was_printed(printed: list[str]) -> None:
    kept = KeptOutput()
    for text in printed:
        kept.add(text)
    found, everything = kept.read(), "".join(printed)
    assert everything.endswith(found.text)
    assert found.text.count("\n") + found.left_out == everything.count("\n")
    assert len(found.text) == len(everything) or len(found.text) <= OUTPUT_CHARACTERS_MAX


class _Own(str):
    def __str__(self) -> str:
        raise RuntimeError("a function's own class")

    def __len__(self) -> int:
        raise RuntimeError("a function's own class")


def test_a_text_of_a_class_of_its_own_is_kept_by_its_letters() -> None:
    kept = KeptOutput()
    kept.add(_Own("letters"))
    kept.add(b"bytes")
    assert kept.read().text == "letters"


def test_threads_print_whole_texts_and_none_is_lost() -> None:
    with printing() as (_, kept):
        threads = [threading.Thread(target=lambda: [sys.stdout.write("0123456789\n") for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert kept.read().text == "0123456789\n" * 2_000


def test_a_forked_process_prints_while_another_thread_keeps() -> None:
    """The lock may be taken for ever in it."""
    with printing() as (_, kept):
        taken: Any = kept._lock
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with taken:
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            sys.stdout.write("of the child\n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join(30)
    assert (status, kept.read().text) == (0, "")

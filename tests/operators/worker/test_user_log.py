"""Where lines of functions go: to the worker's stderr, until the program sets logging up by itself."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.operators.functions.context import LOGGER
from holdfast.operators.worker.main import show_user_log


@contextmanager
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The stderr of a process in which nobody has configured logging; pytest has, around each test."""
    logger, stderr = logging.getLogger(LOGGER), io.StringIO()
    level, handlers = logger.level, logger.handlers[:]
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        patch.setattr("sys.stderr", stderr)
        yield stderr
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_information_is_shown_with_the_name_of_the_function_s_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_process(monkeypatch) as shown:
        show_user_log()
        show_user_log()  # a process that Spark uses for the next worker
        logger = logging.getLogger(f"{LOGGER}.shop.big.0")
        logger.info("opened %d", 5)
        logger.debug("not this")
    (line,) = shown.getvalue().splitlines()
    assert line.endswith("INFO holdfast.user.shop.big.0: opened 5")


def test_a_program_that_configures_logging_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    with fresh_process(monkeypatch) as shown:
        show_user_log()
        logging.root.addHandler(logging.StreamHandler(own))
        logging.getLogger(f"{LOGGER}.shop.big.0").info("once")
    assert (own.getvalue(), shown.getvalue()) == ("once\n", "")


def test_logging_that_is_configured_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_process(monkeypatch):
        logging.root.addHandler(logging.NullHandler())
        before = logging.getLogger(LOGGER).handlers[:]
        show_user_log()
        assert logging.getLogger(LOGGER).handlers == before

"""What every function of a user may ask for: who it is, counters and a logger of its own.

Functions with a beginning and an end: callable objects that define `open(ctx)` or `close()`, and what calls these."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from holdfast.barriers.messages import COUNTER_NAME_CHARS_MAX, COUNTER_NAME_PATTERN, COUNTERS_MAX
from holdfast.operators.base import Counter, Operator, OperatorContext
from holdfast.operators.task.user_failures import raise_located
from holdfast.statebackends.errors import InvalidConfigError

LOGGER = "holdfast.user"
"""Parent of the loggers of functions."""

_NAME = re.compile(COUNTER_NAME_PATTERN)


class FunctionContext:
    """One function on one subtask."""

    __slots__ = ("_logger", "_operator")

    def __init__(self, operator: OperatorContext) -> None:
        self._operator = operator
        self._logger: logging.Logger | None = None

    @property
    def subtask(self) -> int:
        """Index of the subtask, from 0."""
        return self._operator.subtask

    def counter(self, name: str) -> Counter:
        """The function's counter of this name, made when it is first asked for: `ctx.counter("refunds").inc()`.

        Shown as the operator's own in `Progress`, `/metrics` and REST, summed over subtasks and, each record counted once, over
        restarts. Raises InvalidConfigError for a name that is none, or beyond COUNTERS_MAX counters."""
        counters = self._operator.counters.user
        counter = counters.get(name)
        if counter is None:
            self._check(name, len(counters))
            counter = counters[name] = Counter()
        return counter

    def _check(self, name: str, known: int) -> None:
        where = f"operator {self._operator.uid!r}: counter {name!r}"
        if not isinstance(name, str) or _NAME.match(name) is None:
            raise InvalidConfigError(
                f"{where}: a name has 1 to {COUNTER_NAME_CHARS_MAX} letters, digits and . _ : -, and begins with a letter or _",
                setting="counter",
                operator=self._operator.uid,
            )
        if known >= COUNTERS_MAX:
            raise InvalidConfigError(
                f"{where} is one too many: a function may have {COUNTERS_MAX}. What differs from row to row belongs into state or "
                "output, not into a counter's name",
                setting="counter",
                operator=self._operator.uid,
            )

    @property
    def logger(self) -> logging.Logger:
        """`holdfast.user.<job>.<operator>.<subtask>`, dots in names written as `_`. Unless the program configures logging in the
        worker, it writes from INFO on to the worker's stderr: that of Spark's executor, on `local[N]` the driver's own."""
        if self._logger is None:
            operator = self._operator
            names = (operator.job_name or operator.job_id, operator.uid, str(operator.subtask))
            self._logger = logging.getLogger(".".join((LOGGER, *(name.replace(".", "_") for name in names))))
        return self._logger


class RichFunction:
    """Base of callable objects for `map`, `filter`, `flat_map` and `map_batches` that make something once per subtask: a model, a
    client, a compiled pattern. Define `__call__`, and `open` or `close`; any other class that defines these will do as well.

    Each subtask has a copy of its own, as it was when the job was submitted. What rows leave behind in it is lost with the
    worker: what must survive belongs into state.

        class Score(hf.RichFunction):
            def open(self, ctx):
                self.model = load_model()

            def __call__(self, row):
                return {**row, "score": self.model.score(row)}
    """

    def open(self, ctx: FunctionContext) -> None:
        """Once per subtask, before the first row; also when the job was restarted."""

    def close(self) -> None:
        """Once per subtask, after the last row, also after a failure; not when the worker is killed."""

    def __call__(self, value: Any) -> Any:
        """What the stream's method says of its function."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")


class UserFunctionOperator(Operator):
    """Base: opens and closes `function`, if it is an object that can be."""

    function: Callable[[Any], Any]
    _opened = False

    def open(self) -> None:
        self._opened = True  # also when it raises: what it had made by then is closed
        if opening := _method(self.function, "open"):
            self._guarded(opening, FunctionContext(self.context))

    def close(self) -> None:
        if self._opened:
            self._opened = False
            if closing := _method(self.function, "close"):
                self._guarded(closing)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            raise_located(error, operator=self.context.uid, subtask=self.context.subtask, function=call)


def _method(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The method that the object's class defines; what a function or a class that is called has by chance is none."""
    method = getattr(function, name, None)
    return method if callable(method) and callable(getattr(type(function), name, None)) else None

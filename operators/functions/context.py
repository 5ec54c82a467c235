"""What every function of a user may ask for: who it is, counters and a logger of its own."""

from __future__ import annotations

import logging
import re

from holdfast.barriers.messages import COUNTER_NAME_CHARS_MAX, COUNTER_NAME_PATTERN, COUNTERS_MAX
from holdfast.operators.base import Counter, OperatorContext
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

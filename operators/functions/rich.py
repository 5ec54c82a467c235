"""Functions with a beginning and an end: callable objects that define `open(ctx)` or `close()`, and what calls these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.operators.base import Operator
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.task.user_failures import raise_told


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
            raise_told(error, operator=self.context.uid, subtask=self.context.subtask, function=call)


def _method(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The method that the object's class defines; what a function or a class that is called has by chance is none."""
    method = getattr(function, name, None)
    return method if callable(method) and callable(getattr(type(function), name, None)) else None

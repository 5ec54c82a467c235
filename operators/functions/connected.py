"""Functions of two connected streams: one for the records of each, which share state, timers and output.

An operator of two inputs gets batches of either in the order in which they arrive; neither input waits for the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.functions.process import (
    Collector,
    FunctionOperator,
    KeyedFunction,
    KeyedFunctionOperator,
    ProcessContext,
    StatefulFunction,
)
from holdfast.operators.functions.rows import RowFunctionOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.statebackends.errors import InvariantError


class KeyedCoProcessFunction(KeyedFunction):
    """Base of functions of two keyed streams: records of equal keys meet in the state, whichever came first.

    A row that was emitted or put into state must not be changed afterwards: emit or store a copy.

        class Pay(hf.KeyedCoProcessFunction):
            order = hf.ValueStateDescriptor("order", str)
            states = (order,)

            def process_element1(self, value, ctx, out):
                ctx.state(self.order).update(value["item"])

            def process_element2(self, value, ctx, out):
                out({"item": ctx.state(self.order).value(), "paid": value["amount"]})
    """

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record of the first stream; its key is current."""
        raise InvariantError(f"{type(self).__name__} defines no process_element1, which building the graph refuses")

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record of the second stream; its key is current."""
        raise InvariantError(f"{type(self).__name__} defines no process_element2, which building the graph refuses")


class CoProcessFunction(StatefulFunction):
    """Base of functions of two streams without keys: operator state alone, no keyed state and no timers.

    Which records of the two meet on a subtask is the partitioning's choice: for a function whose records belong together use
    KeyedCoProcessFunction, or broadcast one of the streams."""

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record of the first stream."""
        raise InvariantError(f"{type(self).__name__} defines no process_element1, which building the graph refuses")

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record of the second stream."""
        raise InvariantError(f"{type(self).__name__} defines no process_element2, which building the graph refuses")


class CoProcessOperator(FunctionOperator):
    """Runs a CoProcessFunction on two streams."""

    function: CoProcessFunction

    def __init__(
        self,
        function: CoProcessFunction,
        input_types: tuple[RowType, RowType],
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.input_types = input_types

    def process_batch(self, batch: Batch, input_index: int) -> None:
        process = self.function.process_element2 if input_index else self.function.process_element1
        self._take_plain(batch, self._context, self.input_types[input_index], process)


class KeyedCoProcessOperator(KeyedFunctionOperator):
    """Runs a KeyedCoProcessFunction on two keyed streams."""

    function: KeyedCoProcessFunction

    def __init__(
        self,
        function: KeyedCoProcessFunction,
        selectors: tuple[Selector, Selector],
        input_types: tuple[RowType, RowType],
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.selectors = selectors
        self.input_types = input_types

    def process_batch(self, batch: Batch, input_index: int) -> None:
        process = self.function.process_element2 if input_index else self.function.process_element1
        self._take(batch, self.selectors[input_index], self.input_types[input_index], process)


class CoRowFunctionOperator(Operator):
    """A row function for each of two inputs: that of the input is applied to each of its rows."""

    def __init__(self, first: RowFunctionOperator, second: RowFunctionOperator) -> None:
        self.functions = (first, second)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        first, second = self.functions
        for each in self.functions:
            each.setup(context, output)
        second.share_skipped(first)

    def open(self) -> None:
        for each in self.functions:
            each.open()

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self.functions[input_index].process_batch(batch, 0)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        for each in self.functions:
            each.notify_checkpoint_complete(checkpoint_id)

    def close(self) -> None:
        """Both, whatever the first one raises."""
        first, second = self.functions
        try:
            first.close()
        finally:
            second.close()

"""What of the elements of a restored piece stands in front of a subtask's channel. Pure.

Pieces of an old consumer whose key groups are now several subtasks' go to each of these whole; each one leaves out the rows of the
others here, by the edge's own selector, so that each row is restored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.barriers.exchange.partition import KeySelector
from holdfast.statebackends.errors import HoldfastError, InvalidKeyError, UserFunctionError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.keygroups import assign_key_groups


class KeyGroupFilter:
    """Keeps the rows of one subtask, by key group: a whole batch at once, in its order."""

    def __init__(
        self, selector: KeySelector, *, max_parallelism: int, parallelism: int, operator: str, subtask: int, edge: str
    ) -> None:
        """`selector`: of the edge. `max_parallelism`, `parallelism`, `operator` (uid): of its target, of which `subtask` restores.
        `edge`: how errors call it. Raises InvalidConfigError on a parallelism or subtask out of bounds."""
        self._selector = selector
        self._max_parallelism = max_parallelism
        self._key_groups: KeyGroupRange = assign_key_groups(max_parallelism, parallelism, subtask)
        self._operator = operator
        self._subtask = subtask
        self._edge = edge

    def apply(self, batch: Batch) -> Batch:
        """The rows of the subtask; the batch itself where all are.

        Raises the selector's errors (UserFunctionError, InvalidKeyError), which then name the edge, too."""
        if not batch.num_rows:
            return batch
        try:
            keys = self._selector.keys(
                batch, max_parallelism=self._max_parallelism, operator=self._operator, subtask=self._subtask
            )
            groups = keys.key_groups
        except (UserFunctionError, InvalidKeyError) as error:
            raise self._located(error) from error
        mask = (groups >= self._key_groups.start) & (groups < self._key_groups.stop)
        return batch if mask.all() else batch.filter(mask)

    def _located(self, error: HoldfastError) -> HoldfastError:
        message = f"in-flight records of {self._edge} can't be dealt out by key: {error.message}"
        return type(error).of(message, {**error.fields, "edge": self._edge})


def restored_elements(
    elements: Iterable[Element], *, keeps_events: bool, key_filter: KeyGroupFilter | None = None
) -> Iterator[Element]:
    """The elements that stand in front of the channel, in their order. `keeps_events`: as of RestoredChannel.

    `key_filter`: for a piece with rows of other subtasks. Raises its errors."""
    for element in elements:
        if not isinstance(element, Batch):
            if keeps_events or not isinstance(element, Watermark | WatermarkStatus):
                yield element
            continue
        batch = element if key_filter is None else key_filter.apply(element)
        if batch.num_rows:
            yield batch

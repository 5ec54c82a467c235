"""The committing half of two-phase sinks, at parallelism 1, whatever they commit to: keeps committables by checkpoint id, and
commits those of completed checkpoints in the order of ids, one flow at a time.

It places commits in the life of a subtask; what a commit does, and what of it is stored, is its subclasses'. Committables stay in
state until their commit is known to be done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from holdfast.barriers.elements import Batch
from holdfast.operators.base import CommitBacklog, Operator, OperatorContext, Output
from holdfast.statebackends.storage.port import Flow, Storage

T = TypeVar("T")


class TwoPhaseCommitter(Operator, Generic[T]):
    """Operator kind `sink_committer`. T: what a writer sends, one or several for each checkpoint."""

    allow_output_repeat = False
    """Set by the launcher when the job was submitted so: a restore from before the committed output is then accepted."""

    def check_fresh_start(self, beside: Storage | None = None) -> None:
        """For a job that is to forget its stored state: raise OutputMayRepeatError if it would write committed rows once more, as
        far as that can be seen from the driver, before state is dropped. `beside`: the storage whose access the sink's shares."""

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._pending: dict[int, list[T]] = {}
        self._released = context.restored_checkpoint_id
        """Every pending id up to this one may be committed."""
        self._since_ms: dict[int, int] = {}
        """Pending id that may be committed -> monotonic time at which that was known."""
        self._busy = False
        self._swept = False
        self._closed = False

    @property
    @abstractmethod
    def _is_open(self) -> bool:
        """Whether it is known what is committed, so that commits may begin."""

    @abstractmethod
    def _decode(self, committable: bytes) -> tuple[int, tuple[T, ...]]:
        """(checkpoint id, its items) of what a writer sent."""

    @abstractmethod
    def _commit(self, due: tuple[int, ...]) -> None:
        """Start the commit of these ids, ascending, or of the first of them."""

    @abstractmethod
    def _sweep(self) -> None:
        """Delete what earlier attempts staged and nothing can refer to. Correctness never depends on it."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        for encoded in batch.columns().column("committable").to_pylist():
            checkpoint_id, items = self._decode(encoded)
            self._pending.setdefault(checkpoint_id, []).extend(items)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._released = max(self._released, checkpoint_id)
        self._note_waiting()
        self._commit_next()

    def _note_waiting(self) -> list[int]:
        """Ids of complete checkpoints that are not known to be committed, those among them that are under way."""
        now_ms, waiting = self.context.monotonic_ms(), [number for number in self._pending if number <= self._released]
        self._since_ms = {number: self._since_ms.get(number, now_ms) for number in waiting}
        return waiting

    def commit_backlog(self) -> CommitBacklog:
        waiting = self._note_waiting()
        items = [item for number in waiting for item in self._pending[number]]
        oldest_ms = min(self._since_ms.values(), default=None)
        lag_ms = 0 if oldest_ms is None else max(0, self.context.monotonic_ms() - oldest_ms)
        return CommitBacklog(len(waiting), len(items), lag_ms, self._rows_of(items))

    def _rows_of(self, items: Sequence[T]) -> int | None:
        """Rows of these; None: they don't say."""
        return None

    def _commit_next(self) -> None:
        """Start the next commit, in the order of ids; one at a time."""
        if self._busy or not self._is_open or self._closed:
            return
        due = self._due
        if due:
            self._commit(due)
        else:
            self._sweep_once()

    @property
    def _due(self) -> tuple[int, ...]:
        return tuple(sorted(checkpoint for checkpoint in self._pending if checkpoint <= self._released))

    def _count_commit(self) -> None:
        self.context.counters.named["commits"] = self.context.counters.named.get("commits", 0) + 1

    def _start(self, flow: Flow[Any], storage: Storage, ended: Callable[[Any], None]) -> None:
        """Run a flow; a failure of it fails the subtask."""
        self._busy = True

        def done(result: Any, error: BaseException | None) -> None:
            self._busy = False
            if self._closed:
                return
            if error is not None:
                self.context.fail(error)
            else:
                ended(result)

        self._submit(flow, storage, done)

    def _submit(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        """On the pool, where only storage is waited for: a flow that calls a user's object has a thread of its own."""
        self.context.submit_flow(flow, storage, done)

    def _sweep_once(self) -> None:
        """After the restored commits."""
        if not self._swept:
            self._swept = True
            self._sweep()

    def has_pending_work(self) -> bool:
        return self._busy or bool(self._due)

    def close(self) -> None:
        self._closed = True

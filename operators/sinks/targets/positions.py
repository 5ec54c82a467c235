"""CORE: who may move a sink's output on, by the position that its target has stored. Pure.

A target stores one `CommitPosition` beside a sink's rows, and changes both in one atomic step, if the stored position is the one
that the committer expects. So a commit is repeated without harm, and a committer that another one has replaced can't commit. It
knows nothing of files, of Parquet and of what the target is.

Two facts are judged apart. *Who*: attempts are numbered in one state directory, so that they are compared within one line alone; a
job of another line takes the target over if the state that it restored is of the line that has it. *What*: a stored position is
this job's output if its tag is that of rows which the job knows, never by the number of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.barriers.sinks.staged import ALL_ROWS as ALL_ROWS
from holdfast.barriers.sinks.staged import POSITION_VERSION as POSITION_VERSION
from holdfast.barriers.sinks.staged import CommitMark as CommitMark
from holdfast.barriers.sinks.staged import CommitPosition as CommitPosition
from holdfast.statebackends.errors import CommitPositionLostError, FencedError, OutputMayRepeatError


@dataclass(frozen=True, slots=True)
class CommitOwner:
    """The committer that opens a target: one attempt of one job. What `CommitTarget.open` gets."""

    sink_id: str
    job_id: str
    attempt: int
    """1, 2, 3 ... within the line."""
    nonce: str
    known: CommitPosition | None
    """As restored, or as last confirmed: a target that is behind it has lost rows. None: the job's state has none."""
    pending: tuple[CommitMark, ...]
    """Checkpoints whose rows may still have to be committed, each as the mark of all its rows."""
    restored_checkpoint_id: int
    """Highest completed id of the state in use: no row behind it can be committed yet. 0: the job started empty."""
    allow_output_repeat: bool = False
    place: str = ""
    """Where the target writes, for errors."""
    line: str = ""
    """As of `CommitPosition`."""
    reopens: bool = False
    """This very committer has opened the target before: the position there is its own, or it was replaced."""

    def take(self, stored: CommitPosition | None) -> CommitPosition:
        """Judge what the target has stored, and return what it has to store instead, in the same atomic step: then every older
        owner is fenced. Changes no row. `stored`: None if the target has no position of this sink.

        Raises FencedError when another job owns the sink, the same job in another state directory, or a later attempt of this one;
        OutputMayRepeatError when rows are committed that the restored state does not have; CommitPositionLostError when rows that
        were committed are not there any more."""
        if stored is None:
            return self._begin()
        self._check_owner(stored)
        if self.known is not None and stored.highest.progress < self.known.progress:
            raise self._lost(stored, f"it is at {stored}")
        if self._is_own(stored):
            return self._owned(stored.owner + 1, stored.mark, stored.reached, stored.repeated)
        return self._judge(stored)

    def _begin(self) -> CommitPosition:
        if self.known is not None and self.known.checkpoint_id:
            raise self._lost(None, "it has none")
        return self._owned(1 if self.known is None else self.known.owner + 1)

    # ------------------------------------------------------------------------------------------------------------ who

    def _check_owner(self, stored: CommitPosition) -> None:
        if stored.sink_id != self.sink_id:
            raise self._fenced(stored, f"holds the position of sink {stored.sink_id}: give each sink a place of its own")
        if self.reopens and stored.nonce != self.nonce:
            raise self._fenced(stored, f"was taken over meanwhile: it is at {stored}")
        if self._is_of_line(stored):
            self._check_attempt(stored)
        elif not self._inherits(stored):
            self._check_foreign(stored)

    def _is_own(self, stored: CommitPosition) -> bool:
        """Whether this very committer has opened the target before. It may not know: its first request was taken for lost, and took
        effect behind what it committed since. That was judged then, and to go back by it would be to go back twice."""
        return self.reopens or (self._is_of_line(stored) and (stored.attempt, stored.nonce) == (self.attempt, self.nonce))

    def _is_of_line(self, stored: CommitPosition) -> bool:
        return (stored.job_id, stored.line) == (self.job_id, self.line)

    def _inherits(self, stored: CommitPosition) -> bool:
        """Whether the restored state is of the job that has the target: that job ends here."""
        known = self.known
        return known is not None and (known.job_id, known.line) == (stored.job_id, stored.line)

    def _check_attempt(self, stored: CommitPosition) -> None:
        if stored.attempt > self.attempt:
            raise self._fenced(stored, f"was taken over by attempt {stored.attempt} of this job, this is {self.attempt}")
        if stored.attempt == self.attempt and stored.nonce != self.nonce:
            why = "are two state directories copies of each other?"
            raise self._fenced(stored, f"was opened by another committer of attempt {stored.attempt} of this job: {why}")

    def _check_foreign(self, stored: CommitPosition) -> None:
        if stored.job_id != self.job_id:
            raise self._fenced(stored, f"is owned by job {stored.job_id}: give this one another sink_id or another place")
        if not self.allow_output_repeat:
            raise self._fenced(
                stored,
                "is owned by a job of this name in another state directory, and this one was not restored from its state: name one "
                "of them otherwise, give this sink another place, or take it over with allow_output_repeat",
            )

    # ----------------------------------------------------------------------------------------------------------- what

    def _judge(self, stored: CommitPosition) -> CommitPosition:
        owner, reached = stored.owner + 1, stored.reached
        if reached is not None and reached.tag and self._has(reached):
            return self._owned(owner, reached)  # a user had gone back, and changed his mind before a row was repeated
        is_known = self._has(stored.mark)
        if not (is_known and (reached is None or self._went_back_from(reached))) and not self.allow_output_repeat:
            raise self._may_repeat(stored.highest)
        if is_known:
            return self._owned(owner, stored.mark, reached, stored.repeated)
        # What is stored tells nothing of the rows to come: their ids may be lower, if another line took it; and what the snapshot
        # has staged may be of a line that ended with it, so that the stored position is behind rows which it does not have.
        known = CommitMark() if self.known is None else self.known.mark
        is_ours = self._is_of_line(stored) or self._inherits(stored)
        repeated = min(self.restored_checkpoint_id, stored.highest.checkpoint_id) if is_ours else 0
        return self._owned(owner, known, stored.highest, repeated)

    def _has(self, mark: CommitMark) -> bool:
        """Whether all that is committed up to a mark is output of this job, and no less than it knows of."""
        known = CommitMark() if self.known is None else self.known.mark
        if mark.progress < known.progress:
            return False
        points = (CommitMark(), known, *self.pending)
        return any((point.checkpoint_id, point.tag) == (mark.checkpoint_id, mark.tag) for point in points)

    def _went_back_from(self, reached: CommitMark) -> bool:
        """Whether the state in use is of the line that began where a user went back."""
        known = None if self.known is None else self.known.reached
        return known is not None and known.progress == reached.progress

    # ---------------------------------------------------------------------------------------------------------- results

    def _owned(
        self, owner: int, mark: CommitMark | None = None, reached: CommitMark | None = None, repeated: int = 0
    ) -> CommitPosition:
        mark = mark or CommitMark()
        return CommitPosition(
            version=POSITION_VERSION,
            sink_id=self.sink_id,
            owner=owner,
            nonce=self.nonce,
            job_id=self.job_id,
            attempt=self.attempt,
            checkpoint_id=mark.checkpoint_id,
            row=mark.row,
            repeated=repeated,
            line=self.line,
            tag=mark.tag,
            reached=reached,
        )

    @property
    def _at(self) -> str:
        return f" at {self.place}" if self.place else ""

    def _fenced(self, stored: CommitPosition, why: str) -> FencedError:
        return FencedError(
            f"sink {self.sink_id}{self._at} {why}",
            sink=self.sink_id,
            owner=stored.job_id,
            job_id=self.job_id,
            held=self.attempt,
            newer=stored.attempt,
        )

    def _may_repeat(self, committed: CommitMark) -> OutputMayRepeatError:
        if committed.checkpoint_id > self.restored_checkpoint_id:
            why = f"the job starts at {self.restored_checkpoint_id}"
        else:
            why = f"the snapshot {self.restored_checkpoint_id} that the job starts from has other rows"
        return OutputMayRepeatError(
            f"sink {self.sink_id}{self._at}: output up to checkpoint {committed.checkpoint_id} is committed, and {why}: it would "
            "repeat. Choose a newer snapshot, another place, or allow_output_repeat",
            sink=self.sink_id,
            restored=self.restored_checkpoint_id,
            committed=committed.checkpoint_id,
        )

    def _lost(self, stored: CommitPosition | None, what: str) -> CommitPositionLostError:
        return CommitPositionLostError(
            f"sink {self.sink_id}{self._at}: rows up to {self.known} were committed, and the target does not have their position: "
            f"{what}. Restore the target, or start from a snapshot that it is not behind; a sink of another uid begins anew there",
            sink=self.sink_id,
            place=self.place,
            known=self.known.checkpoint_id if self.known is not None else 0,
            stored=None if stored is None else stored.checkpoint_id,
        )

"""The checkers of the invariants I1 to I46 (docs/invariants.md). Each observes stores, the wire and ports of workers,
from outside the job."""

from __future__ import annotations

from holdfast.chaos.checkers.aborts import AbortsChecker
from holdfast.chaos.checkers.asynchronous import AsyncChecker
from holdfast.chaos.checkers.attempts import AttemptsChecker
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.bounds import BoundsChecker
from holdfast.chaos.checkers.causes import CausesChecker
from holdfast.chaos.checkers.claims import ClaimsChecker
from holdfast.chaos.checkers.cleanup import CleanupChecker
from holdfast.chaos.checkers.completion import CompletionChecker
from holdfast.chaos.checkers.cut import CutChecker
from holdfast.chaos.checkers.distribution import DistributionChecker
from holdfast.chaos.checkers.effects import EffectsChecker
from holdfast.chaos.checkers.eventtime import EventTimeChecker, ForwardedChecker, LateChecker
from holdfast.chaos.checkers.finished import FinishedChecker
from holdfast.chaos.checkers.forgetting import ForgettingChecker
from holdfast.chaos.checkers.in_flight import InFlightChecker
from holdfast.chaos.checkers.labels import LabelsChecker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.liveness import LivenessChecker
from holdfast.chaos.checkers.notices import NoticesChecker
from holdfast.chaos.checkers.observations import Report, WorldView
from holdfast.chaos.checkers.output import OutputChecker
from holdfast.chaos.checkers.outside import OutsideChecker
from holdfast.chaos.checkers.pacing import PacingChecker
from holdfast.chaos.checkers.reconciling import ReconcilingChecker
from holdfast.chaos.checkers.records import RecordsChecker
from holdfast.chaos.checkers.recovery import RecoveryChecker
from holdfast.chaos.checkers.registers import RegisterChecker
from holdfast.chaos.checkers.repair import RepairChecker
from holdfast.chaos.checkers.repeats import RepeatsChecker
from holdfast.chaos.checkers.restarts import RestartsChecker
from holdfast.chaos.checkers.retention import RetentionChecker
from holdfast.chaos.checkers.settings import SettingsChecker
from holdfast.chaos.checkers.silence import AlignmentChecker, SilenceChecker
from holdfast.chaos.checkers.splits import SplitsChecker
from holdfast.chaos.checkers.stops import StopsChecker
from holdfast.chaos.checkers.takeovers import TakeoversChecker
from holdfast.chaos.checkers.workingfolders import WorkingFoldersChecker
from holdfast.chaos.workloads.scenario import Scenario

__all__ = ["CHECKERS", "INVARIANTS", "NOT_COVERED", "make_checkers"]

CHECKERS: tuple[type[Checker], ...] = (
    ClaimsChecker,
    RegisterChecker,
    CompletionChecker,
    FinishedChecker,
    AbortsChecker,
    CausesChecker,
    StopsChecker,
    EffectsChecker,
    AttemptsChecker,
    DistributionChecker,
    OutputChecker,
    OutsideChecker,
    RepeatsChecker,
    CutChecker,
    InFlightChecker,
    RetentionChecker,
    LabelsChecker,
    ForgettingChecker,
    RecoveryChecker,
    RepairChecker,
    PacingChecker,
    SettingsChecker,
    RestartsChecker,
    ReconcilingChecker,
    EventTimeChecker,
    ForwardedChecker,
    RecordsChecker,
    CleanupChecker,
    AsyncChecker,
    LateChecker,
    SplitsChecker,
    SilenceChecker,
    AlignmentChecker,
    BoundsChecker,
    WorkingFoldersChecker,
    NoticesChecker,
    TakeoversChecker,
    LivenessChecker,
)
"""Order in which checkers receive an observation: causes before their consequences."""

INVARIANTS: dict[str, str] = {
    "I1": "every record's effect is in the committed output",
    "I2": "no record's effect is in the committed output twice",
    "I3": "the rows of a key are in order",
    "I4": "the sums of the input are those of the output, compared row by row with I1 and I2; what is dropped as late is counted",
    "I5": "each row of a key is one step behind the one before it",
    "I6": "state after crashes is the state of a run without any: compared at each cut with I7",
    "I7": "a checkpoint holds the effect of exactly the records in front of its cut",
    "I8": "sources continue at the positions of the restored checkpoint, without gap or overlap",
    "I9": "nothing is emitted between a barrier and its snapshot: seen as I2 or I7",
    "I10": "timers fire once over crashes, and within an attempt event time never goes back, nor ends before the input",
    "I11": "a completed checkpoint has every acknowledgement of its attempt, and all its files as long as it is claimed",
    "I12": "ids rise over restarts and leaders, and are never used again",
    "I13": "an id is decided once, for good; one that was aborted, or is older than a complete one, is not triggered again",
    "I14": "a notice follows the durable record of what it says",
    "I15": "a stale leader, attempt or process can't complete, abort, commit or delete, nor fail an attempt; nor can a stranger",
    "I16": "retention, pauses, tolerated failures, waits and modes are as configured, and the newest checkpoint can be restored",
    "I17": "memory is bounded",
    "I18": "output is visible only once a checkpoint that covers it is complete",
    "I19": "output is committed once, in the order of ids, and never taken back",
    "I20": "staged files are deleted only when nothing can refer to them any more",
    "I21": "a plain savepoint makes nothing visible",
    "I22": "a job never begins behind its visible output unless its user allows it",
    "I23": "shared files live as long as a checkpoint refers to them",
    "I24": "in the end no file is without an owner",
    "I25": "savepoints are changed and deleted only by a job that owns them",
    "I26": "every key group, every keyed part and every subtask has one owner",
    "I27": "list entries are neither lost nor repeated by a restore",
    "I28": "state survives a rescale and the way back: compared at the cuts that follow, with I7",
    "I29": "recovering twice is recovering once",
    "I30": "without faults a checkpoint completes, none fails, and the job ends; tasks get notice of aborts; stops are tried again",
    "I31": "nothing leaves an operator behind a watermark that was forwarded but what late records and timers bring",
    "I32": "each record of a window is in a result, in the late output or in the count of late records, and in one of them alone",
    "I33": "a silent input is idle after its timeout, not before, an idle one holds no event time, aligned sources keep together",
    "I34": "results of async_map keep the order of their rows if they are ordered, and come before their watermark",
    "I35": "no window and no join keeps state past the watermark at which it is to be cleaned up",
    "I36": "what a snapshot holds in flight is restored by its attempt: once, in order, first; a savepoint holds none",
    "I37": "at least once: no record is lost, one repeats only behind a restore, and each staged file is committed once",
    "I38": "the rows of a target outside are those that its position says, each once",
    "I39": "a target outside has one owner: whoever was replaced commits nothing, and takes nothing over",
    "I40": "a split is with its enumerator or with one reader, in every snapshot, and is read from its start once",
    "I41": "nothing is outside before a checkpoint that covers it is complete",
    "I42": "no staged file is lost before its rows are outside, and none is left when they are",
    "I43": "a merge replaces committed files that are current, by one with their rows, and nothing else changes",
    "I44": "a member takes over from one that left, gave up, freed its lock, or neither gave a sign of life nor answered; one that "
    "can store no sign gives up",
    "I45": "a checkpoint with a label is not deleted until the label is taken back",
    "I46": "behind the certificate of an erasure no file of the job decodes to the key",
}
"""Invariant -> its meaning in one line."""

NOT_COVERED: dict[str, str] = {}
"""Invariant -> why no checker watches it."""


def make_checkers(world: WorldView, scenario: Scenario, report: Report) -> list[Checker]:
    """Checkers of one run, over one ledger of the job's records."""
    ledger = JobLedger(world)
    return [checker(world, scenario, report, ledger) for checker in CHECKERS]

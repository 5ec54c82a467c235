"""CORE: the election: which of several members is the active one, seen by one of them.

A member takes over when the active's sign of life has not changed for `takeover_after_ms` on the member's own clock *and* a probe
of the active fails. Either alone is wrong: a cut between two members looks like a death to the probe, and a storage that hangs, or
an active that it has cut off, looks like one to the sign. It takes over at once when the kernel frees the lock that the active said
it held on this host, and when the active has handed over, or says that it gave up.

An active member whose signs have not been stored for twice that time gives up: it can lead no job, and its answers to probes would
keep the others from doing so.

All of this is courtesy: it makes one member lead as a rule. If two do, each job has one leader all the same, by its own epochs. The
core imports no clock, thread, lock or socket; what it can't know, such as the wall clock of another member, it doesn't compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, assert_never

from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.statebackends.errors import InvalidConfigError, InvariantError

TAKEOVER_AFTER_MS = 3_000
TAKEOVER_AFTER_S3_MS = 10_000
TAKEOVER_AFTER_MS_MIN, TAKEOVER_AFTER_MS_MAX = 300, 600_000


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Times of one member; all members of a state directory should have the same."""

    takeover_after_ms: int = TAKEOVER_AFTER_MS
    """Time for which the active's sign of life must not have changed before it is probed; 300..600,000."""

    def check(self) -> None:
        """Raise InvalidConfigError for a time out of bounds."""
        if not TAKEOVER_AFTER_MS_MIN <= self.takeover_after_ms <= TAKEOVER_AFTER_MS_MAX:
            text = f"takeover_after_ms must be {TAKEOVER_AFTER_MS_MIN}..{TAKEOVER_AFTER_MS_MAX}, got {self.takeover_after_ms}"
            raise InvalidConfigError(text, setting="takeover_after_ms")

    @property
    def beat_interval_ms(self) -> int:
        """Time between two signs: two may be lost, or late, before anybody probes."""
        return self.takeover_after_ms // 3

    @property
    def give_up_after_ms(self) -> int:
        """Time without a stored sign after which the active member leads no longer. Twice, so that a storage that fails all for
        a moment changes nothing."""
        return 2 * self.takeover_after_ms

    @property
    def watch_interval_ms(self) -> int:
        """Time between two looks at the others."""
        return self.takeover_after_ms // 10

    @property
    def probe_timeout_ms(self) -> int:
        """Time in which a living active answers."""
        return max(1_000, self.takeover_after_ms // 8)


class Role(StrEnum):
    """What a member is."""

    STANDBY = "standby"
    CLAIMING = "claiming"
    """Has asked storage for the next epoch: its answer decides."""
    ACTIVE = "active"
    LEFT = "left"
    """Handed over, or never was the active one: nothing makes it one any more."""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Observed:
    """The answer to `Observe`."""

    seen: Observation


@dataclass(frozen=True, slots=True)
class ObservationFailed:
    """Storage did not answer: nothing is known."""


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The answer to a `Probe`, or that there was none in time."""

    number: int
    is_active: bool
    """The process at the URL said that it is the member that was asked for, and the active one."""


@dataclass(frozen=True, slots=True)
class LockTaken:
    """The kernel gave this member the lock of its host."""


@dataclass(frozen=True, slots=True)
class ClaimAnswered:
    """The active member of the claimed epoch: this one, or another that was first."""

    active: ActiveRecord


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """Whether the epoch is ours is not known: the next observation tells."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SignGiven:
    """A sign is stored, or could not be."""

    is_stored: bool = True


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process is to end: hand over."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """`next_deadline_ms` has come."""


Event: TypeAlias = (
    Observed
    | ObservationFailed
    | ProbeAnswered
    | LockTaken
    | ClaimAnswered
    | ClaimFailed
    | SignGiven
    | StopRequested
    | DeadlineReached
)


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Observe:
    """Read the records of members; one such request is under way at a time."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the process at a URL whether it is this member, and the active one; at most one number counts at a time."""

    number: int
    url: str
    member: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Create the record of an epoch by put-if-absent."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Lead the jobs of the state directory from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StopLeading:
    """Stop leading, without ending a job; finished when the next action begins, unless storage is away."""

    epoch: int
    is_cut_off: bool = False
    """Storage does not answer this member: nothing is waited for that needs it."""


@dataclass(frozen=True, slots=True)
class GiveSign:
    """Store the next sign of life; one is under way at a time, but for the last one."""

    epoch: int
    """0: it stands by."""
    is_leaving: bool = False
    gave_up: int = 0
    """Highest epoch in which it was the active one, and no longer is."""


@dataclass(frozen=True, slots=True)
class ReleaseLock:
    """Release the lock of this host, if this member holds it."""


Action: TypeAlias = Observe | Probe | Claim | Lead | StopLeading | GiveSign | ReleaseLock


class Election:
    """One member's view. Single owner: the thread that calls `handle`."""

    def __init__(self, member: str, config: ElectionConfig, *, lock: str = "", now_ms: int) -> None:
        """`lock`: identity of this host's lock; empty: it has none that works."""
        config.check()
        self.member = member
        self.role = Role.STANDBY
        self.epoch = 0
        """In which this member is the active one, or claims to be; 0 while it stands by."""
        self.active: ActiveRecord | None = None
        """The active member, as far as this one knows."""
        self._config = config
        self._lock = lock
        self._sign: SignOfLife | None = None
        self._changed_ms = now_ms
        """When an observation last differed from the one before, or from what was not known."""
        self._confirmed_ms = now_ms
        """When the newest observation that did not differ was made."""
        self._probe: int | None = None
        """The probe whose answer counts."""
        self._probes = 0
        self._quiet_until_ms = now_ms
        """No probe, and no claim behind one, before that: a probe was answered, or this member has just lost."""
        self._retry_at_ms = now_ms
        """No claim because of a lock, nor a probe, before that: storage has just not answered one."""
        self._given_up = 0
        """Highest epoch in which this member was the active one."""
        self._observe_at_ms: int | None = now_ms
        """None while one is under way."""
        self._sign_at_ms: int | None = now_ms
        self._sign_wanted = False
        """A sign that could not wait came while another one was under way."""
        self._stored_ms = now_ms
        """When the newest sign was stored that is."""
        self._can_store = True
        """The last sign that was tried is stored."""
        self._handled_ms = now_ms
        """When the last event came."""

    def next_deadline_ms(self) -> int | None:
        """When `DeadlineReached` is due; None: not before another event."""
        due = [at_ms for at_ms in (self._observe_at_ms, self._sign_at_ms) if at_ms is not None]
        if self.role is Role.ACTIVE:
            seen_ms = self._handled_ms + self._config.beat_interval_ms  # time that it has seen pass, unlike that of a pause
            due.append(min(seen_ms, self._stored_ms + self._config.give_up_after_ms))
        return min(due, default=None) if self.role is not Role.LEFT else None

    @property
    def wants_lock(self) -> bool:
        """Whether the shell should try to take the lock of this host, without waiting for it, again and again."""
        return bool(self._lock) and (self.role is Role.ACTIVE or (self.role is Role.STANDBY and self._is_guarded))

    @property
    def _is_guarded(self) -> bool:
        """The active member said that it holds the very lock that this one can take: who gets it knows that the other is gone."""
        sign, active = self._sign, self.active
        is_its = sign is not None and active is not None and (sign.member, sign.epoch) == (active.member, active.epoch)
        return is_its and sign is not None and sign.holds_lock and sign.lock == self._lock != ""

    def handle(self, event: Event, *, now_ms: int) -> list[Action]:
        self._note_time(now_ms)
        match event:
            case DeadlineReached():
                actions = self._due(now_ms)
            case Observed():
                actions = self._observed(event.seen, now_ms)
            case ObservationFailed():
                self._observe_at_ms = now_ms + self._config.watch_interval_ms
                actions = []
            case ProbeAnswered():
                actions = self._probed(event, now_ms)
            case LockTaken():
                actions = self._lock_taken(now_ms)
            case ClaimAnswered():
                actions = self._claimed(event.active, now_ms)
            case ClaimFailed():
                actions = self._claim_failed(event.epoch, now_ms)
            case SignGiven():
                actions = self._sign_given(event.is_stored, now_ms)
            case StopRequested():
                actions = self._stop()
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise InvariantError: a bug."""
        leads = self.role in (Role.ACTIVE, Role.CLAIMING)
        if leads != (self.epoch > 0) or (self._probe is not None and self.role is not Role.STANDBY):
            raise InvariantError(f"member {self.member}: {self.role} in epoch {self.epoch}, probe {self._probe}")

    # ---------------------------------------------------------------------------------------------------- what is due

    def _note_time(self, now_ms: int) -> None:
        """A pause of the whole process is none in which storage failed it."""
        paused_ms = now_ms - self._handled_ms
        if paused_ms > 2 * self._config.beat_interval_ms:
            self._stored_ms += paused_ms
        self._handled_ms = now_ms

    def _due(self, now_ms: int) -> list[Action]:
        if self.role is Role.LEFT:
            return []
        actions: list[Action] = []
        if self._is_cut_off(now_ms):
            actions += self._give_up(now_ms)
        if self._sign_at_ms is not None and self._sign_at_ms <= now_ms:
            actions += self._give_sign()
        if self._observe_at_ms is not None and self._observe_at_ms <= now_ms:
            self._observe_at_ms = None
            actions.append(Observe())
        return actions

    def _give_sign(self) -> list[Action]:
        if self._sign_at_ms is None:
            self._sign_wanted = True
            return []
        self._sign_at_ms, self._sign_wanted = None, False
        return [GiveSign(self.epoch) if self.role is Role.ACTIVE else GiveSign(0, gave_up=self._given_up)]

    def _sign_given(self, is_stored: bool, now_ms: int) -> list[Action]:
        self._sign_at_ms = now_ms + self._config.beat_interval_ms
        if is_stored and not self._can_store:
            # The others, which see this sign as soon as this member does, come first.
            self._quiet_until_ms = max(self._quiet_until_ms, now_ms + self._config.beat_interval_ms)
        self._can_store = is_stored
        if is_stored:
            self._stored_ms = now_ms
        return self._give_sign() if self._sign_wanted and self.role is not Role.LEFT else []

    # ---------------------------------------------------------------------------------------------------- observations

    def _observed(self, seen: Observation, now_ms: int) -> list[Action]:
        self._observe_at_ms = now_ms + self._config.watch_interval_ms
        active, sign = seen.active, seen.active_sign
        if self.role in (Role.LEFT, Role.CLAIMING):
            return []
        if active is not None and active.epoch < max(self.epoch, self._known_epoch):
            return []  # read before what is known by now
        if self.role is Role.ACTIVE:
            return self._superseded(active, now_ms) if active is not None and active.epoch > self.epoch else []
        if active is not None and active.member == self.member and active.epoch > self._given_up:
            return self._lead(active)  # a claim whose answer was lost
        self._watch(active, sign, now_ms)
        if active is None:
            return self._claim_if_able(1)
        if sign is not None and sign.is_leaving:
            return self._claim_if_able(active.epoch + 1)
        is_own = active.member == self.member
        if sign is not None and sign.gave_up >= active.epoch:
            return [] if is_own and now_ms < self._quiet_until_ms else self._claim_if_able(active.epoch + 1)
        return [] if is_own else self._probe_if_stale(active, now_ms)

    @property
    def _known_epoch(self) -> int:
        return self.active.epoch if self.active is not None else 0

    def _watch(self, active: ActiveRecord | None, sign: SignOfLife | None, now_ms: int) -> None:
        """Note whether the active's sign is another one than before. Signs are numbered, so that equal ones at two moments mean
        that there was no other between them, whatever this member did meanwhile."""
        if active != self.active or (sign is not None and sign != self._sign):
            self._changed_ms = now_ms
            self._probe = None  # it was about what has changed since
            self.active, self._sign = active, sign
        self._confirmed_ms = now_ms
        stale_ms = self._changed_ms + self._config.takeover_after_ms
        if now_ms < stale_ms < now_ms + self._config.watch_interval_ms:
            self._observe_at_ms = stale_ms  # not a look later

    def _probe_if_stale(self, active: ActiveRecord, now_ms: int) -> list[Action]:
        is_stale = self._confirmed_ms - self._changed_ms >= self._config.takeover_after_ms
        if not is_stale or self._probe is not None or now_ms < max(self._quiet_until_ms, self._retry_at_ms):
            return []
        self._probes += 1
        self._probe = self._probes
        return [Probe(self._probe, active.url, active.member)]

    def _probed(self, event: ProbeAnswered, now_ms: int) -> list[Action]:
        if event.number != self._probe or self.active is None:
            return []
        self._probe = None
        if event.is_active:
            self._quiet_until_ms = now_ms + self._config.beat_interval_ms
            return []
        return self._claim_if_able(self.active.epoch + 1)

    def _lock_taken(self, now_ms: int) -> list[Action]:
        is_able = self._can_store and now_ms >= self._retry_at_ms
        match self.role:
            case Role.STANDBY if self._is_guarded and self.active is not None and is_able:
                return self._claim(self.active.epoch + 1)
            case Role.ACTIVE:
                return self._give_sign()  # those of this host are to know
            case Role.CLAIMING:
                return []
            case _:
                return [ReleaseLock()]

    # ---------------------------------------------------------------------------------------------------------- claims

    def _claim_if_able(self, epoch: int) -> list[Action]:
        """A member that can store no sign could lead no job."""
        return self._claim(epoch) if self._can_store else []

    def _claim(self, epoch: int) -> list[Action]:
        self.role, self.epoch, self._probe = Role.CLAIMING, epoch, None
        return [Claim(epoch)]

    def _claimed(self, active: ActiveRecord, now_ms: int) -> list[Action]:
        if active.epoch != self.epoch or self.role is not Role.CLAIMING:
            is_ours = active.member == self.member and active.epoch > self._given_up
            return self._hand_over(active.epoch) if self.role is Role.LEFT and is_ours else []
        if active.member == self.member:
            return self._lead(active)
        self.role, self.epoch = Role.STANDBY, 0
        self._watch(active, None, now_ms)
        return [ReleaseLock()]

    def _claim_failed(self, epoch: int, now_ms: int) -> list[Action]:
        if self.role is not Role.CLAIMING or epoch != self.epoch:
            return []
        self.role, self.epoch = Role.STANDBY, 0
        self._retry_at_ms = now_ms + self._config.watch_interval_ms
        return [ReleaseLock()]

    def _lead(self, active: ActiveRecord) -> list[Action]:
        self.role, self.epoch, self.active, self._sign, self._probe = Role.ACTIVE, active.epoch, active, None, None
        self._given_up, self._stored_ms = active.epoch, self._handled_ms
        return [Lead(active.epoch), *self._give_sign()]

    def _is_cut_off(self, now_ms: int) -> bool:
        return self.role is Role.ACTIVE and now_ms - self._stored_ms >= self._config.give_up_after_ms

    def _give_up(self, now_ms: int) -> list[Action]:
        """Nobody leads instead as far as it knows: storage does not say. From now on it answers no probe as the active one, and its
        next sign, once one can be stored, says so."""
        lost = self.epoch
        self.role, self.epoch, self._can_store = Role.STANDBY, 0, False
        self._quiet_until_ms = now_ms + self._config.give_up_after_ms
        return [StopLeading(lost, is_cut_off=True), ReleaseLock(), *self._give_sign()]

    def _superseded(self, active: ActiveRecord, now_ms: int) -> list[Action]:
        """Another member leads since: this one was paused, or cut off. It does not grab back: the other has twice the time to show
        that it lives, so that two members which each find the other silent don't take turns."""
        lost = self.epoch
        self.role, self.epoch = Role.STANDBY, 0
        self._watch(active, None, now_ms)
        self._quiet_until_ms = now_ms + 2 * self._config.takeover_after_ms
        return [StopLeading(lost), ReleaseLock(), *self._give_sign()]

    # ----------------------------------------------------------------------------------------------------------- leave

    def _stop(self) -> list[Action]:
        role, epoch = self.role, self.epoch
        self.role, self.epoch, self._probe = Role.LEFT, 0, None
        match role:
            case Role.ACTIVE:
                return [StopLeading(epoch), *self._hand_over(epoch)]
            case Role.LEFT:
                return []
            case Role.STANDBY | Role.CLAIMING:
                return [GiveSign(0, is_leaving=True), ReleaseLock()]
            case _:
                assert_never(role)

    def _hand_over(self, epoch: int) -> list[Action]:
        """The sign comes first: who gets the lock, or reads the sign, takes over at once."""
        return [GiveSign(epoch, is_leaving=True), ReleaseLock()]

"""SHELL: this process as one of several members: it performs what the election decides, and knows the others.

One thread owns the election; storage and probes run on a small pool, and their outcomes come back as events. The service that leads
jobs is opened when this member becomes the active one, and closed when it no longer is."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, assert_never

from holdfast.api.members.lock import HostLock, LocksUnusableError
from holdfast.api.members.peers import Peers
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.notes import THE_COORDINATOR_STOPS
from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Election, ElectionConfig, Role
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.coordinator.standby.store import claim, forget, give_sign, observe
from holdfast.statebackends.errors import HoldfastError, NotLeaderError, RecoveringError
from holdfast.statebackends.storage.port import Flow, Storage, run_flow

log = logging.getLogger("holdfast.members")

LOCK_ROUND_S = 0.05
"""Seconds between two tries to take the lock of this host while the active member holds it."""
OPEN_AGAIN_S = 0.5
"""Pause between two tries to open the service while storage fails."""
FORGET_AFTER_MS = 600_000
"""Time after which the active member deletes the signs of one that gives no new ones."""
FORGOTTEN_MAX = 100
"""Members forgotten behind one look, so that the next one is not late."""
ANOTHER_LEADS = "another member leads"
"""Why the jobs of one that was superseded are led here no more, in their histories."""
STOP_TIMEOUT_S = 5.0
"""Seconds for the last sign of a member that stops; without it the others find out by themselves."""

T = TypeVar("T")


SILENT_AFTER = 3
"""Times `takeover_after_ms` without another sign of life after which a member is shown as gone, and no worker is told of it."""


@dataclass(frozen=True, slots=True)
class KnownMember:
    """A member, as this one knows it."""

    sign: SignOfLife
    is_active: bool
    is_this: bool
    is_gone: bool
    """It has left, or has given no other sign for long."""
    seen_ms: int
    """Time since its sign of life last changed, on this member's clock."""
    is_seen: bool
    """It has changed since this one began; else `seen_ms` is how long this one has looked."""
    holds_lock: bool | None
    """Of its host; None: it did when it gave its last sign, which is too old to say: a process that dies gives its lock up."""


class Membership:
    """This process as a member. Thread-safe; `start` and `stop` once each."""

    def __init__(
        self,
        storage: Storage,
        url: str,
        lock: HostLock | None,
        config: ElectionConfig,
        *,
        open_service: Callable[[], Coordinator],
        announce: Callable[[], None],
        lock_problem: str = "",
        authorities: str | None = None,
    ) -> None:
        """`open_service`: opens the coordinator of the directory's jobs, to be closed by the membership. `announce`: writes down
        where the active member listens. `lock` None: this host has none that works, for the reason `lock_problem`.
        `authorities`: see Peers."""
        self.member = secrets.token_hex(16)
        self.url = url
        self.lock_problem = lock_problem
        self._storage = storage
        self._lock = lock
        self._config = config
        self._open_service = open_service
        self._announce = announce
        self._peers = Peers(url, authorities)
        self._inbox: queue.SimpleQueue[on.Event | None] = queue.SimpleQueue()
        self._election = Election(self.member, config, lock=lock.identity if lock else "", now_ms=_now_ms())
        self._signs = ThreadPoolExecutor(1, "holdfast-signs")
        """One thread: signs are stored in the order of their numbers."""
        self._work = ThreadPoolExecutor(3, "holdfast-members")
        self._seen = Observation()
        self._changed_ms: dict[str, int] = {}
        self._unchanged: frozenset[str] | None = None
        """Members whose signs are those of the first look: how old they were then is not known; None: no look yet."""
        self._beat = 0
        self._guard = threading.Lock()
        self._service: Coordinator | None = None
        self._leading = 0
        """Epoch whose service is open or being opened; 0: none."""
        self._closing: threading.Thread | None = None
        """Closes the service that this member led when it was cut off from storage."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-election", daemon=True)

    # --------------------------------------------------------------------------------------------------- what others ask

    @property
    def peers(self) -> Peers:
        return self._peers

    @property
    def role(self) -> Role:
        return self._election.role

    @property
    def is_active(self) -> bool:
        return self.role is Role.ACTIVE

    def active(self) -> ActiveRecord | None:
        """The active member as far as this one knows; itself while it is."""
        return self._election.active

    def urls(self) -> tuple[str, ...]:
        """Where the members listen, this one first, then those that give signs of life as they should; those that left, or gave no
        sign for long, are left out."""
        others = [each for each in self.members() if not each.is_this and not each.is_gone]
        others.sort(key=lambda each: each.seen_ms > self._config.takeover_after_ms)
        return tuple(dict.fromkeys([self.url, *(each.sign.url for each in others)]))

    def members(self) -> list[KnownMember]:
        """Every member of which there is a sign, the active one first."""
        active, now_ms, seen, changed = self.active(), _now_ms(), self._seen, self._changed_ms
        unchanged = self._unchanged or frozenset()
        signs = dict(seen.signs)
        signs[self.member] = self._sign(self._election.epoch if self.is_active else 0, is_leaving=self.role is Role.LEFT)
        known = [
            self._known(
                sign,
                active,
                0 if member == self.member else now_ms - changed.get(member, now_ms),
                is_seen=member == self.member or member not in unchanged,
            )
            for member, sign in signs.items()
        ]
        return sorted(known, key=lambda each: (not each.is_active, each.is_gone, each.sign.url, each.sign.member))

    def _known(self, sign: SignOfLife, active: ActiveRecord | None, seen_ms: int, *, is_seen: bool) -> KnownMember:
        is_this = sign.member == self.member
        is_active = active is not None and sign.member == active.member and not sign.is_leaving and sign.gave_up < active.epoch
        is_gone = sign.is_leaving or seen_ms > SILENT_AFTER * self._config.takeover_after_ms
        is_fresh = is_seen and seen_ms <= self._config.takeover_after_ms
        holds_lock = None if sign.holds_lock and not is_fresh else sign.holds_lock
        return KnownMember(sign, is_active and (not is_this or self.is_active), is_this, is_gone, seen_ms, is_seen, holds_lock)

    def led(self) -> Coordinator:
        """The service of the active member. Raises NotLeaderError naming the active one while this member stands by,
        RecoveringError until its service is open."""
        service = self._service
        if service is not None:
            return service
        active = self.active()
        if self.is_active:
            raise RecoveringError("this member has just become the active one: try again in a moment")
        if active is None or active.member == self.member:
            raise NotLeaderError("no member is the active one: try again in a moment")
        text = f"this member stands by: the active one is at {active.url}"
        raise NotLeaderError(text, url=active.url, service_epoch=active.epoch)

    # ------------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to give signs and to watch the others."""
        self._thread.start()

    def stop(self) -> None:
        """Hand over and stop. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._inbox.put(on.StopRequested())
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._work.shutdown(wait=False, cancel_futures=True)
        self._signs.shutdown(wait=False)
        self._peers.close()
        if self._lock is not None:
            self._lock.close()

    def _run(self) -> None:
        while (event := self._next()) is not None:
            try:
                for action in self._election.handle(event, now_ms=_now_ms()):
                    self._perform(action)
            except Exception:  # a member without an election would never take over, and never step down
                log.critical("the election of this member failed in a way that no record describes", exc_info=True)

    def _next(self) -> on.Event | None:
        while True:
            deadline_ms, wait_s = self._election.next_deadline_ms(), 1.0
            if deadline_ms is not None:
                wait_s = (deadline_ms - _now_ms()) / 1000
            watches = self._lock is not None and self._election.wants_lock and not self._lock.is_held
            try:
                return self._inbox.get(timeout=max(0.0, min(wait_s, LOCK_ROUND_S) if watches else wait_s))
            except queue.Empty:
                if watches and self._lock is not None and self._lock.take():
                    return on.LockTaken()
                if deadline_ms is not None and deadline_ms <= _now_ms():
                    return on.DeadlineReached()

    # ---------------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: on.Action) -> None:
        match action:
            case on.Observe():
                self._in_pool(lambda: self._observe(), failed=on.ObservationFailed())
            case on.Probe():
                self._in_pool(lambda: self._probe(action), failed=on.ProbeAnswered(action.number, is_active=False))
            case on.Claim():
                self._in_pool(lambda: self._claim(action.epoch), failed=on.ClaimFailed(action.epoch))
            case on.Lead():
                self._lead(action.epoch)
            case on.StopLeading():
                self._stop_leading(action.epoch, is_cut_off=action.is_cut_off)
            case on.GiveSign():
                self._give_sign(action)
            case on.ReleaseLock():
                if self._lock is not None:
                    self._lock.release()
            case _:
                assert_never(action)

    def _in_pool(self, work: Callable[[], on.Event], failed: on.Event) -> None:
        def perform() -> None:
            try:
                event = work()
            except Exception as error:
                level = logging.WARNING if isinstance(error, HoldfastError | OSError) else logging.CRITICAL
                log.log(level, "the records of members: %s: %s", type(error).__name__, error)
                event = failed
            self._inbox.put(event)

        if not self._stopped.is_set():
            self._work.submit(perform)

    def _perform_flow(self, flow: Flow[T]) -> T:
        return run_flow(flow, self._storage)

    def _observe(self) -> on.Event:
        seen = self._perform_flow(observe(self._seen))
        now_ms = _now_ms()
        before = self._seen.beats
        changed = {
            member: self._changed_ms.get(member, now_ms) if before.get(member) == beat else now_ms
            for member, beat in seen.beats.items()
        }
        if self._unchanged is None:
            self._unchanged = frozenset(seen.beats)
        else:
            self._unchanged = frozenset(each for each in self._unchanged if seen.beats.get(each) == before.get(each))
        self._seen, self._changed_ms = seen, changed
        dead = [member for member, at_ms in changed.items() if now_ms - at_ms > FORGET_AFTER_MS and member != self.member]
        if dead and self.is_active:
            self._perform_flow(forget(dead[:FORGOTTEN_MAX]))
        return on.Observed(seen)

    def _probe(self, action: on.Probe) -> on.Event:
        is_active = self._peers.is_active(action.url, action.member, self._config.probe_timeout_ms / 1000)
        log.info("the sign of life of %s does not change, and it %s", action.url, "answers" if is_active else "does not answer")
        return on.ProbeAnswered(action.number, is_active=is_active)

    def _claim(self, epoch: int) -> on.Event:
        mine = ActiveRecord(epoch, self.member, self.url, time.time_ns() // 1_000_000)
        return on.ClaimAnswered(self._perform_flow(claim(mine)))

    def _give_sign(self, action: on.GiveSign) -> None:
        """The last one is waited for, within STOP_TIMEOUT_S: others read in it that they may lead."""
        self._beat += 1
        sign = self._sign(action.epoch, is_leaving=action.is_leaving, gave_up=action.gave_up)

        def store() -> None:
            is_stored = False
            try:
                self._perform_flow(give_sign(sign))
                is_stored = True
            except Exception as error:
                log.warning("no sign of life could be given: %s: %s", type(error).__name__, error)
            self._inbox.put(on.SignGiven(is_stored))

        stored = self._signs.submit(store)
        if action.is_leaving:
            try:
                stored.result(STOP_TIMEOUT_S)
            except TimeoutError:
                log.warning("the others are not told that this member leaves: storage does not answer")

    def _sign(self, epoch: int, *, is_leaving: bool, gave_up: int = 0) -> SignOfLife:
        return SignOfLife(
            self.member,
            max(1, self._beat),
            self.url,
            epoch=epoch,
            lock=self._lock.identity if self._lock is not None else "",
            holds_lock=self._lock is not None and self._lock.is_held and not is_leaving,
            is_leaving=is_leaving,
            host=socket.gethostname(),
            pid=os.getpid(),
            lock_problem=self.lock_problem,
            created_ms=time.time_ns() // 1_000_000,
            gave_up=gave_up,
        )

    # ---------------------------------------------------------------------------------------------------------- leading

    def _lead(self, epoch: int) -> None:
        """Open the service, on a thread of its own: signs go on meanwhile, and it is tried again while storage fails."""
        with self._guard:
            self._leading = epoch
        log.warning("this member is the active one from now on (epoch %d)", epoch)
        threading.Thread(target=self._open, args=(epoch,), name=f"holdfast-lead-{epoch}", daemon=True).start()

    def _open(self, epoch: int) -> None:
        if self._closing is not None:
            self._closing.join()  # what this member led before it was cut off
        while self._leading == epoch and not self._stopped.is_set():
            try:
                service = self._open_service()
            except Exception as error:
                log.warning("the jobs can't be led yet: %s: %s", type(error).__name__, error)
                self._stopped.wait(OPEN_AGAIN_S)
                continue
            with self._guard:
                if self._leading == epoch:
                    self._service = service
                    service.lead()
                    break
            service.close(self._why_over())
            return
        else:
            return
        try:
            self._announce()
        except HoldfastError as error:
            log.warning("the address of the active member is not written down: %s", error)

    def _stop_leading(self, epoch: int, *, is_cut_off: bool = False) -> None:
        with self._guard:
            self._leading = 0
            service, self._service = self._service, None
        why = ": it could not store a sign of life for long" if is_cut_off else ""
        log.warning("this member is not the active one any more (epoch %d)%s", epoch, why)
        if service is None:
            return
        if is_cut_off:  # threads of the service may hang in storage, and the election must not
            name, reason = f"holdfast-close-{epoch}", "this member could not store a sign of life for long"
            self._closing = threading.Thread(target=service.close, args=(reason,), name=name, daemon=True)
            self._closing.start()
        else:
            service.close(self._why_over())

    def _why_over(self) -> str:
        return THE_COORDINATOR_STOPS if self.role is Role.LEFT else ANOTHER_LEADS


def open_lock(folder: Path) -> tuple[HostLock | None, str]:
    """The lock of this host, or why there is none that works."""
    try:
        return HostLock(folder), ""
    except LocksUnusableError as error:
        log.warning("%s; members of this host do without, and take over by time and probe alone", error)
        return None, error.message


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000

"""CORE: leader retrieval: which coordinator a client of a job asks next, the one at the configured address or a leader that it
named.

One rule for workers, drivers and the command line, in production and in the simulator. A coordinator that does not lead a job names
its leader by epoch and URL (NotLeaderError). The module reads no file and sends nothing: addresses come in, targets go out."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from holdfast.statebackends.errors import HoldfastError, NotLeaderError

FOLLOWED_MAX = 4
"""Most leaders followed in a row, each named by the one before; then the address is asked again."""

MEMBERS_MAX = 32
"""Addresses of members that are remembered, at most."""

SILENT_ROUNDS = 16
"""Rounds through the others before one that did not answer in time is asked again."""

URL_CHARACTERS_MAX = 2_048
"""Longer texts are no address of a member."""


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator to ask about one job."""

    url: str
    epoch: int = 0
    """Epoch of a leader that another coordinator named; 0: this is the configured address."""
    unreachable_epoch: int = 0
    """Highest epoch whose leader was named and did not answer, and was not reached since; sent along with the next request."""
    followed: int = 0
    """Leaders that led here, one after the other."""
    service_epoch: int = 0
    """Epoch of the active one of several members, which another member named; 0: it was not."""
    silent_service_epoch: int = 0
    """Highest such epoch whose member did not answer: it is not followed again, since the one that names it does not know yet."""
    silent_url: str = field(default="", compare=False)
    """Which one did not answer last; not followed to, either."""


def next_target(target: Target, error: HoldfastError | None, address: Callable[[], str]) -> Target:
    """Target of the next request after `target` answered with an error, or not at all (None).

    Epochs only rise along the leaders that are followed, so that no two coordinators can send a client back and forth. A result
    with an epoch above the target's may be asked at once; any other one after a pause. `address` is called only if needed."""
    silent = max(target.service_epoch, target.silent_service_epoch) if error is None else target.silent_service_epoch
    if isinstance(error, NotLeaderError):
        url, epoch, service_epoch = error.url, error.epoch, error.service_epoch
        if isinstance(service_epoch, int):
            return _next_member(target, url, service_epoch, address)
        if isinstance(url, str) and isinstance(epoch, int) and _may_follow(target, url.rstrip("/"), epoch):
            return Target(url.rstrip("/"), epoch, target.unreachable_epoch, target.followed + 1)
    if error is None or isinstance(error, NotLeaderError):
        unreachable = max(target.epoch, target.unreachable_epoch)
        silent_url = target.url if error is None else target.silent_url
        return Target(address(), unreachable_epoch=unreachable, silent_service_epoch=silent, silent_url=silent_url)
    # The target was reached. To go on reporting it as unreachable for an old failure would take the job from a live leader.
    return Target(address(), unreachable_epoch=target.unreachable_epoch if target.unreachable_epoch > target.epoch else 0)


def _next_member(target: Target, url: object, service_epoch: int, address: Callable[[], str]) -> Target:
    """A member that stands by named the active one. Their epochs are none of a job's, whose leader's unreachable one is kept."""
    known = max(target.service_epoch, target.silent_service_epoch)
    named = url.rstrip("/") if isinstance(url, str) else ""
    is_onward = service_epoch > known and target.followed < FOLLOWED_MAX and named not in (target.url, target.silent_url)
    if is_onward and is_safe_step(target.url, named):
        return replace(target, url=named, epoch=0, followed=target.followed + 1, service_epoch=service_epoch)
    return Target(
        address(),
        unreachable_epoch=target.unreachable_epoch,
        silent_service_epoch=target.silent_service_epoch,
        silent_url=target.silent_url,
    )


def split_urls(text: str) -> tuple[str, ...]:
    """URLs of coordinators as a setting has them: one, or several with commas between."""
    return tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())


class MemberAddresses:
    """Addresses of the coordinators of which any may be active: each is asked in turn, once a round. Not thread-safe."""

    def __init__(self, configured: Sequence[str]) -> None:
        """`configured`: at least one; the first is asked first."""
        self._configured = tuple(dict.fromkeys(configured))
        self._members: tuple[str, ...] = ()
        self._asked: set[str] = set()
        """In this round."""
        self._silent: dict[str, int] = {}
        """Those that did not answer in time -> rounds in which they are not asked."""
        self.begins_round = True
        """The one that `next` named last is asked for another time, or for the first one: with a pause before it."""

    @property
    def are_several(self) -> bool:
        return len({*self._configured, *self._members}) > 1

    def learn(self, members: Sequence[str]) -> None:
        """Take over what a coordinator says about its members; of those where our token may go, MEMBERS_MAX at most."""
        known = (url for url in members[: 2 * MEMBERS_MAX] if len(url) <= URL_CHARACTERS_MAX)
        safe = (url.rstrip("/") for url in known if is_safe_step(self._configured[0], url))
        self._members = tuple(dict.fromkeys(safe))[:MEMBERS_MAX]

    def reached(self) -> None:
        """One was reached: the next search begins from the front."""
        self._asked.clear()
        self._silent.clear()

    def was_silent(self, url: str) -> None:
        """One of several did not answer in time: asking it costs as much again, and is done every SILENT_ROUNDS rounds."""
        self._silent[url] = SILENT_ROUNDS
        while len(self._silent) > 2 * MEMBERS_MAX:
            del self._silent[next(iter(self._silent))]

    def is_silent(self, url: str) -> bool:
        """Whether one did not answer in time, and nobody was reached since."""
        return url in self._silent

    def next(self, recorded: str | None, failed: str = "") -> str:
        """The next one: what the state directory says (`recorded`, if this machine sees it), the members, the configured ones; and
        so on. `failed`: the one that was asked last, which is passed over."""
        first: tuple[str, ...] = () if recorded is None else (recorded,)
        is_moved = recorded is not None and not self.are_several  # an only coordinator is not at its old address
        known = list(dict.fromkeys(first if is_moved else (*first, *self._members, *self._configured)))
        self._asked.add(failed)
        left = [url for url in known if url not in self._asked and not self._silent.get(url)]
        self.begins_round = not left
        if not left:
            self._asked.clear()
            self._silent = {url: max(0, rounds - 1) for url, rounds in self._silent.items()}
            awake = [url for url in known if not self._silent.get(url)] or known
            left = [url for url in awake if url != failed] or awake
        self._asked.add(left[0])
        return left[0]


def _may_follow(target: Target, url: str, epoch: int) -> bool:
    is_onward = epoch > target.epoch and target.followed < FOLLOWED_MAX and url != target.url
    return is_onward and is_safe_step(target.url, url)


def is_safe_step(before: str, after: str) -> bool:
    """Whether a token meant for one URL may be sent to another that the coordinator or its storage named.

    The token never moves from an encrypted connection to a plain one. A loopback address refers to the machine that wrote it: it is
    followed from loopback alone, or the token would go to any program that listens there on ours."""
    try:
        old, new = urlsplit(before), urlsplit(after)
    except ValueError:
        return False
    same_scheme = new.scheme == old.scheme or (old.scheme, new.scheme) == ("http", "https")
    return same_scheme and bool(new.hostname) and (_is_loopback(old.hostname) or not _is_loopback(new.hostname))


def _is_loopback(host: str | None) -> bool:
    """Whether a host is loopback, or unspecified, which connects to this machine, too; also in forms that only the system's
    resolver accepts (`127.1`, `0x7f.1`). Names are not looked up."""
    name = (host or "").rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost") or name.rpartition(".")[2][:1].isdigit()
    mapped = getattr(address, "ipv4_mapped", None)
    return any(each.is_loopback or each.is_unspecified for each in (address, mapped) if each is not None)

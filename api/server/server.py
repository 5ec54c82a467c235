"""uvicorn around a coordinator: a bound socket, an orderly start and an orderly stop.

It decides the order: bind, listen, lead, announce; and the reverse. It is the only module that uses uvicorn."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from holdfast.api.access.audit_log import AuditLog
from holdfast.api.events.stream import EventStreams
from holdfast.api.events.traces import Traces
from holdfast.api.events.webhooks import Webhooks
from holdfast.api.http.connection_budget import BodyBudget, ConnectionLimits
from holdfast.api.http.door import TlsDoor
from holdfast.api.http.protocol import ConnectionGuard, GuardedProtocol
from holdfast.api.members.membership import Membership
from holdfast.api.server.app import create_app
from holdfast.api.settings import ServerSettings
from holdfast.api.snapshots.forgettings import Forgettings
from holdfast.api.tls.live import LiveContext
from holdfast.api.tokens import is_loopback
from holdfast.barriers.descriptors import sockets_allowed
from holdfast.barriers.run_record import read_run_record
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import InvalidConfigError

log = logging.getLogger("holdfast.api")

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than any heartbeat interval, so that workers never reconnect."""

BODIES_HELD = 2
"""Request bodies of the largest size held at one time; half of these bytes are reserved for workers."""

_BACKLOG = 2_048
"""Connections that the system queues until they are accepted."""

_ACCEPTED_AT_ONCE = 64
"""Connections accepted before open ones get their turn: a whole backlog at once is a fifth of a second's work."""

_UNKNOWN_MIN = 8
"""Smallest cap of unproven connections: below it not even one could be accepted at a time."""


def bind(settings: ServerSettings) -> socket.socket:
    """Bind a socket: to the requested port, else to the state directory's last port, else to a free one.

    Raises InvalidConfigError when the port is taken. A takeover moves on to a free port, since the old coordinator may hold the
    last one."""
    if settings.port is not None:
        return _bind(settings.host, settings.port)
    record = read_run_record(settings.state_dir)
    if record is None or settings.ha:  # the port on record is that of the active member, which may be another one
        return _bind(settings.host, 0)
    try:
        return _bind(settings.host, record.port)
    except InvalidConfigError:
        if not settings.takeover:
            raise
        log.warning("port %d is taken: listening on a free one; workers find it when they register again", record.port)
        return _bind(settings.host, 0)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfigError(f"can't listen on {host}: {error}", setting="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidConfigError(f"port {port} on {host} is in use: choose another with --port", setting="port") from error
        raise InvalidConfigError(f"can't listen on {host}:{port}: {error}", setting="host") from error
    return listener


def advertised_url(settings: ServerSettings, port: int) -> str:
    """URL sent to drivers and workers."""
    host = settings.advertised_host or settings.host
    if host.strip("[]") in ("0.0.0.0", "::", ""):
        host = outward_address()
    scheme = "https" if settings.is_encrypted else "http"
    return f"{scheme}://[{host.strip('[]')}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def outward_address() -> str:
    """Address of this machine's default route; loopback without one. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address: routed like any other, never reached
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def connection_guard(settings: ServerSettings) -> ConnectionGuard:
    """Budgets of one server. Unproven callers may have a quarter of the connections, an eighth from one address, and never less
    than 8; half of the bytes of bodies is reserved for workers."""
    connections_max = sockets_allowed(settings.connections_max)
    limits = ConnectionLimits(
        connections_max=connections_max,
        unknown_max=max(_UNKNOWN_MIN, connections_max // 4),
        unknown_per_address_max=max(_UNKNOWN_MIN, connections_max // 8),
    )
    held_max = BODIES_HELD * settings.body_bytes_max
    return ConnectionGuard(limits, BodyBudget(held_max, kept_for_workers=held_max // 2))


def accepted_at_once(limits: ConnectionLimits) -> int:
    """Connections accepted at once, at least 1: so few that a caller with a token is read before newcomers displace it.

    Three batches count as unproven at one time: while the bytes of one are read the next is open already, and the one before is
    about to prove itself. asyncio may take one more than requested."""
    smallest_cap = min(limits.unknown_max, limits.unknown_per_address_max)
    return max(1, min(_ACCEPTED_AT_ONCE, smallest_cap // 3 - 1))


def _protocol(guard: ConnectionGuard, tls: LiveContext | None) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes of an accepted connection."""
    if tls is None:
        return functools.partial(GuardedProtocol, guard=guard)
    return functools.partial(TlsDoor, guard=guard, context=lambda: tls.context)


class RestServer(uvicorn.Server):
    """Serves one coordinator until stopped; in the main thread, signals stop it in an orderly way."""

    def __init__(
        self,
        service: Coordinator,
        settings: ServerSettings,
        *,
        on_started: Callable[[], None],
        guard: ConnectionGuard | None = None,
        tls: LiveContext | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`guard` None: made from the settings. `tls` None: it speaks in clear text. `membership`: see `create_app`."""
        guard = guard or connection_guard(settings)
        app = create_app(service, settings, guard=guard, membership=membership)
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(guard, tls),  # type: ignore[arg-type]
                loop="asyncio",  # uvloop, if installed, would accept a whole backlog in one turn, whatever `backlog` is
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,  # else whoever is on this machine says from where it asks, in the audit log, too
                backlog=accepted_at_once(guard.limits),
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, settings.stop_timeout_ms // 1000),
            )
        )
        self._service = service
        self._audit: AuditLog = app.state.audit
        self._events: EventStreams = app.state.events
        self._webhooks: Webhooks = app.state.webhooks
        self._forgettings: Forgettings = app.state.forgettings
        self._traces: Traces = app.state.traces
        self._on_started = on_started
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)
        if self._tls is not None:
            self._tls.start()
        self._on_started()
        self._webhooks.start()
        self._traces.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the coordinator first: its command streams end, so that connections can close.

        Runs on the loop's thread: a driver that exits without closing its job comes here when no thread can be started any more."""
        self._events.close()
        self._forgettings.close()
        self._webhooks.close()
        self._traces.close()
        self._service.close()
        await super().shutdown(sockets=sockets)
        if self._tls is not None:
            self._tls.stop()
        self._audit.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second interrupt stops at once. The signal is not raised again afterwards, as the stop was orderly."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def describe_exposure(settings: ServerSettings) -> str:
    """Text that says who can reach the service."""
    reach = "this machine" if is_loopback(settings.host) else "the network"
    way = ", over TLS" if settings.is_encrypted else ""
    return f"{reach}{way}, {'with the token' if settings.token else 'without a token'}, pid {os.getpid()}"

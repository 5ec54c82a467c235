"""The TLS of one server, as its settings want it: where its certificate comes from, and what its clients are told to trust."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never
from urllib.parse import urlsplit

from holdfast.api.server.server import outward_address
from holdfast.api.settings import ServerSettings, Tls
from holdfast.api.tls.files import hosts_in
from holdfast.api.tls.live import FilePair, LiveContext, OwnPair
from holdfast.api.tls.stored import open_authority, publish_certificate
from holdfast.operators.worker.trust import read_authorities

log = logging.getLogger("holdfast.tls")


@dataclass(frozen=True, slots=True)
class ServedTls:
    """What a server needs, and what its clients do."""

    live: LiveContext
    ca_file: Path | None
    """Certificates that clients on this machine trust; None: those of their system."""
    authorities: str | None
    """The same, PEM."""


def served_tls(settings: ServerSettings, url: str) -> ServedTls | None:
    """None for a server without TLS. `url`: the one that clients get. Raises InvalidConfigError naming the file that can't be used,
    CorruptStateError, StorageUnavailableError."""
    match settings.tls:
        case Tls.OFF:
            return None
        case Tls.AUTO:
            authority = open_authority(settings.location)
            ca_file = publish_certificate(authority, settings.state_dir)
            return ServedTls(LiveContext(OwnPair(authority, hosts_of(settings, url))), ca_file, read_authorities(ca_file))
        case Tls.FILES:
            assert settings.tls_cert is not None
            assert settings.tls_key is not None
            authorities = read_authorities(settings.tls_ca) if settings.tls_ca is not None else None
            live = LiveContext(FilePair(settings.tls_cert, settings.tls_key))
            _warn_of_name(live, url)
            return ServedTls(live, settings.tls_ca, authorities)
        case _:
            assert_never(settings.tls)


def hosts_of(settings: ServerSettings, url: str) -> tuple[str, ...]:
    """Host names and addresses under which a server may be asked: the one that it tells first."""
    named = [urlsplit(url).hostname or "", settings.host.strip("[]"), socket.gethostname(), socket.getfqdn()]
    found = [*named, *_addresses(), outward_address(), "localhost", "127.0.0.1", "::1"]
    return tuple(dict.fromkeys(host for host in found if host and _may_be_named(host)))


def _addresses() -> list[str]:
    """Addresses that this machine's own name stands for; none where it has no such name."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _may_be_named(host: str) -> bool:
    """Whether a certificate can be for it: an address of one machine, or a name in ASCII."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host.isascii() and "%" not in host


def _warn_of_name(live: LiveContext, url: str) -> None:
    host, hosts = urlsplit(url).hostname or "", hosts_in(live.pair)
    wild = f"*.{host.partition('.')[2]}"
    if host not in hosts and wild not in hosts:
        log.warning(
            "the certificate is not for %s, which clients are told: give a host that it is for with --advertised-host", host
        )

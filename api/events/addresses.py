"""Which addresses the service may connect to on behalf of a file's URL, judged when the connection is made.

A name may resolve to one address when it is looked at and to another one when it is used: so it is resolved once, each address is
judged, and the connection is made to one of these. Pure but for `connect`."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from holdfast.statebackends.errors import HoldfastError

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "fd00:ec2::254",
        "fd20:ce::254",
    )
)
"""Where clouds answer a machine with its credentials."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class ForbiddenAddressError(HoldfastError):
    """A name leads to an address that the service must not connect to."""

    address: str


def is_forbidden(text: str) -> bool:
    """Whether an address is link-local, a metadata service's, multicast, unspecified or reserved, however it is written. What is no
    address is forbidden."""
    try:
        address: IpAddress = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return True
    return any(_is_bad(each) for each in _all_forms(address))


def _is_bad(address: IpAddress) -> bool:
    if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
        return True
    return address.is_reserved and not address.is_loopback


def _all_forms(address: IpAddress) -> list[IpAddress]:
    """The address, and the IPv4 addresses that it carries."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    forms: list[IpAddress] = [each for each in carried if each is not None]
    is_embedding = address in _NAT64 or address in _NAT64_LOCAL or (address in _COMPATIBLE and int(address) > 1)
    if is_embedding:
        forms.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if forms:
        return forms  # the prefix itself may be "reserved", and says nothing
    return [address]


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to a host, no address of which is forbidden. Raises ForbiddenAddressError, OSError."""
    found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for _, _, _, _, address in found:
        if is_forbidden(str(address[0])):
            text = f"{host} leads to {address[0]}, a link-local, metadata or reserved address: nothing is sent there"
            raise ForbiddenAddressError(text, address=str(address[0]))
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found[:_ADDRESSES_TRIED_MAX]:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


_ADDRESSES_TRIED_MAX = 3

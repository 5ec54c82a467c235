"""Whose an address is: bounds per address hold for all that one machine may send from."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network

IPV6_PREFIX_BITS = 64
"""Of a subnet, within which a machine chooses its addresses itself, as many as it likes (RFC 4291, 2.5.1)."""


def network_of(host: str) -> str:
    """The address itself, of IPv6 its network of 64 bits; what is no address, such as a name or a socket's path, as it is."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, IPV6_PREFIX_BITS), strict=False))

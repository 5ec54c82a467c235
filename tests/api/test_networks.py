"""Addresses that one machine may send from."""

from __future__ import annotations

import pytest

from holdfast.api.access.networks import network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.8", "10.0.0.8"),
        ("10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:DB8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8::9", "2001:db8::/64"),
        ("2001:db8:0:0:7::", "2001:db8::/64"),
        ("::ffff:10.0.0.8", "10.0.0.8"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("localhost", "localhost"),
        ("/run/holdfast.sock", "/run/holdfast.sock"),
        ("", ""),
    ],
)
def test_network(host: str, network: str) -> None:
    assert network_of(host) == network

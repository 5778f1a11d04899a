"""Hosts and networks that requests of the platform may go to, as configurations name them."""

from __future__ import annotations

import ipaddress
import re
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple


class EgressHost(NamedTuple):
    """A host or a network that requests may go to, at one port or at any."""

    host: str
    port: int | None
    network: IPv4Network | IPv6Network | None


def read_egress_host(given: str) -> EgressHost:
    """Read `hooks.example.com`, `hooks.example.com:8443`, `10.0.0.7:8080` or `10.0.0.0/8`; raise ValueError."""
    host, _, port = given.rpartition(":") if re.search(r"[^:]:\d+$|]:\d+$", given) else (given, "", "")
    host = host.strip("[]").rstrip(".").lower()
    try:
        network = ipaddress.ip_network(host)
    except ValueError:
        network = None
    named = network is not None or re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host)
    if not named or (port and not 0 < int(port) < 65536):
        raise ValueError(
            "a host like hooks.example.com or hooks.example.com:8443, or addresses like 10.0.0.0/8"
        )
    return EgressHost(host, int(port) if port else None, network)


def require_egress_host(given: str) -> str:
    """Return a host or network as it was given; ValueError if it is none."""
    read_egress_host(given)
    return given


def require_egress_addresses(given: str) -> str:
    """Return addresses as they were given; ValueError if it is a name."""
    if read_egress_host(given).network is None:
        raise ValueError("addresses like 10.1.0.0/16 or 10.1.2.3:443: a NetworkPolicy knows no names")
    return given

"""Certificates, and the addresses that need none."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from falaj.records.record import Record


def is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


class Tls(Record):
    """Certificate and private key, as PEM files. Only TLS 1.3 is spoken."""

    certificate: Path
    """PEM file with the certificate and its chain."""
    key: Path
    """PEM file with the private key."""

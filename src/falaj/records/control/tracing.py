"""Settings of traces, and whether they may leave this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from falaj.records.record import Record

EgressRule = tuple[str, int | None, IPv4Network | IPv6Network | None]
"""A host or network of `egress.allow`, and its port."""


class TracingConfig(Record):
    """OpenTelemetry traces of requests to the model server. They hold names, versions and times, no values."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")] | None = None
    """Where traces are sent by OTLP over HTTP, as JSON, like `https://otel.example.com/v1/traces`; its host must be in
    `egress.allow`. By default nothing is traced."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a `traceparent` that are traced; one with a `traceparent` decides itself."""


def is_listed(url: str, rules: Sequence[EgressRule]) -> bool:
    """Tell whether the host of a URL is listed; the address that it leads to is checked with every request."""
    target = urlsplit(url)
    host = (target.hostname or "").rstrip(".")
    port = target.port or (443 if target.scheme == "https" else 80)
    fitting = [(name, network) for name, only, network in rules if only in (None, port)]
    if any(name == host and network is None for name, network in fitting):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(network is not None and address in network for _, network in fitting)

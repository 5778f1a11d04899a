"""The settings of the console in falaj.toml."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, Field

from falaj.records.control.tls import Tls
from falaj.records.durations import read_duration
from falaj.records.names import TextRule
from falaj.records.record import Record


def _length(given: object) -> object:
    """A length of time as people write it: 90s, 12h; or as TOML knows it, in seconds."""
    return read_duration(given) or given


SessionLength = Annotated[
    timedelta, BeforeValidator(_length), Field(ge=timedelta(minutes=1), le=timedelta(hours=12))
]
HostName = Annotated[
    str,
    TextRule(
        r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]",
        "a name or address without a port, like ml.example.org",
        limit=253,
    ),
]


class ConsoleConfig(Record):
    """The console for browsers. It uses the TLS of the API by default."""

    enabled: bool = True
    """Whether `falaj up` starts the console."""
    bind: str = "127.0.0.1"
    """Address of the console; beyond loopback only with TLS."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7482
    """Port of the console; 0 takes a free one."""
    tls: Tls | None = None
    """Certificate and key of the console; by default those of the API."""
    hosts: Annotated[tuple[HostName, ...], Field(max_length=100)] = ()
    """Further names under which browsers reach the console; those of loopback are known."""
    session: SessionLength = timedelta(hours=12)
    """How long a session lasts at most, like 12h."""
    idle: SessionLength = timedelta(hours=2)
    """After how long without a click or a page a session ends, like 2h."""

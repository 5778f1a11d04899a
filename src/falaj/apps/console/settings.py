"""What the parent tells the console: where the API is, the socket to listen on, and how long sessions last."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

from falaj.records.config import ServerConfig
from falaj.records.control.console import ConsoleConfig, HostName
from falaj.records.control.tls import Tls, is_loopback
from falaj.records.record import Record

VARIABLE = "FALAJ_CONSOLE_SETTINGS"
WITHHELD = ("FALAJ_TOKEN", "FALAJ_URL", "FALAJ_HOME", "FALAJ_CONFIG_DIR")
"""What the console does not get from the environment: it acts with the token of the person who signed in, alone."""


class ConsoleSettings(Record):
    """The settings of a console process; it reads no other ones."""

    url: str
    """Of the console itself, as `falaj up` prints it."""
    api: str
    origin_key: str = ""
    """With it the console names the addresses of browsers to the API; it opens nothing else."""
    descriptor: int
    """The socket that listens, inherited from the parent."""
    tls: Tls | None = None
    api_tls: Tls | None = None
    hosts: tuple[HostName, ...] | None = None
    """Names under which browsers may reach it; none: any, because the certificate says which."""
    session: timedelta = timedelta(hours=12)
    idle: timedelta = timedelta(hours=2)
    log: Path | None = None

    @classmethod
    def of(
        cls,
        console: ConsoleConfig,
        server: ServerConfig,
        *,
        api: str,
        listener: socket.socket,
        origin_key: str,
        log: Path,
    ) -> ConsoleSettings:
        """Return the settings of a console that listens on `listener`."""
        tls = console.tls or server.tls
        host = f"[{console.bind}]" if ":" in console.bind else console.bind
        known = ("localhost", "127.0.0.1", "[::1]", host, *console.hosts)
        return cls(
            url=f"{'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}",
            api=api,
            origin_key=origin_key,
            descriptor=listener.fileno(),
            tls=tls,
            api_tls=server.tls,
            hosts=known if is_loopback(console.bind) or console.hosts else None,
            session=console.session,
            idle=console.idle,
            log=log,
        )


def console_environment(settings: ConsoleSettings) -> dict[str, str]:
    """Return the environment of the console process: nothing in it gives access to the platform."""
    passed = {name: value for name, value in os.environ.items() if name not in WITHHELD}
    return passed | {VARIABLE: settings.model_dump_json()}

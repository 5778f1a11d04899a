"""The API process: assembles the platform, serves it, and tells its parent when it is ready."""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
from datetime import timedelta
from pathlib import Path

import uvicorn

from falaj.apps.api.app import make_app
from falaj.apps.lifeline import stop_with_parent
from falaj.apps.logs import log_to
from falaj.assembly.home import open_home
from falaj.assembly.platform import Platform, assemble, local_caller
from falaj.governance.caller import acting_as
from falaj.governance.tokens import make_link
from falaj.records.config import Config

LOCAL_TOKEN = "local command line"
LOCAL_TOKEN_DAYS = 30


def main() -> None:
    """Serve the home in FALAJ_HOME; arguments are what the parent decided: bind and port."""
    home = open_home()
    log_to(home.logs / "api.jsonl")
    platform = assemble(home)
    bind, port = sys.argv[1], int(sys.argv[2])
    listener = _listen(bind, port)
    server = uvicorn.Server(_settings(platform, platform.config))
    stop_with_parent(lambda: setattr(server, "should_exit", True))
    _announce(platform, bind, listener.getsockname()[1])
    try:
        server.run(sockets=[listener])
    finally:
        platform.close()


def _settings(platform: Platform, config: Config) -> uvicorn.Config:
    tls = config.server.tls
    settings = uvicorn.Config(
        make_app(platform),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else whoever is on this machine could choose the origin that is audited
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=65536,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
    settings.load()
    if settings.ssl is not None:
        settings.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return settings


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    protocol = socket.IPPROTO_TCP  # said outright, so that asyncio sets TCP_NODELAY
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind, port))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _announce(platform: Platform, bind: str, port: int) -> None:
    """Tell the parent the address, a sign-in code for its owner, and a token for the local command line."""
    scheme = "http" if platform.config.server.tls is None else "https"
    host = f"[{bind}]" if ":" in bind else bind
    owner = local_caller(platform.database)
    with acting_as(owner):
        tokens = platform.rooms.token
        for old in tokens.list(limit=1000).items:
            if old.purpose == LOCAL_TOKEN and old.principal == owner.name and old.revoked_at is None:
                tokens.revoke(old.id)
        issued = tokens.issue(purpose=LOCAL_TOKEN, expires_in=timedelta(days=LOCAL_TOKEN_DAYS))
    with platform.database.write() as tx:
        link = make_link(tx, owner.id, now=platform.gate.clock())
    told = {"url": f"{scheme}://{host}:{port}", "code": link.code, "token": issued.secret}
    with os.fdopen(int(os.environ["FALAJ_READY_FD"]), "w") as parent:
        json.dump(told, parent)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    main()

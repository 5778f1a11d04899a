"""The API process: assembles the platform, serves it, and tells its parent when it is ready."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from datetime import timedelta
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from falaj.apps.api.app import make_app
from falaj.apps.api.errors import error_response
from falaj.apps.api.headers import HEADERS
from falaj.apps.logs import log_to
from falaj.apps.process_setup import raise_file_limit, stop_with_parent
from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform, assemble, local_caller
from falaj.errors import InvalidInput, NotFound
from falaj.governance.identity.tokens import in_use
from falaj.governance.operations.caller import acting_as
from falaj.records.config import Config

HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
CONNECTIONS = 2000
LOCAL_TOKEN = "local command line"
LOCAL_TOKEN_DAYS = 30


def main() -> None:
    """Serve the home in FALAJ_HOME; arguments are what the parent decided: bind and port."""
    os.umask(0o077)
    raise_file_limit()
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


class LimitedHeaders(HttpToolsProtocol):
    """Refuses heads that are too large or come too slowly, and connections beyond a limit: strangers send them, too."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """What else comes, be it the rest of a body that nobody reads, is no reason to keep the connection."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._await_head()

    def _await_head(self) -> None:
        self._head_came()
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed is answered as a problem too, with the headers of every answer."""
        body = error_response(InvalidInput(f"this is not a request that Falaj can read: {msg}"))
        headers = [*body.headers.items(), *HEADERS.items(), ("Connection", "close")]
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers), "", ""]
        self.transport.write("\r\n".join(lines).encode("latin-1") + bytes(body.body))
        self.transport.close()

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("the head of the request is too large")


def _settings(platform: LocalPlatform, config: Config) -> uvicorn.Config:
    tls = config.server.tls
    settings = uvicorn.Config(
        make_app(platform),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else whoever is on this machine could choose the origin that is audited
        timeout_graceful_shutdown=5,
        http=LimitedHeaders,
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


def _announce(platform: LocalPlatform, bind: str, port: int) -> None:
    """Tell the parent the address and, at its start, a sign-in code for the owner and a token for the command line."""
    scheme = "http" if platform.config.server.tls is None else "https"
    host = f"[{bind}]" if ":" in bind else bind
    told = {"url": f"{scheme}://{host}:{port}"}
    if "FALAJ_RESTART" not in os.environ:
        told |= issue_owner_credentials(platform)
    with os.fdopen(int(os.environ["FALAJ_READY_FD"]), "w") as parent:
        json.dump(told, parent)


def issue_owner_credentials(platform: LocalPlatform) -> dict[str, str]:
    """A new token in place of those of earlier starts, whose work goes on, and a sign-in code."""
    try:
        owner = local_caller(platform.database)
    except NotFound:  # the platform was founded by another user, on another machine
        return {}
    purpose = f"{LOCAL_TOKEN}, {platform.home.ident}"
    with platform.database.read() as tx:
        earlier = in_use(tx, owner.id, purpose=purpose, now=platform.gate.clock())
    with acting_as(owner):
        for token in earlier:
            platform.services.tokens.revoke(token, keep_work=True)
        issued = platform.services.tokens.issue(purpose=purpose, expires_in=timedelta(days=LOCAL_TOKEN_DAYS))
        link = platform.services.tokens.sign_in_link()
    return {"code": link.code, "token": issued.secret}


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    main()

"""The API process: assembles the platform, serves it, and reports to its parent when it is ready."""

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
    """Serve the home in FALAJ_HOME; the parent passes the address to bind to and the port as arguments."""
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
    """Refuses request heads that are too large or too slow, and connections beyond a limit."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Restart the timer for the next head: the rest of an unread body does not keep the connection open."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
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
        """Respond to a request that cannot be parsed with a problem document and the security headers."""
        body = error_response(InvalidInput(f"the request cannot be parsed: {msg}"))
        headers = [*body.headers.items(), *HEADERS.items(), ("Connection", "close")]
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers), "", ""]
        self.transport.write("\r\n".join(lines).encode("latin-1") + bytes(body.body))
        self.transport.close()

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("the request head is too large")


def _settings(platform: LocalPlatform, config: Config) -> uvicorn.Config:
    tls = config.server.tls
    settings = uvicorn.Config(
        make_app(platform),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # otherwise local processes could forge the audited origin
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
    protocol = socket.IPPROTO_TCP  # explicit, so that asyncio sets TCP_NODELAY
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind, port))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _announce(platform: LocalPlatform, bind: str, port: int) -> None:
    """Report the address to the parent and, on the first start, a sign-in code and a token for the owner."""
    scheme = "http" if platform.config.server.tls is None else "https"
    host = f"[{bind}]" if ":" in bind else bind
    facts = {"url": f"{scheme}://{host}:{port}"}
    if "FALAJ_RESTART" not in os.environ:
        facts |= issue_owner_credentials(platform)
    with os.fdopen(int(os.environ["FALAJ_READY_FD"]), "w") as parent:
        json.dump(facts, parent)


def issue_owner_credentials(platform: LocalPlatform) -> dict[str, str]:
    """Return a sign-in code and a new token; tokens of earlier starts are revoked, and their work continues."""
    try:
        owner = local_caller(platform.database)
    except NotFound:  # the platform was created by another user, on another machine
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

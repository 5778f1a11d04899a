"""The console process: serves pages on the socket that its parent opened, as a client of the API."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.apps.console.settings import VARIABLE, ConsoleSettings
from falaj.apps.logs import log_to
from falaj.apps.process_setup import raise_file_limit, stop_with_parent

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from falaj.records.governance.identity import IssuedToken
    from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
UNUSED = ("aiohttp", "redis", "pandas", "polars", "matplotlib", "plotly")
"""Packages that the framework imports if they are there, for what the console does not use: some 15 MB of memory."""
SOCKET_BYTES = 1 << 20
"""The largest message of a browser."""


def main() -> None:
    """Serve the console until the parent ends."""
    os.umask(0o077)
    raise_file_limit()
    settings = ConsoleSettings.model_validate_json(os.environ.pop(VARIABLE))
    if settings.log is not None:
        log_to(settings.log)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it would log each websocket with its page
    with tempfile.TemporaryDirectory(prefix="falaj-console-") as folder:
        sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type] # none: as if it were not there
        os.environ["NICEGUI_STORAGE_PATH"] = folder  # nothing is stored; the framework wants a folder
        try:
            serve(settings)
        except Exception:
            log.exception("the console did not start")
            raise


def serve(settings: ConsoleSettings) -> None:
    """Serve on the inherited socket."""
    from falaj.apps.api.forwarded_origin import origin_headers
    from falaj.apps.console.application import Console
    from falaj.apps.http_server import HttpServer
    from falaj.sdk.remote import connect, redeem_token

    for name in UNUSED:  # the framework has looked; pyarrow looks later, and takes a none for pandas itself
        sys.modules.pop(name, None)
    trust = None if settings.api_tls is None else _pinned(settings.api_tls.certificate)

    def headers(address: str) -> dict[str, str]:
        return origin_headers(address, settings.origin_key)

    def open_platform(token: str, address: str) -> Platform:
        return connect(settings.api, token, verify=trust, headers=headers(address))

    def redeem(code: str, address: str) -> IssuedToken:
        return redeem_token(settings.api, code, verify=trust, headers=headers(address))

    console = Console(settings, connect=open_platform, redeem=redeem)
    server = HttpServer(_server_settings(console.app), tls=settings.tls)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_with_parent(lambda: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[socket.socket(fileno=settings.descriptor)])
    finally:
        console.sessions.close()


def _server_settings(app: ASGIApp) -> uvicorn.Config:
    import uvicorn

    from falaj.apps.http_server import LimitedHeaders

    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        http=LimitedHeaders,
        ws="websockets-sansio",
        ws_max_size=SOCKET_BYTES,
    )
    settings.load()
    return settings


def _pinned(certificate: Path) -> ssl.SSLContext:
    """Return a context that accepts the certificate of the API and no other, whatever address it is reached by."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    main()

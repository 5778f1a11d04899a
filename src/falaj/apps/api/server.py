"""The API process: assembles the platform, serves it, and reports to its parent when it is ready."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from falaj.apps.api.app import make_app
from falaj.apps.api.forwarded_origin import VARIABLE as ORIGIN_KEY
from falaj.apps.http_server import HttpServer, LimitedHeaders, listen
from falaj.apps.logs import log_to
from falaj.apps.process_setup import raise_file_limit, reduce_collections, stop_with_parent
from falaj.assembly.home import open_home
from falaj.assembly.owner import issue_owner_token, revoke_owner_tokens
from falaj.assembly.platform import LocalPlatform, assemble, local_caller
from falaj.errors import FalajError, NotFound
from falaj.governance.operations.caller import acting_as

log = logging.getLogger("falaj.api")


def main() -> None:
    """Serve the home in FALAJ_HOME; the parent passes the address to bind to and the port as arguments."""
    os.umask(0o077)
    raise_file_limit()
    home = open_home()
    log_to(home.logs / "api.jsonl")
    bind, port = sys.argv[1], sys.argv[2]
    try:
        platform = assemble(home)
        listener = listen(bind, port)
    except FalajError as error:
        log.error("the API did not start", extra={"reason": str(error)})
        report(error=error_fields(error))
        sys.exit(1)
    server = HttpServer(_settings(platform), tls=platform.config.server.tls)
    stop_with_parent(lambda: setattr(server, "should_exit", True))
    _announce(platform, bind, listener.getsockname()[1])
    reduce_collections()
    try:
        server.run(sockets=[listener])
    finally:
        platform.close()


def _settings(platform: LocalPlatform) -> uvicorn.Config:
    settings = uvicorn.Config(
        make_app(platform, origin_key=os.environ.pop(ORIGIN_KEY, None)),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # otherwise local processes could forge the audited origin
        timeout_graceful_shutdown=5,
        http=LimitedHeaders,
        ws="none",
    )
    settings.load()
    return settings


def _announce(platform: LocalPlatform, bind: str, port: int) -> None:
    """Report the address to the parent and, on the first start, a sign-in code and a token for the owner."""
    scheme = "http" if platform.config.server.tls is None else "https"
    host = f"[{bind}]" if ":" in bind else bind
    facts = {"url": f"{scheme}://{host}:{port}"}
    if "FALAJ_RESTART" not in os.environ:
        facts |= issue_owner_credentials(platform)
    report(**facts)


def report(**facts: Any) -> None:
    """Report to the parent: where the API is, or the error that kept it from starting."""
    with os.fdopen(int(os.environ["FALAJ_READY_FD"]), "w") as parent:
        json.dump(facts, parent)


def error_fields(error: FalajError) -> dict[str, Any]:
    """Return what `rebuild` makes the error from, in another process."""
    faults = [fault.model_dump() for fault in error.faults]
    return {"code": error.code, "message": error.message, "faults": faults, "details": error.details}


def issue_owner_credentials(platform: LocalPlatform) -> dict[str, str]:
    """Return a sign-in code and a new token; tokens of earlier starts are revoked, and their work continues."""
    try:
        owner = local_caller(platform.database)
    except NotFound:  # the platform was created by another user, on another machine
        return {}
    revoke_owner_tokens(platform)
    issued = issue_owner_token(platform)
    with acting_as(owner):
        link = platform.services.tokens.sign_in_link()
    return {"code": link.code, "token": issued.secret, "token_until": issued.expires_at.isoformat()}


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    main()

"""The process of the model server: serves the endpoints of the home in FALAJ_HOME until it is stopped."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial

from falaj.apps.logs import log_to
from falaj.apps.model_server.platform.log_process import log_in_process
from falaj.apps.model_server.process import Listeners, announce, run, serve, tune_interpreter, wait_for_stop
from falaj.apps.model_server.server import listen
from falaj.apps.ports import listen_on
from falaj.assembly.home import open_home
from falaj.assembly.model_server import publish_local_socket
from falaj.assembly.platform import assemble
from falaj.records.config import Tls


def main() -> None:
    """Serve on the bind address, port and port of gRPC given as arguments by the parent."""
    os.umask(0o077)
    home = open_home()
    log_to(home.logs / "models.jsonl")
    bind, port = sys.argv[1], sys.argv[2]
    platform = assemble(home)
    grpc_port = sys.argv[3] if len(sys.argv) > 3 else str(platform.config.serving.grpc_port)
    tls = platform.config.tls_of_serving
    try:
        listener = _listener(bind, port, tls, "port")
        grpc_listener = None if grpc_port == "off" else _listener(bind, grpc_port, tls, "grpc_port")
        with publish_local_socket(home) as inner:
            given = {name: value for name, value in os.environ.items() if name != "FALAJ_READY_FD"}
            log = log_in_process(given | {"FALAJ_HOME": str(home.path)})
            options = Listeners(listener, inner, grpc_listener)
            run(lambda: serve(platform, options, ready=_on_ready, until=wait_for_stop, start_log=log))
    finally:
        platform.close()
    os._exit(0)  # everything is flushed; skips noisy teardown warnings of datasketches


def _listener(bind: str, port: str, tls: Tls | None, name: str) -> socket.socket:
    try:
        return listen_on(port, partial(listen, bind, tls=tls))
    except OSError as error:
        problem = (
            f"the model server cannot listen on {bind}:{port.rstrip('+')} ({error.strerror}); set serving.{name} in "
            "falaj.toml to a free port, or to 0, and restart the platform"
        )
        sys.exit(1 if announce(problem=problem) else problem)


def _on_ready(url: str, grpc: str | None) -> None:
    tune_interpreter()
    announce(url=url, **({} if grpc is None else {"grpc": grpc}))


if __name__ == "__main__":
    main()

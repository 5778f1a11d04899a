"""The process of the model server: serves the endpoints of the home in FALAJ_HOME until it is stopped."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial

from falaj.apps.logs import log_to
from falaj.apps.model_server.platform.log_channel import StartLog
from falaj.apps.model_server.platform.log_process import log_in_process
from falaj.apps.model_server.process import (
    run,
    serve,
    serve_replica,
    tune_interpreter,
    wait_for_stop,
)
from falaj.apps.model_server.replica import read_facts
from falaj.apps.model_server.server import listen
from falaj.apps.ports import listen_on
from falaj.assembly.home import Home, open_home
from falaj.assembly.model_server import publish_local_socket
from falaj.assembly.platform import LocalPlatform, assemble


def main() -> None:
    """Serve as a replica of `falaj up`, or alone on the bind address and port given as arguments."""
    os.umask(0o077)
    facts = read_facts()
    home = open_home()
    first = facts is None or facts.name == "1"
    log_to(home.logs / ("models.jsonl" if facts is None or first else f"models-{facts.name}.jsonl"))
    platform = assemble(home)
    try:
        log = log_in_process({**os.environ, "FALAJ_HOME": str(home.path)})
        if facts is not None:
            run(lambda: serve_replica(platform, facts, start_log=log))
        else:
            _serve_alone(home, platform, log, bind=sys.argv[1], port=sys.argv[2])
    finally:
        platform.close()
    os._exit(0)  # everything is flushed; the teardown of the interpreter would only take time


def _serve_alone(home: Home, platform: LocalPlatform, log: StartLog, *, bind: str, port: str) -> None:
    grpc_port = str(platform.config.serving.grpc_port)
    listener = _listener(platform, bind, port)
    grpc = None if grpc_port == "off" else _listener(platform, bind, grpc_port)
    with publish_local_socket(home) as inner:
        run(
            lambda: serve(
                platform,
                listener,
                inner,
                ready=lambda _: tune_interpreter(),
                until=wait_for_stop,
                grpc=grpc,
                start_log=log,
            )
        )


def _listener(platform: LocalPlatform, bind: str, port: str) -> socket.socket:
    try:
        return listen_on(port, partial(listen, bind, tls=platform.config.tls_of_serving))
    except OSError as error:
        sys.exit(f"the model server cannot listen on {bind}:{port.rstrip('+')} ({error.strerror})")


if __name__ == "__main__":
    main()

"""The process of the model server: serves the endpoints of the home in FALAJ_HOME until it is stopped."""

from __future__ import annotations

import os
import sys
from functools import partial

from falaj.apps.logs import log_to
from falaj.apps.model_server.platform.log_process import log_in_process
from falaj.apps.model_server.process import announce, run, serve, tune_interpreter, wait_for_stop
from falaj.apps.model_server.server import listen
from falaj.apps.ports import listen_on
from falaj.assembly.home import open_home
from falaj.assembly.model_server import publish_local_socket
from falaj.assembly.platform import assemble


def main() -> None:
    """Serve on the bind address and port given as arguments by the parent."""
    os.umask(0o077)
    home = open_home()
    log_to(home.logs / "models.jsonl")
    bind, port = sys.argv[1], sys.argv[2]
    platform = assemble(home)
    try:
        try:
            listener = listen_on(port, partial(listen, bind, tls=platform.config.tls_of_serving))
        except OSError as error:
            problem = (
                f"the model server cannot listen on {bind}:{port.rstrip('+')} ({error.strerror}); set serving.port in "
                "falaj.toml to a free port, or to 0, and restart the platform"
            )
            sys.exit(1 if announce(problem=problem) else problem)
        with publish_local_socket(home) as inner:
            given = {name: value for name, value in os.environ.items() if name != "FALAJ_READY_FD"}
            log = log_in_process(given | {"FALAJ_HOME": str(home.path)})
            run(lambda: serve(platform, listener, inner, ready=_on_ready, until=wait_for_stop, start_log=log))
    finally:
        platform.close()
    os._exit(0)  # everything is flushed; skips noisy teardown warnings of datasketches


def _on_ready(url: str) -> None:
    tune_interpreter()
    announce(url=url)


if __name__ == "__main__":
    main()
